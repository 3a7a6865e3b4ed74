"""Where gradients are complete: each term of a gradient is reduced where it is born, not at the end.

A gradient that leaves the program is followed back through sums and widening casts to its terms. Each
term becomes a reduce-scatter right after the step that computes it, and shares are added instead of whole
arrays. A term that a `scan` stacks, for a leaf that is cut inside each layer, is reduced in the scan's body.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..jaxpr.compat import scan_parts
from ..jaxpr.flat import Atom, Flat, Known, Step, Var
from ..sharding.layout import Layout

_SUMS = {"add_any", "add"}


@dataclasses.dataclass(eq=False)
class GradientTerms:
    """The terms of every gradient of one flat program.

    Attributes:
      terms: Variable -> the results (by position) that it is a term of.
      scanned: Scan step -> {number of a stacked result: position of the gradient}.
      skipped: Steps that only added or cast terms; shares are added instead.
      count: Position -> how many terms there are that a step computes.
      constants: Terms that no step computes: (position, array); a gradient without any term is zero.
    """

    terms: dict[Var, list[int]]
    scanned: dict[Step, dict[int, int]]
    skipped: set[Step]
    count: dict[int, int]
    constants: list[tuple[int, Any]]


def find(flat: Flat, layouts: Mapping[int, Layout]) -> GradientTerms:
    """Finds the terms of the results at the positions of `layouts`."""
    makers = {v: step for step in flat.steps for v in step.outs}
    users: dict[Var, int] = {}
    for x in [*(x for step in flat.steps for x in step.ins), *flat.outs]:
        if isinstance(x, Var):
            users[x] = users.get(x, 0) + 1
    sinks = GradientTerms({}, {}, set(), dict.fromkeys(layouts, 0), [])
    for position, layout in layouts.items():
        _follow(flat.outs[position], position, layout, makers, users, sinks)
    return sinks


def _follow(atom: Atom, position: int, layout: Layout, makers: Any, users: Any, sinks: GradientTerms) -> None:
    pending = [atom]
    while pending:
        x = pending.pop()
        if isinstance(x, Known):
            if np.any(np.asarray(x.value)):
                sinks.constants.append((position, x.value))
            continue
        step = makers.get(x)
        if step is not None and is_zero(step, makers):
            continue
        if step is not None and users[x] == 1:
            if step.name in _SUMS and all(_shape(i) == layout.shape for i in step.ins):
                sinks.skipped.add(step)
                pending += step.ins
                continue
            if step.name == "convert_element_type" and _widens(step):
                sinks.skipped.add(step)
                pending += step.ins
                continue
            if step.name == "scan" and layout.lead and step.outs.index(x) >= _carries(step):
                sinks.scanned.setdefault(step, {})[step.outs.index(x)] = position
                sinks.count[position] += 1
                continue
        sinks.terms.setdefault(x, []).append(position)
        sinks.count[position] += 1


def _shape(x: Atom) -> tuple[int, ...]:
    return tuple(x.aval.shape) if isinstance(x, Var) else np.shape(x.value)


def _carries(step: Step) -> int:
    _, carry, _ = scan_parts(step.eqn, step.ins)
    return len(carry)


def _widens(step: Step) -> bool:
    (x,) = step.ins
    if not isinstance(x, Var):
        return False
    old, new = x.aval.dtype, step.outs[0].aval.dtype
    both = jnp.issubdtype(old, jnp.floating) and jnp.issubdtype(new, jnp.floating)
    return both and jnp.promote_types(old, new) == new


def is_zero(step: Step, makers: Mapping[Var, Step] | None = None) -> bool:
    """Whether a step makes zeros: the gradient of a parameter that the loss does not use."""
    if step.name != "broadcast_in_dim" or len(step.ins) != 1:
        return False
    x = step.ins[0]
    if isinstance(x, Var):
        made = makers.get(x) if makers else None
        return made is not None and is_zero(made, makers)
    return not np.any(np.asarray(x.value))
