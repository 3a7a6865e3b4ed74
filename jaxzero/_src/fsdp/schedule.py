"""When to gather what: the plan of one flat program, made before anything is computed.

The program is walked once. Every step that mixes a parameter with data is a *use*; which gather serves it
is decided in `slots`, where its gradient is reduced in `sinks`, what a view of it is in `views`.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..jaxpr.calls import nbytes
from ..jaxpr.compat import open_program, scan_parts
from ..jaxpr.flat import Atom, Flat, Step, Var, flatten
from ..sharding.layout import Layout
from ..sharding.options import Options
from . import gradient_terms, reorder
from . import views as fsdp_views
from .gathers import Gather, GatheredParam, gathers
from .gradient_terms import GradientTerms
from .views import View


@dataclasses.dataclass(eq=False)
class Scan:
    """The plan of a scan whose body gathers or reduces.

    Attributes:
      body: The plan of its body.
      sliced: Number of an operand -> the input whose shares are scanned in its place.
      sunk: Number of a stacked result -> position of the gradient.
      outer: Input of the body that holds a share of one layer -> the input that holds those of all.
    """

    body: "Schedule"
    sliced: dict[int, Var]
    sunk: dict[int, int]
    outer: dict[Var, Var]


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
      fills: With no prefetch, steps of the backward pass that make large arrays of constants -> what ends the
        forward pass, for which they wait.
    """

    flat: Flat
    layouts: dict[Var, Layout]
    views: dict[Var, View]
    sinks: GradientTerms
    grads: dict[int, Layout]
    groups: dict[int, list[int]]
    makers: dict[Step, Step | None]
    scans: dict[Step, Scan]
    slots: list[Gather]
    uses: dict[int, dict[GatheredParam, Gather]]
    lazy: set[int]
    in_flight: int
    fills: dict[Step, Var] = dataclasses.field(default_factory=dict)

    def passive(self, step: Step) -> bool:
        """Whether a step computes nothing: its results are views or it only adds terms."""
        if step in self.sinks.skipped:
            return True
        views = all(v in self.views for v in step.outs)  # a step without results, a print, is none
        return step.eqn is not None and bool(step.outs) and views

    def unit(self, view: View) -> GatheredParam:
        """What has to be gathered for a view."""
        return GatheredParam(view.source, jnp.dtype(view.dtype(view.source.aval.dtype)))


def plan(
    flat: Flat,
    layouts: dict[Var, Layout],
    given: Mapping[Var, View],
    grads: dict[int, Layout],
    options: Options,
    turn: int | None = None,
    stacked: int | None = None,
    late: bool = False,
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
      late: Of a scan's body: whether the scan belongs to the backward pass.

    Returns:
      The plan.
    """
    found = gradient_terms.find(flat, grads)
    schedule = Schedule(flat, layouts, dict(given), found, grads, {}, {}, {}, [], {}, set(), options.prefetch)
    for v in layouts:
        schedule.views.setdefault(v, View(v))
    end = -1 if late else _turn(flat, turn)
    for number, step in enumerate(flat.steps):
        if step in found.skipped:
            continue
        if step.eqn is None:
            schedule.views.update(
                (o, schedule.views[i]) for i, o in zip(step.ins, step.outs, strict=True) if i in schedule.views
            )
        elif step.name == "scan":
            _scan(schedule, step, options, number > end)
        else:
            through = fsdp_views.view_through(step, schedule.views)
            if through is not None:
                schedule.views.update(zip(step.outs, through, strict=True))
    last = None if turn is None else flat.outs[turn]
    if isinstance(last, Var) and last not in schedule.views and end >= 0 and options.prefetch == 0:
        schedule.fills = dict.fromkeys(_fills(flat.steps[end + 1 :], options.chunk_bytes or 0), last)
    behind = range(len(flat.outs) if stacked is None else stacked, len(flat.outs))
    schedule.lazy = {i for i in behind if i not in grads and flat.outs[i] in schedule.views}
    _late_gradients(schedule, options)
    uses = [(i, schedule.unit(view)) for i in range(len(flat.steps) + 1) for view in needs(schedule, i)]
    size = {u: nbytes(schedule.layouts[u.source].shape, u.dtype) for _, u in uses}
    regions = [step.region for step in flat.steps] + [None]
    schedule.slots, schedule.uses = gathers(uses, size, regions, end, options, _gathering(schedule))
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


def _turn(flat: Flat, turn: int | None) -> int:
    """The number of the last step of the forward pass."""
    if turn is None:
        return len(flat.steps)
    return next((i for i, s in enumerate(flat.steps) if flat.outs[turn] in s.outs), -1)


def _fills(steps: Sequence[Step], least: int) -> list[Step]:
    """Steps that make at least `least` bytes of constants: nothing else would keep them from running at once."""
    fills = (s for s in steps if s.eqn is not None and not any(isinstance(x, Var) for x in s.ins))
    return [s for s in fills if s.ins and sum(nbytes(v.aval.shape, v.aval.dtype) for v in s.outs) >= least]


def _scan(schedule: Schedule, step: Step, options: Options, late: bool) -> None:
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
    inside = plan(body, layouts, given, grads, options, stacked=len(carry), late=late)
    for number in inside.lazy:
        view = inside.views[body.outs[number]]  # type: ignore[index]
        schedule.views[step.outs[number]] = view.stacked(outer[view.source])
    schedule.scans[step] = Scan(inside, sliced, sunk, outer)


def _gathering(schedule: Schedule) -> dict[int, int]:
    """Numbers of the scans that gather in their bodies -> the number of the step that first reads a result."""
    steps = schedule.flat.steps
    reads = lambda i, outs: not schedule.passive(steps[i]) and not outs.isdisjoint(steps[i].ins)
    return {
        i: next((j for j in range(i + 1, len(steps)) if reads(j, set(step.outs))), len(steps))
        for i, step in enumerate(steps)
        if step in schedule.scans and any(slot.large for slot in schedule.scans[step].body.slots)
    }


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
        for step, tail in reorder.find(flat, schedule.sinks.terms, large).items()
        if step not in uses and step not in schedule.scans
    }
    schedule.makers = dict.fromkeys(makers) | reorder.defer_wgrads(flat, makers, uses)


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
