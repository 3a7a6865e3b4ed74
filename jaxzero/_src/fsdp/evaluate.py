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

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from .._positions import replace_at
from ..comm import collectives
from ..comm.reduce import GradReducer
from ..jaxpr.calls import scan_options
from ..jaxpr.compat import scan_parts
from ..jaxpr.flat import Atom, Known, Step, Var
from ..jaxpr.varying import Vary, evaluate_equation
from ..sharding.axes import Axes
from ..sharding.host import on_host, to_device
from ..sharding.leaves import is_key
from .gathers import Gather, GatheredParam
from .schedule import NodeShard, ScanSchedule, Schedule

Array = jax.Array
NodeShards = dict[NodeShard, Array]
#: An operand or result of a step; `None` for a view, which is not computed where it stands.
Value = ArrayLike | None
Result = Array | None
#: What a scan carries: the carry of the program, and stacks of shares of gradients by number of the result.
_Carry = tuple[list[Array], dict[int, Array]]
#: What a scan reads for each layer: its number, scanned operands, node shards.
_Layer = tuple[Array, list[Any], list[Array]]
T = TypeVar("T")


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
    evaluation = _Evaluation(schedule, args, reducer, vary, {})
    return evaluation.run(), evaluation.gradients.shares


class _Gathers:
    """The parameters of one program on one device.

    Attributes:
      shares: Input -> this device's share.
      prefetched: Gather -> its shares, from a barrier with the data for which they wait.
      whole: Gather -> the gathered parameters, until no step reads them any more.
      node_shards: The `1/k` of parameters that this device fetched from other nodes (`regather="local"`).
    """

    def __init__(
        self, schedule: Schedule, shares: Mapping[Var, Array], axes: Axes, vary: Vary, node_shards: NodeShards
    ) -> None:
        self.schedule, self.axes, self.vary = schedule, axes, vary
        self.shares = shares
        self.prefetched: dict[Gather, list[Array]] = {}
        self.whole: dict[Gather, dict[GatheredParam, Array]] = {}
        self.node_shards = node_shards

    def operands(self, gather: Gather) -> list[Array]:
        """The arrays from which a gather starts."""
        if gather.intra_node:
            return [self.node_shards[p, 0] for p in gather.params]
        shares = [(self.shares[p.source], p.dtype) for p in gather.params]
        # One on the host waits there, as it is.
        return [x if on_host(x) else lax.convert_element_type(x, dtype) for x, dtype in shares]

    def read(self, number: int, param: GatheredParam) -> Array:
        """A whole parameter for the step with this number; gathered, if it is the first that reads it."""
        gather = self.schedule.served_by[number][param]
        if gather not in self.whole:
            operands = self.prefetched.pop(gather, []) or self.operands(gather)
            pairs = zip(operands, gather.params, strict=True)
            done = self._gather(gather, [lax.convert_element_type(to_device(x), p.dtype) for x, p in pairs])
            if gather.large:
                self.whole = {g: x for g, x in self.whole.items() if not g.large or g.keep}
            done = [self.vary(x) for x in done]
            if len(done) > 1:
                # XLA:CPU of jaxlib 0.10.2 can read beyond the joined array when it fuses the cutting into the loss.
                done = lax.optimization_barrier(done)
            self.whole[gather] = dict(zip(gather.params, done, strict=True))
        return self.whole[gather][param]

    def _gather(self, gather: Gather, operands: Sequence[Array]) -> list[Array]:
        layouts = [self.schedule.layouts[p.source] for p in gather.params]
        if not self.schedule.regather:
            return collectives.all_gather(operands, layouts, self.axes.hops, bucket_bytes=collectives.NO_LIMIT)
        if not gather.intra_node:
            operands = [self.vary(x) for x in collectives.gather_inter_node(operands, layouts, self.axes.hops)]
            self.node_shards.update(zip([(p, 0) for p in gather.params], operands, strict=True))
        return collectives.gather_intra_node(operands, layouts, self.axes.hops)


class _Gradients:
    """The gradients of one program on one device, by position of the result.

    Attributes:
      shares: This device's shares of sums over the shard axis.
      pending: Whole local sums of the terms of small gradients, until all terms of the group are there.
      missing: How many terms are still to come.
      in_flight: Gradients whose reduction no later step was ordered after yet, oldest first.
      unordered_small_grads: Pending gradients whose sum no later step was ordered after yet.
    """

    def __init__(self, schedule: Schedule, reducer: GradReducer) -> None:
        self.schedule, self.reducer = schedule, reducer
        self.shares: dict[int, Array] = {}
        self.pending: dict[int, Array] = {}
        self.missing = dict(schedule.terms.count)
        self.in_flight: list[int] = []
        self.unordered_small_grads: list[int] = []

    def add_term(self, v: Var, x: Array) -> None:
        """Reduces `x` if `v` is a term of a gradient; that of a small one, when its group is complete."""
        for position in self.schedule.terms.terms.get(v, ()):
            group = self.schedule.groups.get(position)
            if group is None:
                self.reduce([position], [x])
                continue
            before, dtype = self.pending.get(position), self.schedule.grad_dtype(position)
            self.pending[position] = x if before is None else before.astype(dtype) + x.astype(dtype)
            self.unordered_small_grads.append(position)
            self.missing[position] -= 1
            if not any(self.missing[p] for p in group):
                self.reduce(group, [self.pending.pop(p) for p in group])

    def reduce(self, positions: Sequence[int], values: Sequence[Array]) -> None:
        """Adds whole local terms of gradients, in one reduce-scatter."""
        sent = [self.reducer.send(x) for x in values]
        layouts = [self.schedule.grads[p] for p in positions]
        axes, no_limit = self.reducer.axes, collectives.NO_LIMIT
        done = collectives.reduce_scatter(sent, layouts, axes.hops, bucket_bytes=no_limit)
        for position, x in zip(positions, done, strict=True):
            self.add_share(position, x)
        self.in_flight.append(positions[0])

    def add_share(self, position: int, x: Array) -> None:
        """Adds this device's share of a term."""
        before = self.shares.get(position)
        self.shares[position] = x if before is None else before + x

    def order_after(self, data: Sequence[Value], later: T, max_in_flight: int) -> tuple[list[Any], T]:
        """A barrier: `later` comes after `data`, and what reads either comes after reductions in flight.

        Args:
          data: Values that `later` waits for; such as cannot enter a barrier come back as they are.
          later: Any tree of arrays.
          max_in_flight: How many of the last reductions are left out.

        Returns:
          `data` and `later`.
        """
        count = max(len(self.in_flight) - max_in_flight, 0)
        reduced = list(dict.fromkeys(self.in_flight[:count]))
        small = [p for p in dict.fromkeys(self.unordered_small_grads) if p in self.pending]
        self.in_flight, self.unordered_small_grads = self.in_flight[count:], []
        gradients = [self.shares[p] for p in reduced], [self.pending[p] for p in small]
        out, (later, (shares, sums)) = barrier(data, (later, gradients))
        self.shares.update(zip(reduced, shares, strict=True))
        self.pending.update(zip(small, sums, strict=True))
        return out, later

    def order_last(self) -> None:
        """Orders the last reductions in flight, which have no later step to be ordered before.

        Where a reduction is an all-reduce and a slice, as on TPU, the slice would be fused into the optimizer's step,
        and the whole sum kept until then.
        """
        for position in dict.fromkeys(self.in_flight):
            self.shares[position] = lax.optimization_barrier(self.shares[position])


class _Evaluation:
    """The values of one program on one device: the steps, with what is gathered and what is reduced."""

    def __init__(
        self,
        schedule: Schedule,
        args: Sequence[ArrayLike],
        reducer: GradReducer,
        vary: Vary,
        node_shards: NodeShards,
    ) -> None:
        self.schedule, self.vary = schedule, vary
        self.env: dict[Var, Any] = dict(zip(schedule.flat.inputs, map(vary, args), strict=True))
        shares = {v: self.env[v] for v in schedule.layouts}
        self.gathers = _Gathers(schedule, shares, reducer.axes, vary, node_shards)
        self.gradients = _Gradients(schedule, reducer)

    def run(self) -> list[Result]:
        """Evaluates all steps; the results, and the gradients in `gradients`."""
        schedule, flat = self.schedule, self.schedule.flat
        for position, x in schedule.terms.constants:
            self.gradients.reduce([position], [self.vary(jnp.asarray(x))])
        for v in flat.inputs:
            self._add_term(v)
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
                    self._add_term(v)
        not_read = schedule.grads.keys() | schedule.lazy
        outs = [None if i in not_read else self._result(x) for i, x in enumerate(flat.outs)]
        for v, positions in schedule.terms.terms.items():
            if v in schedule.views:
                x = self._result(v)
                for position in positions:
                    self.gradients.reduce([position], [x])
        self.gradients.order_last()
        return outs

    def _add_term(self, v: Var) -> None:
        if v not in self.schedule.views:
            self.gradients.add_term(v, self.env[v])

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
        gathers, is_wgrad = schedule.tied.get(number, []), step in schedule.wgrads
        shares = [self.gathers.operands(gather) for gather in gathers]
        if any(map(_can_wait, ins)) and (is_wgrad or any(shares)):
            zeros = [i for i, x in enumerate(step.ins) if is_wgrad and x in schedule.zeros]
            avals = [jax.typeof(ins[i]) for i in zeros]
            starts = [self.vary(jnp.zeros((), aval.dtype)) for aval in avals]
            before = schedule.wgrads.get(step, [])
            data = [*replace_at(ins, zeros, [None] * len(zeros)), *(self.env[v] for v in before)]
            data, (shares, starts) = self.gradients.order_after(data, (shares, starts), schedule.max_in_flight)
            self.env.update(zip(before, data[len(ins) :], strict=True))
            full = [jnp.full(aval.shape, x) for aval, x in zip(avals, starts, strict=True)]
            ins = replace_at(data[: len(ins)], zeros, full)
        self.gathers.prefetched.update(zip(gathers, shares, strict=True))
        return ins

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

    def _scan(self, step: Step, ins: list[ArrayLike]) -> list[Result]:
        """A scan whose body gathers one layer, and reduces the gradients of one layer into stacks of shares."""
        assert step.eqn is not None
        scan, length, vary = self.schedule.scans[step], step.eqn.params["length"], self.vary
        consts, start, xs = scan_parts(step.eqn, ins)
        count = len(start)
        carry = [vary(jnp.asarray(x, v.aval.dtype)) for x, v in zip(start, step.outs[:count], strict=True)]
        carry, zero = self.gradients.order_after(carry, vary(jnp.float32(0)), 0)
        # From a zero that waits too: else room for all gradients would be taken long before they are made.
        stacks = {i: jnp.full((length, *shape), zero, dtype) for i, shape, dtype in self._layer_grads(scan)}
        node_shards = [self.gathers.node_shards[scan.stacked(p)] for p in scan.node_shards_in]
        layers = (vary(jnp.arange(length)), xs, node_shards)
        body, options = self._scan_body(scan, consts, count), scan_options(step.eqn)
        (carry, stacks), (ys, left) = lax.scan(body, (carry, stacks), layers, **options)
        self.gathers.node_shards.update(zip(map(scan.stacked, scan.node_shards_out), left, strict=True))
        kept = [i for i in range(count, len(step.outs)) if i not in scan.body.lazy and i not in stacks]
        for i, position in scan.stacked_grads.items():
            self.gradients.add_share(position, stacks[i])
        return replace_at([*carry, *[None] * (len(step.outs) - count)], kept, ys)

    def _scan_body(self, scan: ScanSchedule, consts: list[ArrayLike], count: int) -> Callable[[_Carry, _Layer], Any]:
        """The body of a scan: its carry is the program's, with the stacks of shares of gradients."""
        reducer = self.gradients.reducer

        def body(carries: _Carry, layer: _Layer) -> tuple[_Carry, tuple[list[Result], list[Array]]]:
            (carry, stacks), (number, xs, node_shards) = carries, layer
            given = dict(zip(scan.node_shards_in, node_shards, strict=True))
            evaluation = _Evaluation(scan.body, [*consts, *carry, *xs], reducer, self.vary, given)
            outs, grads = evaluation.run(), evaluation.gradients.shares
            kept = [y for i, y in enumerate(outs[count:], count) if i not in scan.body.lazy and i not in stacks]
            # Together, so that no whole gradient waits for the next layer: XLA would pipeline its reduction.
            carry, grads = barrier([jnp.asarray(y) for y in outs[:count]], grads)
            put = lambda i: lax.dynamic_update_index_in_dim(stacks[i], grads[i], number, 0)
            left = [evaluation.gathers.node_shards[p] for p in scan.node_shards_out]
            return (carry, {i: put(i) if i in grads else stacks[i] for i in stacks}), (kept, left)

        return body

    def _layer_grads(self, scan: ScanSchedule) -> Iterable[tuple[int, tuple[int, ...], jnp.dtype]]:
        """The gradients that a scan's body makes: number of the stacked result, shape and dtype of a layer's share."""
        for i, layout in scan.body.grads.items():
            yield i, layout.local_shape, self.gradients.reducer.wire(scan.body.grad_dtype(i))


# --- barriers --------------------------------------------------------------------------------------


def barrier(data: Sequence[Value], later: T) -> tuple[list[Any], T]:
    """`data` and `later`, from one barrier; values of `data` that cannot enter it come back as they are."""
    held = [i for i, x in enumerate(data) if _can_wait(x)]
    done, later = lax.optimization_barrier(([data[i] for i in held], later))
    return replace_at(data, held, done), later


def together(shares: Sequence[Array], data: Sequence[Array]) -> tuple[list[Array], list[Array]]:
    """Shares that wait for data: else the compiler gathers them once, for all microbatches, before the loop."""
    values, _ = barrier([*shares, *data], ())
    return values[: len(shares)], values[len(shares) :]


def _can_wait(x: Any) -> bool:
    """Whether a value may enter a barrier."""
    return isinstance(x, Array) and x.size > 0 and not is_key(x.dtype) and x.dtype != jax.dtypes.float0
