"""When to gather what: the plan of one flat program, made before anything is computed.

The program is walked once. Every step that mixes a parameter with data is a *use*. A use of a large
parameter gathers it; inside one `jax.checkpoint` it is gathered once, and so are two uses with no other
large gather between them. Small parameters travel together, in chunks in the order of first use, and stay
for the forward or the backward pass (`chunk_bytes`) or for both (`persist_bytes`). Each gather waits for
the data of the use `prefetch` large gathers before it: that bounds how much is whole at any time.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from . import makers as making
from . import sinks as terms
from . import views as viewing
from ._compat import open_program, scan_parts
from .flat_program import Atom, Flat, Step, Var, flatten, nbytes
from .layout import Layout
from .options import Options
from .sinks import Sinks
from .views import View


@dataclasses.dataclass(frozen=True)
class Unit:
    """A parameter in the dtype in which it travels."""

    source: Var
    dtype: Any


@dataclasses.dataclass(eq=False)
class Slot:
    """One gather: what it brings, and the step before which it happens.

    Attributes:
      units: What it brings; several for a chunk.
      step: The number of the step.
      large: Whether it counts for `prefetch`.
      tied: The number of the step whose data it waits for; `None`: it is free to run at once.
      keep: Whether what it brings is used again after another large gather.
    """

    units: list[Unit]
    step: int
    large: bool
    tied: int | None = None
    keep: bool = False


@dataclasses.dataclass(eq=False)
class Scan:
    """The plan of a scan whose body gathers or reduces.

    Attributes:
      body: The plan of its body.
      sliced: Number of an operand -> the input whose shares are scanned in its place.
      sunk: Number of a stacked result -> position of the gradient.
    """

    body: "Schedule"
    sliced: dict[int, Var]
    sunk: dict[int, int]


@dataclasses.dataclass(eq=False)
class Schedule:
    """The plan of one flat program.

    Attributes:
      flat: The program.
      layouts: Input -> the layout of the share that it holds.
      views: Variables that are views of an input.
      sinks: Where gradients are complete.
      grads: Position of a result that is a gradient -> the layout of its share.
      groups: Position -> the positions whose gradients are reduced together with it.
      makers: Steps that make a whole gradient which is reduced by itself -> the use of the parameter that it
        is made after, if there is one.
      scans: Plans of the scans among the steps.
      slots: Gathers, in order.
      uses: Step number -> {unit: its gather}; the number of steps stands for the results.
      lazy: Positions of results that stay views: a scan does not stack them.
      flying: How many whole gradients may be on their way when the next is made.
    """

    flat: Flat
    layouts: dict[Var, Layout]
    views: dict[Var, View]
    sinks: Sinks
    grads: dict[int, Layout]
    groups: dict[int, list[int]]
    makers: dict[Step, Step | None]
    scans: dict[Step, Scan]
    slots: list[Slot]
    uses: dict[int, dict[Unit, Slot]]
    lazy: set[int]
    flying: int

    def passive(self, step: Step) -> bool:
        """Whether a step computes nothing: its results are views or it only adds terms."""
        if step in self.sinks.skipped:
            return True
        views = all(v in self.views for v in step.outs)  # a step without results, a print, is none
        return step.eqn is not None and bool(step.outs) and views

    def unit(self, view: View) -> Unit:
        """What has to be gathered for a view."""
        return Unit(view.source, jnp.dtype(view.dtype(view.source.aval.dtype)))


def plan(
    flat: Flat,
    layouts: dict[Var, Layout],
    given: Mapping[Var, View],
    grads: dict[int, Layout],
    options: Options,
    turn: int | None = None,
    stacked: int | None = None,
) -> Schedule:
    """Plans a program.

    Args:
      flat: The program.
      layouts: The inputs that hold shares.
      given: Inputs that are views of inputs to begin with.
      grads: The results that are gradients of leaves that are cut.
      options: `prefetch`, `persist_bytes`, `chunk_bytes`.
      turn: The position of the result that ends the forward pass.
      stacked: Of a scan's body: from which position on results are stacked.

    Returns:
      The plan.
    """
    found = terms.find(flat, grads)
    schedule = Schedule(flat, layouts, dict(given), found, grads, {}, {}, {}, [], {}, set(), options.prefetch)
    for v in layouts:
        schedule.views.setdefault(v, View(v))
    for step in flat.steps:
        if step in found.skipped:
            continue
        if step.eqn is None:
            schedule.views.update(
                (o, schedule.views[i]) for i, o in zip(step.ins, step.outs, strict=True) if i in schedule.views
            )
        elif step.name == "scan":
            _scan(schedule, step, options)
        else:
            through = viewing.view_through(step, schedule.views)
            if through is not None:
                schedule.views.update(zip(step.outs, through, strict=True))
    late = range(len(flat.outs) if stacked is None else stacked, len(flat.outs))
    schedule.lazy = {i for i in late if i not in grads and flat.outs[i] in schedule.views}
    _late_gradients(schedule, options)
    _gathers(schedule, options, turn)
    _ties(schedule.slots, options.prefetch)
    _reductions(schedule, options)
    return schedule


def needs(schedule: Schedule, number: int) -> list[View]:
    """The views that a step computes with; past the last step, those that are results."""
    flat = schedule.flat
    if number == len(flat.steps):
        atoms: Sequence[Atom] = [
            x for i, x in enumerate(flat.outs) if i not in schedule.grads and i not in schedule.lazy
        ]
        late = [v for v in schedule.sinks.terms if v in schedule.views]
        return [schedule.views[x] for x in [*atoms, *late] if x in schedule.views]
    step = flat.steps[number]
    if step.eqn is None or schedule.passive(step):
        return []
    sliced = schedule.scans[step].sliced if step in schedule.scans else {}
    return [schedule.views[x] for i, x in enumerate(step.ins) if x in schedule.views and i not in sliced]


def _scan(schedule: Schedule, step: Step, options: Options) -> None:
    """Plans a scan: stacked leaves are scanned share by share, views that it stacks stay views."""
    body = flatten(*open_program(step.eqn.params["jaxpr"]))
    _, carry, xs = scan_parts(step.eqn, list(step.ins))
    layouts: dict[Var, Layout] = {}
    given: dict[Var, View] = {}
    sliced: dict[int, Var] = {}
    outer: dict[Var, Var] = {}
    for i in range(len(step.ins) - len(xs), len(step.ins)):
        view = schedule.views.get(step.ins[i])  # type: ignore[arg-type]
        if view is None or not schedule.layouts[view.source].lead:
            continue
        layer = schedule.layouts[view.source].per_layer()
        source = Var(jax.ShapeDtypeStruct(layer.shape, view.source.aval.dtype))
        inner = view.per_layer(source)
        if inner is not None:
            layouts[source], given[body.inputs[i]] = layer, inner
            sliced[i] = outer[source] = view.source
    sunk = schedule.sinks.scanned.get(step, {})
    if not sliced and not sunk:
        return
    grads = {number: schedule.grads[position].per_layer() for number, position in sunk.items()}
    body.inputs = [given[x].source if x in given else x for x in body.inputs]
    inside = plan(body, layouts, given, grads, options, stacked=len(carry))
    for number in inside.lazy:
        view = inside.views[body.outs[number]]  # type: ignore[index]
        schedule.views[step.outs[number]] = view.stacked(outer[view.source])
    schedule.scans[step] = Scan(inside, sliced, sunk)


def _late_gradients(schedule: Schedule, options: Options) -> None:
    """Large gradients are made after the parameter's last use, so that the two are not whole together."""
    flat, least = schedule.flat, options.chunk_bytes or 0
    size = lambda view: nbytes(schedule.layouts[view.source].shape, schedule.unit(view).dtype)
    uses = [s for i, s in enumerate(flat.steps) if any(size(v) >= least for v in needs(schedule, i))]
    large = lambda position: (
        nbytes(schedule.grads[position].shape, flat.outs[position].aval.dtype) >= least  # type: ignore[union-attr]
    )
    makers = {
        step: tail
        for step, tail in making.find(flat, schedule.sinks.terms, large).items()
        if step not in uses and step not in schedule.scans
    }
    schedule.makers = dict.fromkeys(makers) | making.postpone(flat, makers, uses)


def _gathers(schedule: Schedule, options: Options, turn: int | None) -> None:
    """Decides which gather serves each use."""
    flat = schedule.flat
    end = len(flat.steps)
    if turn is not None:
        loss = flat.outs[turn]
        end = next((i for i, s in enumerate(flat.steps) if loss in s.outs), -1)
    uses = [(i, schedule.unit(view)) for i in range(len(flat.steps) + 1) for view in needs(schedule, i)]
    size = {u: nbytes(schedule.layouts[u.source].shape, u.dtype) for _, u in uses}
    limit = options.chunk_bytes or 0
    small = {u for u in size if size[u] <= options.persist_bytes or size[u] < limit}

    def span(i: int, u: Unit) -> Any:
        """For how long a small parameter stays."""
        return "always" if size[u] <= options.persist_bytes else i > end

    chunks: dict[Any, list[Unit]] = {}
    member: dict[Any, list[Unit]] = {}
    for i, u in uses:
        key = (u, span(i, u))
        if u not in small or key in member:
            continue
        kind = (span(i, u), u.dtype)
        chunk = chunks.get(kind)
        if chunk is None or not limit or sum(size[x] for x in chunk) + size[u] > limit:
            chunk = chunks[kind] = []
        chunk.append(u)
        member[key] = chunk
    there: dict[Any, Slot] = {}
    recent: Slot | None = None
    for i, u in uses:
        region = flat.steps[i].region if i < len(flat.steps) else None
        if u in small:
            units = member[u, span(i, u)]
            slot = there.get(id(units))
            if slot is None:
                slot = there[id(units)] = Slot(units, i, False)
                schedule.slots.append(slot)
        else:
            slot = there.get((region, u)) if region is not None else None
            if slot is None and recent is not None and recent.units[0] == u:
                slot = recent
            if slot is None:
                slot = Slot([u], i, True, keep=region is not None)
                schedule.slots.append(slot)
                if region is not None:
                    there[region, u] = slot
            recent = slot
        schedule.uses.setdefault(i, {})[u] = slot


def _ties(slots: list[Slot], prefetch: int) -> None:
    """Each gather waits for the data of the use `prefetch` large gathers before it."""
    large = [s for s in slots if s.large]
    before = 0
    for slot in slots:
        if prefetch == 0:
            slot.tied = slot.step
        elif before >= prefetch:
            slot.tied = large[before - prefetch].step
        before += slot.large


def _reductions(schedule: Schedule, options: Options) -> None:
    """Small gradients, in the order in which they are complete, are reduced together."""
    made: dict[int, int] = {}
    for number, step in enumerate(schedule.flat.steps):
        for v in step.outs:
            for position in schedule.sinks.terms.get(v, ()):
                made[position] = number
    alone = {p for scan in schedule.sinks.scanned.values() for p in scan.values()}
    alone |= {p for v, positions in schedule.sinks.terms.items() if v in schedule.views for p in positions}
    limit = options.chunk_bytes or 0
    open_: dict[Any, tuple[list[int], int]] = {}
    for position in sorted(made, key=made.__getitem__):
        if position in alone:
            continue
        out = schedule.flat.outs[position]
        size = nbytes(schedule.grads[position].shape, out.aval.dtype)  # type: ignore[union-attr]
        if size >= limit:
            continue
        kind = out.aval.dtype  # type: ignore[union-attr]
        members, total = open_.get(kind, ([], 0))
        if not members or total + size > limit:
            members, total = [], 0
        members.append(position)
        open_[kind] = (members, total + size)
        schedule.groups[position] = members
