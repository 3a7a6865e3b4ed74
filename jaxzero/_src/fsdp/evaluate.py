"""Stage 3: a gradient program evaluated over parameters that are gathered where they meet data.

The loss is differentiated once, at full shapes and outside any manual region; what is evaluated here, on
each device, is the resulting program. So every use of a parameter, forward or backward, is just a use.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..comm import collectives
from ..comm.reduce import GradReducer
from ..jaxpr.bind import bind
from ..jaxpr.compat import scan_parts
from ..jaxpr.flat import Known, Step, Var
from ..sharding.host import on_host, to_device
from ..sharding.leaves import is_key
from ..sharding.vma import cast
from . import gradient_terms, varying
from .gathers import Gather, GatheredParam
from .schedule import Scan, Schedule


def evaluate(
    schedule: Schedule, args: Sequence[Any], mean: GradReducer, typed: bool
) -> tuple[list[Any], dict[int, Any]]:
    """Runs a planned program on one device.

    Args:
      schedule: The plan.
      args: One array per input; this device's share where the plan says so.
      mean: How gradients are sent, and over which axes.
      typed: Whether the region checks types: then every value is typed as varying over all axes.

    Returns:
      The results (`None` for gradients and views), and the gradients: sums over the shard axis of this
      device's share, by position; a gradient that is zero is missing.
    """
    return _Evaluation(schedule, args, mean, typed, {}).run()


class _Evaluation:
    def __init__(
        self,
        schedule: Schedule,
        args: Sequence[Any],
        mean: GradReducer,
        typed: bool,
        node_shards: dict[GatheredParam, Any],
    ) -> None:
        self.plan, self.mean, self.axes, self.typed = schedule, mean, mean.axes, typed
        self.local_again = mean.options.regather == "local" and len(mean.axes.hops) > 1
        # What the backward pass gathers from inside its node: of one layer, and of all layers of a scan.
        self.node_shards = {u: x for u, x in node_shards.items() if x.ndim == len(self.axes.hops) + 1}
        self.stacked = {u: x for u, x in node_shards.items() if u not in self.node_shards}
        self.intra_node: set[Gather] = set()
        values = [self._type(x) for x in args]
        self.env: dict[Var, Any] = dict(zip(schedule.flat.inputs, values, strict=True))
        self.wait_for_step: dict[Gather, list[Any]] = {}
        self.whole: dict[Gather, dict[GatheredParam, Any]] = {}
        self.grads: dict[int, Any] = {}
        self.local: dict[int, Any] = {}
        self.left = dict(schedule.sinks.count)
        self.in_flight: list[int] = []
        self.fresh: list[int] = []
        self.zeros: set[Any] = set()

    def run(self) -> tuple[list[Any], dict[int, Any]]:
        flat, plan = self.plan.flat, self.plan
        ties: dict[int, list[Gather]] = {}
        for slot in plan.slots:
            if slot.wait_for_step is not None:
                ties.setdefault(slot.wait_for_step, []).append(slot)
        for position, x in plan.sinks.constants:
            self._reduce([position], [self._type(jnp.asarray(x))])
        for v in flat.inputs:
            self._absorb(v)
        for number, step in enumerate(flat.steps):
            if plan.passive(step):
                continue
            ins = self._operands(step, ties.get(number, ()))
            ins = self._with_views(number, step, ins)
            if step in plan.fills:
                end = plan.fills[step]
                (self.env[end],), ins = _barrier([self.env[end]], [self._type(jnp.asarray(x)) for x in ins])
            self._results(step, self._compute(step, ins))
        outs = []
        for i, x in enumerate(flat.outs):
            outs.append(None if i in plan.grads or i in plan.lazy else self._read(len(flat.steps), x))
        for v in [v for v in plan.sinks.terms if v in plan.views]:
            self.env[v] = self._read(len(flat.steps), v)
            self._absorb(v, late=True)
        # The last ones have nothing after them to land before. Where a reduction is an all-reduce and a cut, as on TPU,
        # the cut would be fused into the optimizer's step, and the whole sum kept until then.
        self.grads.update((p, lax.optimization_barrier(self.grads[p])) for p in dict.fromkeys(self.in_flight))
        return outs, self.grads

    # --- operands ---

    def _type(self, x: Any) -> Any:
        return cast(x, self.axes.every) if self.typed else x

    def _operands(self, step: Step, slots: Sequence[Gather]) -> list[Any]:
        """The data of a step, in one barrier with what has to wait for it or to be over before it.

        The shares of `slots` wait for the data. Whole gradients on their way land before the next is made, and
        small ones are made, so that they do not hold what they are made from. All results of the barrier are
        used: else it would be dropped.
        """
        known = lambda x: x.value if isinstance(x, Known) else None if x in self.plan.views else self.env[x]
        ins: list[Any] = [known(x) for x in step.ins]
        makes, use = step in self.plan.makers, self.plan.makers.get(step)
        shares = [self._shares(slot) for slot in slots]
        if any(map(_can_wait, ins)) and (makes or any(shares)):
            zeros = {i: x.aval for i, x in enumerate(step.ins) if makes and x in self.zeros and isinstance(x, Var)}
            starts = [self._type(jnp.zeros((), aval.dtype)) for aval in zeros.values()]
            before = [v for v in (use.outs if use else ()) if v in self.env]
            data = [*(None if i in zeros else x for i, x in enumerate(ins)), *(self.env[v] for v in before)]
            data, (shares, starts) = self._settle(data, (shares, starts), self.plan.in_flight)
            self.env.update(zip(before, data[len(ins) :], strict=True))
            ins = data[: len(ins)]
            for (i, aval), x in zip(zeros.items(), starts, strict=True):
                ins[i] = jnp.full(aval.shape, x)
        self.wait_for_step.update(zip(slots, shares, strict=True))
        return ins

    def _settle(self, data: Sequence[Any], later: Any, in_flight: int) -> tuple[list[Any], Any]:
        """A barrier: `later` waits for `data`, and both for all gradients but the last `flying` that are whole."""
        count = max(len(self.in_flight) - in_flight, 0)
        landed = list(dict.fromkeys(self.in_flight[:count]))
        made = [p for p in dict.fromkeys(self.fresh) if p in self.local]
        self.in_flight, self.fresh = self.in_flight[count:], []
        gradients = [self.grads[p] for p in landed], [self.local[p] for p in made]
        out, (later, (shares, sums)) = _barrier(data, (later, gradients))
        self.grads.update(zip(landed, shares, strict=True))
        self.local.update(zip(made, sums, strict=True))
        return out, later

    def _shares(self, slot: Gather) -> list[Any]:
        if slot.late and all(u in self.node_shards for u in slot.units):
            self.intra_node.add(slot)
            return [self.node_shards[u] for u in slot.units]
        shares = [(self.env[u.source], u.dtype) for u in slot.units]
        # One on the host waits there, as it is.
        return [x if on_host(x) else lax.convert_element_type(x, dtype) for x, dtype in shares]

    def _gathered(self, number: int, unit: GatheredParam) -> Any:
        slot = self.plan.uses[number][unit]
        if slot not in self.whole:
            shares = self.wait_for_step.pop(slot, []) or self._shares(slot)
            rows = zip(shares, slot.units, strict=True)
            done = self._gather(slot, [lax.convert_element_type(to_device(x), u.dtype) for x, u in rows])
            if slot.large:
                self.whole = {s: w for s, w in self.whole.items() if not s.large or s.keep}
            done = [self._type(x) for x in done]
            if len(done) > 1:
                # XLA:CPU of jaxlib 0.10 can read beyond the joined array when it fuses the cutting into the loss.
                done = lax.optimization_barrier(done)
            self.whole[slot] = dict(zip(slot.units, done, strict=True))
        return self.whole[slot][unit]

    def _gather(self, slot: Gather, shares: list[Any]) -> list[Any]:
        layouts = [self.plan.layouts[u.source] for u in slot.units]
        if not self.local_again:
            return collectives.all_gather(shares, layouts, self.axes.hops, bucket_bytes=collectives.NO_LIMIT)
        if slot not in self.intra_node:
            shares = [self._type(x) for x in collectives.gather_inter_node(shares, layouts, self.axes.hops)]
            self.node_shards.update(zip(slot.units, shares, strict=True))
        return collectives.gather_intra_node(shares, layouts, self.axes.hops)

    def _with_views(self, number: int, step: Step, ins: list[Any]) -> list[Any]:
        if step.eqn is None:
            return ins
        scan = self.plan.scans.get(step)
        for i, x in enumerate(step.ins):
            if isinstance(x, Var) and x in self.plan.views:
                ins[i] = self.env[scan.sliced[i]] if scan and i in scan.sliced else self._read(number, x)
        return ins

    def _read(self, number: int, x: Any) -> Any:
        if isinstance(x, Known):
            return self._type(jnp.asarray(x.value)) if self.typed else x.value
        if x not in self.plan.views:
            return self.env[x]
        view = self.plan.views[x]
        return self._type(view.apply(self._gathered(number, self.plan.unit(view))))

    # --- one step ---

    def _compute(self, step: Step, ins: list[Any]) -> list[Any]:
        if step.eqn is None:
            return _barrier(ins, ())[0]
        if step in self.plan.scans:
            return self._scan(step, ins)
        return varying.equation(step.eqn, ins, self._type) if self.typed else bind(step.eqn, ins)

    def _scan(self, step: Step, ins: list[Any]) -> list[Any]:
        """A scan whose body gathers one layer, and reduces the gradient of one layer."""
        scan, params = self.plan.scans[step], step.eqn.params
        consts, carry, xs = (list(x) for x in scan_parts(step.eqn, ins))
        count = len(carry)
        carry = [self._type(jnp.asarray(x, v.aval.dtype)) for x, v in zip(carry, step.outs[:count], strict=True)]
        carry, zero = self._settle(carry, self._type(jnp.float32(0)), 0)
        # From a zero that waits too: else room for all gradients would be taken long before they are made.
        stores = {i: jnp.full((params["length"], *shape), zero, dtype) for i, (shape, dtype) in self._sunk(scan)}

        given = self._given(scan)
        made: list[GatheredParam] = []

        def body(carries: Any, xs: Any) -> Any:
            (c, stores), (number, x, intra_node) = carries, xs
            inner = dict(zip(given, intra_node, strict=True))
            evaluation = _Evaluation(scan.body, [*consts, *c, *x], self.mean, self.typed, inner)
            outs, grads = evaluation.run()
            left = evaluation.node_shards | evaluation.stacked
            made[:] = [u for u in left if u.source in scan.outer and u not in given]
            kept = [y for i, y in enumerate(outs[count:], count) if i not in scan.body.lazy and i not in stores]
            # Together, so that no whole gradient waits for the next turn: XLA would pipeline its reduction.
            out, grads = _barrier([jnp.asarray(y) for y in outs[:count]], grads)
            put = lambda i: lax.dynamic_update_index_in_dim(stores[i], grads[i], number, 0)
            inter_node = [left[u] for u in made]
            return (out, {i: put(i) if i in grads else stores[i] for i in stores}), (kept, inter_node)

        keywords = {k: params[k] for k in ("reverse", "unroll", "length")}
        numbers = self._type(jnp.arange(params["length"]))
        scanned = (numbers, xs, list(given.values()))
        (carry, stores), (ys, inter_node) = lax.scan(body, (carry, stores), scanned, **keywords)
        self.stacked.update(
            (GatheredParam(scan.outer[u.source], u.dtype), x) for u, x in zip(made, inter_node, strict=True)
        )
        rest = iter(ys)
        skipped = scan.body.lazy | stores.keys()
        stacked = [None if i in skipped else next(rest) for i in range(count, len(step.outs))]
        for i, position in scan.sunk.items():
            self._add(position, stores[i])
        return [*carry, *stacked]

    def _given(self, scan: Scan) -> dict[GatheredParam, Any]:
        """What the forward scan left of the parameters that the body of a backward one gathers, by unit of the body."""
        late = [u for slot in scan.body.slots if slot.late for u in slot.units if u.source in scan.outer]
        known = {u: GatheredParam(scan.outer[u.source], u.dtype) for u in late}
        return {u: self.stacked[outer] for u, outer in known.items() if outer in self.stacked}

    def _sunk(self, scan: Scan) -> Iterator[tuple[int, Any]]:
        """Numbers of the stacked results of a scan that are gradients; shape and dtype of one layer's share."""
        for i, layout in scan.body.grads.items():
            dtype = scan.body.flat.outs[i].aval.dtype  # type: ignore[union-attr]
            yield i, (layout.local_shape, self.mean.wire(dtype))

    def _results(self, step: Step, outs: list[Any]) -> None:
        if gradient_terms.is_zero(step):
            self.zeros.update(step.outs)
        for v, x in zip(step.outs, outs, strict=True):
            if v not in self.plan.views:
                self.env[v] = x
                self._absorb(v)

    # --- gradients ---

    def _absorb(self, v: Var, late: bool = False) -> None:
        """If a value is a term of a gradient it is reduced now; small ones when their group is complete."""
        if v in self.plan.views and not late:
            return
        for position in self.plan.sinks.terms.get(v, ()):
            group = self.plan.groups.get(position)
            if group is None or late:
                self._reduce([position], [self.env[v]])
                continue
            before, dtype = self.local.get(position), self.plan.flat.outs[position].aval.dtype  # type: ignore[union-attr]
            self.local[position] = self.env[v] if before is None else before.astype(dtype) + self.env[v].astype(dtype)
            self.fresh.append(position)
            self.left[position] -= 1
            if not any(self.left[p] for p in group):
                self._reduce(group, [self.local.pop(p) for p in group])

    def _reduce(self, positions: Sequence[int], values: Sequence[Any]) -> None:
        sent = [self.mean.send(x) for x in values]
        layouts = [self.plan.grads[p] for p in positions]
        done = collectives.reduce_scatter(sent, layouts, self.axes.hops, bucket_bytes=collectives.NO_LIMIT)
        for position, x in zip(positions, done, strict=True):
            self._add(position, x)
        self.in_flight.append(positions[0])

    def _add(self, position: int, x: Any) -> None:
        before = self.grads.get(position)
        self.grads[position] = x if before is None else before + x


def _barrier(data: Sequence[Any], later: Any) -> tuple[list[Any], Any]:
    """`data` and `later` in one barrier; of `data`, what cannot enter it passes beside it."""
    held = [i for i, x in enumerate(data) if _can_wait(x)]
    done, later = lax.optimization_barrier(([data[i] for i in held], later))
    out = list(data)
    for i, x in zip(held, done, strict=True):
        out[i] = x
    return out, later


def together(shares: Sequence[Any], data: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Shares that wait for data: else the compiler gathers them once, before a loop over micro-steps, for all of it."""
    values, _ = _barrier([*shares, *data], ())
    return values[: len(shares)], values[len(shares) :]


def _can_wait(x: Any) -> bool:
    """Whether a value may enter a barrier."""
    return isinstance(x, jax.Array) and x.size > 0 and not is_key(x.dtype) and x.dtype != jax.dtypes.float0
