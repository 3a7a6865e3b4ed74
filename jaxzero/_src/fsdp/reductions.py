"""The gradients of one program on one device: local terms, what is in reduction, and shares of sums.

A reduction in two hops, over 2 nodes of 4 devices, of a gradient of shape (4096, 1024):

    reduce    (4096, 1024) -> (2, 512, 1024)    inside the node, beside the product after the one that made it
    advance   (2, 512, 1024) -> (512, 1024)     between nodes, beside a later one

With replicas, one more step sums the share over them, where there is one microbatch and the gradient is one term.

In the body of a scan a gradient behind which no product stands is left to the next iteration, and reduced beside the
products of that.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
from jax import lax

from ..comm import collectives
from ..comm.reduce import GradReducer
from ..jaxpr.flat import Var
from .barriers import barrier
from .schedule import Schedule

Array = jax.Array
T = TypeVar("T")
#: How many reductions stay halfway when the next is.
_HALFWAY = 1


class LeftOver(NamedTuple):
    """The gradients that a iteration of a scan leaves to the next; which they are is the same in all iterations.

    Attributes:
      waiting: Whole local terms, per reduce-scatter.
      halfway: Results of a step of a reduction that is not the last.
      shares: Shares of other terms of these gradients.
    """

    waiting: list[list[Array]]
    halfway: list[Array]
    shares: list[Array]


class Names(NamedTuple):
    """The positions of the arrays of a `LeftOver`; of those that are halfway also the number of the next step."""

    waiting: list[list[int]]
    halfway: list[tuple[int, int]]
    shares: list[int]

    @property
    def positions(self) -> set[int]:
        """All of them."""
        return {p for group in self.waiting for p in group} | {p for p, _ in self.halfway}


class Reductions:
    """The gradients of one program on one device, by position of the result.

    Attributes:
      shares: This device's shares of sums over the shard axis.
      pending: Whole local sums of the terms of small gradients, until all terms of the group are there.
      missing: How many terms are still to come.
      waiting: Local terms, in the dtype of the sum, that the next iteration reduces: positions and arrays.
      over_replicas: The gradients that are summed over replicas here.
      halfway: Results of a step of a reduction of which a later one has not begun, oldest first: position, number of
        the next step, array.
      in_flight: Gradients whose reduction no later step was ordered after yet, oldest first.
      unordered_small_grads: Pending gradients whose sum no later step was ordered after yet.
    """

    def __init__(self, schedule: Schedule, reducer: GradReducer, over_replicas: frozenset[int]) -> None:
        self.schedule, self.reducer, self.over_replicas = schedule, reducer, over_replicas
        self.shares: dict[int, Array] = {}
        self.pending: dict[int, Array] = {}
        self.missing = dict(schedule.terms.count)
        self.waiting: list[tuple[list[int], list[Array]]] = []
        self.halfway: list[tuple[int, int, Array]] = []
        self.in_flight: list[int] = []
        self.unordered_small_grads: list[int] = []

    def add_term(self, v: Var, x: Array, *, wait: bool = False) -> None:
        """Reduces `x` if `v` is a term of a gradient; that of a small one, when its group is complete.

        Args:
          v: A variable of the program.
          x: Its value.
          wait: Whether terms are left to the next iteration.
        """
        for position in self.schedule.terms.terms.get(v, ()):
            group = self.schedule.groups.get(position)
            if group is None:
                self.reduce([position], [x], wait=wait)
                continue
            before, dtype = self.pending.get(position), self.schedule.grad_dtype(position)
            self.pending[position] = x if before is None else before.astype(dtype) + x.astype(dtype)
            self.unordered_small_grads.append(position)
            self.missing[position] -= 1
            if not any(self.missing[p] for p in group):
                self.reduce(group, [self.pending.pop(p) for p in group], wait=wait)

    def reduce(self, positions: Sequence[int], values: Sequence[Array], *, wait: bool = False) -> None:
        """Adds whole local terms of gradients, in one reduce-scatter."""
        sent = [self.reducer.send(x) for x in values]
        if wait:
            self.waiting.append((list(positions), sent))
        else:
            self._begin(positions, sent)

    def _begin(self, positions: Sequence[int], sent: Sequence[Array]) -> None:
        layouts, axes = [self.schedule.grads[p] for p in positions], self.reducer.axes
        if len(sent) == 1 and self.schedule.max_in_flight:
            self.advance(positions[0], 0, sent[0])
            return
        done = collectives.reduce_scatter(sent, layouts, axes.hops, bucket_bytes=collectives.NO_LIMIT)
        for position, x in zip(positions, done, strict=True):
            self.add_share(position, x)
        self.in_flight.append(positions[0])

    def advance(self, position: int, number: int, x: Array) -> None:
        """Runs one step of a reduction."""
        steps = self._steps(position)
        x = steps[number](x)
        if number + 1 < len(steps):
            self.halfway.append((position, number + 1, x))
            return
        self.add_share(position, x)
        self.in_flight.append(position)

    def _steps(self, position: int) -> list[Callable[[Array], Array]]:
        """The collectives that reduce one gradient, each of which may stand beside another product."""
        layout, axes = self.schedule.grads[position], self.reducer.axes
        if collectives.hops_apart(layout, axes.hops):
            first = lambda x: collectives.scatter_first_hop(x, layout, axes.hops)
            outer = lambda x: collectives.scatter_outer_hops(x, layout, axes.hops)
            steps = [first, outer]
        else:
            steps = [lambda x: collectives.reduce_scatter([x], [layout], axes.hops, bucket_bytes=None)[0]]
        if position in self.over_replicas:
            other = [layout.other_axes]
            steps.append(lambda x: collectives.all_reduce([x], axes.replica, bucket_bytes=None, other_axes=other)[0])
        return steps

    def add_share(self, position: int, x: Array) -> None:
        """Adds this device's share of a term."""
        before = self.shares.get(position)
        self.shares[position] = x if before is None else before + x

    def flush(self) -> None:
        """Begins everything that waits."""
        for positions, sent in self.waiting:
            self._begin(positions, sent)
        self.waiting = []
        while self.halfway:
            self.advance(*self.halfway.pop(0))

    def order_last(self) -> None:
        """Orders the last reductions in flight, which have no later step to be ordered before.

        Where a reduction is an all-reduce and a slice, as on TPU, the slice would be fused into the optimizer's step,
        and the whole sum kept until then.
        """
        for position in dict.fromkeys(self.in_flight):
            self.shares[position] = lax.optimization_barrier(self.shares[position])

    # --- iterations of a scan ---

    def hand_over(self) -> tuple[LeftOver, Names]:
        """The gradients that the next iteration goes on with, and which they are."""
        waiting, halfway = [p for p, _ in self.waiting], [(p, number) for p, number, _ in self.halfway]
        names = Names(waiting, halfway, [])
        names.shares.extend(sorted(names.positions & self.shares.keys()))
        shares = [self.shares.pop(p) for p in names.shares]
        return LeftOver([x for _, x in self.waiting], [x for *_, x in self.halfway], shares), names

    def take_over(self, left: LeftOver, names: Names) -> None:
        """Begins what the iteration before has left."""
        self.shares.update(zip(names.shares, left.shares, strict=True))
        for (position, number), x in zip(names.halfway, left.halfway, strict=True):
            self.advance(position, number, x)
        for positions, sent in zip(names.waiting, left.waiting, strict=True):
            self._begin(positions, sent)


def order_after(
    reductions: Sequence[Reductions], data: Sequence[Any], later: T, max_in_flight: int
) -> tuple[list[Any], T]:
    """A barrier: `later` comes after `data`, and what reads either comes after reductions in flight.

    Args:
      reductions: The gradients of one program, or of two iterations of one.
      data: Values that `later` waits for; such as cannot enter a barrier come back as they are.
      later: Any tree of arrays.
      max_in_flight: How many of the last reductions of each are left out.

    Returns:
      `data` and `later`.
    """
    ordered = [_ordered(r, max_in_flight) for r in reductions]
    arrays = [
        ([r.shares[p] for p in shares], [r.pending[p] for p in small], [x for *_, x in halfway])
        for r, (shares, small, halfway) in zip(reductions, ordered, strict=True)
    ]
    out, (later, arrays) = barrier(data, (later, arrays))
    for r, (positions, small, halfway), (shares, sums, crossing) in zip(reductions, ordered, arrays, strict=True):
        r.shares.update(zip(positions, shares, strict=True))
        r.pending.update(zip(small, sums, strict=True))
        for (position, number, _), x in zip(halfway, crossing, strict=True):
            r.advance(position, number, x)
    return out, later


def _ordered(r: Reductions, max_in_flight: int) -> tuple[list[int], list[int], list[tuple[int, int, Array]]]:
    """What a barrier takes: positions of shares and of small sums, and what is halfway."""
    count = max(len(r.in_flight) - max_in_flight, 0)
    reduced = list(dict.fromkeys(r.in_flight[:count]))
    small = [p for p in dict.fromkeys(r.unordered_small_grads) if p in r.pending]
    crossing = r.halfway[: max(len(r.halfway) - min(max_in_flight, _HALFWAY), 0)]
    r.in_flight, r.unordered_small_grads, r.halfway = r.in_flight[count:], [], r.halfway[len(crossing) :]
    return reduced, small, crossing
