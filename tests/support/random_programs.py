"""Random programs over arrays: every step takes values made before, and all of them are results."""

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxzero._src.sharding.layout import Layout

SHAPES = [(1,), (3,), (7,), (16,), (37,), (130,), (8, 1), (3, 7), (8, 3), (16, 16), (24, 5), (5, 24)]
SHAPES += [(2, 8, 3), (3, 16, 5), (1, 3, 7), (16, 1, 8), (2, 3, 4, 8), (2, 5, 3, 7)]
MOST = 3000  # elements of a value


@dataclasses.dataclass(eq=False)
class Program:
    """A program, its arguments and how they are cut (`None`: whole)."""

    steps: list[tuple[str, Callable[[list[Any]], list[Any]]]]
    arrays: list[np.ndarray]
    layouts: list[Layout | None]
    world: int

    def __call__(self, *arrays: Any) -> list[Any]:
        values = list(arrays)
        for _, step in self.steps:
            values += [tame(y) for y in step(values)]
        return values


def tame(y: Any) -> Any:
    """Keeps values small: products of products would overflow."""
    if y.dtype == np.bool_:
        return y
    return y % 101 if jnp.issubdtype(y.dtype, jnp.integer) else y / (1 + jnp.abs(y) / 8)


def layouts_of(shape: tuple[int, ...], world: int) -> list[Layout]:
    """All the ways in which an array can be cut."""
    flat = [Layout(shape, world, "flat", lead) for lead in range(len(shape))]
    return flat + [Layout(shape, world, "rows", i) for i in range(len(shape))]  # padded where it does not divide


def make(seed: int, length: int = 20) -> Program:
    rng = np.random.default_rng(seed)
    program = Program([], [], [], int(rng.choice([8, 8, 8, 3, 5, 2, 1])))
    for _ in range(int(rng.integers(2, 5))):
        shape = SHAPES[rng.integers(len(SHAPES))]
        x = rng.integers(-16, 17, shape).astype(np.float32) / 8
        program.arrays.append(x if rng.integers(5) else x.astype(np.int32))
        found = layouts_of(shape, program.world)
        program.layouts.append(found[rng.integers(len(found))] if rng.integers(6) else None)
    avals = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in program.arrays]
    while len(program.steps) < length:
        family = FAMILIES[rng.choice(len(FAMILIES), p=WEIGHTS)]
        i = int(max(rng.integers(len(avals), size=2)))  # later values more often
        step = family(rng, avals, i)
        if step is None:
            continue
        try:
            outs = jax.eval_shape(step, avals)
        except (TypeError, ValueError, IndexError):  # shapes or dtypes that this step does not take
            continue
        if all(0 < y.size <= MOST for y in outs):
            program.steps.append((f"{family.__name__} of {i}", step))
            avals += outs
    return program


# --- the families of steps; each chooses its constants now, and its arrays by number ---------------


def is_float(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.floating))


def pick(rng: Any, options: Any) -> Any:
    return options[rng.integers(len(options))]


def axis_of(rng: Any, x: Any) -> int:
    return int(rng.integers(x.ndim))


def one(i: int, f: Callable[[Any], Any]) -> Callable[[list[Any]], list[Any]]:
    """A step of one operand, with any tree of results."""
    return lambda values: jax.tree.leaves(f(values[i]))


FLOATS = [
    lambda a: jnp.tanh(a) * a,
    lambda a: jnp.where(a > 0.3, a, 0.5),
    lambda a: a.astype(jnp.bfloat16).astype(jnp.float32),
    lambda a: jnp.floor(a * 3 + 0.13).astype(jnp.int32),
    lambda a: a > 0.31,
    lambda a: jnp.where(a > 1.33, jnp.nan, a),
    lambda a: jnp.abs(a * (1 + 0.5j)),
    lambda a: a + jax.random.uniform(jax.random.key(1), a.shape),
    jax.checkpoint(lambda a: jnp.cos(a) * a),
    jax.jit(lambda a: jnp.exp(-a * a)),
    jax.nn.gelu,
]
INTEGERS = [lambda a: a.astype(jnp.float32) / 8, lambda a: a // 3, lambda a: a.astype(jnp.int8), lambda a: a & 5]


def elementwise(rng: Any, avals: Any, i: int) -> Any:
    return one(i, pick(rng, FLOATS if is_float(avals[i]) else INTEGERS))


def binary(rng: Any, avals: Any, i: int) -> Any:
    j = int(rng.integers(len(avals)))
    f = pick(rng, [operator.add, operator.mul, jnp.maximum, lambda a, b: jnp.where(a > b, a, b), lambda a, b: a > b])
    return lambda values: [f(values[i], values[j])]


def reduction(rng: Any, avals: Any, i: int) -> Any:
    x = avals[i]
    axes = tuple(sorted(rng.permutation(x.ndim)[: rng.integers(x.ndim + 1)].tolist()))
    f = pick(rng, [jnp.sum, jnp.max, jnp.min, jnp.mean, jnp.any, jnp.all, jnp.var, jnp.prod])
    keep = bool(rng.integers(2))
    return one(i, lambda a: f(a, axis=axes or None, keepdims=keep))


def along(rng: Any, avals: Any, i: int) -> Any:
    if not avals[i].ndim:
        return None
    axis = axis_of(rng, avals[i])
    f = pick(rng, [jnp.argmax, jnp.cumsum, jnp.sort, jnp.flip, jax.nn.softmax, lambda a, axis: jnp.roll(a, 2, axis)])
    return one(i, lambda a: f(a, axis=axis))


def structure(rng: Any, avals: Any, i: int) -> Any:
    x = avals[i]
    if not x.ndim:
        return None
    axis, order = axis_of(rng, x), rng.permutation(x.ndim).tolist()
    start, stop = sorted(rng.integers(0, x.shape[axis] + 1, 2).tolist())
    window = (*[slice(None)] * axis, slice(start, stop, pick(rng, [1, 1, 2])))
    width = [(1, 2) if d == axis else (0, 0) for d in range(x.ndim)]
    factor = pick(rng, [d for d in (1, 2, 3, 4, 8) if x.size % d == 0])
    place = int(rng.integers(x.shape[0]))
    return one(
        i,
        pick(
            rng,
            [
                lambda a: a.reshape(factor, -1),
                lambda a: a.reshape(*a.shape, 1),
                lambda a: a.reshape(-1, *a.shape[2:]),
                lambda a: a.transpose(order),
                lambda a: a.transpose(order),
                lambda a: a[window],
                lambda a: jnp.concatenate([a, a[window]], axis),
                lambda a: jnp.stack([a, a], axis),
                lambda a: jnp.pad(a, width, constant_values=1),
                lambda a: jnp.broadcast_to(a, (2, *a.shape)),
                lambda a: a[place],
                lambda a: a.at[place].set(a[0]),
                lambda a: jnp.take(a, jnp.array([0, 0]), axis=axis),
                lambda a: lax.dynamic_slice_in_dim(a, jnp.argmax(a.ravel()), 1, axis),
            ],
        ),
    )


def product(rng: Any, avals: Any, i: int) -> Any:
    """An einsum over random common letters, each of them summed or kept."""
    j = int(rng.integers(len(avals)))
    a, b = avals[i], avals[j]
    letters = [chr(97 + d) for d in range(a.ndim)]
    others = [chr(107 + d) for d in range(b.ndim)]
    for d, e in rng.permutation([(d, e) for d in range(a.ndim) for e in range(b.ndim)] or [(0, 0)]).tolist():
        if a.ndim and b.ndim and a.shape[d] == b.shape[e] and others[e] >= "k" and letters[d] not in others:
            others[e] = letters[d]
    common = set(letters) & set(others)
    out = [c for c in dict.fromkeys(letters + others) if c not in common or not rng.integers(3)]
    text = f"{''.join(letters)},{''.join(others)}->{''.join(rng.permutation(out))}"
    if not common or not is_float(a) or not is_float(b):
        return None
    return lambda values: [jnp.einsum(text, values[i], values[j])]


TURNS = [
    jnp.tanh,
    lambda a: a - a.mean(),
    lambda a: a / (1 + jnp.abs(a).max()),
    lambda a: jnp.sort(a.ravel()).reshape(a.shape),
    lambda a: jnp.zeros_like(a) + 0.25,
    lambda a: jnp.full_like(a, jnp.sum(a) / a.size),
    lambda a: lax.cond(a.sum() > 0.111, jnp.sin, lambda z: z * 0.5, a),
    lambda a: lax.fori_loop(0, 2, lambda t, c: c * 0.5 + a, a),
    lambda a: lax.while_loop(lambda c: jnp.abs(c).max() > 0.7, lambda c: c * 0.6, a),
    lambda a: a + jax.random.normal(jax.random.key(2), a.shape),
    lambda a: a.T.reshape(a.shape),
]


def control(rng: Any, avals: Any, i: int) -> Any:
    """Branches, loops and maps around functions that keep the shape; carries change places, or start as constants."""
    if not is_float(avals[i]):
        return None
    first, second, third = (
        functools.partial(lambda f, g, a: f(g(a)), pick(rng, TURNS), pick(rng, TURNS)) for _ in "abc"
    )
    return one(
        i,
        pick(
            rng,
            [
                lambda a: lax.cond(
                    a.sum() > 0.077, lambda a: (first(a), a.sum()), lambda a: (second(a), jnp.max(a)), a
                ),
                lambda a: lax.switch(jnp.argmax(a.ravel()) % 3, [first, second, jnp.zeros_like], a),
                lambda a: lax.scan(lambda c, _: (tame(first(c)), (second(c), c.sum())), a, None, length=2),
                lambda a: lax.scan(lambda c, v: (tame(third(c) + v.sum()), (first(v), v.max())), jnp.float32(0.5), a),
                lambda a: lax.scan(lambda c, v: (tame(first(c) + v), c * v), a[0] * 0, a, reverse=True),
                lambda a: lax.fori_loop(0, 3, lambda t, c: (c[1], tame(first(c[0])), c[2] + a.sum()), (a, a * 0, 0.0)),
                lambda a: lax.while_loop(
                    lambda c: (c[0] < 3) & (jnp.sum(c[1]) < 1e4),
                    lambda c: (c[0] + 1, tame(second(c[1])), c[1]),
                    (0, a, jnp.zeros_like(a)),
                ),
                lambda a: jax.vmap(first)(a),
                lambda a: jax.vmap(lambda r: lax.while_loop(lambda c: jnp.sum(c * c) > 1.03, lambda c: c * 0.5, r))(
                    jnp.nan_to_num(a)
                ),
                lambda a: jax.grad(lambda v: jnp.sum(jnp.tanh(v * jnp.sum(v) * 0.01) * v))(a),
            ],
        ),
    )


FAMILIES = [elementwise, binary, reduction, along, structure, product, control]
WEIGHTS = np.array([4, 7, 8, 2, 10, 6, 7]) / 44
