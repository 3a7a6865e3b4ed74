"""Dot products: a contraction over the cut dimension is a partial sum, a free cut dimension stays cut."""

from collections.abc import Sequence
from typing import NamedTuple

from jax.extend.core import JaxprEqn

from ..jaxpr import primitives as p
from ..jaxpr.bind import bind
from ..jaxpr.compat import aval
from ..sharding.layout import Layout, Shape
from .values import Array, Context, Partial, Results, Split, Value


class _Side(NamedTuple):
    """One operand of a product: its value, its shape, its contracted dimensions and its batch dimensions."""

    value: Value
    shape: Shape
    contract: Sequence[int]
    batch: Sequence[int]

    @property
    def free(self) -> list[int]:
        """The dimensions that the result has from this operand alone."""
        return [d for d in range(len(self.shape)) if d not in self.contract and d not in self.batch]


def dot_general(ctx: Context, eqn: JaxprEqn, ins: list[Value]) -> Results:
    """One rule for vectors, matrices and batches; what fits none of its cases is gathered."""
    (contract_a, contract_b), (batch_a, batch_b) = eqn.params["dimension_numbers"]
    a, b = (aval(v).shape for v in eqn.invars)
    sides = [_Side(ins[0], a, contract_a, batch_a), _Side(ins[1], b, contract_b, batch_b)]
    full = _full_contraction(*sides)
    if full is not None:
        return [_inner_product(ctx, eqn, ins, full)]
    for number, side in enumerate(sides):
        x = side.value
        if not isinstance(x, Split) or x.layout.kind != "rows":
            continue
        cut = x.layout.lead
        rule = _free_cut if cut in side.free else _common_cut
        out = rule(ctx, eqn, sides, number, x)
        if out is not None:
            return [out]
    return None


def _common_cut(ctx: Context, eqn: JaxprEqn, sides: list[_Side], number: int, x: Split) -> Value | None:
    """Operand `number` is cut along a contracted or batch dimension: the other one is cut along its counterpart."""
    cut, (_, _, contract, batch), other = x.layout.lead, sides[number], sides[1 - number]
    mine, theirs = (contract, other.contract) if cut in contract else (batch, other.batch)
    there = theirs[mine.index(cut)]
    y = other.value
    if isinstance(y, Split) and (y.layout.kind, y.layout.lead) != ("rows", there):
        return None
    share = ctx.masked(ctx.split(y, Layout(other.shape, ctx.n, "rows", there)))
    own = ctx.masked(x) if cut in contract else x.local
    (local,) = bind(eqn, [own, share] if number == 0 else [share, own])
    return Partial(local, "sum") if cut in contract else _split(eqn, local, ctx.n, batch.index(cut))


def _free_cut(ctx: Context, eqn: JaxprEqn, sides: list[_Side], number: int, x: Split) -> Value | None:
    """Operand `number` is cut along a dimension of the result; the other one is whole."""
    side, other = sides[number], sides[1 - number].value
    if isinstance(other, Split):  # both would have to be gathered
        return None
    (y,) = ctx.whole([other])
    (local,) = bind(eqn, [x.local, y] if number == 0 else [y, x.local])
    before = len(side.batch) + (0 if number == 0 else len(sides[0].free))
    return _split(eqn, local, ctx.n, before + side.free.index(x.layout.lead))


def _split(eqn: JaxprEqn, local: Array, n: int, lead: int) -> Split:
    return Split(local, Layout(aval(eqn.outvars[0]).shape, n, "rows", lead))


def _full_contraction(a: _Side, b: _Side) -> Layout | None:
    """The layout of an inner product of two arrays of the same shape, all dimensions in order."""
    order = tuple(range(len(a.shape)))
    if tuple(a.contract) != order or tuple(b.contract) != order or a.shape != b.shape:
        return None
    layouts = [x.layout for x in (a.value, b.value) if isinstance(x, Split)]
    return layouts[0] if layouts and 0 not in a.shape else None


def _inner_product(ctx: Context, eqn: JaxprEqn, ins: list[Value], layout: Layout) -> Value:
    """Both as shares; padding is masked in both, since zero times a NaN is a NaN."""
    terms = [ctx.masked(ctx.split(x, layout)) for x in ins]
    if layout.kind == "rows":
        return Partial(bind(eqn, terms)[0], "sum")
    dims = tuple(range(layout.lead + 1))
    return Partial(bind(eqn, terms, dimension_numbers=((dims, dims), ((), ())))[0], "sum")


RULES = {p.DOT_GENERAL: dot_general}
