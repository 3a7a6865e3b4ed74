"""The report of what the partitioner did with one update, and what it costs."""

import collections
import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from .._table import fold, table, terminal_width
from .._text import path_text, size_text
from .._types import PyTree
from ..optimizer import checks, split_regions
from ..optimizer import trace as optimizer_trace
from ..optimizer.step import Update
from ..optimizer.wrapper import ShardedOptimizer, optimizer_leaves
from ..partition.record import Communication, Dealt, Record
from ..sharding.checks import check_params
from ..sharding.leaves import shape_dtype
from ..sharding.options import Options, resolve_axes
from ..sharding.place import abstract
from ..sharding.regions import open_region
from .hlo import Collective
from .hlo import collectives as hlo_collectives


@dataclasses.dataclass(frozen=True)
class Report:
    """What the partitioner did with one optimizer's update; `print` it.

    Attributes:
      local: Equations that ran on shares.
      whole: Equations on arrays of more than one element that every device ran in full, by primitive.
      scalars: Equations on whole scalars.
      crossings: What crossed devices, in order.
      n: The number of shares.
      others: With `param_specs`, what the compiled update moves over other mesh axes (a tuple of `Collective`);
        `None` where there are none, or no devices to compile for.
      changed: State leaves whose dtype the update changes: (path, dtype before, dtype after). The step is compiled
        again for them, and a `lax.scan` over steps refuses them.
      dealt: Work on whole matrices that was dealt out to devices, one entry for each exchange.
    """

    local: int
    whole: dict[str, int]
    scalars: int
    crossings: tuple[Communication, ...]
    n: int
    others: tuple[Collective, ...] | None = None
    changed: tuple[tuple[str, str, str], ...] = ()
    dealt: tuple[Dealt, ...] = ()

    @classmethod
    def of(
        cls,
        record: Record,
        n: int,
        others: tuple[Collective, ...] | None = None,
        changed: tuple[tuple[str, str, str], ...] = (),
    ) -> "Report":
        """The report of a finished record."""
        many = sum(record.whole.values())
        return cls(
            local=record.counts["local"] + record.counts["loop"],
            whole=dict(record.whole.most_common()),
            scalars=record.counts["whole"] - many,
            crossings=tuple(record.crossings),
            n=n,
            others=others,
            changed=changed,
            dealt=tuple(record.dealt),
        )

    @property
    def reductions(self) -> tuple[Communication, ...]:
        """The crossings that are sums, maxima, minima or products."""
        return tuple(c for c in self.crossings if c.how != "gather")

    @property
    def gathers(self) -> tuple[Communication, ...]:
        """The crossings that made a split value whole."""
        return tuple(c for c in self.crossings if c.how == "gather")

    @property
    def bytes_reduced(self) -> int:
        """Bytes per device and step that the reductions send and receive, ring algorithm."""
        return _wire(self.reductions, self.n, 2)

    @property
    def bytes_gathered(self) -> int:
        """Bytes per device and step that the gathers receive."""
        return _wire(self.gathers, self.n, 1)

    def __str__(self) -> str:
        reduced, gathered = size_text(self.bytes_reduced), size_text(self.bytes_gathered)
        width = terminal_width()
        head = (
            f"{self.local} equations on shares, {self.scalars} on scalars, "
            f"{sum(self.whole.values())} on whole arrays, over {self.n} devices"
        )
        lines = [
            *fold(head, width),
            *fold(f"{len(self.reductions)} values reduced across devices: {reduced} per device and step", width),
            *_groups(self.reductions),
            *fold(f"{len(self.gathers)} values gathered: {gathered} per device and step", width),
            *_groups(self.gathers),
        ]
        for x in self.dealt:
            lines += fold(
                f"{x.jobs} jobs on whole matrices dealt out: {size_text(x.nbytes)} per device and step, the largest "
                f"load {x.balance:.2f} of the mean" + (f", {x.times} times" if x.times > 1 else ""),
                width,
            )
            lines += _counted((count, f"{what} of {read}", 1) for count, read, what in x.kinds)
        if self.others is not None:
            sent = size_text(sum(x.sent for x in self.others))
            lines += fold(f"{len(self.others)} collectives over other mesh axes: {sent} per device and step", width)
            lines += _others(self.others)
        if self.whole:
            names = ", ".join(f"{count} {name}" for name, count in self.whole.items())
            lines += fold(f"in full on every device: {names}", width)
        for path, before, after in self.changed:
            lines += fold(f"state leaf {path!r} is {before} before the update and {after} after it", width)
        return "\n".join(lines)


def _wire(crossings: tuple[Communication, ...], n: int, passes: int) -> int:
    return passes * sum(c.nbytes * c.times for c in crossings) * (n - 1) // n


def _others(moved: tuple[Collective, ...]) -> list[str]:
    groups = collections.Counter((x.kind, "+".join(x.axes or ()), x.nbytes, x.times) for x in moved)
    return _counted(
        (count, f"{kind} of {size_text(nbytes)} over {axes}", times)
        for (kind, axes, nbytes, times), count in groups.most_common()
    )


def _groups(crossings: tuple[Communication, ...]) -> list[str]:
    """One row for crossings that differ in nothing that is shown."""
    groups = collections.Counter((c.how, c.dtype, c.shape, c.primitive, c.times) for c in crossings)
    return _counted(
        (count, f"{how:6s} {dtype}{list(shape)} for {name}", times)
        for (how, dtype, shape, name, times), count in groups.items()
    )


def _counted(groups: Iterable[tuple[int, str, int]]) -> list[str]:
    """Indented rows: how many, what, and how often if more than once."""
    rows = [(f"{count:4d} x {what}" + (f", {times} times" if times > 1 else ""),) for count, what, times in groups]
    return table((), rows, "<", indent=2).splitlines()


def explain(
    options: Options, inner: optax.GradientTransformation, params: PyTree, extra: Mapping[str, PyTree]
) -> Report:
    """See `Zero.explain`."""
    checks.inner_optimizer(inner, ShardedOptimizer, "explain")
    axes, _ = resolve_axes(options, "explain")
    check_params("explain", options, params)
    leaves, _ = optimizer_leaves(options, "explain", params, axes)
    state = optimizer_trace.trace_init(inner, leaves, axes).out
    more, _, others = optimizer_trace.sort_extra(inner, extra, leaves, "explain", False)
    with optimizer_trace.naming_missing_extra("explain", "zero.explain(inner, params, value=..., grad=..., ...)"):
        traced = optimizer_trace.trace_update(inner, leaves, state, leaves, more, axes, False)
    known = leaves.leaves
    cut_params = tuple(leaf.layout is not None and options.stage == 3 for leaf in known)
    given = (*known, *(leaf for tree in more.trees.values() for leaf in tree.leaves))
    cut = tuple(leaf.layout is not None for leaf in given)
    body = Update(options, axes, traced, given, cut, False, known, cut_params)
    shapes: list[Any] = [
        [(x.layout.stored_shape if x.layout else x.shape, x.dtype) for x in given],
        [(x.stored_shape, x.dtype) for x in traced.state],
        [(x.cut.stored_shape if c else x.shape, x.dtype) for x, c in zip(known, cut_params, strict=True)],
        [shape_dtype(x) for x in others],
        [(np.shape(x), jnp.result_type(x)) for x in traced.program.consts],
    ]
    arrays = [abstract(options.mesh, x, spec) for x, spec in zip(shapes, body.in_specs, strict=True)]
    record = Record()
    observed = functools.partial(body, record=record)
    jax.eval_shape(open_region(options.mesh, axes, observed, body.in_specs, body.out_specs), *arrays)
    return Report.of(record, axes.n, _over_others(options, body, arrays), _changed(traced))


def _changed(traced: optimizer_trace.UpdateProgram) -> tuple[tuple[str, str, str], ...]:
    """The state leaves whose dtype is another one after the update."""
    before = {leaf.path: leaf.dtype for leaf in traced.state}
    rows = ((leaf.path, before.get(leaf.path, leaf.dtype), leaf.dtype) for leaf in traced.changing)
    return tuple((path_text(path), str(old), str(new)) for path, old, new in rows if old != new)


def _over_others(options: Options, body: Update, arrays: Sequence[PyTree]) -> tuple[Collective, ...] | None:
    """The collectives of the compiled update over other mesh axes, which the compiler inserts."""
    if options.param_specs is None or not isinstance(options.mesh, Mesh):
        return None
    own = set(body.axes.every)
    compiled = jax.jit(split_regions.around(body)).lower(*arrays).compile()
    return tuple(x for x in hlo_collectives(compiled, options.mesh) if x.axes and set(x.axes) - own)
