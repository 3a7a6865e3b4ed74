"""A value of the traced program on one device: a whole array, a `Split`, a `Partial` or a `LazyBroadcast`.

A plain array is *whole*: equal on every device, and typed so. A `Split` holds this device's share, a `Partial`
this device's term of a sum (or maximum, minimum, product) that is not yet reduced over devices, and a
`LazyBroadcast` a whole array and the larger shape that it is to be broadcast to. All three are pytrees, so they
pass through `lax.scan`, `lax.cond` and `lax.while_loop` as they are.
"""

import copy
import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from ..comm import collectives
from ..comm.hierarchical import gather
from ..sharding.axes import Axes
from ..sharding.layout import Layout, Shape
from ..sharding.vma import cast, varying

Array = jax.Array


@functools.partial(jax.tree_util.register_dataclass, data_fields=["local"], meta_fields=["layout"])
@dataclasses.dataclass(eq=False)
class Split:
    """Each device holds its even share; entries in the padding are arbitrary until they are stored."""

    local: Array
    layout: Layout
    whole: Array | None = dataclasses.field(default=None, init=False)

    @property
    def shape(self) -> Shape:
        """The logical shape."""
        return self.layout.shape

    @property
    def dtype(self) -> np.dtype:
        """The dtype."""
        return self.local.dtype


@functools.partial(jax.tree_util.register_dataclass, data_fields=["local"], meta_fields=["how"])
@dataclasses.dataclass(eq=False)
class Partial:
    """Each device holds a term; the value is their sum, maximum, minimum or product (`how`)."""

    local: Array
    how: str
    whole: Array | None = dataclasses.field(default=None, init=False)

    @property
    def shape(self) -> Shape:
        """The logical shape, which is that of the term."""
        return self.local.shape

    @property
    def dtype(self) -> np.dtype:
        """The dtype."""
        return self.local.dtype


@functools.partial(jax.tree_util.register_dataclass, data_fields=["value"], meta_fields=["shape", "dims"])
@dataclasses.dataclass(eq=False)
class LazyBroadcast:
    """`broadcast_in_dim(value, shape, dims)`, made only where it is needed and only as large."""

    value: Array
    shape: Shape
    dims: tuple[int, ...]

    @property
    def dtype(self) -> np.dtype:
        """The dtype."""
        return self.value.dtype


Value = Array | Split | Partial | LazyBroadcast
#: What a rule returns: a value for each result, or `None` where it does not apply.
Results = list[Value] | None


def only_split(ins: Sequence[Value]) -> Split:
    """The operand of an equation that has one, where it is known to be split."""
    (x,) = ins
    assert isinstance(x, Split)
    return x


class NeedsReplicated(Exception):
    """Raised by a rule that needs these values whole: the evaluator communicates them and calls the rule again."""

    def __init__(self, values: Sequence[Split | Partial]) -> None:
        super().__init__("values that are needed whole")
        self.values = list(values)


class Recorder(Protocol):
    """The record of an evaluation; `record.Record` is one."""

    def note(self, eqn: JaxprEqn, how: str, times: int) -> None:
        """One equation was evaluated."""

    def communicated(self, name: str, values: Sequence[Split | Partial], times: int) -> None:
        """Values were communicated."""

    def exchanged(self, kinds: Any, loads: tuple[float, ...], nbytes: int, times: int) -> None:
        """Work was dealt out."""


class Context:
    """One evaluation on shares: the axes, the record, and what it has already computed."""

    def __init__(
        self,
        axes: Axes,
        bucket_bytes: int | None,
        record: Recorder | None,
        times: int = 1,
        sharded_draws: Any = None,
        deal: bool = False,
    ) -> None:
        self.axes = axes
        self.bucket_bytes = bucket_bytes
        self.record = record
        self.times = times
        self.sharded_draws = sharded_draws  # which random draws are made share by share (`draws.ShardedDraws`)
        self.deal = deal  # whether work on whole matrices is dealt out to the devices (`jobs`)
        self.found: dict[Any, Any] = {}  # the jobs of each program, for all inner contexts too
        self.abstract = False  # whether only the forms of results are asked for
        self.all_varying = False  # whether values that are not split may differ between devices too
        self._index: Array | None = None
        self._masks: dict[tuple[int, int], Array] = {}

    @property
    def n(self) -> int:
        """The number of shares."""
        return self.axes.n

    def child(self, *, times: int = 1, quiet: bool = False) -> "Context":
        """A context for an inner program: its own trace, so nothing computed is carried over."""
        new = copy.copy(self)
        new._index, new._masks, new.times = None, {}, self.times * times
        if quiet:
            new.record, new.abstract = None, True
        return new

    def dry(self, record: Any) -> "Context":
        """A context that deals nothing out; what it does goes to another record."""
        new = self.child()
        new.record, new.deal, new.times = record, False, 1
        return new

    def note(self, eqn: JaxprEqn, how: str) -> None:
        """Writes one line of the record, if there is one."""
        if self.record is not None:
            self.record.note(eqn, how, self.times)

    @property
    def index(self) -> Array:
        """This device's number along the shard axis."""
        if self._index is None:
            self._index = lax.axis_index(self.axes.shard)
        return self._index

    def mask(self, layout: Layout) -> Array | None:
        """Which elements of a share along its cut dimension are not padding; `None` where all of them are real.

        The counts come from a table, so that no offset is computed in 32 bits.
        """
        if not layout.padding:
            return None
        k = layout.local_shape[layout.lead]
        size = layout.shape[layout.lead] if layout.kind == "rows" else math.prod(layout.shape[layout.lead :])
        key = (k, size)
        if key not in self._masks:
            counts = [min(max(size - i * k, 0), k) for i in range(self.n)]
            count = lax.dynamic_index_in_dim(np.array(counts, np.int32), self.index, keepdims=False)
            self._masks[key] = lax.lt(lax.iota(np.int32, k), lax.broadcast(count, (k,)))
        return self._masks[key]

    def masked(self, x: Split, fill: float = 0) -> Array:
        """The share with `fill` in the padding."""
        mask = self.mask(x.layout)
        if mask is None:
            return x.local
        mask = lax.broadcast_in_dim(mask, x.local.shape, (x.layout.lead,))
        other = cast(lax.full(x.local.shape, fill, x.local.dtype), varying(x.local))
        return lax.select(cast(mask, varying(x.local)), x.local, other)

    # --- whole ---

    def whole(self, values: Sequence[Value]) -> list[Array]:
        """All of `values` as whole arrays, without communication; raises `NeedsReplicated` for those that need some."""
        missing = [x for x in values if isinstance(x, (Split, Partial)) and x.whole is None]
        if missing:
            raise NeedsReplicated(missing)
        return [_whole(x) for x in values]

    def communicate(self, values: Sequence[Split | Partial]) -> None:
        """Makes values whole: one bucketed collective for each way of reducing, one for the gathers."""
        todo = list({id(x): x for x in values if x.whole is None}.values())
        for how, reduce in _REDUCE.items():
            terms = [x for x in todo if isinstance(x, Partial) and x.how == how]
            sent = [part for x in terms for part in _sent(x)]
            done = collectives.all_reduce(sent, self.axes.shard, bucket_bytes=self.bucket_bytes, reduce=reduce)
            rest = iter(done)
            for term in terms:
                term.whole = _received(term, [next(rest) for _ in _sent(term)])
        for x in todo:
            if isinstance(x, Partial) and x.how == "prod":
                x.whole = lax.reduce_prod(gather(lax.expand_dims(x.local, (0,)), self.axes.hops, 0), (0,))
        splits = [x for x in todo if isinstance(x, Split)]
        gathered = collectives.all_gather(
            [x.local for x in splits],
            [x.layout for x in splits],
            self.axes.hops,
            bucket_bytes=self.bucket_bytes,
        )
        for split, y in zip(splits, gathered, strict=True):
            split.whole = y

    # --- shares ---

    def share(self, x: Value, layout: Layout) -> Array:
        """`x` (of the layout's shape, or broadcasting to it) as a share.

        Raises `NeedsReplicated` where `x` has to be whole first. Where `x` has dimensions of size 1, or none, the
        result may have them too.
        """
        if isinstance(x, Split):
            if x.layout == layout:
                return x.local
            if _aligned(x.layout, layout):
                return x.local
            if _same_ranges(x.layout, layout):
                return x.local.reshape(layout.local_shape)
        if isinstance(x, LazyBroadcast):
            return _broadcast_share(x, layout, self.index)
        (x,) = self.whole([x])
        if x.ndim == 0 or (layout.kind == "rows" and x.shape[layout.lead] == 1):
            return x
        if layout.kind == "flat" and x.shape != layout.shape:
            x = jnp.broadcast_to(x, layout.shape)
        return collectives.share(x, _like(layout, x.shape), self.index)

    def split(self, x: Value, layout: Layout) -> Split:
        """`x` cut as `layout` says."""
        if isinstance(x, Split) and x.layout == layout:
            return x
        local = self.share(x, layout)
        if local.shape != layout.local_shape:
            local = jnp.broadcast_to(local, layout.local_shape)
        return Split(cast(local, self.axes.shard), layout)

    def convert_all(
        self, values: Sequence[Value], layouts: Sequence[Layout | None], *, record: bool = True
    ) -> list[Value]:
        """Every value in the wanted form (`None`: whole), with one round of collectives for all."""
        need: list[Split | Partial] = []
        for x, layout in zip(values, layouts, strict=True):
            try:
                self.whole([x]) if layout is None else self.share(x, layout)
            except NeedsReplicated as missing:
                need += missing.values
        if record and self.record is not None:
            self.record.communicated("the result", need, self.times)
        self.communicate(need)
        return [
            self.whole([x])[0] if layout is None else self.split(x, layout)
            for x, layout in zip(values, layouts, strict=True)
        ]

    def stored(self, values: Sequence[Value]) -> list[Array]:
        """Whole and split values as the arrays to store: zeros in the padding, and never of weak type."""
        arrays = [self.masked(x) if isinstance(x, Split) else jnp.asarray(x) for x in values]
        return [lax.convert_element_type(x, x.dtype) if jax.typeof(x).weak_type else x for x in arrays]


def _like(layout: Layout, shape: Shape) -> Layout:
    """The layout for an array that broadcasts to one of `layout`: a dimension of size 1 is not sharded."""
    if not layout.other_axes:
        return dataclasses.replace(layout, shape=shape)
    return layout.rows(shape, layout.lead, range(len(shape)))


def _whole(x: Value) -> Array:
    if isinstance(x, (Split, Partial)):
        return x.whole  # type: ignore[return-value]
    if isinstance(x, LazyBroadcast):
        return lax.broadcast_in_dim(x.value, x.shape, x.dims)
    return x


_REDUCE = {"sum": lax.psum, "max": lax.pmax, "min": lax.pmin}


def _sent(x: Partial) -> list[Array]:
    """The arrays that a term sends. Devices have no maximum of booleans, and their maximum drops NaN.

    So a floating maximum or minimum sends a second array: whether this device has a NaN.
    """
    if x.dtype == np.bool_:
        return [x.local.astype(np.int8)]
    if x.how == "sum" or not jnp.issubdtype(x.dtype, jnp.floating):
        return [x.local]
    flag = jnp.isnan(x.local).astype(x.dtype)
    return [x.local, flag if x.how == "max" else -flag]


def _received(x: Partial, parts: list[Array]) -> Array:
    """The value from the reduced arrays."""
    if len(parts) == 1:
        return parts[0].astype(x.dtype)
    value, flag = parts
    return jnp.where(flag == 0, value, jnp.full_like(value, jnp.nan))


def _aligned(a: Layout, b: Layout) -> bool:
    """Whether a share of `a` broadcasts against a share of `b`: rows, cut at the same dimension."""
    return (
        a.kind == b.kind == "rows"
        and len(a.shape) == len(b.shape)
        and a.lead == b.lead
        and a.shape[a.lead] == b.shape[b.lead]
        and all(p in (1, q) for p, q in zip(a.shape, b.shape, strict=True))
    )


def _same_ranges(a: Layout, b: Layout) -> bool:
    """Whether both layouts give each device the same elements, in the same order."""
    if a.padding or b.padding:
        kinds = {x.kind for x in (a, b) if x.lead < len(x.shape) - 1}  # of one dimension, rows and flat are the same
        if a.shape != b.shape or len(kinds) > 1 or ("rows" in kinds and a.lead != b.lead):
            return False
    before = [math.prod(x.shape[: x.lead]) for x in (a, b)]
    return a.shape == b.shape and before[0] == before[1]


def _broadcast_share(x: LazyBroadcast, layout: Layout, index: Array) -> Array:
    """A device's share of a broadcast array, without the array."""
    if x.value.ndim == 0 or x.value.size == 1:
        return lax.broadcast(x.value.reshape(()), layout.local_shape)
    rows = layout.kind == "rows" and len(x.shape) == len(layout.shape)
    if not rows:
        return collectives.share(jnp.broadcast_to(_whole(x), layout.shape), layout, index)
    value, local = x.value, layout.local_shape
    for axis, dim in enumerate(x.dims):
        if dim == layout.lead and value.shape[axis] != 1:
            value = collectives.share(value, Layout(value.shape, layout.n, "rows", axis), index)
    shape = tuple(s if full != 1 else 1 for s, full in zip(local, x.shape, strict=True))
    return lax.broadcast_in_dim(value, shape, x.dims)
