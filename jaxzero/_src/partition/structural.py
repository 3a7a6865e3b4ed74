"""Reshapes, transposes, broadcasts, slices: relabel the share where no element changes its device."""

import math

from jax import lax
from jax.extend.core import JaxprEqn

from ..jaxpr import primitives as p
from ..jaxpr.bind import bind
from ..jaxpr.compat import aval
from ..sharding.layout import Layout, Shape
from .values import Context, Results, Split, Value, only_split


def relabelled(layout: Layout, shape: Shape) -> Layout | None:
    """The layout of a row-major reshape to `shape` in which every device keeps what it has."""
    n = layout.n
    if not shape:  # a scalar is never split
        return None
    if layout.kind == "flat":
        before = math.prod(layout.shape[: layout.lead])
        leads = [lead for lead in range(len(shape)) if math.prod(shape[:lead]) == before]
        return Layout(shape, n, "flat", leads[0]) if leads else None
    before, cut = math.prod(layout.shape[: layout.lead]), layout.shape[layout.lead]
    for lead, size in enumerate(shape):
        if math.prod(shape[:lead]) == before and size and (size == cut if layout.padding else size % n == 0):
            return layout.rows(shape, lead, _origin(layout.shape, shape))
    if layout.padding:
        return None
    if before == 1:  # the same contiguous ranges, whatever the shape
        return Layout(shape, n, "flat")
    return None


def _origin(old: Shape, new: Shape) -> list[int | None]:
    """For each dimension of a reshape's result, the one of the operand that it is."""
    starts = {(math.prod(old[:d]), size): d for d, size in enumerate(old)}
    return [starts.get((math.prod(new[:d]), size)) for d, size in enumerate(new)]


def cut_dims(layout: Layout) -> range:
    """The dimensions of which a device holds a part: one of rows, all after the first `lead` of flat ones."""
    return range(layout.lead, layout.lead + 1 if layout.kind == "rows" else len(layout.shape))


def reshape(ctx: Context, eqn: JaxprEqn, ins: list[Value]) -> Results:
    """`reshape`, `squeeze`: row-major order is kept."""
    x = ins[0]
    permutes = eqn.primitive.name == p.RESHAPE and eqn.params["dimensions"] not in (None, ())
    if permutes or len(ins) > 1 or not isinstance(x, Split):
        return None
    layout = relabelled(x.layout, aval(eqn.outvars[0]).shape)
    return None if layout is None else [Split(x.local.reshape(layout.local_shape), layout)]


def broadcast_in_dim(ctx: Context, eqn: JaxprEqn, ins: list[Value]) -> Results:
    """New dimensions, or dimensions of size 1 repeated, other than the cut one."""
    x, shape = ins[0], aval(eqn.outvars[0]).shape
    if len(ins) > 1 or not isinstance(x, Split):
        return None
    layout, dims = x.layout, eqn.params["broadcast_dimensions"]
    if math.prod(shape) == math.prod(layout.shape):
        return reshape(ctx, eqn, ins)
    if layout.kind != "rows" or layout.shape[layout.lead] != shape[dims[layout.lead]]:
        return None
    origin = [dims.index(d) if d in dims else None for d in range(len(shape))]
    new = layout.rows(shape, dims[layout.lead], origin)
    return [Split(lax.broadcast_in_dim(x.local, new.local_shape, dims), new)]


def transpose(ctx: Context, eqn: JaxprEqn, ins: list[Value]) -> Results:
    """The cut goes where its dimension goes."""
    x = only_split(ins)
    if x.layout.kind != "rows":
        return None
    order = eqn.params["permutation"]
    layout = x.layout.rows(aval(eqn.outvars[0]).shape, order.index(x.layout.lead), order)
    return [Split(bind(eqn, [x.local])[0], layout)]


def slice_(ctx: Context, eqn: JaxprEqn, ins: list[Value]) -> Results:
    """Slices that take the cut dimensions whole."""
    x = only_split(ins)
    layout, params, cut = x.layout, eqn.params, cut_dims(x.layout)
    shape, lead = aval(eqn.outvars[0]).shape, layout.lead
    strides = params["strides"] or (1,) * len(layout.shape)
    if any(shape[d] != layout.shape[d] or strides[d] != 1 for d in cut):
        return None
    one = lambda sizes, here: (*sizes[:lead], here, *sizes[cut.stop :])
    keywords = dict(
        start_indices=one(params["start_indices"], 0),
        limit_indices=one(params["limit_indices"], layout.local_shape[lead]),
        strides=one(strides, 1),
    )
    return [Split(bind(eqn, [x.local], **keywords)[0], Layout(shape, layout.n, layout.kind, lead))]


def concatenate(ctx: Context, eqn: JaxprEqn, ins: list[Value]) -> Results:
    """Along a dimension that is not cut, if all operands are cut at the same one."""
    layouts = [x.layout for x in ins if isinstance(x, Split)]
    first = layouts[0]
    if first.kind != "rows" or eqn.params["dimension"] == first.lead:
        return None
    n, lead = first.n, first.lead
    locals_ = [ctx.split(x, Layout(aval(v).shape, n, "rows", lead)).local for x, v in zip(ins, eqn.invars, strict=True)]
    (local,) = bind(eqn, locals_)
    return [Split(local, Layout(aval(eqn.outvars[0]).shape, n, "rows", lead))]


def pad(ctx: Context, eqn: JaxprEqn, ins: list[Value]) -> Results:
    """Padding of dimensions that are not cut."""
    x, value = ins
    config = eqn.params["padding_config"]
    if not isinstance(x, Split) or x.layout.kind != "rows" or tuple(config[x.layout.lead]) != (0, 0, 0):
        return None
    (value,) = ctx.whole([value])
    (local,) = bind(eqn, [x.local, value])
    return [Split(local, Layout(aval(eqn.outvars[0]).shape, x.layout.n, "rows", x.layout.lead))]


def rev(ctx: Context, eqn: JaxprEqn, ins: list[Value]) -> Results:
    """Reversal of dimensions that are not cut."""
    x = only_split(ins)
    if x.layout.kind != "rows" or x.layout.lead in eqn.params["dimensions"]:
        return None
    return [Split(bind(eqn, [x.local])[0], x.layout)]


RULES = {
    p.RESHAPE: reshape,
    p.SQUEEZE: reshape,
    p.BROADCAST: broadcast_in_dim,
    p.TRANSPOSE: transpose,
    p.SLICE: slice_,
    p.CONCATENATE: concatenate,
    p.PAD: pad,
    p.REV: rev,
}
