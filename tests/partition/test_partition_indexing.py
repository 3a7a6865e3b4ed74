"""Slices, gathers and scatters at computed places, and reductions of flat shares over any dimensions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import close
from jax import lax
from on_shares import evaluate

from jaxzero._src.sharding.layout import Layout

pytestmark = pytest.mark.grid(5)


def eighths(*shape):
    """Multiples of 1/8: sums of them are exact, in any order."""
    return np.random.default_rng(sum(shape)).integers(-16, 17, shape).astype(np.float32) / 8


def picks(x):
    i, some = jnp.argmax(x.ravel()) % 4, jnp.array([2, 0, 1])
    return [
        x[i],
        x[:, jnp.int32(1)],
        x[some],
        x[:, some],
        x[some, some],
        x[9:],
        x.at[9].get(mode="fill"),
        jnp.take(x, some + 2, axis=0, mode="fill"),
        jnp.take(x, some, axis=-1),
        lax.dynamic_slice_in_dim(x, i, 2, 0),
        lax.dynamic_slice_in_dim(x, i, 2, 1),
        jax.vmap(lambda row, j: row[j])(x, jnp.arange(4) % 3),
        jax.vmap(lambda j: x[:, j], out_axes=1)(some),
    ]


def writes(x):
    i, some, v = jnp.argmax(x.ravel()) % 4, jnp.array([2, 0, 1]), x[0] * 2
    return [
        x.at[i].set(v),
        x.at[1].add(v),
        x.at[i].mul(v),
        x.at[1].max(v),
        x.at[some].set(1.0),
        x.at[some].add(x[:3]),
        x.at[:, 1].set(0.0),
        x.at[..., 0].set(x[..., 1]),
        x.at[i, 1].set(3.0),
        x.at[9].set(v),
        x.at[some + 2].add(1.0, mode="clip"),
        lax.dynamic_update_slice_in_dim(x, x[:2] * 0, i, 0),
        lax.dynamic_update_index_in_dim(x, x[:, 0], 1, 1),
        jnp.zeros((5, *x.shape)).at[1].set(x)[1],
        lax.scan(lambda c, t: (c.at[t].add(v), x[t]), x, jnp.arange(4)),
    ]


def reductions(x):
    axes = [tuple(i for i in range(x.ndim) if mask >> i & 1) for mask in range(2**x.ndim)]
    found = [f(x, a) for a in axes for f in (jnp.sum, jnp.max)]
    return [*found, *[f(x > 0, axis=a) for a in axes[:: x.ndim - 1] for f in (jnp.all, jnp.any)]]


SHAPES = [(4, 8, 3), (4, 5, 3), (4, 3, 5, 7), (4, 3, 8, 2)]


@pytest.mark.parametrize("shape", SHAPES)
def test_every_layout(shape):
    """All programs over all layouts of one array, padding full of NaN, in one compilation."""
    layouts = [Layout(shape, 8, "flat", lead) for lead in range(len(shape))]
    layouts += [Layout(shape, 8, "rows", i) for i, d in enumerate(shape) if d % 8 == 0]
    every = lambda *xs: [f(x) for x in xs for f in (picks, writes, reductions)]
    x = eighths(*shape)
    got, _ = evaluate(every, [x] * len(layouts), layouts, 8)
    want = jax.tree.leaves(jax.jit(every)(*[x] * len(layouts)))
    close(got, want)
    for y in got:
        assert len({np.asarray(s.data).tobytes() for s in y.addressable_shards}) == 1


LOCAL = [
    lambda x: x[jnp.argmax(jnp.arange(4))] * 2,
    lambda x: jnp.take(x, jnp.array([1, 3]), axis=0) * 2,
    lambda x: x.at[2].set(x[0]),
    lambda x: x.at[jnp.array([0, 2])].add(1.0),
    lambda x: lax.dynamic_update_index_in_dim(x, x[1], 0, 0),
    lambda x: x[None][0].reshape(1, *x.shape),
]


@pytest.mark.parametrize("f", LOCAL)
@pytest.mark.parametrize("layout", [Layout((4, 8, 3), 8, "rows", 1), Layout((4, 5, 3), 8, "flat", 1)])
def test_indices_that_do_not_cut_send_nothing(f, layout):
    _, record = evaluate(f, [eighths(*layout.shape)], [layout], 8)
    assert record.crossings == []


@pytest.mark.parametrize("axes", [(0,), (1,), (2,), (3,), (1, 2), (0, 3), (0, 1, 3), (1, 3)])
def test_flat_reductions_send_only_their_result(axes):
    """A kernel of a convolution is flat on most meshes; Adafactor and SM3 reduce it over all sorts of dimensions."""
    shape = (3, 3, 8, 16)
    _, record = evaluate(lambda x: jnp.tanh(x.max(axes)), [eighths(*shape)], [Layout(shape, 8, "flat")], 8)
    out = tuple(d for i, d in enumerate(shape) if i not in axes)
    assert [(c.how, c.shape) for c in record.crossings] == [("max", out)]
