"""Which device does which job: a pure function of counts and costs, so that every process agrees."""

import dataclasses
from collections.abc import Sequence

#: A kind of job, the first of its slots, and how many of them.
Run = tuple[int, int, int]


@dataclasses.dataclass(frozen=True)
class Assignment:
    """Jobs of several kinds dealt out to devices.

    Attributes:
      rows: For each device what it does, in order.
      loads: For each device, the cost of its jobs.
    """

    rows: tuple[tuple[Run, ...], ...]
    loads: tuple[float, ...]

    @property
    def turns(self) -> int:
        """The most jobs that a device has."""
        return max(sum(count for *_, count in row) for row in self.rows)

    @property
    def balance(self) -> float:
        """The largest load over the mean; 1 where all devices have the same."""
        mean = sum(self.loads) / len(self.loads)
        return max(self.loads) / mean if mean else 1.0

    def slots(self, device: int) -> list[tuple[int, int]]:
        """The jobs of a device one by one, as kind and slot."""
        return [(kind, first + i) for kind, first, count in self.rows[device] for i in range(count)]


def assign(kinds: Sequence[tuple[int, float]], n: int) -> Assignment:
    """Deals out jobs: those that are alike in full rounds, what is left largest first, to the least loaded device.

    Args:
      kinds: For each kind of job, how many there are and what one costs.
      n: How many devices there are.

    Returns:
      The assignment. In the full rounds all devices do the same kind at the same time.

    Examples:
      >>> assign([(9, 2.0), (1, 9.0)], 4).rows
      (((0, 0, 2), (1, 0, 1)), ((0, 2, 2), (0, 8, 1)), ((0, 4, 2),), ((0, 6, 2),))
    """
    rounds = [count // n for count, _ in kinds]
    rows: list[list[Run]] = [[(kind, d * r, r) for kind, r in enumerate(rounds) if r] for d in range(n)]
    loads = [sum(r * cost for r, (_, cost) in zip(rounds, kinds, strict=True))] * n
    left = [(kind, slot) for kind, (count, _) in enumerate(kinds) for slot in range(rounds[kind] * n, count)]
    for kind, slot in sorted(left, key=lambda x: -kinds[x[0]][1]):
        device = min(range(n), key=lambda d: (loads[d], len(rows[d])))
        loads[device] += kinds[kind][1]
        rows[device].append((kind, slot, 1))
    return Assignment(tuple(map(tuple, rows)), tuple(map(float, loads)))
