"""Which leaves are cut, and where optimizer state is cut."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxzero
from jaxzero._src.sharding.layout import EvenSplit, Layout, even_split
from jaxzero._src.sharding.leaves import leaves_of, owner, shape_dtype, state_leaves, unwrap, wrap_padded


def abstract(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


TREE = {
    "w": abstract(16, 3),
    "b": abstract(5),
    "scale": abstract(),
    "empty": abstract(0, 3),
    "count": abstract(64, dtype=jnp.int32),
    "mask": abstract(64, dtype=jnp.bool_),
    "key": jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 64)),
    "half": abstract(8, dtype=jnp.bfloat16),
    "phase": abstract(8, dtype=jnp.complex64),
}


def by_name(leaves):
    return {leaf.path[-1].key: leaf for leaf in leaves.leaves}


def test_leaves():
    found = by_name(leaves_of(TREE, 8, None))
    assert {k for k, v in found.items() if v.trainable} == {"w", "b", "scale", "half", "phase"}
    assert {k: v.layout.kind for k, v in found.items() if v.layout} == {
        "w": "rows",
        "b": "flat",
        "half": "rows",
        "phase": "rows",
    }
    assert {k: v.trace_aval().dtype for k, v in found.items() if k in ("mask", "key", "count", "half")} == {
        "mask": jnp.int32,
        "key": jnp.int32,
        "count": jnp.int32,
        "half": jnp.bfloat16,
    }
    with pytest.raises(AssertionError):
        _ = found["scale"].cut


def test_split_leaves_wear_their_shape():
    leaves = leaves_of({"b": EvenSplit(abstract(8), (5,))}, 8, None)
    (leaf,) = leaves.leaves
    assert (leaf.shape, leaf.layout) == ((5,), even_split((5,), 8))
    assert leaves.unflatten([1]) == {"b": 1}


def test_stacked_leaves_are_cut_inside_a_layer():
    found = by_name(leaves_of({"w": abstract(3, 16), "b": abstract(3, 5), "s": abstract(3)}, 8, lambda path: True))
    assert found["w"].layout == Layout((3, 16), 8, "rows", 1)
    assert found["b"].layout == Layout((3, 5), 8, "flat", 1)
    assert found["s"].layout is None


@pytest.mark.parametrize(
    ("x", "expected"),
    [
        (2.5, ((), jnp.float32)),
        (np.float64(1), ((), np.float32)),
        (True, ((), np.bool_)),
        (np.ones((2, 3), np.float16), ((2, 3), np.float16)),
        (EvenSplit(jnp.zeros(8), (5,)), ((5,), jnp.float32)),
    ],
)
def test_shape_and_dtype_of_legal_leaves(x, expected):
    assert shape_dtype(x) == expected


def test_longest_suffix_owns():
    tree = {"a": {"w": abstract(4)}, "w": abstract(4)}
    leaves = leaves_of(tree, 2, None).leaves
    paths = {leaf.path: leaf for leaf in leaves}
    inner, outer = leaves
    ((path, _),) = jax.tree_util.tree_leaves_with_path({"mu": {"a": {"w": 0}}})
    assert owner(path, (4,), paths) is inner
    assert owner(path[:1] + path[2:], (4,), paths) is outer
    assert owner(path, (5,), paths) is None
    assert owner(path, None, paths) is inner
    assert owner(path[:1], (4,), paths) is None


def layouts(tx, params, n=8):
    leaves = leaves_of(params, n, None).leaves
    state = jax.eval_shape(tx.init, params)
    return {leaf.path[-1]: leaf for leaf in state_leaves(state, leaves, n)}, state_leaves(state, leaves, n)


def test_state_is_cut_like_its_parameter():
    params = {"w": abstract(16, 3), "b": abstract(5), "n": abstract(64, dtype=jnp.int32)}
    leaves = layouts(optax.adam(1e-3), {"w": params["w"], "b": params["b"]})[1]
    count, mu_b, mu_w, nu_b, nu_w = leaves
    assert count.layout is None
    assert mu_w.layout == nu_w.layout == even_split((16, 3), 8)
    assert mu_b.layout == nu_b.layout == even_split((5,), 8)
    assert (mu_b.stored_shape, mu_w.stored_shape, count.stored_shape) == ((8,), (16, 3), ())
    assert not any(leaf.frozen for leaf in leaves)
    whole = [leaf for leaf in layouts(optax.trace(0.9), params)[1] if leaf.layout is None]
    assert [leaf.shape for leaf in whole] == [(64,)]


def test_other_state_has_the_default():
    params = {"w": abstract(256, 130)}
    leaves = layouts(optax.adafactor(1e-3), params)[1]
    large = {leaf.shape: leaf.layout for leaf in leaves}
    assert large[(256,)] == even_split((256,), 8)
    assert large[(130,)] == even_split((130,), 8)
    assert large[(1,)] is None


def test_several_of_a_parameter_have_the_default():
    """The memory of L-BFGS ends with a parameter's path and shape, but has another shape."""
    params = {"w": abstract(16, 4), "b": abstract(5)}
    memory = {leaf.shape: leaf.layout for leaf in layouts(optax.scale_by_lbfgs(memory_size=10), params)[1]}
    assert memory[10, 16, 4] == Layout((10, 16, 4), 8, "flat")
    assert memory[10, 5] is None


def test_specs_of_abstract_state_are_those_of_real_state(mesh8):
    """A state that is only known by its stored shapes goes into a user's `shard_map` like a real one."""
    params = {"w": jnp.ones((16, 4)), "b": jnp.ones(5), "s": jnp.ones(())}
    zero = jaxzero.Zero(mesh8)
    for inner in (optax.adam(0.1), optax.scale_by_lbfgs(memory_size=10), optax.lamb(0.1)):
        tx = zero.optimizer(inner)
        assert zero.specs(jax.eval_shape(tx.init, params)) == zero.specs(tx.init(params))


def test_wear_and_bare():
    x = jnp.zeros(8)
    flat, rows = even_split((5,), 8), even_split((8,), 8)
    assert wrap_padded(x, flat).shape == (5,)
    assert unwrap(wrap_padded(x, flat)) is x
    assert wrap_padded(x, rows) is x
    assert wrap_padded(x, None) is x
    assert unwrap(x) is x
