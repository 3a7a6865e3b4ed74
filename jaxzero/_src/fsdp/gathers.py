"""Which gather serves which use of a parameter, and what each gather waits for.

A use of a large parameter gathers it; inside one `jax.checkpoint` it is gathered once, and so are two uses
with no other large gather between them. Small parameters travel together, in chunks in the order of first
use, and stay for the forward or the backward pass (`chunk_bytes`) or for both (`persist_bytes`). Each gather
waits for the data of the use `prefetch` large gathers before it: that bounds how much is whole at any time.
None lasts through, or runs ahead of, a scan that gathers in its body: it would be whole beside every layer.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from ..jaxpr.flat import Var
from ..sharding.options import Options


@dataclasses.dataclass(frozen=True)
class GatheredParam:
    """A parameter in the dtype in which it travels."""

    source: Var
    dtype: Any


@dataclasses.dataclass(eq=False)
class Gather:
    """One gather: what it brings, and the step before which it happens.

    Attributes:
      units: What it brings; several for a chunk.
      step: The number of the step.
      large: Whether it counts for `prefetch`.
      tied: The number of the step whose data it waits for; `None`: it is free to run at once.
      late: Whether it belongs to the backward pass.
      keep: Whether what it brings is used again after another large gather.
    """

    units: list[GatheredParam]
    step: int
    large: bool
    late: bool
    wait_for_step: int | None = None
    keep: bool = False


def gathers(
    uses: Sequence[tuple[int, GatheredParam]],
    size: Mapping[GatheredParam, int],
    regions: Sequence[int | None],
    end: int,
    options: Options,
    scans: Mapping[int, int],
) -> tuple[list[Gather], dict[int, dict[GatheredParam, Gather]]]:
    """Decides which gather serves each use.

    Args:
      uses: Step numbers in order, each with what is used.
      size: Bytes of each unit, whole.
      regions: The `jax.checkpoint` that each step stands in.
      end: The last step of the forward pass.
      options: `prefetch`, `persist_bytes`, `chunk_bytes`.
      scans: Step numbers of scans that gather in their bodies -> the step that first reads a result.

    Returns:
      The gathers in order, and by step and unit the gather that serves it.
    """
    slots: list[Gather] = []
    served: dict[int, dict[GatheredParam, Gather]] = {}
    limit = options.chunk_bytes or 0
    small = {u for u in size if size[u] <= options.persist_bytes or size[u] < limit}

    def span(i: int, u: GatheredParam) -> Any:
        """For how long a small parameter stays."""
        return "always" if size[u] <= options.persist_bytes else i > end

    chunks: dict[Any, list[GatheredParam]] = {}
    member: dict[Any, list[GatheredParam]] = {}
    for i, u in uses:
        key = (u, span(i, u))
        if u not in small or key in member:
            continue
        kind = (span(i, u), u.dtype)
        chunk = chunks.get(kind)
        if chunk is None or not limit or sum(size[x] for x in chunk) + size[u] > limit:
            chunk = chunks[kind] = []
        chunk.append(u)
        member[key] = chunk
    there: dict[Any, Gather] = {}
    recent: Gather | None = None
    last = 0
    for i, u in uses:
        # With no prefetch nothing lasts from the forward into the backward pass either: what the loss makes of the
        # parameter's last use would be beside it.
        if any(last < scan < i for scan in scans) or (options.prefetch == 0 and last <= end < i):
            recent = None
        last = i
        region = regions[i]
        if u in small:
            units = member[u, span(i, u)]
            slot = there.get(id(units))
            if slot is None:
                slot = there[id(units)] = Gather(units, i, False, i > end)
                slots.append(slot)
        else:
            slot = there.get((region, u)) if region is not None else None
            if slot is None and recent is not None and recent.units[0] == u:
                slot = recent
            if slot is None:
                slot = Gather([u], i, True, i > end, keep=region is not None)
                slots.append(slot)
                if region is not None:
                    there[region, u] = slot
            recent = slot
        served.setdefault(i, {})[u] = slot
    _tie(slots, options.prefetch, scans)
    return slots, served


def _tie(slots: list[Gather], prefetch: int, scans: Mapping[int, int]) -> None:
    """Each gather waits for the data of the use `prefetch` large gathers before it, and for scans before it."""
    large = [s for s in slots if s.large]
    before = 0
    for slot in slots:
        if prefetch == 0:
            slot.wait_for_step = slot.step
        elif before:
            slot.wait_for_step = large[max(before - prefetch, 0)].step
        crossed = [read for scan, read in scans.items() if (slot.wait_for_step or 0) <= scan < slot.step]
        if slot.large and crossed:
            slot.wait_for_step = min(max(crossed), slot.step)
        before += slot.large
