"""Dot products: a contraction over the cut dimension is a partial sum, a free cut dimension stays cut."""

import math
from typing import Any

from ..jaxpr.bind import bind
from ..sharding.layout import Layout
from .values import Context, Partial, Split, Value


def dot_general(ctx: Context, eqn: Any, ins: list[Value]) -> list[Value] | None:
    """One rule for vectors, matrices and batches; what fits none of its cases is gathered."""
    a, b = ins
    (contract_a, contract_b), (batch_a, batch_b) = eqn.params["dimension_numbers"]
    full = _full_contraction(a, b, contract_a, contract_b)
    if full is not None:
        return [_inner_product(ctx, eqn, a, b, full)]
    cuts = [_cut(a), _cut(b)]
    if cuts[0] is None and cuts[1] is None:
        return None
    sides = [(a, contract_a, batch_a), (b, contract_b, batch_b)]
    for i, j in ((0, 1), (1, 0)):
        (x, contract, batch), (y, other_contract, other_batch) = sides[i], sides[j]
        cut = cuts[i]
        if cut is None:
            continue
        if cut in contract or cut in batch:
            mine, other = (contract, other_contract) if cut in contract else (batch, other_batch)
            there = other[mine.index(cut)]
            if isinstance(y, Split) and (y.layout.kind, y.layout.lead) != ("rows", there):
                continue
            y_shape = eqn.invars[j].aval.shape
            share = ctx.masked(ctx.split(y, Layout(y_shape, ctx.n, "rows", there)))
            mine_ = ctx.masked(x) if cut in contract else x.local
            (local,) = bind(eqn, [mine_, share] if i == 0 else [share, mine_])
            if cut in contract:
                return [Partial(local, "sum")]
            return [_split(eqn, local, ctx.n, list(batch).index(cut))]
        if isinstance(y, Split):  # both would have to be gathered
            continue
        (y,) = ctx.whole([y])
        (local,) = bind(eqn, [x.local, y] if i == 0 else [y, x.local])
        free = [d for d in range(len(x.shape)) if d not in contract and d not in batch]
        before = len(batch) + (0 if i == 0 else _free_dims(sides[0]))
        return [_split(eqn, local, ctx.n, before + free.index(cut))]
    return None


def _cut(x: Value) -> int | None:
    return x.layout.lead if isinstance(x, Split) and x.layout.kind == "rows" else None


def _free_dims(side: tuple[Value, Any, Any]) -> int:
    x, contract, batch = side
    return len(x.shape) - len(contract) - len(batch)


def _split(eqn: Any, local: Any, n: int, lead: int) -> Split:
    return Split(local, Layout(eqn.outvars[0].aval.shape, n, "rows", lead))


def _full_contraction(a: Value, b: Value, contract_a: Any, contract_b: Any) -> Layout | None:
    """The layout of an inner product of two arrays of the same shape, all dimensions in order."""
    order = tuple(range(len(a.shape)))
    if tuple(contract_a) != order or tuple(contract_b) != order or a.shape != b.shape:
        return None
    layouts = [x.layout for x in (a, b) if isinstance(x, Split)]
    return layouts[0] if layouts and math.prod(a.shape) else None


def _inner_product(ctx: Context, eqn: Any, a: Value, b: Value, layout: Layout) -> Value:
    """Both as shares; padding is masked in both, since zero times a NaN is a NaN."""
    terms = [ctx.masked(ctx.split(x, layout)) for x in (a, b)]
    if layout.kind == "rows":
        return Partial(bind(eqn, terms)[0], "sum")
    dims = tuple(range(layout.lead + 1))
    return Partial(bind(eqn, terms, dimension_numbers=((dims, dims), ((), ())))[0], "sum")


RULES = {"dot_general": dot_general}
