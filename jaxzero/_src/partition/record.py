"""The record of what each rule did with each equation, and what crossed devices."""

import collections
import dataclasses
import math
from typing import Any

import jax

from .values import Partial, Split


@dataclasses.dataclass(frozen=True)
class Communication:
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
        self.crossings: list[Communication] = []
        self._seen: set[int] = set()
        self._keep: list[Any] = []

    def note(self, eqn: Any, how: str, times: int) -> None:
        """One equation was evaluated: ``"local"``, ``"whole"`` or ``"loop"``."""
        self.counts[how] += 1
        if how == "whole" and any(math.prod(v.aval.shape) > 1 for v in eqn.outvars):
            self.whole[eqn.primitive.name] += 1

    def wait(self, eqn: Any, values: list[Any], times: int) -> None:
        """An equation needs values whole; each value crosses once, whoever else waits for it."""
        self.communicate(eqn.primitive.name, values, times)

    def communicate(self, name: str, values: list[Any], times: int) -> None:
        """Values cross devices for the equation or result called `name`."""
        for x in values:
            if id(x) in self._seen:
                continue
            self._seen.add(id(x))
            self._keep.append(x)  # so that no later value gets the same id
            how = "gather" if isinstance(x, Split) else x.how
            assert isinstance(x, (Split, Partial))
            nbytes = math.prod(x.shape) * x.dtype.itemsize // _parts(x)
            self.crossings.append(Communication(name, how, x.shape, str(x.dtype), nbytes, times))


def _parts(x: Any) -> int:
    """In how many parts other mesh axes shard a value."""
    other_axes = x.layout.other_axes if isinstance(x, Split) else ()
    return math.prod(jax.sharding.get_abstract_mesh().shape[a] for axes in other_axes for a in axes)
