"""Collectives on layouts: every bucket setting, layout and axis order moves the same elements."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxzero._src.comm import collectives
from jaxzero._src.sharding.layout import Layout, even_split

pytestmark = pytest.mark.usefixtures("strict")
LAYOUTS = [
    Layout((16, 3), 8, "rows"),
    Layout((5, 3), 8, "flat"),
    Layout((1,), 8, "flat"),
    Layout((2, 8, 3), 8, "rows", 1),
    Layout((2, 5, 3), 8, "flat", 1),
    Layout((2, 3, 7), 8, "flat", 2),
    Layout((16,), 8, "flat"),
]


def values(dtype=np.float32):
    return [(np.arange(x.size).reshape(x.shape) + i).astype(dtype) for i, x in enumerate(LAYOUTS)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_stored_and_back(layout):
    x = np.arange(1, layout.size + 1, dtype=np.int32).reshape(layout.shape)
    stored = collectives.stored(jnp.asarray(x), layout)
    assert stored.shape == layout.stored_shape
    assert np.count_nonzero(stored) == layout.size
    np.testing.assert_array_equal(collectives.logical(stored, layout), x)
    shares = [collectives.share(jnp.asarray(x), layout, jnp.int32(i)) for i in range(8)]
    assert {s.shape for s in shares} == {layout.local_shape}
    np.testing.assert_array_equal(np.concatenate(shares, axis=layout.lead), stored)


@pytest.mark.parametrize("bucket_bytes", [None, 1, 100, 10**6])
@pytest.mark.parametrize("axes", [("replica", "shard"), ("shard",)])
def test_scatter_and_gather_are_inverse(mesh24, axes, bucket_bytes):
    """The sum over devices of each device's own arrays, cut and made whole again: exact in whole numbers."""
    n = {"replica": 2, "shard": 4}
    world = int(np.prod([n[a] for a in axes]))
    layouts = [even_split(x.shape, world, x.lead) for x in LAYOUTS]

    def body(arrays):
        mine = [x * (1 + lax.axis_index(axes).astype(jnp.float32)) for x in arrays]
        shares = collectives.reduce_scatter(mine, layouts, axes, bucket_bytes=bucket_bytes)
        assert [s.shape for s in shares] == [x.local_shape for x in layouts]
        return collectives.all_gather(shares, layouts, axes, bucket_bytes=bucket_bytes)

    region = jax.shard_map(body, mesh=mesh24, in_specs=P(), out_specs=P())
    for got, x in zip(jax.jit(region)(values()), values(), strict=True):
        np.testing.assert_array_equal(got, x * (world * (world + 1) // 2))


@pytest.mark.parametrize("bucket_bytes", [None, 100, 10**6])
@pytest.mark.parametrize(("reduce", "expected"), [(lax.psum, 36), (lax.pmax, 8), (lax.pmin, 1)])
def test_all_reduce(mesh8, reduce, expected, bucket_bytes):
    arrays = [jnp.ones(()), jnp.ones((3, 2)), jnp.ones(40, jnp.int32), jnp.ones((2, 1, 2))]

    def body(arrays):
        index = lax.axis_index("data") + 1
        mine = [x * index.astype(x.dtype) for x in arrays]
        return collectives.all_reduce(mine, ("data",), bucket_bytes=bucket_bytes, reduce=reduce)

    region = jax.shard_map(body, mesh=mesh8, in_specs=P(), out_specs=P())
    for got, x in zip(jax.jit(region)(arrays), arrays, strict=True):
        assert (got.shape, got.dtype) == (x.shape, x.dtype)
        np.testing.assert_array_equal(got, np.full(x.shape, expected))


@pytest.mark.parametrize(
    ("nbytes", "kinds", "limit", "expected"),
    [
        ([], [], 10, []),
        ([5, 5, 5], "aaa", None, [[0], [1], [2]]),
        ([5, 5, 5], "aba", 100, [[0, 2], [1]]),
        ([5, 5, 5], ["a", None, "a"], 100, [[0, 2], [1]]),
        ([6, 6, 6, 6], "aaaa", 10, [[0, 1], [2, 3]]),
        ([10, 3, 3], "aaa", 10, [[0], [1, 2]]),
        ([0, 0], "aa", 10, [[0, 1]]),
    ],
)
def test_buckets(nbytes, kinds, limit, expected):
    assert collectives.buckets(nbytes, list(kinds), limit) == expected


def test_very_many_leaves_are_dealt_into_few_buckets():
    found = collectives.buckets([1] * 10_000, ["a"] * 10_000, 10**9)
    assert len(found) <= collectives.MORE
    assert sorted(i for members in found for i in members) == list(range(10_000))


@pytest.mark.parametrize("layout", [even_split((3 * 10**9,), 8), even_split((3 * 10**9 + 1,), 8)])
def test_the_start_of_a_share_is_the_number_of_its_device(layout):
    """`index * length` passes 2**31 at the sixth device of an array of 3 * 10**9 elements."""
    arguments = jax.ShapeDtypeStruct(layout.shape, jnp.bool_), jax.ShapeDtypeStruct((), jnp.int32)
    program = str(jax.make_jaxpr(lambda x, index: collectives.share(x, layout, index))(*arguments))
    length = -(-layout.size // 8)
    assert " mul " not in program
    assert f"bool[8,{length}]" in program
    assert f"slice_sizes=(1, {length})" in program


def test_one_collective_per_bucket(mesh8):
    def count(bucket_bytes):
        body = lambda xs: collectives.reduce_scatter(
            [lax.pcast(x, ("data",), to="varying") for x in xs], LAYOUTS, ("data",), bucket_bytes=bucket_bytes
        )
        specs = [x.spec(("data",)) for x in LAYOUTS]
        region = jax.shard_map(body, mesh=mesh8, in_specs=P(), out_specs=specs)
        return str(jax.make_jaxpr(region)(values())).count("reduce_scatter[")

    assert count(10**6) == 1
    assert count(None) == len(LAYOUTS)
