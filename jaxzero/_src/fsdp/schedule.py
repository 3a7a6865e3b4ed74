"""The schedule of one flat program: which gather serves which step, what it waits for, where gradients are reduced.

`schedule_gathers` decides all of it before anything is computed; `evaluate` only follows it. An example: a loss
`mean(relu(x @ w1) @ w2)` with `w1` of shape (1024, 4096) and `w2` of shape (4096, 1024), over 8 devices. The inputs
of the program are shares of shape (128, 4096) and (512, 1024), and its steps with the parameters that each uses are

    forward    0  x @ w1      gathers w1
               1  relu
               2  h @ w2      gathers w2, waits for the data of step 0 (`prefetch=1`)
               3  mean        the end of the forward pass
    backward   4  dy @ w2.T   uses the gather of step 2: no other large gather lies between
               5  h.T @ dy    makes dw2, moved behind step 4 (`reorder`); its reduce-scatter gives (512, 1024)
               6  x.T @ dh    makes dw1; its reduce-scatter gives (128, 4096)

The transpose of `w2` is a view (`views`), so no step computes it. A scan over stacked parameters has a schedule for
its body: the shares of all layers are scanned, and the body gathers one layer and reduces the gradients of one layer.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from ..jaxpr.calls import nbytes
from ..jaxpr.compat import open_program, scan_parts
from ..jaxpr.flat import Atom, Flat, Step, Var, flatten
from ..jaxpr.primitives import DOT_GENERAL, SCAN
from ..sharding.layout import Layout
from ..sharding.options import GatherOptions
from .gathers import START, Gather, GatheredParam, assign_gathers
from .gradient_terms import GradientTerms, find_terms, group_gradients, is_zero
from .reorder import defer_wgrads, wgrad_steps
from .scatter_sums import scatter_onto_sums
from .views import View, view_through

T = TypeVar("T")


class Residual(NamedTuple):
    """What gathers of the forward pass leave of a parameter for the backward pass.

    Attributes:
      param: The parameter.
      depth: How many leading dimensions of the array count layers.
      whole: Whether it is the whole parameter (`persist_bytes`); else the node shard (`regather="local"`).
    """

    param: GatheredParam
    depth: int
    whole: bool


@dataclasses.dataclass(eq=False)
class ScanSchedule:
    """The schedule of a scan whose body gathers or reduces.

    Attributes:
      body: The schedule of its body.
      scanned_params: Number of an operand -> the input whose shares are scanned in its place.
      stacked_grads: Number of a stacked result -> the position of the gradient that it is.
      outer_param_of: Input of the body that holds a share of one layer -> the input that holds those of all layers.
      residuals_in: Residuals of the body that are scanned: a scan before this one has stacked them.
      residuals_out: Residuals of the body that this scan stacks.
    """

    body: "Schedule"
    scanned_params: dict[int, Var]
    stacked_grads: dict[int, int]
    outer_param_of: dict[Var, Var]
    residuals_in: list[Residual] = dataclasses.field(default_factory=list)
    residuals_out: list[Residual] = dataclasses.field(default_factory=list)

    def stacked(self, residual: Residual) -> Residual:
        """The residuals of all layers, for the one of a layer in the body."""
        param, depth, whole = residual
        return Residual(GatheredParam(self.outer_param_of[param.source], param.dtype), depth + 1, whole)


@dataclasses.dataclass(frozen=True, eq=False)
class Dataflow:
    """Where the shares of a flat program go: which values are views of them, and which results are gradients.

    Attributes:
      flat: The program.
      layouts: Input -> the layout of the share that it holds.
      views: Variables that are views of an input.
      grads: Position of a result that is a gradient -> the layout of its share.
      terms: The terms of these gradients.
      scans: Schedules of the scans among the steps that gather or reduce in their bodies.
      lazy: Positions of results that stay views: a scan does not stack them.
    """

    flat: Flat
    layouts: Mapping[Var, Layout]
    views: Mapping[Var, View]
    grads: Mapping[int, Layout]
    terms: GradientTerms
    scans: Mapping[Step, ScanSchedule]
    lazy: frozenset[int]

    def passive(self, step: Step) -> bool:
        """Whether a step computes nothing: its results are views, or it only adds terms."""
        if step in self.terms.skipped:
            return True
        views = all(v in self.views for v in step.outs)  # a step without results, a print, is none
        return step.eqn is not None and bool(step.outs) and views

    def needs(self, number: int) -> list[View]:
        """The views that a step computes with; past the last step, those that are results or terms of gradients."""
        if number == len(self.flat.steps):
            outs: Sequence[Atom] = [
                x for i, x in enumerate(self.flat.outs) if i not in self.grads and i not in self.lazy
            ]
            return [self.views[x] for x in [*outs, *self.terms.terms] if isinstance(x, Var) and x in self.views]
        step = self.flat.steps[number]
        if step.eqn is None or self.passive(step):
            return []
        scanned = self.scans[step].scanned_params if step in self.scans else {}
        pairs = enumerate(step.ins)
        return [self.views[x] for i, x in pairs if isinstance(x, Var) and x in self.views and i not in scanned]

    def gathered_param(self, view: View) -> GatheredParam:
        """The parameter that has to be gathered for a view."""
        return GatheredParam(view.source, jnp.dtype(view.gather_dtype(view.source.aval.dtype)))

    def nbytes(self, param: GatheredParam) -> int:
        """Bytes of a parameter, whole."""
        return nbytes(self.layouts[param.source].shape, param.dtype)

    def grad_dtype(self, position: int) -> jnp.dtype:
        """The dtype of the gradient at a position."""
        return self.flat.outs[position].aval.dtype  # type: ignore[union-attr]

    def grad_nbytes(self, position: int) -> int:
        """Bytes of the gradient at a position, whole."""
        return nbytes(self.grads[position].shape, self.grad_dtype(position))


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule(Dataflow):
    """The schedule of a flat program.

    Attributes:
      gathers: The gathers, in order.
      served_by: Step number -> {parameter: its gather}; the number of steps stands for the results.
      tied: Step number -> the gathers that wait for its data.
      tied_outer_hops: The same for hops across nodes that run before the last hop.
      behind_scans: Number of a scan -> the gathers that wait for the data with which its last iteration begins.
      before_scans: Step number -> scans whose first iteration begins with parameters that are gathered beside the step.
      before_scans_outer_hops: The same for hops across nodes.
      wgrads: Steps that make a whole gradient which is reduced by itself -> results of the parameter's last use,
        for which they wait.
      groups: Position -> the positions whose gradients are reduced together with it.
      zeros: Variables that are arrays of zeros.
      deferred_constants: With no prefetch, steps of the backward pass that make large arrays of constants -> the
        end of the forward pass, for which they wait.
      max_in_flight: How many whole gradients may still be in reduction when the next is made.
      last_product: Of a scan's body, the number of the last product, or of a later step that waits for data: gradients
        that are made there or later are reduced in the next iteration. `None` elsewhere.
      node_shards: Whether node shards are kept.
    """

    gathers: list[Gather]
    served_by: Mapping[int, Mapping[GatheredParam, Gather]]
    tied: Mapping[int, list[Gather]]
    tied_outer_hops: Mapping[int, list[Gather]]
    behind_scans: Mapping[int, list[Gather]]
    before_scans: Mapping[int, list[Step]]
    before_scans_outer_hops: Mapping[int, list[Step]]
    wgrads: Mapping[Step, list[Var]]
    groups: Mapping[int, list[int]]
    zeros: frozenset[Var]
    deferred_constants: Mapping[Step, Var]
    max_in_flight: int
    last_product: int | None
    node_shards: bool

    @property
    def ahead(self) -> list[Gather]:
        """The gathers of a scan's body that run, or begin, in the iteration before."""
        return [gather for gather in self.gathers if gather.ahead or gather.outer_hops_ahead]

    @property
    def single_terms(self) -> frozenset[int]:
        """The positions of the gradients that are one term, reduced by itself."""
        several = {p for p, _ in self.terms.constants}
        for scan in self.scans.values():
            several |= {p for i, p in scan.stacked_grads.items() if i not in scan.body.single_terms}
        alone = (p for p, count in self.terms.count.items() if count == 1 and p not in self.groups)
        return frozenset(alone) - several

    @property
    def reductions(self) -> dict[int, int]:
        """How often each gradient is reduced: for each of its terms, unless these are summed; per layer in a scan."""
        found = {p: min(count, 1) if p in self.groups else count for p, count in self.terms.count.items()}
        for scan in self.scans.values():
            for i, position in scan.stacked_grads.items():
                found[position] += scan.body.reductions[i] - 1
        return found


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a program stands in a training step.

    Attributes:
      loss: The result that ends the forward pass; `None` if the program belongs to one pass.
      in_backward: Whether that is the backward pass.
      stacked: Of a scan's body: the position from which on results are stacked.
      residuals: Of a scan's body: whole parameters that earlier scans have stacked.
    """

    loss: Atom | None = None
    in_backward: bool = False
    stacked: int | None = None
    residuals: frozenset[Residual] = frozenset()

    def forward_end(self, flat: Flat) -> int:
        """The number of the last step of the forward pass; -1 if no step belongs to it."""
        if self.in_backward:
            return -1
        if self.loss is None:
            return len(flat.steps)
        return next((i for i, step in enumerate(flat.steps) if self.loss in step.outs), -1)


def schedule_gathers(
    flat: Flat,
    layouts: Mapping[Var, Layout],
    grads: Mapping[int, Layout],
    options: GatherOptions,
    loss_output: int | None = None,
) -> Schedule:
    """Decides when a program gathers its parameters and reduces their gradients.

    Args:
      flat: The program.
      layouts: The inputs that hold shares, with the layouts of these.
      grads: The positions of the results that are gradients of leaves that are cut, with the layouts of their shares.
      options: How far ahead gathers run, and how small parameters travel together.
      loss_output: The position of the result that ends the forward pass; `None` if all of the program is one.

    Returns:
      The schedule.
    """
    place = _Place(None if loss_output is None else flat.outs[loss_output])
    schedule = _schedule(flat, layouts, {v: View(v) for v in layouts}, grads, options, place)
    _drop_unread(schedule, set())
    if schedule.node_shards:
        _mark_node_shards(schedule, {})
    return schedule


def _schedule(
    flat: Flat,
    layouts: Mapping[Var, Layout],
    views: Mapping[Var, View],
    grads: Mapping[int, Layout],
    options: GatherOptions,
    place: _Place,
) -> Schedule:
    """The schedule of a program or a scan's body, some inputs of which are `views`; steps are numbered last."""
    flat = scatter_onto_sums(flat) if options.sum_first else flat
    end, least = place.forward_end(flat), options.chunk_bytes or 0
    terms = find_terms(flat, grads, sum_first=options.sum_first)
    views, scans = _follow_views(flat, layouts, views, grads, terms, options, place)
    lazy = _lazy_outs(flat, views, grads, place)
    original = Dataflow(flat, layouts, views, grads, terms, scans, lazy)
    in_scan = place.stacked is not None
    beside_last = in_scan and options.prefetch > 0 and not options.several_sums
    flow, wgrads = _defer_wgrads(original, least, end + 1, beside_last=beside_last)
    assert flow.flat.steps[: end + 1] == flat.steps[: end + 1], "a step of the forward pass was moved"
    uses = [(i, flow.gathered_param(v)) for i in range(len(flat.steps) + 1) for v in flow.needs(i)]
    regions = [step.remat for step in flow.flat.steps] + [None]
    sizes = {u: flow.nbytes(u) for _, u in uses}
    stacked = {
        u: Gather([u], i, False, i > end, stacked=True) for i, u in uses if Residual(u, 0, True) in place.residuals
    }
    fetched = [(i, u) for i, u in uses if u not in stacked]
    gathers, served_by = assign_gathers(fetched, sizes, regions, end, options, _gathering_scans(flow), in_scan)
    for i, u in uses:
        if u in stacked:
            served_by.setdefault(i, {})[u] = stacked[u]
    for gather in gathers:
        if any(any(layouts[p.source].other_axes) for p in gather.params):
            gather.outer_hops_at, gather.outer_hops_ahead = None, False
    tied = _by_step((None if g.behind_scan is not None else g.wait_for_step, g) for g in gathers)
    before_scans, before_scans_outer_hops = _before_scans(flow, sorted({i for i, u in uses if sizes[u] >= least}))
    products = (i for i, step in enumerate(flow.flat.steps) if step in wgrads or step.name == DOT_GENERAL)
    constants: dict[Step, Var] = {}
    if options.prefetch == 0 and end >= 0 and isinstance(place.loss, Var) and place.loss not in views:
        constants = dict.fromkeys(_large_constants(flow.flat.steps[end + 1 :], least), place.loss)
    return Schedule(
        **{field.name: getattr(flow, field.name) for field in dataclasses.fields(flow)},
        gathers=gathers,
        served_by=served_by,
        tied=tied,
        tied_outer_hops=_by_step((gather.outer_hops_at, gather) for gather in gathers),
        behind_scans=_by_step((gather.behind_scan, gather) for gather in gathers),
        before_scans=before_scans,
        before_scans_outer_hops=before_scans_outer_hops,
        wgrads=wgrads,
        groups=group_gradients(flow.flat, terms, views, least, _gather_steps(flow, gathers)),
        zeros=frozenset(v for step in flow.flat.steps if is_zero(step) for v in step.outs),
        deferred_constants=constants,
        max_in_flight=options.prefetch,
        last_product=max([*tied, *products]) if in_scan and grads and options.prefetch and wgrads else None,
        node_shards=options.node_shards,
    )


def _by_step(pairs: Iterable[tuple[int | None, T]]) -> dict[int, list[T]]:
    """The gathers, or scans, of each step number."""
    found: dict[int, list[T]] = {}
    for number, gather in pairs:
        if number is not None:
            found.setdefault(number, []).append(gather)
    return found


# --- views and scans -------------------------------------------------------------------------------


def _follow_views(
    flat: Flat,
    layouts: Mapping[Var, Layout],
    views: Mapping[Var, View],
    grads: Mapping[int, Layout],
    terms: GradientTerms,
    options: GatherOptions,
    place: _Place,
) -> tuple[dict[Var, View], dict[Step, ScanSchedule]]:
    """All variables that are views, given those that are inputs; the schedules of scans that gather or reduce."""
    views, end = dict(views), place.forward_end(flat)
    scans: dict[Step, ScanSchedule] = {}
    residuals = place.residuals
    for number, step in enumerate(flat.steps):
        if step in terms.skipped:
            continue
        if step.eqn is None:
            pairs = zip(step.ins, step.outs, strict=True)
            views.update((o, views[i]) for i, o in pairs if isinstance(i, Var) and i in views)
        elif step.name == SCAN:
            stacked_grads = terms.scanned.get(step, {})
            layers = {number: grads[position].per_layer() for number, position in stacked_grads.items()}
            scan = _scan_schedule(
                step, layouts, views, layers, options, _Place(in_backward=number > end, residuals=residuals)
            )
            if scan is not None:
                residuals |= set(map(scan.stacked, scan.residuals_out))
                scans[step] = dataclasses.replace(scan, stacked_grads=stacked_grads)
                views.update(_stacked_views(step, scan))
        elif (through := view_through(step, views)) is not None:
            views.update(zip(step.outs, through, strict=True))
    return views, scans


def _scan_schedule(
    step: Step,
    layouts: Mapping[Var, Layout],
    views: Mapping[Var, View],
    grads: Mapping[int, Layout],
    options: GatherOptions,
    place: _Place,
) -> ScanSchedule | None:
    """The schedule of a scan; `None` if its body neither gathers nor reduces.

    Args:
      step: The scan.
      layouts: The layouts of shares outside.
      views: The views outside.
      grads: Numbers of stacked results that are gradients -> the layout of the share of one layer.
      options: As for the program outside.
      place: To which pass the scan belongs, and the whole parameters outside that earlier scans have stacked.
    """
    assert step.eqn is not None
    body = flatten(*open_program(step.eqn.params["jaxpr"]))
    _, carry, xs = scan_parts(step.eqn, list(step.ins))
    inner_layouts: dict[Var, Layout] = {}
    inner_views: dict[Var, View] = {}
    scanned_params: dict[int, Var] = {}
    outer_param_of: dict[Var, Var] = {}
    for i in range(len(step.ins) - len(xs), len(step.ins)):
        view = views.get(step.ins[i])  # type: ignore[arg-type]
        if view is None or not layouts[view.source].lead:
            continue
        layer = layouts[view.source].per_layer()
        source = Var(jax.ShapeDtypeStruct(layer.shape, view.source.aval.dtype))
        inner = view.per_layer(source)
        if inner is not None:
            inner_layouts[source], inner_views[body.inputs[i]] = layer, inner
            scanned_params[i] = outer_param_of[source] = view.source
    if not scanned_params and not grads:
        return None
    inputs = [inner_views[x].source if x in inner_views else x for x in body.inputs]
    inner_views |= {v: View(v) for v in inner_layouts}
    inner_residuals = frozenset(
        Residual(GatheredParam(source, r.param.dtype), r.depth - 1, True)
        for r in place.residuals
        if r.depth
        for source, outer in outer_param_of.items()
        if outer == r.param.source
    )
    inner_place = _Place(in_backward=place.in_backward, stacked=len(carry), residuals=inner_residuals)
    flat = Flat(inputs, body.steps, body.outs)
    schedule = _schedule(flat, inner_layouts, inner_views, grads, options, inner_place)
    scan = ScanSchedule(schedule, scanned_params, {}, outer_param_of)
    read, made = _whole_residuals(schedule)
    fits = lambda r: nbytes(layouts[outer_param_of[r.param.source]].shape, r.param.dtype) <= options.persist_bytes
    scan.residuals_in, scan.residuals_out = read, list(filter(fits, made))
    return scan


def _whole_residuals(body: Schedule) -> tuple[list[Residual], list[Residual]]:
    """The whole parameters that a scan's body reads from earlier scans, and those that it can leave to later ones."""
    read, made = dict[Residual, None](), dict[Residual, None]()
    for served in body.served_by.values():
        for param, gather in served.items():
            (read if gather.stacked else made)[Residual(param, 0, True)] = None
    for scan in body.scans.values():
        read |= dict.fromkeys(r for r in map(scan.stacked, scan.residuals_in) if r not in made)
        made |= dict.fromkeys(map(scan.stacked, scan.residuals_out))
    return list(read), list(made)


def _drop_unread(schedule: Schedule, read: set[Residual]) -> None:
    """Drops residuals that no later scan reads; `read` holds those of this program that are read after it."""
    for step in reversed(schedule.flat.steps):
        if step in schedule.scans:
            scan = schedule.scans[step]
            scan.residuals_out = [r for r in scan.residuals_out if scan.stacked(r) in read]
            _drop_unread(scan.body, set(scan.residuals_out))
            read |= set(map(scan.stacked, scan.residuals_in))


def _stacked_views(step: Step, scan: ScanSchedule) -> dict[Var, View]:
    """Results of a scan that are stacks of views, and so views of the stacked parameters."""
    body, out = scan.body, {}
    for number in body.lazy:
        view = body.views[body.flat.outs[number]]  # type: ignore[index]
        out[step.outs[number]] = view.stacked(scan.outer_param_of[view.source])
    return out


def _lazy_outs(flat: Flat, views: Mapping[Var, View], grads: Mapping[int, Layout], place: _Place) -> frozenset[int]:
    """The positions of results that a scan would stack, and that stay views instead."""
    stacked = range(len(flat.outs) if place.stacked is None else place.stacked, len(flat.outs))
    return frozenset(i for i in stacked if i not in grads and flat.outs[i] in views)


def _gathering_scans(flow: Dataflow) -> dict[int, int]:
    """Numbers of the scans that gather in their bodies -> the number of the step that first reads a result."""
    steps = flow.flat.steps
    reads = lambda i, outs: not flow.passive(steps[i]) and not outs.isdisjoint(steps[i].ins)
    return {
        i: next((j for j in range(i + 1, len(steps)) if reads(j, set(step.outs))), len(steps))
        for i, step in enumerate(steps)
        if step in flow.scans and any(gather.large for gather in flow.scans[step].body.gathers)
    }


# --- gradients -------------------------------------------------------------------------------------


def _defer_wgrads(
    flow: Dataflow, least: int, first: int, *, beside_last: bool
) -> tuple[Dataflow, dict[Step, list[Var]]]:
    """Large gradients are made after the parameter's last use, so that the two are not whole together.

    Args:
      flow: The program.
      least: From how many bytes on a parameter or gradient is large.
      first: The number of the first step that may move.
      beside_last: Whether none is made after the last use of all: a reduction then stands beside that product, and no
        whole gradient is left to the next iteration of a scan. Several collectives need more products than this one.

    Returns:
      The program in its new order; the steps that make large gradients -> the values for which they wait.
    """
    flat = flow.flat
    size = lambda view: flow.nbytes(flow.gathered_param(view))
    uses = [step for i, step in enumerate(flat.steps) if any(size(view) >= least for view in flow.needs(i))]
    found = wgrad_steps(flat, flow.terms.terms, lambda position: flow.grad_nbytes(position) >= least)
    stay = {*uses, *flow.scans}
    wgrads = {step: tail for step, tail in found.items() if step not in stay}
    flat, behind = defer_wgrads(flat, wgrads, uses[:-1] if beside_last else uses, first)
    waits = {step: [v for v in behind[step].outs if v not in flow.views] if step in behind else [] for step in wgrads}
    return dataclasses.replace(flow, flat=flat), waits


def _large_constants(steps: Sequence[Step], least: int) -> list[Step]:
    """Steps that make at least `least` bytes of constants: nothing else would keep them from running at once."""
    constant = (s for s in steps if s.eqn is not None and not any(isinstance(x, Var) for x in s.ins))
    return [s for s in constant if s.ins and sum(nbytes(v.aval.shape, v.aval.dtype) for v in s.outs) >= least]


def _gather_steps(flow: Dataflow, gathers: Sequence[Gather]) -> list[int]:
    """The numbers of the steps at which a large parameter, or one of a scan's body, is gathered."""
    return [*(gather.step for gather in gathers if gather.large), *_gathering_scans(flow)]


# --- residuals -------------------------------------------------------------------------------------


def _before_scans(flow: Dataflow, uses: Sequence[int]) -> tuple[dict[int, list[Step]], dict[int, list[Step]]]:
    """Beside which steps a scan's first gathers run: the last uses of large parameters between it and a scan before.

    Returns:
      Step number -> scans, and the same for hops across nodes.
    """
    last: list[tuple[int | None, Step]] = []
    outer: list[tuple[int | None, Step]] = []
    before = START
    for number in _gathering_scans(flow):
        step, between = flow.flat.steps[number], [i for i in uses if before < i < number]
        before = number
        if flow.scans[step].body.ahead and between:
            last.append((between[-1], step))
            outer.append((between[-2] if len(between) > 1 else None, step))
    return _by_step(last), _by_step(outer)


def _mark_node_shards(schedule: Schedule, given: Iterable[Residual]) -> list[Residual]:
    """Marks the gathers of the backward pass that stay inside the node (`regather="local"`, hpZ of ZeRO++).

    A gather over `m` nodes of `k` devices goes across nodes first: each device fetches `1/k` of the parameter, its
    *node shard*, of shape (m, elements of a share). Then the devices of a node exchange these. A later gather of the
    same parameter can start from the node shard, and crosses no nodes. A scan of the forward pass stacks the node
    shards of its layers, for the scan of the backward pass. This walk is in the order of the evaluation.

    Args:
      schedule: The schedule, whose gathers and scans are marked.
      given: The node shards that are there at the start.

    Returns:
      Those that are there at the end.
    """
    there = dict.fromkeys(given)
    steps = schedule.flat.steps
    decided: set[Gather] = set()

    def decide(gather: Gather) -> None:
        if gather not in decided:
            gather.intra_node = gather.in_backward and all(Residual(p, 0, False) in there for p in gather.params)
            decided.add(gather)

    for gather in [*schedule.ahead, *schedule.tied_outer_hops.get(START, [])]:
        decide(gather)
    for number in range(len(steps) + 1):
        computed = number < len(steps) and not schedule.passive(steps[number])
        for gather in [*schedule.tied_outer_hops.get(number, []), *schedule.tied.get(number, [])] if computed else []:
            decide(gather)
        for gather in schedule.served_by.get(number, {}).values():
            if gather.stacked:
                continue
            decide(gather)
            if not gather.intra_node:
                there.update(dict.fromkeys(Residual(p, 0, False) for p in gather.params))
        for gather in schedule.behind_scans.get(number, []):
            decide(gather)
        if computed and steps[number] in schedule.scans:
            there.update(dict.fromkeys(_mark_scan(schedule.scans[steps[number]], there)))
    return list(there)


def _mark_scan(scan: ScanSchedule, outside: Iterable[Residual]) -> list[Residual]:
    """Marks the gathers in a scan's body, and which node shards the scan reads and stacks; returns those it stacks."""
    regathered = [p for gather in scan.body.gathers if gather.in_backward for p in gather.params]
    regathered = [p for p in dict.fromkeys(regathered) if p.source in scan.outer_param_of]
    stacks = [r for r in outside if r.depth]
    given = [Residual(p, r.depth - 1, False) for p in regathered for r in stacks]
    given = [r for r in given if scan.stacked(r) in stacks]
    left = _mark_node_shards(scan.body, given)
    new = [r for r in left if r not in given and r.param.source in scan.outer_param_of]
    scan.residuals_in, scan.residuals_out = [*scan.residuals_in, *given], [*scan.residuals_out, *new]
    return [scan.stacked(r) for r in new]
