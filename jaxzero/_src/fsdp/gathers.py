"""Which gather serves which use of a parameter, and what each gather waits for.

A use of a large parameter gathers it; inside one `jax.checkpoint` it is gathered once, and so are two uses
with no other large gather between them. Small parameters travel together, in chunks in the order of first
use, and stay for the forward or the backward pass (`chunk_bytes`) or for both (`persist_bytes`). Each gather
waits for the data of the use `prefetch` large gathers before it: that bounds how much is whole at any time.
A large parameter of up to `persist_bytes` is gathered once, alone, and stays.

Only what `persist_bytes` keeps is kept through a scan that gathers in its body: it is whole beside every layer.

Example: large `A`, `B`, `C` are used at steps 1, 3 and 5 and `A` again at 7; with `prefetch=1` there are four
gathers, and they wait for the data of steps (none), 1, 3 and 5.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import jax.numpy as jnp

from ..jaxpr.flat import Var
from ..sharding.options import GatherOptions


@dataclasses.dataclass(frozen=True)
class GatheredParam:
    """A parameter in the dtype in which it travels.

    Attributes:
      source: The input of the program that holds the share.
      dtype: The dtype.
    """

    source: Var
    dtype: jnp.dtype


#: Stands for the number of a step before the first.
START = -1
#: Stands for the number of a `jax.checkpoint`: parameters that persist are gathered once for the whole program.
_PERSISTS = 0
#: The number of a step, and a parameter that it computes with.
Use = tuple[int, GatheredParam]


@dataclasses.dataclass(eq=False)
class Gather:
    """One gather: which parameters it brings, and before which step.

    Attributes:
      params: The parameters; several for a chunk.
      step: The number of the first step that uses one of them.
      large: Whether it counts for `prefetch`.
      in_backward: Whether it belongs to the backward pass.
      wait_for_step: The number of the step whose data it waits for; `None` if it may run at once.
      outer_hops_at: The number of the step whose data its hops across nodes wait for, if they run before the last hop:
        a product then stands beside each hop. `None` if all hops run one after the other.
      behind_scan: The number of the last scan before `step` that it may not cross: it waits for the data with which
        the scan's last iteration begins.
      ahead: Whether both numbers are of steps of the iteration before, in the body of a scan.
      outer_hops_ahead: Whether `outer_hops_at` alone is.
      keep: Whether a later step uses it again after another large gather.
      intra_node: Whether it starts from node shards, so that nothing crosses nodes.
      stacked: Whether an earlier scan has stacked its parameter whole, so that nothing is sent.
    """

    params: list[GatheredParam]
    step: int
    large: bool
    in_backward: bool
    wait_for_step: int | None = None
    outer_hops_at: int | None = None
    behind_scan: int | None = None
    ahead: bool = False
    outer_hops_ahead: bool = False
    keep: bool = False
    intra_node: bool = False
    stacked: bool = False


def assign_gathers(
    uses: Sequence[Use],
    sizes: Mapping[GatheredParam, int],
    regions: Sequence[int | None],
    forward_end: int,
    options: GatherOptions,
    scans: Mapping[int, int],
    repeats: bool = False,
) -> tuple[list[Gather], dict[int, dict[GatheredParam, Gather]]]:
    """Decides which gather serves each use.

    Args:
      uses: The uses, in the order of steps.
      sizes: Bytes of each parameter, whole.
      regions: For each step the number of the `jax.checkpoint` in which it stands.
      forward_end: The number of the last step of the forward pass.
      options: How far ahead, and in which chunks.
      scans: Numbers of the scans that gather in their bodies -> the number of the step that first reads a result.
      repeats: Whether the steps are the body of a scan: gathers may run ahead in the iteration before.

    Returns:
      The gathers in order, and for each step number and parameter the gather that serves it.
    """
    limit = options.chunk_bytes or 0
    small = {u for u in sizes if sizes[u] < limit}
    persists = {u for u in sizes if sizes[u] <= options.persist_bytes}
    by_use = _chunks([(i, u) for i, u in uses if u in small], sizes, forward_end, options)
    by_region: dict[tuple[int, GatheredParam], Gather] = {}
    for several in _between_scans(uses, scans, forward_end if options.prefetch == 0 else None):
        large = [(i, u, _PERSISTS if u in persists else regions[i]) for i, u in several if u not in small]
        by_use |= _large_gathers(large, forward_end, by_region)
    gathers = list(dict.fromkeys(by_use[use] for use in uses))
    large_uses = list(dict.fromkeys(i for i, u in uses if u not in small))
    _tie(gathers, options, scans, large_uses if repeats else [])
    served: dict[int, dict[GatheredParam, Gather]] = {}
    for i, u in uses:
        served.setdefault(i, {})[u] = by_use[i, u]
    return gathers, served


def _chunks(
    uses: Sequence[Use], sizes: Mapping[GatheredParam, int], forward_end: int, options: GatherOptions
) -> dict[Use, Gather]:
    """Gathers of small parameters: a chunk is full at `chunk_bytes`, and holds parameters of one dtype."""
    limit = options.chunk_bytes or 0
    by_param: dict[tuple[GatheredParam, str], Gather] = {}
    unfilled: dict[tuple[str, jnp.dtype], Gather] = {}
    by_use: dict[Use, Gather] = {}
    for i, u in uses:
        in_backward = i > forward_end
        stay = "both" if sizes[u] <= options.persist_bytes else "backward" if in_backward else "forward"
        if (u, stay) not in by_param:
            chunk = unfilled.get((stay, u.dtype))
            if chunk is None or not limit or sum(sizes[x] for x in chunk.params) + sizes[u] > limit:
                chunk = unfilled[stay, u.dtype] = Gather([], i, False, in_backward)
            chunk.params.append(u)
            by_param[u, stay] = chunk
        by_use[i, u] = by_param[u, stay]
    return by_use


def _between_scans(uses: Sequence[Use], scans: Mapping[int, int], end: int | None) -> Iterator[list[Use]]:
    """The uses, cut where no gathered parameter may be kept: at each scan that gathers in its body, and at `end`.

    `end` is the end of the forward pass if there is no prefetch: else the parameter of its last use would be whole
    beside what the loss makes of it.
    """
    several: list[Use] = []
    last = 0
    for i, u in uses:
        if any(last < scan < i for scan in scans) or (end is not None and last <= end < i):
            yield several
            several = []
        several.append((i, u))
        last = i
    yield several


def _large_gathers(
    uses: Sequence[tuple[int, GatheredParam, int | None]],
    forward_end: int,
    by_region: dict[tuple[int, GatheredParam], Gather],
) -> dict[Use, Gather]:
    """Gathers of large parameters, each alone: one serves all uses in a `jax.checkpoint`, and uses in a row.

    Each use comes with the number of its `jax.checkpoint`, or `_PERSISTS`. `by_region` holds the gathers of each of
    these, and takes up new ones.
    """
    by_use: dict[Use, Gather] = {}
    recent: Gather | None = None
    for i, u, region in uses:
        gather = None if region is None else by_region.get((region, u))
        if gather is None and recent is not None and recent.params[0] == u:
            gather = recent
        if gather is None:
            gather = Gather([u], i, True, i > forward_end, keep=region is not None)
            if region is not None:
                by_region[region, u] = gather
        by_use[i, u] = recent = gather
    return by_use


def _tie(gathers: Sequence[Gather], options: GatherOptions, scans: Mapping[int, int], iteration: Sequence[int]) -> None:
    """Each gather waits for the data of the use `prefetch` large gathers before it, and for scans before it.

    `iteration` holds the steps of a scan's body that use large parameters. Gathers before which none stands run in
    the iteration before: they wait for the data of its last uses.
    """
    prefetch = options.prefetch
    large = [g for g in gathers if g.large]
    before = 0
    for gather in gathers:
        if prefetch == 0:
            gather.wait_for_step = gather.step
        elif before:
            gather.wait_for_step = large[max(before - prefetch, 0)].step
        elif iteration:
            gather.ahead = True
            gather.wait_for_step = iteration[max(len(iteration) - prefetch, 0)]
        crossed = {scan: read for scan, read in scans.items() if (gather.wait_for_step or 0) <= scan < gather.step}
        if gather.large and crossed and not gather.ahead:
            gather.wait_for_step = min(max(crossed.values()), gather.step)
            gather.behind_scan = max(crossed) if prefetch else None
        if gather.large and options.several_hops and prefetch:
            _tie_outer_hops(gather, [g.step for g in large], before - prefetch, prefetch, iteration)
        before += gather.large


def _tie_outer_hops(gather: Gather, steps: Sequence[int], at: int, prefetch: int, iteration: Sequence[int]) -> None:
    """Hops across nodes wait for the data of one use before that for which the last hop waits.

    Args:
      gather: The gather, whose last hop is tied already.
      steps: The first uses of all large gathers.
      at: The index in `steps` of the step for which the last hop waits; below 0 if there are none so far before.
      prefetch: As in the options.
      iteration: As for `_tie`.
    """
    if gather.ahead:
        gather.outer_hops_at = iteration[max(len(iteration) - prefetch - 1, 0)]
        gather.outer_hops_ahead = True
    elif at > 0:
        gather.outer_hops_at = steps[at - 1]
    elif gather.wait_for_step is not None:
        gather.outer_hops_ahead = bool(iteration)
        gather.outer_hops_at = iteration[-1] if iteration else START
    if gather.outer_hops_at == gather.wait_for_step and gather.outer_hops_ahead == gather.ahead:
        gather.outer_hops_at, gather.outer_hops_ahead = None, False
