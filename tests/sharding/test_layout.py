"""The even split: arithmetic on shapes."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxzero._src.sharding.layout import EvenSplit, Layout, default_split, even_split, is_split


@pytest.mark.parametrize("n", range(1, 9))
def test_every_element_has_one_owner(n):
    """Sizes 1 to 40: device i holds [i*k, (i+1)*k) of the row-major order, the rest is padding."""
    for size in range(1, 41):
        for shape in [(size,), *((a, size // a) for a in range(1, size) if size % a == 0)]:
            layout = even_split(shape, n)
            k = layout.length
            assert k == -(-size // n)
            assert math.prod(layout.local_shape) * n == math.prod(layout.stored_shape) == k * n
            assert layout.padding == k * n - size
            assert (layout.kind == "rows") == (shape[0] % n == 0)
            assert layout.padding == 0 or layout.kind == "flat"


@pytest.mark.parametrize(("shape", "lead"), [((4, 8, 3), 1), ((4, 5, 3), 1), ((2, 3, 16), 2), ((2, 3, 5), 2)])
def test_lead_dimensions_are_not_cut(shape, lead):
    layout = even_split(shape, 8, lead)
    assert layout.local_shape[:lead] == layout.stored_shape[:lead] == shape[:lead]
    assert layout.spec(("data",)) == P(*[None] * lead, "data")
    assert layout.per_layer() == even_split(shape[1:], 8, lead - 1)


def test_what_stays_whole():
    assert even_split((), 8) is None
    assert even_split((0, 3), 8) is None
    assert even_split((4,), 8, lead=1) is None
    assert default_split((63,), 8) is None
    assert default_split((64,), 8) == Layout((64,), 8, "rows")


def test_more_elements_than_32_bits_count():
    layout = even_split((50257, 70001), 8)
    assert layout.size == 50257 * 70001 > 2**31
    assert layout.length * 8 - layout.size == layout.padding < 8
    assert even_split((2**20, 2**13), 8).local_shape == (2**17, 2**13)


def test_spec_of_several_axes():
    assert even_split((16,), 8).spec(("node", "local")) == P(("node", "local"))


def test_even_split_is_a_node_that_wears_its_shape():
    leaf = EvenSplit(jnp.arange(8.0), (3, 2))
    assert (leaf.shape, leaf.ndim, leaf.size, leaf.nbytes, leaf.dtype) == ((3, 2), 2, 6, 24, np.float32)
    assert repr(leaf) == "EvenSplit(shape=(3, 2), stored=float32[8])"
    ((path, value),) = jax.tree_util.tree_leaves_with_path({"w": leaf})
    assert jax.tree_util.keystr(path, simple=True, separator="/") == "w/value"
    assert value is leaf.value
    doubled = jax.jit(lambda t: jax.tree.map(lambda x: 2 * x, t))(leaf)
    assert is_split(doubled)
    assert doubled.shape == (3, 2)
    np.testing.assert_array_equal(doubled.value, 2 * np.arange(8.0))


def test_even_split_compares_like_a_tuple():
    a, b = EvenSplit(P("data"), (3,)), EvenSplit(P("data"), (3,))
    assert a == b
    assert hash(a) == hash(b)
    assert a != EvenSplit(P("data"), (4,))
    assert a != EvenSplit(P(), (3,))
    assert a != P("data")
    assert {"w": a} == {"w": b}


@pytest.mark.parametrize("use", [jnp.asarray, np.asarray, jnp.sum, lambda x: jnp.ones(3) + x])
def test_even_split_is_not_an_array(use):
    with pytest.raises(ValueError, match=r"EvenSplit.*zero.gather"):
        use(EvenSplit(jnp.zeros(8), (3,)))


def test_layouts_of_one_shape_differ():
    made = {Layout((16, 8), 8, kind, lead) for kind, lead in itertools.product(("rows", "flat"), (0, 1))}
    assert len(made) == 4
