"""Axes, contexts and types."""

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxzero
from jaxzero._src._text import path_text
from jaxzero._src.sharding.axes import Axes, in_manual_region, names, resolve
from jaxzero._src.sharding.axis_checks import check_axes
from jaxzero._src.sharding.place import named_sharding, place
from jaxzero._src.sharding.vma import cast, match, varying


def test_names_and_sizes():
    assert names(None) == ()
    assert names("a") == ("a",)
    assert names(["a", "b"]) == ("a", "b")
    axes = Axes(("node", "local"), ("replica",), (2, 3, 4))
    assert (axes.n, axes.r, axes.every) == (12, 2, ("replica", "node", "local"))
    assert (Axes(("data",), (), (8,)).r, Axes(("data",), (), (8,)).n) == (1, 8)


def test_paths_are_text():
    ((path, _),) = jax.tree_util.tree_leaves_with_path({"layers": [1]})
    assert path_text(path) == "layers/0"
    assert path_text(()) == "(root)"


@pytest.mark.parametrize(
    ("shard", "replica", "message"),
    [
        ("model", None, r"shard_axis='model' is not an axis.*\{'replica': 2, 'shard': 4\}"),
        ("shard", "node", r"replica_axis='node' is not an axis"),
        ((), None, "shard_axis is empty"),
        ("shard", "shard", "name one axis twice"),
        (("shard", "shard"), None, "name one axis twice"),
        (3, None, "shard_axis=3 is not an axis"),
    ],
)
def test_axes_that_are_refused(mesh24, shard, replica, message):
    with pytest.raises(ValueError, match=message):
        check_axes(mesh24, shard, replica)


def test_axes_that_are_accepted(mesh24):
    check_axes(mesh24, "shard", "replica")
    check_axes(mesh24, ("replica", "shard"), None)
    check_axes(None, "anything", None)


def inside(mesh, f, **keywords):
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P(), out_specs=P(), **keywords))(jnp.zeros(8))


def test_contexts(mesh24):
    assert not in_manual_region("call", ("shard",), ("replica",))
    seen = []

    def body(x):
        seen.append(in_manual_region("call", ("shard",), ("replica",)))
        seen.append(resolve("call", None, ("shard",), ("replica",), True))
        return x

    inside(mesh24, body)
    assert seen == [True, Axes(("shard",), ("replica",), (2, 4))]
    assert resolve("call", mesh24, ("shard",), (), False) == Axes(("shard",), (), (4,))
    with pytest.raises(ValueError, match="call: no mesh"):
        resolve("call", None, ("shard",), (), False)


def test_half_a_context_is_refused(mesh24):
    with pytest.raises(ValueError, match=r"manual over \['shard'\] but not over \['replica'\]"):
        inside(mesh24, lambda x: in_manual_region("call", ("shard",), ("replica",)) or x, axis_names={"shard"})


def test_unchecked_context_is_refused(mesh8):
    with pytest.raises(ValueError, match="check_vma=False"):
        inside(mesh8, lambda x: in_manual_region("call", ("data",), ()) or x, check_vma=False)


def test_types(mesh24):
    def body(x):
        assert varying(x) == frozenset()
        y = cast(x, ("shard",))
        assert varying(y) == {"shard"}
        assert cast(y, ("shard",)) is y
        z = cast(y, ("replica", "shard"))
        assert varying(z) == {"replica", "shard"}
        assert [varying(v) for v in match([x, y, z, np.float32(1)])] == [{"replica", "shard"}] * 4
        assert match([x, x])[0] is x
        return lax.psum(z, ("replica", "shard"))

    inside(mesh24, body)


@pytest.mark.parametrize("explicit", [False, True])
def test_place(mesh, explicit):
    two = mesh((2, 4), ("model", "data"), explicit=explicit)
    x = place("call", two, (), np.arange(8.0), P("data"), ("data",))
    assert x.sharding.spec == P("data")
    traced = jax.jit(lambda x: place("call", two, (), x, P(), ("data",)))(x)
    np.testing.assert_array_equal(traced, np.arange(8.0))
    other = jax.device_put(np.arange(8.0), jax.NamedSharding(two, P("model")))
    with pytest.raises(ValueError, match=r"call: leaf '\(root\)' is already sharded over other mesh axes.*'model'"):
        place("call", two, (), other, P("data"), ("data",))


@pytest.mark.parametrize("types", [(AxisType.Auto, AxisType.Explicit), (AxisType.Explicit, AxisType.Auto)])
@pytest.mark.parametrize("options", [{}, dict(shard_axis=("data", "other")), dict(replica_axis="other")])
def test_axes_of_different_types_are_refused(types, options):
    on = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "other"), axis_types=types)
    zero = jaxzero.Zero(on, **options)
    found = r"Found \{'data': '\w+', 'other': '\w+'\}; expected all Auto or all Explicit\. Fix: jax\.make_mesh"
    with pytest.raises(ValueError, match="shard: the axes of the mesh are of different types. " + found):
        zero.shard({"w": jnp.ones(5)})
    with pytest.raises(ValueError, match="init: the axes"):
        zero.optimizer(optax.sgd(0.1)).init({"w": jnp.ones(5)})


# --- one program for what was placed and for what a program returned ------------------------------

MESHES = [((8,), ("data",)), ((1,), ("data",)), ((1, 8), ("node", "local")), ((2, 1), ("replica", "data"))]


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize(("shape", "axes"), MESHES)
def test_specs_are_written_as_jax_writes_those_of_results(shape, axes, explicit):
    on = helpers.make_mesh(shape, axes, explicit=explicit)
    for spec in (P(), P(axes), P(None, axes), P(axes[-1]), P(axes[0], axes[-1]) if len(axes) > 1 else P()):
        target = named_sharding(on, spec, 3)
        assert target.is_equivalent_to(NamedSharding(on, spec), 3)
        x = jax.device_put(np.ones((8, 8, 2)), target)
        assert jax.jit(lambda x: x + 1)(x).sharding == target, spec


CELLS = [(shape, axes, e, s) for shape, axes in MESHES for e in (False, True) for s in (1, 2, 3)]
QUICK = [(*MESHES[1], False, 3), (*MESHES[2], False, 3), (*MESHES[0], True, 2), (*MESHES[0], True, 3)]


@pytest.mark.parametrize(
    ("shape", "axes", "explicit", "stage"),
    [pytest.param(*cell, marks=[] if cell in QUICK else pytest.mark.slow) for cell in CELLS],
)
def test_ten_steps_are_one_compilation(shape, axes, explicit, stage):
    """Whether parameters were put in place or born there, and state made eagerly, under jit or from abstract ones."""
    replica = "replica" if "replica" in axes else None
    shard = tuple(a for a in axes if a != replica)
    on = helpers.make_mesh(shape, axes, explicit=explicit)
    zero = jaxzero.Zero(on, stage=stage, shard_axis=shard, replica_axis=replica)
    tx = zero.optimizer(optax.adam(1e-2))
    start = lambda: {"w": jnp.ones((16, 4)), "odd": jnp.ones((5, 3)), "s": jnp.ones(())}
    loss = lambda p, x: jnp.mean((x @ p["w"]) ** 2) * p["s"] + jnp.sum(p["odd"] ** 2)

    @jax.jit
    def step(params, state, x):
        _, grads = zero.value_and_grad(loss)(params, x)
        return zero.apply(tx, grads, state, params)

    placed = lambda tree: [x.sharding for x in jax.tree.leaves(tree)]
    x = jax.device_put(np.ones((16, 16), np.float32), NamedSharding(on, P(axes)))
    for params, init in ((zero.shard(start()), tx.init), (zero.init(start), jax.jit(tx.init))):
        state = init(params)
        before = placed((params, state))
        assert placed(tx.init(jax.eval_shape(lambda p=params: p))) == placed(state)
        for _ in range(10):
            params, state = step(params, state, x)
            assert placed((params, state)) == before
    assert step._cache_size() == 1
