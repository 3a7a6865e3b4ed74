"""Which ways to compile, in which order, and when to stop; knows no program.

A way is ruled out without a compile if the bytes at rest do not fit, if they do not fit beside the temporaries that
the same stage needed in another group, if its collectives alone take longer than the best way does, if stage 2 of the
same group sends no more, or if its loss was the slower one in a smaller group. First stages and groups are tried, then,
if none fits, what saves memory, then single options around the best one.
"""

import dataclasses
from collections.abc import Callable, Sequence

from .._text import size_text
from .ways import Way, faster, smaller


@dataclasses.dataclass(frozen=True)
class Measured:
    """What a compiled way needs.

    Attributes:
      total: Bytes of a device's memory; `None` where the compiler refused the program because it does not fit.
      seconds: The predicted time of a step.
      busy: The part of it in which a device computes.
      program: What tells the program from others.
    """

    total: int | None
    seconds: float
    busy: float
    program: str


@dataclasses.dataclass(frozen=True)
class Trial:
    """A way, and what is known of it.

    Attributes:
      way: The way.
      rest: Bytes of a device at rest, as planned.
      found: What was compiled; `None` where the way was ruled out before.
      fits: Whether the compiled program is within the budget.
      why: Why it was ruled out, or does not fit.
    """

    way: Way
    rest: int
    found: Measured | None
    fits: bool
    why: str = ""


@dataclasses.dataclass(frozen=True)
class Known:
    """What is known of a way before it is compiled: bytes at rest, and seconds that its busiest network is needed."""

    rest: int
    wire: float


class Search:
    """One search; `run` returns all trials, those that were ruled out too."""

    def __init__(
        self,
        known: Callable[[Way], Known],
        compile_way: Callable[[Way], Measured],
        budget: float,
        most: int,
        progress: Callable[[str], None],
    ) -> None:
        self.known, self.compile_way, self.budget, self.most = known, compile_way, budget, most
        self.progress = progress
        self.trials: dict[Way, Trial] = {}
        self.compiled = 0

    def run(self, starts: Sequence[Way], *, remat: bool, offload: bool) -> list[Trial]:
        """Tries the ways to start with, and what follows from them."""
        kept = max(1, 2 * self.most // 3)  # the rest is for single options
        for way in sorted(starts, key=lambda way: (way.group, way.remat, way.stage == 1, self.known(way).wire)):
            if self.best is None or self.compiled < kept:
                self.try_(way)
        if self.best is None and starts:
            least = min(starts, key=lambda way: (self.known(way).rest, not way.remat))
            for way in smaller(least, remat, offload):
                if self.best is None:
                    self.try_(way)
        self._improve()
        return list(self.trials.values())

    @property
    def best(self) -> Trial | None:
        """The fastest trial that fits."""
        fitting = [x for x in self.trials.values() if x.fits]
        return min(fitting, key=_seconds, default=None)

    def try_(self, way: Way) -> Trial | None:
        """One trial, compiled unless it is ruled out; `None` where no compile is left."""
        if way in self.trials:
            return self.trials[way]
        known = self.known(way)
        why = self._ruled_out(way, known)
        if why:
            self.trials[way] = Trial(way, known.rest, None, fits=False, why=why)
            return self.trials[way]
        if self.compiled >= self.most:
            return None
        found = self.compile_way(way)
        if same := next((x for x in self.trials.values() if x.found and x.found.program == found.program), None):
            self.trials[way] = Trial(way, known.rest, None, fits=False, why=f"the same program as {same.way}")
            return self.trials[way]
        self.compiled += 1
        fits = found.total is not None and found.total <= self.budget
        why = "" if fits else "too large"
        self.trials[way] = Trial(way, known.rest, found, fits, why)
        size = "refused by the compiler" if found.total is None else size_text(found.total)
        time = f"{1e3 * found.seconds:.4g} ms" if found.total is not None else "no time"
        self.progress(f"{self.compiled} of {self.most}: {way}: {size}{'' if fits else ', too large'}, {time}")
        return self.trials[way]

    def _ruled_out(self, way: Way, known: Known) -> str:
        if known.rest > self.budget:
            return f"{size_text(known.rest)} at rest"
        if (needed := known.rest + self._temporaries(way)) > self.budget:
            return f"about {size_text(needed)}: at rest, and the temporaries of another group"
        second = dataclasses.replace(way, stage=2)
        if way.stage == 1 and second in self.trials and known.wire >= self.known(second).wire:
            return "stage 2 holds and sends no more"
        if self.best is None or self.best.found is None:
            return ""
        return self._slower(way, known, self.best.found.seconds)

    def _slower(self, way: Way, known: Known, best: float) -> str:
        """Why a way is not faster than the best one."""
        for x in self.trials.values():
            other = dataclasses.replace(x.way, remat=not x.way.remat)
            same = dataclasses.replace(x.way, group=way.group, hops=way.hops) == way
            found = self._found(other) if same and x.found else None
            if found and x.found and self.trials[other].fits and found.seconds < x.found.seconds:
                return f"in groups of {other.group} slower than {'with' if other.remat else 'without'} remat"
        computing = [x.found.busy for x in self.trials.values() if x.found and x.way.remat == way.remat]
        least = max(known.wire, 0.95 * min(computing, default=0.0))
        return f"takes {1e3 * least:.4g} ms at least" if least > best else ""

    def _found(self, way: Way) -> Measured | None:
        """What an earlier compile of a way has shown."""
        return self.trials[way].found if way in self.trials else None

    def _temporaries(self, way: Way) -> int:
        """The least that the same settings needed beside what rests, in another group."""
        same = lambda x: dataclasses.replace(x, group=way.group, hops=way.hops)
        found = [
            x.found.total - x.rest
            for x in self.trials.values()
            if x.found and x.found.total is not None and same(x.way) == way
        ]
        return max(0, min(found, default=0))

    def _improve(self) -> None:
        """Changes one option after the other, from the best way on, as long as one change helps."""
        while (best := self.best) is not None:
            for way in faster(best.way):
                self.try_(way)
            if self.best is best or self.compiled >= self.most:
                return


def _seconds(trial: Trial) -> float:
    return trial.found.seconds if trial.found else float("inf")
