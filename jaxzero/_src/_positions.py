"""Lists of which some positions change."""

from collections.abc import Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")


def replace_at(values: Sequence[T], positions: Iterable[int], new: Iterable[T]) -> list[T]:
    """`values` as a list in which `new`, in order, stands at `positions`.

    Examples:
      >>> replace_at("abc", [2, 0], "xy")
      ['y', 'b', 'x']
    """
    out = list(values)
    for i, x in zip(positions, new, strict=True):
        out[i] = x
    return out
