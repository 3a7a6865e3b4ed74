"""Which results of a traced program may differ between devices: a walk over its equations.

The region that runs a user's loss has no type check, so whether an integer in `aux` depends on the device is read
from the program instead: a value that is computed from this device's examples, its index or its folded key does,
unless it has been reduced over all devices since.
"""

from collections.abc import Sequence

from jax.extend.core import JaxprEqn, Var

from . import primitives as p
from .calls import inner_programs, while_parts
from .compat import Literal, open_program, scan_parts
from .trace import AnyJaxpr

#: Collectives whose result is the same on all devices.
_REPLICATING = {p.PSUM, p.PMAX, p.PMIN, p.ALL_GATHER, p.PSUM_INVARIANT, p.ALL_GATHER_INVARIANT}


def depends(jaxpr: AnyJaxpr, inputs: Sequence[bool], axes: Sequence[str]) -> list[bool]:
    """Marks the results that depend on a marked input, or on the device's index along `axes`.

    Args:
      jaxpr: An open program.
      inputs: For each of its inputs, whether it differs between devices.
      axes: All axes over which devices may differ.

    Returns:
      One mark per result.
    """
    marks: dict[Var, bool] = dict.fromkeys(jaxpr.constvars, False)
    marks.update(zip(jaxpr.invars, inputs, strict=True))
    read = lambda atom: not isinstance(atom, Literal) and marks[atom]
    for eqn in jaxpr.eqns:
        outs = _equation(eqn, [read(v) for v in eqn.invars], axes)
        marks.update(zip(eqn.outvars, outs, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _equation(eqn: JaxprEqn, ins: list[bool], axes: Sequence[str]) -> list[bool]:
    name, count = eqn.primitive.name, len(eqn.outvars)
    if name == p.AXIS_INDEX:
        return [not set(axes).isdisjoint(p.collective_axes(eqn))] * count
    grouped = eqn.params.get("axis_index_groups") is not None
    if name in _REPLICATING and not grouped and set(axes) <= set(p.collective_axes(eqn)):
        return [False] * count
    rule = {p.COND: _cond, p.SCAN: _scan, p.WHILE: _while}.get(name)
    if rule is not None:
        return rule(eqn, ins, axes)
    for inner in inner_programs(eqn):  # a call, or what binds its operands to its program's inputs as a call does
        if len(inner.invars) == len(ins) and len(inner.outvars) == count:
            return depends(inner, ins, axes)
    return [any(ins)] * count


def _cond(eqn: JaxprEqn, ins: list[bool], axes: Sequence[str]) -> list[bool]:
    branches = [open_program(b)[0] for b in eqn.params["branches"]]
    outs = [depends(b, ins[1:], axes) for b in branches]
    return [ins[0] or any(column) for column in zip(*outs, strict=True)]


def _scan(eqn: JaxprEqn, ins: list[bool], axes: Sequence[str]) -> list[bool]:
    inner, _ = open_program(eqn.params["jaxpr"])
    consts, carry, xs = scan_parts(eqn, ins)
    while True:
        outs = depends(inner, [*consts, *carry, *xs], axes)
        merged = [a or b for a, b in zip(carry, outs[: len(carry)], strict=True)]
        if merged == list(carry):
            return outs
        carry = merged


def _while(eqn: JaxprEqn, ins: list[bool], axes: Sequence[str]) -> list[bool]:
    test, body = open_program(eqn.params["cond_jaxpr"])[0], open_program(eqn.params["body_jaxpr"])[0]
    for_test, for_body, carry = while_parts(eqn, ins)
    while True:
        goes_on = depends(test, [*for_test, *carry], axes)[0]
        outs = depends(body, [*for_body, *carry], axes)
        merged = [a or b or goes_on for a, b in zip(carry, outs, strict=True)]
        if merged == list(carry):
            return merged
        carry = merged
