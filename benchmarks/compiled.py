"""Collectives of a compiled program: which devices talk, how many bytes each sends, and how often.

Reads optimized HLO text of either way of printing groups (lists of devices, or named mesh axes). A collective
in a loop counts once per turn, loops in loops too; one in a branch of a conditional counts as if it were taken.
"""

import math
import re
from typing import NamedTuple

WIDTH = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "f32": 4, "s32": 4, "u32": 4, "f64": 8, "s64": 8, "u64": 8}
_ARRAY = re.compile(rf"({'|'.join(WIDTH)})\[([\d,]*)\]")
_CALL = re.compile(r"= (\(.*?\)|\S+) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(-start)?\(")
_HEAD = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$")
_CALLEES = re.compile(r"(?:body|condition|to_apply|calls|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TURNS = re.compile(r'known_trip_count":\{"n":"(\d+)"')


class Collective(NamedTuple):
    """One collective.

    Attributes:
      kind: `"all-gather"`, `"reduce-scatter"`, `"all-reduce"`, ...
      nbytes: Bytes of its full operand: the result of an all-gather, all shares of a reduce-scatter.
      groups: The devices that take part together, by number.
      times: How often it runs.
    """

    kind: str
    nbytes: int
    groups: tuple[tuple[int, ...], ...]
    times: int

    @property
    def sent(self) -> float:
        """Bytes that each device sends in all its runs, as a ring does it."""
        size = len(self.groups[0])
        return self.times * self.nbytes * (size - 1) / size * (2 if self.kind == "all-reduce" else 1)

    def axes(self, sizes: dict[str, int]) -> tuple[str, ...]:
        """The axes of a mesh (its sizes, in order, devices in row-major order) over which it runs."""
        places = [_unravel(device, tuple(sizes.values())) for device in self.groups[0]]
        return tuple(a for i, a in enumerate(sizes) if len({place[i] for place in places}) > 1)


def collectives(text: str, devices: int) -> list[Collective]:
    """All collectives of an optimized HLO text for `devices` devices, in the order of the text."""
    lines, parents = _computations(text)
    out = []
    for computation, body in lines.items():
        times = _times(computation, parents)
        for line in body:
            if found := _CALL.search(line):
                groups = _groups(line, devices)
                sizes = [_size(*array) for array in _ARRAY.findall(found[1])]
                started = found[3] and found[2] in ("all-gather", "reduce-scatter")  # (operands, results)
                nbytes = sum(sizes[len(sizes) // 2 :] if started else sizes)
                full = nbytes * (len(groups[0]) if found[2] == "reduce-scatter" else 1)
                out.append(Collective(found[2], full, groups, times))
    return out


def _size(dtype: str, dims: str) -> int:
    return WIDTH[dtype] * math.prod(int(d) for d in dims.split(",") if d)


def _computations(text: str) -> tuple[dict[str, list[str]], dict[str, list[tuple[str, int]]]]:
    """The lines of each computation, and for each the computations that run it, with how often."""
    lines: dict[str, list[str]] = {}
    parents: dict[str, list[tuple[str, int]]] = {}
    here = ""
    for line in text.splitlines():
        if head := _HEAD.match(line):
            here = head[1]
        lines.setdefault(here, []).append(line)
        turns = int(found[1]) if (found := _TURNS.search(line)) else 1
        called = _CALLEES.findall(line)
        if branches := _BRANCHES.search(line):
            called += [name.strip().lstrip("%") for name in branches[1].split(",")]
        for name in called:
            parents.setdefault(name, []).append((here, turns))
    return lines, parents


def _times(computation: str, parents: dict[str, list[tuple[str, int]]]) -> int:
    """How often a computation runs; nobody calls the entry."""
    if computation not in parents:
        return 1
    return sum(turns * _times(parent, parents) for parent, turns in parents[computation])


def _groups(line: str, devices: int) -> tuple[tuple[int, ...], ...]:
    if found := re.search(r"replica_groups=\{(\{[\d,{}]+\})\}", line):
        return tuple(tuple(map(int, group.split(","))) for group in re.findall(r"\{([\d,]+)\}", found[1]))
    if found := re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line):
        sizes = _numbers(found[3])
        order = _numbers(found[4]) if found[4] else tuple(range(len(sizes)))
        return _cut(_transposed(sizes, order), int(found[2]))
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", line):
        pairs = [pair.split("=") for pair in re.sub(r"['\s]", "", found[1]).split(",")]
        names, sizes = [name for name, _ in pairs], tuple(int(size) for _, size in pairs)
        inside = [names.index(name) for name in re.sub(r"['\s]", "", found[2]).split(",")]
        order = (*(i for i in range(len(names)) if i not in inside), *inside)
        return _cut(_transposed(sizes, order), math.prod(sizes[i] for i in inside))
    return (tuple(range(devices)),)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def _cut(devices: list[int], size: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(devices[i : i + size]) for i in range(0, len(devices), size))


def _transposed(sizes: tuple[int, ...], order: tuple[int, ...]) -> list[int]:
    """The device numbers of an array of `sizes`, read with its dimensions in `order`."""
    strides = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
    out = [0]
    for dim in order:
        out = [base + i * strides[dim] for base in out for i in range(sizes[dim])]
    return out


def _unravel(index: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    out = []
    for size in reversed(sizes):
        index, place = divmod(index, size)
        out.append(place)
    return tuple(reversed(out))
