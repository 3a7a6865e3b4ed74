"""Slices, gathers and scatters at computed places: each device does them on its share of what they leave uncut.

An index into a dimension that is cut makes the array whole.
"""

from typing import Any

import numpy as np

from ..jaxpr.bind import bind
from ..sharding.layout import Layout, Shape
from .structural import cut_dims
from .values import Context, Split, Value


def _local(layout: Layout, sizes: Any) -> Shape:
    """Sizes of a window that takes the cut dimensions whole, on one share."""
    cut = cut_dims(layout)
    return (*sizes[: cut.start], layout.local_shape[layout.lead], *sizes[cut.stop :])


def _takes_all(layout: Layout, sizes: Any) -> bool:
    return all(sizes[d] == layout.shape[d] for d in cut_dims(layout))


def _starts(layout: Layout, starts: list[Any]) -> list[Any]:
    """Starting points on one share: zero in the cut dimension, which is taken whole."""
    cut = cut_dims(layout)
    return [*starts[: cut.start], np.zeros((), starts[0].dtype), *starts[cut.stop :]]


def dynamic_slice(ctx: Context, eqn: Any, ins: list[Value]) -> list[Value] | None:
    """Takes the cut dimensions whole."""
    x, sizes = ins[0], eqn.params["slice_sizes"]
    if not isinstance(x, Split) or not _takes_all(x.layout, sizes):
        return None
    starts = _starts(x.layout, ctx.whole(ins[1:]))
    (local,) = bind(eqn, [x.local, *starts], slice_sizes=_local(x.layout, sizes))
    return [Split(local, Layout(tuple(sizes), ctx.n, x.layout.kind, x.layout.lead))]


def dynamic_update_slice(ctx: Context, eqn: Any, ins: list[Value]) -> list[Value] | None:
    """The update has the cut dimensions whole."""
    x, update = ins[:2]
    shape = eqn.invars[1].aval.shape
    if not isinstance(x, Split) or not _takes_all(x.layout, shape):
        return None
    starts = _starts(x.layout, ctx.whole(ins[2:]))
    share = ctx.split(update, Layout(shape, ctx.n, x.layout.kind, x.layout.lead))
    return [Split(bind(eqn, [x.local, share.local, *starts])[0], x.layout)]


def _window(layout: Layout, indexed: Any, dropped: Any, window_dims: Any, ndim: int) -> tuple[int, Any] | None:
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


def gather(ctx: Context, eqn: Any, ins: list[Value]) -> list[Value] | None:
    """Picks along dimensions that are not cut."""
    x, indices = ins
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    if not isinstance(x, Split) or numbers.operand_batching_dims or not _takes_all(x.layout, sizes):
        return None
    shape = eqn.outvars[0].aval.shape
    found = _window(x.layout, numbers.start_index_map, numbers.collapsed_slice_dims, numbers.offset_dims, len(shape))
    if found is None:
        return None
    lead, window_dims = found
    (indices,) = ctx.whole([indices])
    numbers, sizes = numbers._replace(offset_dims=window_dims), _local(x.layout, sizes)
    (local,) = bind(eqn, [x.local, indices], dimension_numbers=numbers, slice_sizes=sizes)
    return [Split(local, Layout(shape, ctx.n, x.layout.kind, lead))]


def scatter(ctx: Context, eqn: Any, ins: list[Value]) -> list[Value] | None:
    """Writes along dimensions that are not cut."""
    x, indices, updates = ins
    numbers, shape = eqn.params["dimension_numbers"], eqn.invars[2].aval.shape
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


_SCATTERS = ("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max")
RULES = {
    "dynamic_slice": dynamic_slice,
    "dynamic_update_slice": dynamic_update_slice,
    "gather": gather,
    **dict.fromkeys(_SCATTERS, scatter),
}
