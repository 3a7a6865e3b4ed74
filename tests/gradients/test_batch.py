"""The arguments of a loss after the parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxzero._src.gradients.batch import check_divides, fold, sort_arguments
from jaxzero._src.sharding.axes import Axes

AXES = Axes(("data",), ("replica",), (2, 4))


def kinds(*batch, whole=(), traced=False, fold_keys=True):
    arguments, arrays = sort_arguments(batch, whole, fold_keys, traced)
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
    again = arguments.rebuild(arrays)
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
