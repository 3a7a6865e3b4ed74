"""Reductions: over dimensions that are not cut they stay local; else one term per device.

Padding never enters: it holds the neutral element before a share is reduced.
"""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from ..jaxpr import primitives as p
from ..jaxpr.bind import bind
from ..sharding.layout import Layout, Shape
from ..sharding.vma import cast, varying
from .values import Array, Context, Partial, Results, Split, Value, only_split

_HOW = {
    p.REDUCE_SUM: "sum",
    p.REDUCE_MAX: "max",
    p.REDUCE_MIN: "min",
    p.REDUCE_PROD: "prod",
    p.REDUCE_OR: "max",
    p.REDUCE_AND: "min",
}


def neutral(how: str, dtype: np.dtype) -> float:
    """What leaves a sum, product, maximum or minimum as it is."""
    if how in ("sum", "prod"):
        return int(how == "prod")
    if dtype == np.bool_:
        return how == "min"
    if jnp.issubdtype(dtype, jnp.integer):
        info: Any = jnp.iinfo(dtype)
    elif np.isinf(np.array(np.inf, dtype)):
        return -np.inf if how == "max" else np.inf
    else:  # some short types have no infinity
        info = jnp.finfo(dtype)
    return info.min if how == "max" else info.max


def reduce(ctx: Context, eqn: JaxprEqn, ins: list[Value]) -> Results:
    """`reduce_sum`, `_max`, `_min`, `_prod`, `_and`, `_or` of a split or partial value."""
    (x,) = ins
    how = _HOW[eqn.primitive.name]
    axes = tuple(sorted(eqn.params["axes"]))
    bitwise = eqn.primitive.name in (p.REDUCE_AND, p.REDUCE_OR) and x.dtype != np.bool_
    if bitwise or (how in ("max", "min") and jnp.issubdtype(x.dtype, jnp.complexfloating)):
        return None  # devices have no such reduction
    if isinstance(x, Partial):  # a sum of sums, a maximum of maxima
        return [Partial(bind(eqn, [x.local])[0], how)] if x.how == how else None
    x = only_split(ins)
    if x.layout.kind == "rows":
        return [_rows(ctx, eqn, x, axes, how)]
    out = _flat(ctx, eqn, x, axes, how)
    return None if out is None else [out]


def _rows(ctx: Context, eqn: JaxprEqn, x: Split, axes: tuple[int, ...], how: str) -> Value:
    layout = x.layout
    if layout.lead in axes:
        return Partial(bind(eqn, [ctx.masked(x, neutral(how, x.dtype))])[0], how)
    return Split(bind(eqn, [x.local])[0], _without(layout, axes))


def _without(layout: Layout, axes: tuple[int, ...]) -> Layout:
    """The layout without some dimensions other than the cut one."""
    kept = [d for d in range(len(layout.shape)) if d not in axes]
    return layout.rows(tuple(layout.shape[d] for d in kept), kept.index(layout.lead), kept)


def _flat(ctx: Context, eqn: JaxprEqn, x: Split, axes: tuple[int, ...], how: str) -> Value | None:
    layout = x.layout
    dims = range(layout.lead, len(layout.shape))
    cut_all = set(dims) <= set(axes)
    fill = neutral(how, x.dtype)
    if cut_all:  # also over any of the leading dimensions
        local = ctx.masked(x, fill)
        kept = tuple(a for a in axes if a < layout.lead) + (layout.lead,)
        return Partial(bind(eqn, [local], axes=kept)[0], how)
    if not axes:
        return x
    if layout.lead or how == "prod":
        return None
    run = _longest_run(layout.shape, axes)
    local = (_between if run[0] else _leading)(ctx, eqn, x, run, how, fill)
    rest = tuple(a - len(run) if a > run[0] else a for a in axes if a not in run)
    return Partial(bind(eqn, [local], axes=rest)[0] if rest else local, how)


def _longest_run(shape: Shape, axes: tuple[int, ...]) -> tuple[int, ...]:
    """Those of `axes` that follow each other and leave the fewest elements; the others are reduced after."""
    runs: list[list[int]] = []
    for a in axes:
        if runs and runs[-1][-1] == a - 1:
            runs[-1].append(a)
        else:
            runs.append([a])
    return tuple(max(runs, key=lambda run: math.prod(shape[a] for a in run)))


def _whole_rows(ctx: Context, x: Split, width: int, fill: float) -> tuple[Array, Array]:
    """The share laid into whole rows of `width`: (`[rows, width]`, the number of its first row)."""
    k, layout = x.layout.length, x.layout
    rows = -(-k // width) + 1
    starts = [divmod(i * k, width) for i in range(ctx.n)]
    last = -(-layout.size // width)  # shares that are all padding start past the end
    table = lambda values: lax.dynamic_index_in_dim(np.array(values, np.int32), ctx.index, keepdims=False)
    first = table([min(row, last) for row, _ in starts])
    offset = table([column for _, column in starts])
    buffer = cast(lax.full((rows * width,), fill, x.dtype), varying(x.local))
    buffer = lax.dynamic_update_slice(buffer, ctx.masked(x, fill), (offset,))
    return buffer.reshape(rows, width), first


def _between(ctx: Context, eqn: JaxprEqn, x: Split, axes: tuple[int, ...], how: str, fill: float) -> Array:
    """Over dimensions that follow others: each device has its own blocks, and two of them in part."""
    shape, first, last = x.layout.shape, axes[0], axes[-1] + 1
    reduced, after = math.prod(shape[first:last]), math.prod(shape[last:])
    window, row = _whole_rows(ctx, x, reduced * after, fill)
    (mine,) = bind(eqn, [window.reshape(-1, reduced, after)], axes=(1,))
    count = math.prod(shape[:first])
    out = cast(lax.full((count + mine.shape[0], after), fill, mine.dtype), varying(mine))
    out = lax.dynamic_update_slice(out, mine, (row, np.int32(0)))
    return out[:count].reshape(*shape[:first], *shape[last:])


def _leading(ctx: Context, eqn: JaxprEqn, x: Split, axes: tuple[int, ...], how: str, fill: float) -> Array:
    """Over the first dimensions: each device adds up the rows that it has."""
    shape, count = x.layout.shape, len(axes)
    window, _ = _whole_rows(ctx, x, math.prod(shape[count:]), fill)
    (mine,) = bind(eqn, [window], axes=(0,))
    return mine.reshape(shape[count:])


def along(ctx: Context, eqn: JaxprEqn, ins: list[Value]) -> Results:
    """`argmax`, `argmin`, cumulative sums and sorts along a dimension that is not cut."""
    params = eqn.params
    splits = [x for x in ins if isinstance(x, Split)]
    layout = splits[0].layout
    if len(splits) < len(ins) or any(x.layout != layout for x in splits):
        return None
    axes = params.get("axes", (params.get("axis", params.get("dimension")),))
    if layout.kind != "rows" or layout.lead in axes:
        return None
    outs = bind(eqn, [x.local for x in splits])
    if "axes" in params:
        layout = _without(layout, axes)
    return [Split(y, layout) for y in outs]


RULES = {
    **dict.fromkeys(_HOW, reduce),
    **dict.fromkeys((p.ARGMAX, p.ARGMIN, *p.CUMULATIVE, p.SORT), along),
}
