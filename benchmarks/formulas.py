"""Bytes that each device sends in one optimizer step: the formulas of the ZeRO and MiCS papers, as functions.

    M  bytes of the parameters (gradients travel in as many)
    n  devices; p devices in a shard group, r = n / p groups
    k  devices in a node; e = p / k nodes in a group
    s  microbatches

In a ring gather or reduce-scatter of M bytes over g devices each device sends `M(g-1)/g`, in an all-reduce twice that.
In two hops each device sends `M(e-1)/p` to other nodes and `M(k-1)/k` inside its node; the sum is the same.
"""

from typing import NamedTuple

GATHER, SCATTER, REDUCE = "all-gather", "reduce-scatter", "all-reduce"


class Sent(NamedTuple):
    """The bytes that each device sends over one link in collectives of one kind.

    Attributes:
      axis: `"all"` devices, `"group"`, `"node"` (across nodes, in a group), `"local"` (inside a node),
        `"replica"` (across groups).
      kind: The collective.
      nbytes: Bytes per device and step.
      formula: The formula, to print.
    """

    axis: str
    kind: str
    nbytes: float
    formula: str


def replicated(M: float, n: int) -> list[Sent]:
    """Plain data parallelism: one all-reduce."""
    return [Sent("all", REDUCE, 2 * M * (n - 1) / n, "2M(n-1)/n")]


def zero1(M: float, n: int) -> list[Sent]:
    """Optimizer state split: gradients are all-reduced, new parameters gathered."""
    return [
        Sent("all", GATHER, M * (n - 1) / n, "M(n-1)/n"),
        Sent("all", REDUCE, 2 * M * (n - 1) / n, "2M(n-1)/n"),
    ]


def zero2(M: float, n: int, s: int = 1) -> list[Sent]:
    """Gradients split too: each microbatch reduce-scatters."""
    return [
        Sent("all", GATHER, M * (n - 1) / n, "M(n-1)/n"),
        Sent("all", SCATTER, s * M * (n - 1) / n, "sM(n-1)/n"),
    ]


def zero3(M: float, n: int, s: int = 1) -> list[Sent]:
    """Parameters split too: each microbatch gathers them forward and backward."""
    return [
        Sent("all", GATHER, 2 * s * M * (n - 1) / n, "2sM(n-1)/n"),
        Sent("all", SCATTER, s * M * (n - 1) / n, "sM(n-1)/n"),
    ]


def mics(M: float, p: int, r: int, s: int = 1, stage: int = 3) -> list[Sent]:
    """A stage inside groups of p devices; the share is all-reduced across r groups once."""
    gathers = 2 * s if stage == 3 else 1
    return [
        Sent("group", GATHER, gathers * M * (p - 1) / p, f"{_gathers(stage)}M(p-1)/p"),
        Sent("group", SCATTER, s * M * (p - 1) / p, "sM(p-1)/p"),
        _all_reduce_replicas(M, p, r),
    ]


def mics_hierarchical(M: float, p: int, r: int, k: int, s: int = 1, stage: int = 3) -> list[Sent]:
    """The same with gathers and reduce-scatters in two hops, over e = p / k nodes of k devices."""
    gathers, e, g = 2 * s if stage == 3 else 1, p // k, _gathers(stage)
    return [
        Sent("node", GATHER, gathers * M * (e - 1) / p, f"{g}M(e-1)/p"),
        Sent("local", GATHER, gathers * M * (k - 1) / k, f"{g}M(k-1)/k"),
        Sent("local", SCATTER, s * M * (k - 1) / k, "sM(k-1)/k"),
        Sent("node", SCATTER, s * M * (e - 1) / p, "sM(e-1)/p"),
        _all_reduce_replicas(M, p, r),
    ]


def hpz(M: float, p: int, r: int, k: int, s: int = 1) -> list[Sent]:
    """Hierarchical stage 3 whose backward pass gathers inside the node only (hpZ of ZeRO++)."""
    rows = mics_hierarchical(M, p, r, k, s)
    return [Sent("node", GATHER, s * M * (p // k - 1) / p, "sM(e-1)/p"), *rows[1:]]


def into_a_node(M: float, p: int, k: int, hierarchical: bool) -> float:
    """Bytes that enter one node in one gather: by one ring through it, or by one channel per device of the node."""
    return (p - k) * M / p if hierarchical else (p - 1) * M / p


def total(rows: list[Sent], kind: str) -> float:
    """Bytes per device in all collectives of a kind."""
    return sum(row.nbytes for row in rows if row.kind == kind)


def _gathers(stage: int) -> str:
    return "2s" if stage == 3 else ""


def _all_reduce_replicas(M: float, p: int, r: int) -> Sent:
    return Sent("replica", REDUCE, 2 * (M / p) * (r - 1) / r, "2(M/p)(r-1)/r")
