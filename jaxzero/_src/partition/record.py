"""The record of one evaluation: how each equation ran, and which values were communicated."""

import collections
import dataclasses
import math
from collections.abc import Sequence

import jax
from jax.extend.core import JaxprEqn

from ..jaxpr.compat import aval
from .values import Partial, Split


@dataclasses.dataclass(frozen=True)
class Communication:
    """One value that was communicated for one equation.

    Attributes:
      primitive: The primitive of the equation that needed it.
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


@dataclasses.dataclass(frozen=True)
class Dealt:
    """Jobs on whole matrices that were dealt out to devices in one exchange.

    Attributes:
      kinds: Of each kind how many jobs there are, the shapes that one reads, and the primitives on matrices in it.
      loads: For each device the operations of its jobs.
      nbytes: Bytes that a device sends in both directions together.
      times: How often per step.
    """

    kinds: tuple[tuple[int, str, str], ...]
    loads: tuple[float, ...]
    nbytes: int
    times: int

    @property
    def jobs(self) -> int:
        """How many jobs there are."""
        return sum(count for count, *_ in self.kinds)

    @property
    def balance(self) -> float:
        """The largest load over the mean."""
        return max(self.loads) * len(self.loads) / (sum(self.loads) or 1.0)


class Record:
    """Filled while a program is evaluated; `analysis.explain.Report` shows it to users."""

    def __init__(self) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self.whole: collections.Counter[str] = collections.Counter()
        self.crossings: list[Communication] = []
        self.dealt: list[Dealt] = []
        self._seen: set[int] = set()
        self._alive: list[Split | Partial] = []

    def note(self, eqn: JaxprEqn, how: str, times: int) -> None:
        """One equation was evaluated: ``"local"``, ``"whole"`` or ``"loop"``."""
        self.counts[how] += 1
        if how == "whole" and any(math.prod(aval(v).shape) > 1 for v in eqn.outvars):
            self.whole[eqn.primitive.name] += 1

    def communicated(self, name: str, values: Sequence[Split | Partial], times: int) -> None:
        """Values were communicated for the equation or result called `name`; each one counts once."""
        for x in values:
            if id(x) in self._seen:
                continue
            self._seen.add(id(x))
            self._alive.append(x)  # so that no later value gets the same id
            how = "gather" if isinstance(x, Split) else x.how
            nbytes = math.prod(x.shape) * x.dtype.itemsize // _parts(x)
            self.crossings.append(Communication(name, how, x.shape, str(x.dtype), nbytes, times))

    def exchanged(
        self, kinds: tuple[tuple[int, str, str], ...], loads: tuple[float, ...], nbytes: int, times: int
    ) -> None:
        """Jobs were dealt out in one exchange; see `Dealt`."""
        self.dealt.append(Dealt(kinds, loads, nbytes, times))


def _parts(x: Split | Partial) -> int:
    """The number of parts into which other mesh axes shard a value."""
    other_axes = x.layout.other_axes if isinstance(x, Split) else ()
    return math.prod(jax.sharding.get_abstract_mesh().shape[a] for axes in other_axes for a in axes)
