"""The partitioner: any program over split arrays gives what it gives over whole ones, and how it does it."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from on_shares import evaluate

from jaxzero._src.jaxpr.trace import trace
from jaxzero._src.partition import evaluate as partition_evaluate
from jaxzero._src.partition.values import Context
from jaxzero._src.sharding.axes import Axes
from jaxzero._src.sharding.layout import Layout, even_split


def normal(*shape, seed=0):
    return np.random.default_rng(seed + sum(shape)).standard_normal(shape, np.float32)


def layouts_of(x, world):
    """The ways in which an array can be split: flat or rows, at any leading dimension that divides."""
    found = [Layout(x.shape, world, "flat")] if x.ndim else []
    return found + [Layout(x.shape, world, "rows", i) for i, d in enumerate(x.shape) if d and d % world == 0]


def loop(x, steps=3):
    return lax.fori_loop(0, steps, lambda i, c: jnp.tanh(c) * 0.5 + x / (1 + i), x)


def newton(x):
    y = x / jnp.linalg.norm(x)
    return lax.scan(lambda c, _: (1.5 * c - 0.5 * (c @ c.T) @ c, jnp.sum(c)), y, None, length=3)


def stacked(x):
    return lax.scan(lambda c, row: (c + jnp.sum(row * row), row * c), jnp.float32(1), x)


def branches(x):
    return lax.cond(jnp.sum(x) > 0, lambda v: (v * 2, jnp.zeros(())), lambda v: (jnp.zeros_like(v), v.max()), x)


def collatz(x):
    return lax.while_loop(lambda c: jnp.sum(c * c) > 1, lambda c: c * 0.5, x)


@jax.custom_jvp
def custom(x):
    return jnp.sin(x) * x


custom.defjvp(lambda p, t: (custom(*p), t[0]))

PROGRAMS = {
    "elementwise": lambda x: jnp.where(x > 0, jnp.exp(x), -(x**3)) + 2,
    "scalars": lambda x: x * jnp.sum(x) + jnp.max(x) - jnp.min(x),
    "ndim": lambda x: x * x.ndim + x.shape[-1],
    "sum of each axis": lambda x: [x.sum(i) for i in range(x.ndim)],
    "kept dims": lambda x: [x - x.mean(i, keepdims=True) for i in range(x.ndim)],
    "all but one": lambda x: [x.max(tuple(j for j in range(x.ndim) if j != i)) for i in range(x.ndim)],
    "product": lambda x: jnp.prod(1 + 0.01 * x),
    "logic": lambda x: (jnp.all(x > -9), jnp.any(x > 2), jnp.all(x > 0, axis=-1), jnp.any(x > 1, axis=0)),
    "argmax": lambda x: (jnp.argmax(x), jnp.argmin(x, 0), jnp.argmax(x, -1)),
    "isfinite": lambda x: jnp.isfinite(x).all().astype(jnp.int32),
    "integers": lambda x: (jnp.sum((x > 0).astype(jnp.int32)), jnp.max(jnp.round(x * 5).astype(jnp.int32))),
    "cumulative": lambda x: (jnp.cumsum(x, -1), jnp.cumsum(x, 0), jnp.sort(x, -1)),
    "transpose": lambda x: (x.T * 2, jnp.moveaxis(x, 0, -1) + 1),
    "reshape": lambda x: (x.reshape(-1) * 2, x.reshape(*x.shape, 1) + 1, x[None].reshape(x.shape) - 1),
    "slices": lambda x: (x[..., :1] * 2, x[:1] + 1, x[::-1], x[..., ::-1], jnp.flip(x)),
    "concatenate": lambda x: (jnp.concatenate([x, x * 2], -1), jnp.concatenate([x, x], 0), jnp.stack([x, x * 3])),
    "pad": lambda x: jnp.pad(x, [(1, 2)] * x.ndim, constant_values=7.0),
    "update": lambda x: (x.at[0].set(1.0), x.at[..., 0].add(2.0)),
    "norms": lambda x: (jnp.linalg.norm(x), jnp.linalg.norm(x.ravel(), 1), jnp.vdot(x, x * 2)),
    "gram": lambda x: (jnp.tensordot(x, x, x.ndim), jnp.tensordot(x, x.T, 1), jnp.tensordot(x.T, x, 1)),
    "matmul": lambda x: (x @ normal(x.shape[-1], 3), normal(2, x.shape[0]) @ x.reshape(x.shape[0], -1)),
    "outer": lambda x: x[..., None] * jnp.ones(2),
    "loop": loop,
    "stacked scan": stacked,
    "cond": branches,
    "while": collatz,
    "calls": lambda x: (jax.checkpoint(jnp.sin)(x), custom(x), jax.jit(jnp.cos)(x), jax.nn.relu(x)),
    "vmap": jax.vmap(lambda row: row / (1 + jnp.sum(row * row))),
    "casts": lambda x: (x.astype(jnp.bfloat16).astype(jnp.float32), (x + 1j * x) * (1 - 2j)),
    "random": lambda x: x + jax.random.normal(jax.random.key(3), x.shape),
    "fft": lambda x: jnp.abs(jnp.fft.fft(x)),
    "constants": lambda x: jnp.zeros_like(x) + jnp.arange(x.size).reshape(x.shape) * x,
}
SHAPES = [(1,), (16,), (8, 6), (5, 3), (2, 8, 3)]  # each with a world of its own; the product is slow
CASES = [
    pytest.param(shape, world, marks=() if i == j and i % 2 == 0 else pytest.mark.slow)
    for (i, shape), (j, world) in itertools.product(enumerate(SHAPES), enumerate((5, 8, 2, 3, 8)))
]


@pytest.mark.parametrize(("shape", "world"), CASES)
def test_programs(shape, world):
    """Every program over every layout of one array, all in one compilation."""
    x = normal(*shape)
    programs = dict(PROGRAMS)
    if len(shape) == 2:
        programs |= {"newton": newton, "qr": lambda x: jnp.abs(jnp.linalg.qr(x.T @ x + jnp.eye(x.shape[1]))[1])}
    every = lambda *xs: {name: [f(v) for v in xs] for name, f in programs.items()}
    layouts = layouts_of(x, world)
    got, _ = evaluate(every, [x] * len(layouts), layouts, world)
    want = jax.jit(every)(*[x] * len(layouts))
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(want)]
    for path, a, b in zip(paths, got, jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        for part in a.addressable_shards:
            np.testing.assert_allclose(part.data, b, rtol=2e-5, atol=2e-5, err_msg=f"{path} of {layouts}")


def how(f, *shapes, world=8):
    arrays = [normal(*s) for s in shapes]
    got, record = evaluate(f, arrays, [even_split(s, world) for s in shapes], world)
    for a, b in zip(got, jax.tree.leaves(f(*arrays)), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)
    return [(c.how, c.shape, c.times) for c in record.crossings]


@pytest.mark.parametrize(
    ("f", "shape", "crossings"),
    [
        (lambda x: jnp.sum(jnp.sin(x) * 2 + x**2) * 0, (5, 3), []),
        (lambda x: x - x.mean(1, keepdims=True), (16, 3), []),
        (lambda x: jnp.sqrt(x.T.sum(0)), (16, 3), []),
        (lambda x: jnp.sqrt(jnp.vdot(x, x)), (5, 3), [("sum", (), 1)]),
        (lambda x: jnp.sqrt((x * x).mean(0)), (37, 6), [("sum", (6,), 1)]),
        (lambda x: jnp.sqrt((x * x).mean(1)), (37, 6), [("sum", (37,), 1)]),
        (lambda x: jnp.tanh(x.T @ x), (16, 3), [("sum", (3, 3), 1)]),
        (lambda x: jnp.tanh(jnp.max(x, 0)), (16, 3), [("max", (3,), 1)]),
        (lambda x: x @ normal(3, 4), (16, 3), []),
        (lambda x: lax.scan(lambda c, v: (c + 1, v * c), 0.0, x.T.reshape(3, 16))[1], (16, 3), []),
    ],
)
def test_how(f, shape, crossings):
    """What crosses devices before the results themselves are gathered by the test."""
    assert [c for c in how(f, shape) if c[0] != "sum" or crossings] == crossings


def test_many_norms_cross_together():
    """One all-reduce for the norms of all leaves, though each is used by an equation of its own."""
    shapes = [(16,), (5, 3), (8, 2), (7,)]
    arrays = [normal(*s) for s in shapes]
    f = lambda *xs: [x / jnp.sqrt(jnp.sum(x * x)) for x in xs]
    axes = Axes(("data",), (), (8,))
    program = trace(lambda xs: f(*xs), arrays)

    def body(arrays):
        ctx = Context(axes, 4096, None)
        layouts = [even_split(s, 8) for s in shapes]
        out = partition_evaluate.evaluate(
            ctx, program.jaxpr, [], [ctx.split(x, layout) for x, layout in zip(arrays, layouts, strict=True)]
        )
        return [x.local for x in out]

    devices = Mesh(np.array(jax.devices()), ("data",))
    jaxpr = jax.make_jaxpr(jax.shard_map(body, mesh=devices, in_specs=(P(),), out_specs=P("data")))(arrays)
    assert str(jaxpr).count("psum") == 1
    assert "all_gather" not in str(jaxpr)


def test_chain_of_sums_crosses_once():
    crossings = how(lambda *xs: jnp.sqrt(sum(jnp.sum(x * x) for x in xs)), (16,), (5,), (3, 3), (8, 8))
    assert crossings == [("sum", (), 1)]


def test_chain_of_maxima_crosses_in_one_round():
    """Each maximum waits for the one before, yet all cross at once."""
    f = lambda *xs: functools.reduce(jnp.maximum, [jnp.sqrt(jnp.sum(x * x)) for x in xs])
    assert how(f, (16,), (5,), (3, 3)) == [("sum", (), 1)] * 3


def test_loop_gathers_before_and_not_inside():
    """A carry that every turn needs whole is gathered once."""
    crossings = how(lambda x: newton(x)[0], (16, 16))
    assert [c for c in crossings if c[0] == "gather"] in ([], [("gather", (16, 16), 1)])
