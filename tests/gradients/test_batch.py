"""The arguments of a loss after the parameters."""

import re

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxzero
from jaxzero._src.gradients.batch import check_agree, check_divides, fold, sort_arguments
from jaxzero._src.sharding.arguments import Whole
from jaxzero._src.sharding.axes import Axes

AXES = Axes(("data",), ("replica",), (2, 4))


def kinds(*batch, whole=(), traced=False, fold_keys=True):
    arguments, arrays = sort_arguments(batch, {}, Whole(whole), fold_keys, traced)
    return arguments, [(a.cut, a.key) for a in arguments.arrays], arrays


def test_what_each_argument_is():
    key = jax.random.key(0)
    batch = ({"x": jnp.ones((8, 3)), "step": jnp.int32(2)}, key, jax.random.split(key, 8), "mean", jnp.tanh, None)
    arguments, found, arrays = kinds(*batch)
    # in tree order: the step and x, a scalar key, an array of keys
    assert found == [(False, False), (True, False), (False, True), (True, False)]
    assert [a.name for a in arguments.arrays] == [
        "argument 1, leaf 'step'",
        "argument 1, leaf 'x'",
        "argument 2",
        "argument 3",
    ]
    assert [a.spec(AXES.every) for a in arguments.arrays] == [P(), P(("replica", "data")), P(), P(("replica", "data"))]
    again, named = arguments.rebuild(arrays)
    assert named == {}
    assert jax.tree.structure(again) == jax.tree.structure(batch)
    assert again[3:] == ("mean", jnp.tanh, None)


def test_python_numbers_are_arrays_only_where_the_call_is_eager():
    assert kinds(2.5, 3, True, traced=False)[1] == [(False, False)] * 2
    assert kinds(2.5, 3, True, traced=True)[1] == []
    assert kinds(np.float32(1), traced=True)[1] == [(False, False)]


def test_whole_arguments_are_neither_cut_nor_folded():
    key = jax.random.key(0)
    assert kinds(jnp.ones((3, 2)), key, whole=(1, 2))[1] == [(False, False), (False, False)]
    assert kinds(key, fold_keys=False)[1] == [(False, False)]


@pytest.mark.parametrize("position", [0, 3])
def test_whole_argnums_out_of_range(position):
    with pytest.raises(ValueError, match=rf"whole_argnums=\({position},\) names position {position}.*1 to 2"):
        kinds(jnp.ones(8), jnp.ones(8), whole=(position,))


def test_equal_structures_compare_equal():
    """A traced gradient is kept by the structure of its batch."""
    first, second = kinds(jnp.ones(8), "a")[0], kinds(jnp.zeros(16), "a")[0]
    assert first == second
    assert hash(first.static) == hash(second.static)
    assert first != kinds(jnp.ones(8), "b")[0]


def test_examples_that_cannot_be_dealt():
    arguments, _, arrays = kinds(jnp.ones((8, 3)), {"y": jnp.ones((12,))})
    with pytest.raises(
        ValueError, match=r"argument 2, leaf 'y'.* 12 .*8 \(4 shares x 2 replicas x 1 micro-steps.*drop or pad"
    ):
        check_divides(arguments.arrays, arrays, (AXES.n, AXES.r))
    arguments, _, arrays = kinds(jax.random.PRNGKey(0))
    with pytest.raises(ValueError, match=r"PRNG key use jax.random.key"):
        check_divides(arguments.arrays, arrays, (AXES.n, AXES.r))


def test_keys_differ_between_devices(mesh24):
    key = jax.random.key(7)
    axes = Axes(("shard",), ("replica",), (2, 4))
    arguments, _, arrays = kinds(key, jnp.float32(3))

    def body(key, x):
        folded, same = fold(arguments.arrays, [key, x], axes)
        (again,) = fold(arguments.arrays[:1], [folded], axes)  # varies already: left alone
        return jax.random.key_data(folded)[None], same, jax.random.key_data(again)[None]

    split = P(("replica", "shard"))
    region = jax.shard_map(body, mesh=mesh24, in_specs=(P(), P()), out_specs=(split, P(), split))
    data, same, again = jax.jit(region)(*arrays)
    expected = [jax.random.key_data(jax.random.fold_in(key, i)) for i in range(8)]
    np.testing.assert_array_equal(data, expected)
    np.testing.assert_array_equal(again, expected)
    assert same == 3


# --- numbers of examples -------------------------------------------------------------------------


def loss(params, x, table, *, shift=0.0):
    return jnp.mean((x @ params["w"]) ** 2) + jnp.sum(table) * jnp.sum(params["w"]) + jnp.mean(shift)


P5, X, TABLE = {"w": jnp.ones(5)}, jnp.arange(320.0).reshape(64, 5) / 99, jnp.arange(8.0)


@pytest.mark.parametrize(
    ("batch", "named", "found"),
    [
        ((X, TABLE), {}, "argument 2 has leading dimension 8 (shape (8,)), but argument 1 has 64 (shape (64, 5))"),
        ((X,), {"table": TABLE}, "argument 'table' has leading dimension 8"),
        ((), {"x": X, "table": TABLE}, "whole_argnums=2 gives argument 'table' whole"),
        ((TABLE, X, X), {}, "whole_argnums=1 gives argument 1 whole"),
        ((X, X), {"shift": TABLE}, "make it a positional argument of its own"),
        (({"x": X, "y": X, "table": TABLE},), {}, "leaf 'table' has leading dimension 8"),
        ((X, jax.random.PRNGKey(0)), {}, "for a PRNG key use jax.random.key"),
    ],
)
def test_arrays_of_different_numbers_of_examples(batch, named, found):
    whole = Whole((), ("params", "x", "table"))
    arguments, arrays = sort_arguments(batch, named, whole, True, False)
    with pytest.raises(ValueError, match=re.escape(found)):
        check_agree(arguments.arrays, arrays, whole)


def test_what_is_no_batch_may_have_any_length():
    batch = (X, TABLE, jnp.float32(3), jax.random.key(0), "mean", None)
    whole = Whole((2,))
    arguments, arrays = sort_arguments(batch, {}, whole, True, False)
    check_agree(arguments.arrays, arrays, whole)
    assert [a.cut for a in arguments.arrays] == [True, False, False, False]


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_batch_by_keyword(mesh24, stage, jit):
    """As under `jax.value_and_grad`: a table among the examples is refused, and whole by the position it would have."""
    zero = jaxzero.Zero(mesh24, stage=stage, shard_axis="shard", replica_axis="replica")
    params = zero.shard(P5)
    make = jax.jit if jit else lambda f: f
    with pytest.raises(ValueError, match="value_and_grad: argument 'table' has leading dimension 8"):
        make(zero.value_and_grad(loss))(params, x=X, table=TABLE)
    with pytest.raises(ValueError, match="forward: argument 2 has leading dimension 8"):
        make(zero.forward(loss))(params, X, TABLE)
    batch = {"x": X, "table": TABLE, "shift": X[:, 0]}
    want = jax.value_and_grad(loss)(P5, **batch)
    value, grads = make(zero.value_and_grad(loss, whole_argnums=2, accumulate=2))(params, **batch)
    np.testing.assert_allclose(value, want[0], rtol=1e-6)
    helpers.close(zero.gather(grads), want[1])
    value = make(zero.forward(loss, whole_argnums=2))(params, X, table=TABLE, shift=X[:, 0])
    np.testing.assert_allclose(value, want[0], rtol=1e-6)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_table_inside_a_users_shard_map(mesh8, stage):
    """Nothing is cut there but microbatches."""
    zero = jaxzero.Zero(mesh8, stage=stage)
    params = zero.shard(P5)

    def run(accumulate, whole):
        grad_fn = zero.value_and_grad(loss, accumulate=accumulate, whole_argnums=whole)
        specs = zero.specs(params)
        region = jax.shard_map(grad_fn, mesh=mesh8, in_specs=(specs, P("data"), P()), out_specs=(P(), P("data")))
        return jax.jit(region)(params, X, TABLE[:4])[0]

    with pytest.raises(ValueError, match="argument 2 has leading dimension 4 .*whole_argnums=2"):
        run(4, ())
    for found in (run(1, ()), run(4, 2)):
        np.testing.assert_allclose(found, loss(P5, X, TABLE[:4]), rtol=1e-6)


def test_observe_takes_the_batch_by_keyword(mesh8):
    zero = jaxzero.Zero(mesh8, stage=3).observe(loss, P5, X, table=TABLE, whole_argnums=2)
    traffic = {t.kind for t in zero.plan(P5).traffic if t.phase == "gradient"}
    assert "reduce-scatter" in traffic
