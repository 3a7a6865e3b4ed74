"""A compiled program on a clock: its instructions in the order of their schedule, its collectives on their networks.

The computation is one stream, each network another. A collective starts when the computation reaches its start and its
network is free; the computation waits at its end. One without an end of its own keeps the computation waiting all the
time. The body of a loop runs a few times, until its time no longer changes, and the last time stands for the rest.
"""

import dataclasses
from typing import NamedTuple

from .costs import Costs
from .hlo import Placed
from .hlo_parser import HloProgram, Instruction, body_of, branches_of, called, trip_count
from .machine import Machine
from .network import transfer

#: How many iterations of a loop are walked.
_WALKED = 3


class Event(NamedTuple):
    """What one instruction does to the clock.

    Attributes:
      busy: Seconds of computation.
      starts: The number of the collective that it starts, or -1.
      ends: The number of the collective that it waits for, or -1.
      inside: The computations it runs, each `times` times; of several branches the longest.
      times: How often.
      operations: Operations of products, by dtype.
    """

    busy: float = 0.0
    starts: int = -1
    ends: int = -1
    inside: tuple[str, ...] = ()
    times: int = 1
    operations: tuple[tuple[str, float], ...] = ()


@dataclasses.dataclass
class Clock:
    """Where the time has gone so far.

    Attributes:
      now: Seconds since the start of the program.
      busy: Seconds of computation.
      free: When each network is free.
      wire: Seconds that each collective was on its network.
      exposed: Seconds that the computation waited for each collective.
      operations: Operations of products, by dtype.
    """

    now: float = 0.0
    busy: float = 0.0
    free: dict[str, float] = dataclasses.field(default_factory=dict)
    wire: dict[int, float] = dataclasses.field(default_factory=dict)
    exposed: dict[int, float] = dataclasses.field(default_factory=dict)
    operations: dict[str, float] = dataclasses.field(default_factory=dict)

    def copy(self) -> "Clock":
        """The same, at this time."""
        return Clock(self.now, self.busy, dict(self.free), dict(self.wire), dict(self.exposed), dict(self.operations))

    def repeat(self, before: "Clock", times: int) -> None:
        """Goes on as since `before`, so many times more."""
        passed = self.now - before.now
        for mine, old in ((self.wire, before.wire), (self.exposed, before.exposed)):
            for i in mine:
                mine[i] += times * (mine[i] - old.get(i, 0.0))
        for dtype in self.operations:
            self.operations[dtype] += times * (self.operations[dtype] - before.operations.get(dtype, 0.0))
        for network in self.free:
            self.free[network] += times * passed
        self.busy += times * (self.busy - before.busy)
        self.now += times * passed


class Timeline:
    """One walk through a program."""

    def __init__(self, program: HloProgram, found: list[Placed], machine: Machine) -> None:
        self.program, self.machine, self.costs = program, machine, Costs(program)
        self.starts = {(x.computation, x.start): i for i, x in enumerate(found)}
        self.ends = {(x.computation, x.end): i for i, x in enumerate(found) if x.end is not None}
        self.waits = {i for i, x in enumerate(found) if x.end is None}
        one = lambda x: x.collective.sent / max(1, x.collective.times)
        self.transfers = [transfer(machine, x.collective.groups, one(x)) for x in found]
        self._events: dict[str, list[Event]] = {}
        self._until: dict[int, float] = {}
        self.clock = Clock()

    def run(self) -> Clock:
        """The clock at the end of the program, when also the networks are free."""
        self._walk(self.program.entry)
        return self.clock

    def _walk(self, computation: str) -> None:
        for event in self._events_of(computation):
            self.clock.now += event.busy
            self.clock.busy += event.busy
            for dtype, count in event.operations:
                self.clock.operations[dtype] = self.clock.operations.get(dtype, 0.0) + count
            if event.inside:
                self._repeat(event)
            if event.ends >= 0:
                self._wait(event.ends)
            if event.starts >= 0:
                self._start(event.starts)

    def _start(self, number: int) -> None:
        clock, (network, seconds) = self.clock, self.transfers[number]
        clock.free[network] = max(clock.now, clock.free.get(network, 0.0)) + seconds
        clock.wire[number] = clock.wire.get(number, 0.0) + seconds
        self._until[number] = clock.free[network]
        if number in self.waits:
            self._wait(number)

    def _wait(self, number: int) -> None:
        clock, end = self.clock, self._until.get(number, 0.0)
        clock.exposed[number] = clock.exposed.get(number, 0.0) + max(0.0, end - clock.now)
        clock.now = max(clock.now, end)

    def _repeat(self, event: Event) -> None:
        if len(event.inside) > 1:
            return self._longest(event.inside)
        before = self.clock
        for _ in range(min(event.times, _WALKED)):
            before = self.clock.copy()
            self._walk(event.inside[0])
        if event.times > _WALKED:
            self.clock.repeat(before, event.times - _WALKED)
        return None

    def _longest(self, branches: tuple[str, ...]) -> None:
        """Runs the branch that takes longest."""
        start, best = self.clock, None
        for name in branches:
            self.clock = start.copy()
            self._walk(name)
            if best is None or self.clock.now > best.now:
                best = self.clock
        self.clock = best or start

    # --- what each instruction does ---

    def _events_of(self, computation: str) -> list[Event]:
        if computation not in self._events:
            body = self.program.computations.get(computation, [])
            events = (self._event(computation, i, x) for i, x in enumerate(body))
            self._events[computation] = [event for event in events if event != Event()]
        return self._events[computation]

    def _event(self, computation: str, place: int, x: Instruction) -> Event:
        starts, ends = self.starts.get((computation, place), -1), self.ends.get((computation, place), -1)
        if x.op == "while":
            return Event(inside=(body_of(x.line),), times=trip_count(x.line, self.program.computations))
        if branches := branches_of(x.line):
            return Event(inside=tuple(branches))
        if x.op == "call":
            return Event(inside=(called(x.line)[0],))
        moved = starts >= 0 and x.op != "fusion"
        if moved or x.op.endswith(("-start", "-done")):  # the network's work, or the wait for it
            return Event(self.machine.launch if moved else 0.0, starts, ends)
        cost = self.costs.of(computation, x)
        seconds = sum(count / self.machine.peak(dtype) for dtype, count in cost.operations.items())
        seconds = max(seconds, cost.nbytes / (self.machine.memory_reach * self.machine.bandwidth))
        busy = max(seconds, self.machine.launch) if seconds else 0.0
        return Event(busy, starts, ends, operations=tuple(cost.operations.items()))
