"""Where gradients are complete: each term of a gradient is reduced where it is computed, not at the end.

A gradient that leaves the program is followed back through sums and widening casts to its terms. Each term
becomes a reduce-scatter right after the step that computes it, and shares are added instead of whole arrays. A
term that a `scan` stacks, for a leaf that is cut inside each layer, is reduced in the scan's body.

Example: `w` of shape (4096, 1024) is used at two steps of the loss, so autodiff computes `g = a + b`, all of
shape (4096, 1024). `a` and `b` are the terms of `g`. Over 8 devices each becomes a share of shape (512, 1024) at
once, the step that adds them is skipped, and what is added is shares.
"""

import dataclasses
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from .._dtypes import promote
from ..jaxpr.calls import nbytes
from ..jaxpr.compat import scan_parts
from ..jaxpr.flat import Atom, Flat, Known, Step, Var
from ..jaxpr.primitives import ADD, ADD_ANY, BROADCAST, CONVERT, SCAN
from ..sharding.layout import Layout

_SUMS = {ADD_ANY, ADD}


@dataclasses.dataclass(eq=False)
class GradientTerms:
    """The terms of every gradient of one flat program.

    Attributes:
      terms: Variable -> the results (by position) of which it is a term.
      scanned: Scan step -> {number of a stacked result: position of the gradient}.
      skipped: Steps that only add or cast terms; shares are added instead.
      count: Position -> the number of its terms that a step computes.
      constants: Terms that no step computes: (position, array). A gradient without any term is zero.
    """

    terms: dict[Var, list[int]]
    scanned: dict[Step, dict[int, int]]
    skipped: set[Step]
    count: dict[int, int]
    constants: list[tuple[int, Any]]


def find_terms(flat: Flat, layouts: Mapping[int, Layout], *, sum_first: bool = False) -> GradientTerms:
    """The terms of the results at the positions of `layouts`; with `sum_first` a sum is one term."""
    made_by = {v: step for step in flat.steps for v in step.outs}
    reads = Counter(x for x in [*(x for step in flat.steps for x in step.ins), *flat.outs] if isinstance(x, Var))
    found = GradientTerms({}, {}, set(), dict.fromkeys(layouts, 0), [])
    for position, layout in layouts.items():
        pending = [flat.outs[position]]
        while pending:
            x = pending.pop()
            if isinstance(x, Known):
                if np.any(np.asarray(x.value)):
                    found.constants.append((position, x.value))
                continue
            step = made_by.get(x)
            if step is not None and is_zero(step, made_by):
                continue
            if step is not None and reads[x] == 1 and _only_adds(step, layout, sum_first):
                found.skipped.add(step)
                pending += step.ins
                continue
            found.count[position] += 1
            if step is not None and reads[x] == 1 and layout.lead and _stacks(step, x):
                found.scanned.setdefault(step, {})[step.outs.index(x)] = position
            else:
                found.terms.setdefault(x, []).append(position)
    return found


def _only_adds(step: Step, layout: Layout, sum_first: bool) -> bool:
    """Whether a step adds arrays of the gradient's own shape, which are not to be added first, or widens one."""
    if step.name in _SUMS and not sum_first:
        return all(_shape(x) == layout.shape for x in step.ins)
    return step.name == CONVERT and _widens(step)


def _stacks(step: Step, x: Var) -> bool:
    """Whether a step is a scan, and `x` is one of its stacked results (not of its carry)."""
    if step.name != SCAN or step.eqn is None:
        return False
    _, carry, _ = scan_parts(step.eqn, step.ins)
    return step.outs.index(x) >= len(carry)


def _shape(x: Atom) -> tuple[int, ...]:
    return tuple(x.aval.shape) if isinstance(x, Var) else np.shape(x.value)


def _widens(step: Step) -> bool:
    (x,) = step.ins
    if not isinstance(x, Var):
        return False
    old, new = x.aval.dtype, step.outs[0].aval.dtype
    both = jnp.issubdtype(old, jnp.floating) and jnp.issubdtype(new, jnp.floating)
    return both and promote(old, new) == new


def is_zero(step: Step, made_by: Mapping[Var, Step] | None = None) -> bool:
    """Whether a step makes zeros: the gradient of a parameter that the loss does not use.

    With `made_by` (variable -> its step) zeros that other steps have made count, too.
    """
    if step.name != BROADCAST or len(step.ins) != 1:
        return False
    x = step.ins[0]
    if isinstance(x, Var):
        made = made_by.get(x) if made_by else None
        return made is not None and is_zero(made, made_by)
    return not np.any(np.asarray(x.value))


def zero_results(flat: Flat) -> set[int]:
    """The positions of the results that are zeros: the gradients of parameters that the loss does not change with."""
    made_by = {v: step for step in flat.steps for v in step.outs}
    known = lambda x: made_by[x] if isinstance(x, Var) and x in made_by else None
    return {i for i, x in enumerate(flat.outs) if (step := known(x)) is not None and is_zero(step, made_by)}


def group_gradients(
    flat: Flat, found: GradientTerms, views: Container[Var], limit: int, gather_steps: Sequence[int]
) -> dict[int, list[int]]:
    """Gradients whose terms are summed whole, and then reduced together.

    These are small gradients, up to `limit` bytes, in the order in which they are complete; and, alone, a large one of
    several terms between which nothing large is gathered: the parameter itself stays whole as long as this sum.

    Args:
      flat: The program.
      found: The terms.
      views: The variables that are views of parameters.
      limit: From how many bytes on a gradient is large.
      gather_steps: The numbers of the steps at which large parameters are gathered.

    Returns:
      Position -> all positions of its group.
    """
    begun: dict[int, int] = {}
    complete: dict[int, int] = {}
    for number, step in enumerate(flat.steps):
        for v in step.outs:
            for position in found.terms.get(v, ()):
                begun.setdefault(position, number)
                complete[position] = number
    alone = {p for scanned in found.scanned.values() for p in scanned.values()}
    alone |= {p for v, positions in found.terms.items() if v in views for p in positions}
    groups: dict[int, list[int]] = {}
    unfilled: dict[jnp.dtype, tuple[list[int], int]] = {}
    for position in sorted(complete, key=complete.__getitem__):
        aval = flat.outs[position].aval  # type: ignore[union-attr]
        dtype, size = aval.dtype, nbytes(aval.shape, aval.dtype)
        if position in alone:
            continue
        if size >= limit:
            between = (begun[position] < step <= complete[position] for step in gather_steps)
            if found.count[position] > 1 and not any(between):
                groups[position] = [position]
            continue
        members, total = unfilled.get(dtype, ([], 0))
        if not members or total + size > limit:
            members, total = [], 0
        members.append(position)
        unfilled[dtype] = (members, total + size)
        groups[position] = members
    return groups
