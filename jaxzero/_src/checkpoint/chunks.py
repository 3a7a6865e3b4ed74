"""Ranges of the row-major order as boxes, and chunks that begin and end such ranges: shape arithmetic only.

The share of a flat leaf may begin in the middle of a row, but its file has the logical shape and regular chunks, each
written by one process. So a chunk is contiguous in row-major order, and every device writes from the first chunk that
begins in its share to the first that begins in the next share.
"""

import dataclasses
import math
from collections.abc import Iterator

from ..sharding.layout import Shape

#: The padding of the last chunk is at most `1 / _WASTE` of the cut axis.
_WASTE = 100

Box = tuple[slice, ...]


@dataclasses.dataclass(frozen=True)
class Chunks:
    """Regular chunks of one array, each contiguous in row-major order; sends nothing.

    Attributes:
      shape: The shape of the array.
      axis: The axis that is cut; chunks are 1 long before it and whole behind it.
      rows: The length of a chunk along it.

    Examples:
      >>> chunks = Chunks.of((10, 6, 4), 50)
      >>> chunks.chunk, chunks.elements
      ((2, 6, 4), 48)
      >>> [chunks.start_at(x) for x in (0, 1, 48, 239, 240)]
      [0, 48, 48, 240, 240]
    """

    shape: Shape
    axis: int
    rows: int

    @classmethod
    def of(cls, shape: Shape, limit: int) -> "Chunks":
        """Chunks of at most `limit` elements, with little padding at the end of the cut axis."""
        if not shape:
            return cls((), 0, 1)
        axis = next(j for j in range(len(shape)) if math.prod(shape[j + 1 :]) <= limit)
        most = min(limit // math.prod(shape[axis + 1 :]), shape[axis])
        rows = next(r for r in range(most, 0, -1) if -shape[axis] % r * _WASTE <= shape[axis])
        return cls(tuple(shape), axis, rows)

    @property
    def chunk(self) -> Shape:
        """The shape of one chunk."""
        return ((1,) * self.axis + (self.rows, *self.shape[self.axis + 1 :]))[: len(self.shape)]

    @property
    def elements(self) -> int:
        """Elements of one chunk."""
        return math.prod(self.chunk)

    def start_at(self, position: int) -> int:
        """The first position in row-major order, from `position` on, at which a chunk begins (or the array ends)."""
        row = math.prod(self.shape[self.axis :])  # the last chunk of each is shorter
        begun = position // row * row
        within = -(-(position - begun) // self.elements) * self.elements
        return begun + min(within, row)


def boxes(shape: Shape, start: int, stop: int) -> Iterator[Box]:
    """The positions `[start, stop)` of the row-major order as boxes, in order: at most `2 * len(shape) - 1`.

    Examples:
      >>> [[(s.start, s.stop) for s in box] for box in boxes((3, 4), 2, 9)]
      [[(0, 1), (2, 4)], [(1, 2), (0, 4)], [(2, 3), (0, 1)]]
    """
    if start >= stop:
        return
    if len(shape) < 2:
        yield (slice(start, stop),) if shape else ()
        return
    row = math.prod(shape[1:])
    first, last = start // row, (stop - 1) // row
    if first == last:
        for box in boxes(shape[1:], start - first * row, stop - first * row):
            yield slice(first, first + 1), *box
        return
    whole_from, whole_to = -(-start // row), stop // row
    if first < whole_from:
        for box in boxes(shape[1:], start - first * row, row):
            yield slice(first, first + 1), *box
    if whole_from < whole_to:
        yield slice(whole_from, whole_to), *(slice(0, d) for d in shape[1:])
    if whole_to * row < stop:
        for box in boxes(shape[1:], 0, stop - whole_to * row):
            yield slice(whole_to, whole_to + 1), *box


def extents(box: Box) -> Shape:
    """The shape of a box."""
    return tuple(s.stop - s.start for s in box)


def within(box: Box, shape: Shape) -> Box:
    """The part of a box that lies in an array of this shape; open ends become the array's.

    Examples:
      >>> within((slice(4, 8), slice(None)), (5, 3)), within((slice(8, 12),), (5,))
      ((slice(4, 5, None), slice(0, 3, None)), (slice(5, 5, None),))
    """
    ends = ((s.start or 0, d if s.stop is None else s.stop, d) for s, d in zip(box, shape, strict=True))
    return tuple(slice(min(start, d), min(stop, d)) for start, stop, d in ends)


def filling(shape: Shape, limit: int) -> Shape:
    """Chunks of at most `limit` elements that fill a box of this shape: their extents divide its.

    Examples:
      >>> filling((8, 6), 24), filling((7, 6), 8), filling((7, 5), 1)
      ((4, 6), (7, 1), (1, 1))
    """
    chunk = list(shape)
    while math.prod(chunk) > limit:
        factors = [next((p for p in range(2, d + 1) if d % p == 0), math.inf) for d in chunk]
        axis = factors.index(min(factors))
        chunk[axis] //= int(factors[axis])
    return tuple(chunk)
