"""Slices, gathers and scatters at computed places: each device does them on its share of what they leave uncut.

An index into a dimension that is cut makes the array whole.
"""

from collections.abc import Sequence

import numpy as np
from jax.extend.core import JaxprEqn

from .._types import ArrayLike
from ..jaxpr import primitives as p
from ..jaxpr.bind import bind
from ..jaxpr.compat import aval
from ..sharding.layout import Layout, Shape
from .structural import cut_dims
from .values import Array, Context, Results, Split, Value


def _local(layout: Layout, sizes: Sequence[int]) -> Shape:
    """Sizes of a window that takes the cut dimensions whole, on one share."""
    cut = cut_dims(layout)
    return (*sizes[: cut.start], layout.local_shape[layout.lead], *sizes[cut.stop :])


def _takes_all(layout: Layout, sizes: Sequence[int]) -> bool:
    return all(sizes[d] == layout.shape[d] for d in cut_dims(layout))


def _starts(layout: Layout, starts: list[Array]) -> list[ArrayLike]:
    """Starting points on one share: zero in the cut dimension, which is taken whole."""
    cut = cut_dims(layout)
    return [*starts[: cut.start], np.zeros((), starts[0].dtype), *starts[cut.stop :]]


def dynamic_slice(ctx: Context, eqn: JaxprEqn, ins: list[Value]) -> Results:
    """Takes the cut dimensions whole."""
    x, sizes = ins[0], eqn.params["slice_sizes"]
    if not isinstance(x, Split) or not _takes_all(x.layout, sizes):
        return None
    starts = _starts(x.layout, ctx.whole(ins[1:]))
    (local,) = bind(eqn, [x.local, *starts], slice_sizes=_local(x.layout, sizes))
    return [Split(local, Layout(tuple(sizes), ctx.n, x.layout.kind, x.layout.lead))]


def dynamic_update_slice(ctx: Context, eqn: JaxprEqn, ins: list[Value]) -> Results:
    """The update has the cut dimensions whole."""
    x, update = ins[:2]
    shape = aval(eqn.invars[1]).shape
    if not isinstance(x, Split) or not _takes_all(x.layout, shape):
        return None
    starts = _starts(x.layout, ctx.whole(ins[2:]))
    share = ctx.split(update, Layout(shape, ctx.n, x.layout.kind, x.layout.lead))
    return [Split(bind(eqn, [x.local, share.local, *starts])[0], x.layout)]


def _window(layout: Layout, indexed: Shape, dropped: Shape, window_dims: Shape, ndim: int) -> tuple[int, Shape] | None:
    """Where the cut dimensions are in the windows of a gather or scatter.

    Args:
      layout: Of the operand.
      indexed: Its dimensions that are indexed.
      dropped: Its dimensions that the windows do not have.
      window_dims: The dimensions of the windows, among the `ndim` of the array of all windows.
      ndim: Dimensions of that array.

    Returns:
      The leading dimensions of that array's layout, and `window_dims` on one share; `None` if an index cuts.
    """
    cut = cut_dims(layout)
    if set(cut) & {*indexed, *dropped}:
        return None
    kept = [d for d in range(len(layout.shape)) if d not in dropped]
    places = [window_dims[kept.index(d)] for d in cut]
    if layout.kind == "rows":
        return places[0], tuple(window_dims)
    if places != list(range(ndim - len(places), ndim)):
        return None
    return places[0], (*window_dims[: -len(places)], places[0])


def gather(ctx: Context, eqn: JaxprEqn, ins: list[Value]) -> Results:
    """Picks along dimensions that are not cut."""
    x, indices = ins
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    if not isinstance(x, Split) or numbers.operand_batching_dims or not _takes_all(x.layout, sizes):
        return None
    shape = aval(eqn.outvars[0]).shape
    found = _window(x.layout, numbers.start_index_map, numbers.collapsed_slice_dims, numbers.offset_dims, len(shape))
    if found is None:
        return None
    lead, window_dims = found
    (indices,) = ctx.whole([indices])
    numbers, sizes = numbers._replace(offset_dims=window_dims), _local(x.layout, sizes)
    (local,) = bind(eqn, [x.local, indices], dimension_numbers=numbers, slice_sizes=sizes)
    return [Split(local, Layout(shape, ctx.n, x.layout.kind, lead))]


def scatter(ctx: Context, eqn: JaxprEqn, ins: list[Value]) -> Results:
    """Writes along dimensions that are not cut."""
    x, indices, updates = ins
    numbers, shape = eqn.params["dimension_numbers"], aval(eqn.invars[2]).shape
    if not isinstance(x, Split) or numbers.operand_batching_dims:
        return None
    layout, dropped = x.layout, numbers.inserted_window_dims
    found = _window(layout, numbers.scatter_dims_to_operand_dims, dropped, numbers.update_window_dims, len(shape))
    if found is None:
        return None
    lead, window_dims = found
    windows = Layout(shape, ctx.n, layout.kind, lead)
    if [shape[d] for d in cut_dims(windows)] != [layout.shape[d] for d in cut_dims(layout)]:
        return None
    (indices,) = ctx.whole([indices])
    share = ctx.split(updates, windows)
    numbers = numbers._replace(update_window_dims=window_dims)
    (local,) = bind(eqn, [x.local, indices, share.local], dimension_numbers=numbers)
    return [Split(local, layout)]


RULES = {
    p.DYNAMIC_SLICE: dynamic_slice,
    p.DYNAMIC_UPDATE_SLICE: dynamic_update_slice,
    p.GATHER: gather,
    **dict.fromkeys(p.SCATTERS, scatter),
}
