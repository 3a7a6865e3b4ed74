"""The record of what each rule did with each equation, and what crossed devices."""

import collections
import dataclasses
import math
from typing import Any

import jax

from .values import Partial, Split


@dataclasses.dataclass(frozen=True)
class Crossing:
    """Values that crossed devices for one equation.

    Attributes:
      primitive: The equation that needed them.
      how: ``"gather"`` (a split value made whole), or ``"sum"``, ``"max"``, ``"min"``, ``"prod"``.
      shape: The logical shape.
      dtype: The dtype's name.
      nbytes: Bytes of the whole value; of one that other mesh axes shard, of a device's part of it.
      times: How often per step (more than once inside a loop of known length).
    """

    primitive: str
    how: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    times: int


class Record:
    """Collects while the evaluation runs; `Report` is what a user sees."""

    def __init__(self) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self.whole: collections.Counter[str] = collections.Counter()
        self.crossings: list[Crossing] = []
        self._seen: set[int] = set()
        self._keep: list[Any] = []

    def note(self, eqn: Any, how: str, times: int) -> None:
        """One equation was evaluated: ``"local"``, ``"whole"`` or ``"loop"``."""
        self.counts[how] += 1
        if how == "whole" and any(math.prod(v.aval.shape) > 1 for v in eqn.outvars):
            self.whole[eqn.primitive.name] += 1

    def wait(self, eqn: Any, values: list[Any], times: int) -> None:
        """An equation needs values whole; each value crosses once, whoever else waits for it."""
        self.cross(eqn.primitive.name, values, times)

    def cross(self, name: str, values: list[Any], times: int) -> None:
        """Values cross devices for the equation or result called `name`."""
        for x in values:
            if id(x) in self._seen:
                continue
            self._seen.add(id(x))
            self._keep.append(x)  # so that no later value gets the same id
            how = "gather" if isinstance(x, Split) else x.how
            assert isinstance(x, (Split, Partial))
            nbytes = math.prod(x.shape) * x.dtype.itemsize // _parts(x)
            self.crossings.append(Crossing(name, how, x.shape, str(x.dtype), nbytes, times))


def _parts(x: Any) -> int:
    """In how many parts other mesh axes shard a value."""
    beside = x.layout.beside if isinstance(x, Split) else ()
    return math.prod(jax.sharding.get_abstract_mesh().shape[a] for axes in beside for a in axes)


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
    """

    local: int
    whole: dict[str, int]
    scalars: int
    crossings: tuple[Crossing, ...]
    n: int
    others: tuple[Any, ...] | None = None

    @classmethod
    def of(cls, record: Record, n: int, others: tuple[Any, ...] | None = None) -> "Report":
        """The report of a finished record."""
        many = sum(record.whole.values())
        return cls(
            local=record.counts["local"] + record.counts["loop"],
            whole=dict(record.whole.most_common()),
            scalars=record.counts["whole"] - many,
            crossings=tuple(record.crossings),
            n=n,
            others=others,
        )

    @property
    def reductions(self) -> tuple[Crossing, ...]:
        """The crossings that are sums, maxima, minima or products."""
        return tuple(c for c in self.crossings if c.how != "gather")

    @property
    def gathers(self) -> tuple[Crossing, ...]:
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
        lines = [
            f"{self.local} equations on shares, {self.scalars} on scalars, "
            f"{sum(self.whole.values())} on whole arrays, over {self.n} devices",
            f"{len(self.reductions)} values reduced across devices: {reduced} per device and step",
            *_groups(self.reductions),
            f"{len(self.gathers)} values gathered: {gathered} per device and step",
            *_groups(self.gathers),
        ]
        if self.others is not None:
            sent = size_text(sum(x.sent for x in self.others))
            lines += [f"{len(self.others)} collectives over other mesh axes: {sent} per device and step"]
            lines += _others(self.others)
        if self.whole:
            names = ", ".join(f"{count} {name}" for name, count in self.whole.items())
            lines.append(f"in full on every device: {names}")
        return "\n".join(lines)


def _wire(crossings: tuple[Crossing, ...], n: int, passes: int) -> int:
    return passes * sum(c.nbytes * c.times for c in crossings) * (n - 1) // n


def size_text(nbytes: float) -> str:
    """Bytes as people read them: at most four digits and a decimal unit."""
    for unit in ("B", "kB", "MB"):
        if nbytes < 1000:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.4g} GB"


def _others(collectives: tuple[Any, ...]) -> list[str]:
    groups = collections.Counter((x.kind, "+".join(x.axes), x.nbytes, x.times) for x in collectives)
    return [
        f"  {count:4d} x {kind} of {size_text(nbytes)} over {axes}" + (f", {times} times" if times > 1 else "")
        for (kind, axes, nbytes, times), count in groups.most_common()
    ]


def _groups(crossings: tuple[Crossing, ...]) -> list[str]:
    """One line for crossings that differ in nothing that is shown."""
    groups = collections.Counter((c.how, c.primitive, c.shape, c.dtype, c.times) for c in crossings)
    return [
        f"  {count:4d} x {how:6s} {dtype}{list(shape)} for {name}" + (f", {times} times" if times > 1 else "")
        for (how, name, shape, dtype, times), count in groups.items()
    ]
