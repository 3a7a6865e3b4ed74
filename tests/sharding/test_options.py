"""Options as they are given: scalars of NumPy and JAX, narrow dtypes, trees that are callable too."""

import dataclasses
from typing import Any, NamedTuple

import equinox as eqx
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxzero

NUMBERS = {"stage": 3, "bucket_bytes": 64, "prefetch": 1, "persist_bytes": 0, "chunk_bytes": 64, "predivide": 8}


@pytest.mark.parametrize("kind", [np.int64, np.uint8, np.int32, np.array, jnp.int32])
def test_integers_of_numpy_are_python_s(kind):
    mesh = helpers.make_mesh(8)
    zero, same = jaxzero.Zero(mesh, **{k: kind(x) for k, x in NUMBERS.items()}), jaxzero.Zero(mesh, **NUMBERS)
    assert zero == same
    assert hash(zero) == hash(same)
    assert {type(getattr(zero, name)) for name in NUMBERS} == {int}
    params, x = zero.shard({"w": jnp.arange(15.0).reshape(5, 3)}), jnp.arange(80.0).reshape(16, 5)
    loss = lambda p, x, shift: jnp.mean((x @ p["w"] + jnp.sum(shift)) ** 2)
    shift = jnp.arange(3.0)
    got = zero.value_and_grad(loss, accumulate=kind(2), whole_argnums=kind(2))(params, x, shift)
    again = zero.value_and_grad(loss, accumulate=kind(2), whole_argnums=[kind(2)])(params, x, shift)
    want = same.value_and_grad(loss, accumulate=2, whole_argnums=2)(params, x, shift)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    jax.tree.map(np.testing.assert_array_equal, again, want)
    np.testing.assert_allclose(got[0], loss({"w": jnp.arange(15.0).reshape(5, 3)}, x, shift), rtol=1e-6)
    plan = zero.plan(params, optax.adam(1e-3), accumulate=kind(2))
    assert plan.to_dict() == same.plan(params, optax.adam(1e-3), accumulate=2).to_dict()


def test_other_scalars_of_numpy():
    mesh = helpers.make_mesh(8)
    assert jaxzero.Zero(mesh, predivide=np.float32(2.5)) == jaxzero.Zero(mesh, predivide=2.5)
    assert jaxzero.Zero(mesh, hierarchical=np.bool_(False)).hierarchical is False


@pytest.mark.parametrize("value", [np.float32(2), np.bool_(True), np.array([2]), "2", np.int64(-1)])
@pytest.mark.parametrize("name", ["prefetch", "bucket_bytes", "chunk_bytes", "persist_bytes"])
def test_what_is_no_count(name, value):
    with pytest.raises(ValueError, match=f"Zero: {name}="):
        jaxzero.Zero(helpers.make_mesh(8), **{name: value})


@pytest.mark.parametrize("value", [1.0, None, "1", (1.5,), np.float32(1)])
def test_what_is_no_position(value):
    with pytest.raises(ValueError, match=r"whole_argnums=.*Expected positions of the loss's arguments"):
        jaxzero.Zero(helpers.make_mesh(8)).value_and_grad(lambda p, x: 0.0, whole_argnums=value)


NARROW = ["float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz", "float4_e2m1fn"]


@pytest.mark.parametrize("dtype", [*NARROW, *(getattr(jnp, name) for name in NARROW)])
def test_sums_in_eight_bits_are_refused_at_once(dtype):
    mesh = helpers.make_mesh(8)
    with pytest.raises(ValueError, match=r"Zero: reduce_dtype=.*Expected a floating dtype of 16 bits or more"):
        jaxzero.Zero(mesh, reduce_dtype=dtype)
    with pytest.raises(ValueError, match=r"value_and_grad: accumulate_dtype=.*of 16 bits or more"):
        jaxzero.Zero(mesh).value_and_grad(lambda p, x: 0.0, accumulate=2, accumulate_dtype=dtype)


@pytest.mark.parametrize("dtype", [None, "nonsense", object(), jnp.int32])
def test_what_is_no_dtype_to_add_in(dtype):
    with pytest.raises(ValueError, match="value_and_grad: accumulate_dtype="):
        jaxzero.Zero(helpers.make_mesh(8)).value_and_grad(lambda p, x: 0.0, accumulate_dtype=dtype)


class Tuple(NamedTuple):
    w: Any
    b: Any

    def __call__(self, x, y=None):
        return x @ self.w + self.b


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Data:
    w: Any
    b: Any
    __call__ = Tuple.__call__


class Module(eqx.Module):
    w: Any
    b: Any

    def __call__(self, x, y=None):
        return x @ self.w + self.b


@pytest.mark.parametrize("tree", [Tuple, Data, Module])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_callable_tree_of_specs_is_a_tree(tree, stage):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    rng = np.random.default_rng(0)
    plain = tree(rng.normal(size=(6, 4)).astype(np.float32), rng.normal(size=4).astype(np.float32))
    specs = tree(P(None, "model"), None)
    params = tree(jax.device_put(plain.w, NamedSharding(mesh, specs.w)), jnp.asarray(plain.b))
    zero = jaxzero.Zero(mesh, stage=stage, param_specs=specs)
    rows = [leaf.layout for leaf in zero.plan(params).leaves]
    assert rows == ["rows", "rows"]
    loss = lambda p, x: jnp.mean(p(x) ** 2)
    x = rng.normal(size=(8, 6)).astype(np.float32)
    want = jax.value_and_grad(loss)(tree(jnp.asarray(plain.w), jnp.asarray(plain.b)), x)
    got, grads = zero.value_and_grad(loss)(zero.shard(params), x)
    np.testing.assert_allclose(got, want[0], rtol=1e-6)
    for a, b in zip(jax.tree.leaves(zero.gather(grads)), jax.tree.leaves(want[1]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


def test_functions_of_all_kinds_stay_functions():
    """Bound methods, partials, objects, jitted ones, modules without a spec in them."""

    class Object:
        def __call__(self, path, leaf):
            return P()

        method = __call__

    class Rule(eqx.Module):
        scale: Any

        def __call__(self, path, leaf):
            return P()

    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    function = lambda path, leaf: P()
    given = [Object(), Object().method, function, jax.tree_util.Partial(function), eqx.Partial(function), Rule(1.0)]
    for f in given:
        zero = jaxzero.Zero(mesh, param_specs=f)
        assert zero.plan({"w": jnp.ones((8, 4))}).leaves[0].layout == "rows"


def test_a_callable_tree_with_a_wrong_leaf_is_named():
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    wrong = Tuple(P(None, "model"), "model")
    with pytest.raises(ValueError, match="param_specs: leaf 'b' is a str"):
        jaxzero.Zero(mesh, param_specs=wrong)
