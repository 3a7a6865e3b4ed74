"""Stage 3: a gradient program evaluated on shares of the parameters, which are gathered where they meet data.

The loss is differentiated once, at full shapes and outside any manual region; the resulting program is evaluated
here, on each device, step by step as its schedule says. So every use of a parameter, forward or backward, is just a
use. One step of `x @ w`, with `w` of shape (4096, 1024) over 8 devices:

    1. The step's data `x` and the shares (512, 1024) of the gathers that are tied to the step enter one barrier: these
       gathers cannot start before `x` is there. Gradients that were in reduction long enough enter it too.
    2. `w` is read: its gather, whose shares left an earlier barrier, gives (4096, 1024).
    3. The step is computed.
    4. If the result is a term of a gradient, a reduce-scatter makes a share (512, 1024) of it at once.

A barrier is `lax.optimization_barrier`: its results depend on all of its operands, so the compiler cannot move what
reads a result before what makes an operand. Every result of a barrier is used: else the compiler drops it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from .._positions import replace_at
from ..comm.reduce import GradReducer
from ..jaxpr.calls import scan_options
from ..jaxpr.compat import scan_parts
from ..jaxpr.flat import Atom, Known, Step, Var
from ..jaxpr.varying import Vary, evaluate_equation
from ..sharding.host import on_host
from ..sharding.leaves import is_key
from .barriers import barrier, can_wait
from .gathering import Arrived, Gathering, Residuals
from .gathers import START, Gather
from .reductions import LeftOver, Names, Reductions, order_after
from .schedule import ScanSchedule, Schedule

Array = jax.Array
#: An operand or result of a step; `None` for a view, which is not computed where it stands.
Value = ArrayLike | None
Result = Array | None


def evaluate(
    schedule: Schedule, args: Sequence[ArrayLike], reducer: GradReducer, vary: Vary
) -> tuple[list[Result], dict[int, Array]]:
    """Evaluates a scheduled program on one device.

    Args:
      schedule: The schedule.
      args: One array per input; this device's share where the schedule has a layout.
      reducer: In which dtype gradients are summed, and over which axes.
      vary: Types a value as varying over all axes; `unchecked` in a region without types.

    Returns:
      The results (`None` for gradients and views), and the gradients: sums over the shard axis of this
      device's share, by position; a gradient that is zero is missing.
    """
    evaluation = _Evaluation(schedule, args, reducer, vary, {}, over_replicas(schedule, reducer))
    outs = evaluation.run()
    evaluation.gradients.flush()
    evaluation.gradients.order_last()
    return outs, evaluation.gradients.shares


def over_replicas(schedule: Schedule, reducer: GradReducer) -> frozenset[int]:
    """The positions of the gradients that `evaluate` sums over replicas, too: beside products, one by one.

    With several microbatches none is: the sum over them is summed over replicas once.
    """
    once = reducer.axes.replica and reducer.steps == 1 and schedule.max_in_flight
    return schedule.single_terms if once else frozenset()


class _Evaluation:
    """The values of one program on one device: the steps, with what is gathered and what is reduced.

    Attributes:
      env: The values of variables.
      gathers: The parameters.
      gradients: The gradients.
      ahead: In the body of a scan, the parameters of the next iteration, if gathers of that run in this one.
      behind: In the body of a scan, the gradients of the iteration before, if that left some to this one.
      first: Scan -> the parameters of its first iteration, which are gathered before it.
    """

    def __init__(
        self,
        schedule: Schedule,
        args: Sequence[ArrayLike],
        reducer: GradReducer,
        vary: Vary,
        residuals: Residuals,
        replicas: frozenset[int],
    ) -> None:
        self.schedule, self.vary = schedule, vary
        self.env: dict[Var, Any] = dict(zip(schedule.flat.inputs, map(vary, args), strict=True))
        shares = {v: self.env[v] for v in schedule.layouts}
        self.gathers = Gathering(schedule, shares, reducer.axes, vary, residuals)
        self.gradients = Reductions(schedule, reducer, replicas)
        self.ahead: Gathering | None = None
        self.behind: Reductions | None = None
        self.first: dict[Step, Gathering] = {}

    def run(self) -> list[Result]:
        """Evaluates all steps; the results, and the gradients in `gradients`."""
        schedule, flat = self.schedule, self.schedule.flat
        for position, x in schedule.terms.constants:
            self.gradients.reduce([position], [self.vary(jnp.asarray(x))])
        for parameters, gather in self._tied(schedule.tied_outer_hops.get(START, []), outer=True):
            parameters.cross(gather, parameters.operands(gather))
        for v in flat.inputs:
            self._add_term(v, START)
        for number, step in enumerate(flat.steps):
            if schedule.passive(step):
                continue
            ins = self._views(number, step, self._ordered_operands(number, step))
            if step in schedule.deferred_constants:
                end = schedule.deferred_constants[step]
                (self.env[end],), ins = barrier([self.env[end]], [self.vary(jnp.asarray(x)) for x in ins])
            for v, x in zip(step.outs, self._compute(step, ins), strict=True):
                if v not in schedule.views:
                    self.env[v] = x
                    self._add_term(v, number)
        return self._results()

    def _results(self) -> list[Result]:
        """The results; terms of gradients that are views are reduced."""
        schedule = self.schedule
        not_read = schedule.grads.keys() | schedule.lazy
        outs = [None if i in not_read else self._result(x) for i, x in enumerate(schedule.flat.outs)]
        for v, positions in schedule.terms.terms.items():
            if v in schedule.views:
                x = self._result(v)
                for position in positions:
                    self.gradients.reduce([position], [x])
        return outs

    def _add_term(self, v: Var, number: int) -> None:
        """Reduces the value of `v` if it is a term of a gradient, made by the step with this number."""
        last = self.schedule.last_product
        if v not in self.schedule.views:
            self.gradients.add_term(v, self.env[v], wait=last is not None and number >= last)

    # --- operands ---

    def _ordered_operands(self, number: int, step: Step) -> list[Value]:
        """The data of a step (`None` for views), in one barrier with what is ordered by it.

        The shares of the gathers that are tied to the step wait for the data. Before a whole gradient is made,
        earlier ones are reduced but for the last few, and small ones are summed, so that what they are made from is
        not kept. An array of zeros is made again behind the barrier from one zero: it takes no room before.
        """
        schedule = self.schedule
        known = lambda x: x.value if isinstance(x, Known) else None if x in schedule.views else self.env[x]
        ins: list[Value] = [known(x) for x in step.ins]
        is_wgrad = step in schedule.wgrads
        crossing = self._tied(schedule.tied_outer_hops.get(number, []), outer=True)
        crossing += self._of_first_iterations(schedule.before_scans_outer_hops.get(number, []), outer=True)
        gathers = self._tied(schedule.tied.get(number, []))
        gathers += self._of_first_iterations(schedule.before_scans.get(number, []))
        shares = [parameters.operands(gather) for parameters, gather in [*crossing, *gathers]]
        if any(map(can_wait, ins)) and (is_wgrad or any(shares)):
            zeros = [i for i, x in enumerate(step.ins) if is_wgrad and x in schedule.zeros]
            avals = [jax.typeof(ins[i]) for i in zeros]
            starts = [self.vary(jnp.zeros((), aval.dtype)) for aval in avals]
            before = schedule.wgrads.get(step, [])
            data = [*replace_at(ins, zeros, [None] * len(zeros)), *(self.env[v] for v in before)]
            reductions = [r for r in (self.behind, self.gradients) if r is not None]
            data, (shares, starts) = order_after(reductions, data, (shares, starts), schedule.max_in_flight)
            self.env.update(zip(before, data[len(ins) :], strict=True))
            full = [jnp.full(aval.shape, x) for aval, x in zip(avals, starts, strict=True)]
            ins = replace_at(data[: len(ins)], zeros, full)
        for (parameters, gather), operands in zip(crossing, shares, strict=False):
            parameters.cross(gather, operands)
        for (parameters, gather), operands in zip(gathers, shares[len(crossing) :], strict=True):
            parameters.prefetched[gather] = operands
            if gather.ahead:
                parameters.fetch(gather)
        return ins

    def _tied(self, gathers: Sequence[Gather], *, outer: bool = False) -> list[tuple[Gathering, Gather]]:
        """The gathers of this iteration and of the next, with the parameters that they gather; or their outer hops."""
        found = []
        for gather in gathers:
            parameters = self.ahead if (gather.outer_hops_ahead if outer else gather.ahead) else self.gathers
            if parameters is not None and not (outer and gather.intra_node):
                found.append((parameters, gather))
        return found

    def _of_first_iterations(self, scans: Sequence[Step], *, outer: bool = False) -> list[tuple[Gathering, Gather]]:
        """The gathers with which these scans begin; or their outer hops."""
        found = []
        for step in scans:
            gathers = self.schedule.scans[step].body.ahead
            chosen = [g for g in gathers if (g.outer_hops_ahead and not g.intra_node if outer else g.ahead)]
            found += [(self.first_parameters(step), gather) for gather in chosen]
        return found

    def first_parameters(self, step: Step) -> Gathering:
        """The parameters of the first iteration of a scan, of which some may be gathered before it."""
        if step in self.first:
            return self.first[step]
        scan, options = self.schedule.scans[step], scan_options(step.eqn)
        take = lambda x: lax.index_in_dim(x, options["length"] - 1 if options["reverse"] else 0, 0, keepdims=False)
        shares = {v: self.vary(take(self.env[outer])) for v, outer in scan.outer_param_of.items()}
        residuals = {p: take(self.gathers.residuals[scan.stacked(p)]) for p in scan.residuals_in}
        self.first[step] = Gathering(scan.body, shares, self.gathers.axes, self.vary, residuals)
        return self.first[step]

    def gather_behind_scan(self, step: Step, carry: list[Array]) -> list[Array]:
        """Gathers of this program that no iteration but the last may stand beside, from the data of that."""
        number = self.schedule.flat.steps.index(step)
        gathers = self.schedule.behind_scans.get(number, [])
        shares = [self.gathers.operands(gather) for gather in gathers]
        carry, shares = order_after([self.gradients], carry, shares, 0)
        self.gathers.prefetched.update(zip(gathers, shares, strict=True))
        return carry

    def _views(self, number: int, step: Step, ins: list[Value]) -> list[Any]:
        """The operands of a step, with whole views; a scan takes the shares of all layers instead."""
        if step.eqn is None:
            return ins
        views = {i: x for i, x in enumerate(step.ins) if isinstance(x, Var) and x in self.schedule.views}
        scanned = self.schedule.scans[step].scanned_params if step in self.schedule.scans else {}
        values = [self.env[scanned[i]] if i in scanned else self._view(number, x) for i, x in views.items()]
        return replace_at(ins, views, values)

    def _view(self, number: int, x: Var) -> Array:
        view = self.schedule.views[x]
        return self.vary(view.apply(self.gathers.read(number, self.schedule.gathered_param(view))))

    def _result(self, x: Atom) -> Array:
        if isinstance(x, Known):
            return self.vary(jnp.asarray(x.value))
        return self._view(len(self.schedule.flat.steps), x) if x in self.schedule.views else self.env[x]

    # --- one step ---

    def _compute(self, step: Step, ins: list[ArrayLike]) -> Sequence[Result]:
        if step.eqn is None:
            return barrier(ins, ())[0]
        return self._scan(step, ins) if step in self.schedule.scans else evaluate_equation(step.eqn, ins, self.vary)

    # --- scans ---

    def _scan(self, step: Step, ins: list[ArrayLike]) -> list[Result]:
        """A scan whose body gathers one layer, and reduces the gradients of one layer into stacks of shares."""
        iterations, scan = _Iterations(self, step, ins), self.schedule.scans[step]
        end, stacked = iterations.run()
        self.gathers.residuals.update(zip(map(scan.stacked, scan.residuals_out), stacked.residuals, strict=True))
        for i, position in scan.stacked_grads.items():
            self.gradients.add_share(position, end.stacks[i])
        return replace_at([*end.carry, *[None] * (len(step.outs) - len(end.carry))], iterations.kept, stacked.ys)


class _State(NamedTuple):
    """What one iteration of a scan hands to the next.

    Attributes:
      carry: The carry of the program.
      stacks: Number of a stacked result that is a gradient -> shares of the gradients of all layers.
      arrived: Parameters of the next layer that are gathered already.
      gradients: Gradients of this layer that are reduced in the next iteration.
    """

    carry: list[Array]
    stacks: dict[int, Array]
    arrived: list[Arrived]
    gradients: LeftOver


class _Layer(NamedTuple):
    """What a iteration reads for its layer: scanned operands, and residuals that an earlier scan has stacked."""

    xs: list[Any]
    residuals: list[Array]


class _Stacked(NamedTuple):
    """What iterations stack: results of the program, and residuals for a later scan."""

    ys: list[Array]
    residuals: list[Array]


class _Iterations:
    """The iterations of one scan. Each gathers for the next one, and reduces gradients that the one before has left.

    So every gather and every reduction stands beside products, though no collective reaches over the end of an
    iteration. The first and the last iteration stand outside of the loop. Without prefetch, no iteration gathers or
    reduces for another, and all are in the loop.

    A body with two products, `prefetch=1`, and weights `a` and `b` of four layers; the loop is between the lines:

        gather a0
        a0      b0: gather a1
        ----------------------------
        a1      b1: gather a2
        a2      b2: gather a3
        ----------------------------
        a3      b3
    """

    def __init__(self, outside: "_Evaluation", step: Step, ins: list[ArrayLike]) -> None:
        assert step.eqn is not None
        self.outside, self.step, self.vary = outside, step, outside.vary
        self.reducer = outside.gradients.reducer
        self.scan: ScanSchedule = outside.schedule.scans[step]
        self.body: Schedule = self.scan.body
        self.replicas = frozenset(
            i for i, position in self.scan.stacked_grads.items() if position in outside.gradients.over_replicas
        )
        self.options = scan_options(step.eqn)
        self.consts, self.carry, xs = (list(x) for x in scan_parts(step.eqn, ins))
        self.layers = _Layer(xs, [outside.gathers.residuals[self.scan.stacked(p)] for p in self.scan.residuals_in])
        self.count, self.length = len(self.carry), self.options["length"]
        stacked = range(self.count, len(step.outs))
        self.kept = [i for i in stacked if i not in self.body.lazy and i not in self.body.grads]
        self.left_over = Names([], [], [])

    def run(self) -> tuple[_State, _Stacked]:
        """The results of all iterations."""
        first, last = self.body.last_product is not None, bool(self.body.ahead)
        loop = self.length - first - last  # XLA writes out a loop of one iteration
        if loop < 2 or not (first or last) or not self._may_overlap():
            return self._loop()
        state = self._start(overlap=True)
        stacked = self._stacks(state)

        def iteration(n: int | Array, state: _State, stacked: _Stacked, **where: bool) -> tuple[_State, _Stacked]:
            state, new = self._iteration(n, state, self._layer(n), **where)
            put = lambda stack, x: lax.dynamic_update_index_in_dim(stack, x, self._place(n), 0)
            return state, jax.tree.map(put, stacked, new)

        def in_loop(all_: tuple[_State, _Stacked], n: Array) -> tuple[tuple[_State, _Stacked], None]:
            return iteration(n, *all_, ahead=last, behind=first, leave=first), None

        if first:
            state, stacked = iteration(0, state, stacked, ahead=last, behind=False, leave=True)
            carry, _ = order_after([self.outside.gradients], state.carry, (), 0)
            state = state._replace(carry=carry)
        numbers = self.vary(jnp.arange(int(first), self.length - last))
        (state, stacked), _ = lax.scan(in_loop, (state, stacked), numbers, unroll=self.options["unroll"])
        state = state._replace(carry=self.outside.gather_behind_scan(self.step, state.carry))
        if last:
            state, stacked = iteration(self.length - 1, state, stacked, ahead=False, behind=first, leave=False)
            return state, stacked
        behind = Reductions(self.body, self.reducer, self.replicas)
        behind.take_over(state.gradients, self.left_over)
        return state._replace(stacks=self._put_behind(state.stacks, behind, self.length)), stacked

    def _loop(self) -> tuple[_State, _Stacked]:
        """All iterations in the loop, none of which gathers or reduces for another."""
        state = self._start(overlap=False)

        def body(state: _State, inputs: tuple[Array, _Layer]) -> tuple[_State, _Stacked]:
            place, layer = inputs
            n = self.length - 1 - place if self.options["reverse"] else place
            return self._iteration(n, state, layer, ahead=False, behind=False, leave=False)

        state, stacked = lax.scan(body, state, (self.vary(jnp.arange(self.length)), self.layers), **self.options)
        return state._replace(carry=self.outside.gather_behind_scan(self.step, state.carry)), stacked

    def _may_overlap(self) -> bool:
        """Whether iterations may stand outside of the loop: everything that is scanned is an array on the device."""
        ys = [self.step.outs[i].aval.dtype for i in self.kept]
        return not any(map(on_host, self.layers.xs)) and not any(map(is_key, ys))

    # --- before the first iteration ---

    def _start(self, *, overlap: bool) -> _State:
        """The state before the first iteration. Stacks start from a zero that waits: else room is taken long before."""
        carry = [self.vary(jnp.asarray(x, v.aval.dtype)) for x, v in zip(self.carry, self.step.outs, strict=False)]
        first = self.outside.first_parameters(self.step) if overlap else None
        gathers = [g for g in self.body.ahead if g not in first.arrived] if first is not None else []
        shares = [first.operands(gather) for gather in gathers] if first is not None else []
        later = (self.vary(jnp.float32(0)), shares)
        in_flight = self.outside.schedule.max_in_flight if overlap and self.body.last_product is not None else 0
        carry, (zero, shares) = order_after([self.outside.gradients], carry, later, in_flight)
        stacks = {}
        for i, layout in self.body.grads.items():
            dtype = self.reducer.wire(self.body.grad_dtype(i))
            stacks[i] = jnp.full((self.length, *layout.local_shape), zero, dtype)
        if first is None:
            return _State(carry, stacks, [], LeftOver([], [], []))
        for gather, operands in zip(gathers, shares, strict=True):
            if gather.outer_hops_ahead and gather not in first.crossed and not gather.intra_node:
                first.cross(gather, operands)
            elif gather.ahead:
                first.prefetched[gather] = operands
            if gather.ahead:
                first.fetch(gather)
        return _State(carry, stacks, first.hand_over(), LeftOver([], [], []))

    def _stacks(self, state: _State) -> _Stacked:
        """Room for what all iterations stack."""
        zero = self.vary(jnp.zeros(()))
        empty = lambda shape, dtype: self.vary(jnp.full((self.length, *shape), zero, dtype))
        avals = [self.step.outs[i].aval for i in self.kept]
        ys = [empty(aval.shape[1:], aval.dtype) for aval in avals]
        if not self.scan.residuals_out:
            return _Stacked(ys, [])
        iteration = lambda: self._iteration(0, state, self._layer(0), ahead=False, behind=False, leave=False)
        _, shapes = jax.eval_shape(iteration)
        return _Stacked(ys, [empty(x.shape, x.dtype) for x in shapes.residuals])

    # --- one iteration ---

    def _place(self, n: int | Array) -> int | Array:
        """The number of the layer that iteration `n` computes."""
        return self.length - 1 - n if self.options["reverse"] else n

    def _layer(self, n: int | Array) -> _Layer:
        take = lambda x: lax.dynamic_index_in_dim(x, self._place(n), 0, keepdims=False)
        return jax.tree.map(take, self.layers)

    def _parameters(self, n: int | Array) -> Gathering:
        """The parameters of the layer of iteration `n`, of which nothing is gathered yet."""
        layer, before = self._layer(n), len(self.consts) + self.count
        inputs = dict(zip(self.body.flat.inputs[before:], layer.xs, strict=True))
        shares = {v: self.vary(inputs[v]) for v in self.body.layouts}
        residuals = dict(zip(self.scan.residuals_in, layer.residuals, strict=True))
        return Gathering(self.body, shares, self.reducer.axes, self.vary, residuals)

    def _iteration(
        self, n: int | Array, state: _State, layer: _Layer, *, ahead: bool, behind: bool, leave: bool
    ) -> tuple[_State, _Stacked]:
        """One iteration.

        Args:
          n: Its number.
          state: What the iteration before has handed over.
          layer: What it reads.
          ahead: Whether it gathers for the next iteration.
          behind: Whether it reduces gradients that the iteration before has left.
          leave: Whether it leaves gradients to the next iteration.

        Returns:
          What the next iteration takes over, and what is stacked.
        """
        given = dict(zip(self.scan.residuals_in, layer.residuals, strict=True))
        arguments = [*self.consts, *state.carry, *layer.xs]
        evaluation = _Evaluation(self.body, arguments, self.reducer, self.vary, given, self.replicas)
        evaluation.gathers.take_over(state.arrived)
        evaluation.ahead = self._parameters(n + 1) if ahead else None
        if behind:
            evaluation.behind = Reductions(self.body, self.reducer, self.replicas)
            evaluation.behind.take_over(state.gradients, self.left_over)
        outs = evaluation.run()
        gradients, left = self._leave(evaluation.gradients, leave=leave)
        stacks = self._put_behind(state.stacks, evaluation.behind, n) if evaluation.behind else state.stacks
        # Together, so that no other whole gradient waits for the next iteration: XLA would pipeline its reduction.
        carry, shares = barrier([jnp.asarray(y) for y in outs[: self.count]], gradients.shares)
        stacks = self._put(stacks, shares, n)
        arrived = evaluation.ahead.hand_over() if evaluation.ahead else []
        residuals = [evaluation.gathers.residuals[p] for p in self.scan.residuals_out]
        return _State(carry, stacks, arrived, left), _Stacked([jnp.asarray(outs[i]) for i in self.kept], residuals)

    def _leave(self, gradients: Reductions, *, leave: bool) -> tuple[Reductions, LeftOver]:
        """What is left to the next iteration; the rest is reduced."""
        if not leave:
            gradients.flush()
            gradients.order_last()
            return gradients, LeftOver([], [], [])
        gradients.order_last()
        left, self.left_over = gradients.hand_over()
        return gradients, left

    def _put(self, stacks: dict[int, Array], shares: dict[int, Array], n: int | Array) -> dict[int, Array]:
        """The stacks with the gradients of the layer of iteration `n`."""
        put = lambda i: lax.dynamic_update_index_in_dim(stacks[i], shares[i], self._place(n), 0)
        return {i: put(i) if i in shares else stacks[i] for i in stacks}

    def _put_behind(self, stacks: dict[int, Array], behind: Reductions, n: int | Array) -> dict[int, Array]:
        """The stacks with the gradients that the iteration before iteration `n` has left."""
        behind.flush()
        behind.order_last()
        return self._put(stacks, behind.shares, n - 1)
