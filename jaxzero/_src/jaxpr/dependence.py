"""Which results of a traced program may differ between devices: a walk over its equations.

The region that runs a user's loss has no type check, so whether an integer in `aux` depends on the
device is read from the program instead: what touches this device's examples, its index or its folded
key does, unless it was reduced over all devices since.
"""

from collections.abc import Sequence
from typing import Any

from ..sharding.axes import names
from .compat import Literal, open_program, scan_parts

_REDUCED = {"psum", "pmax", "pmin", "all_gather", "psum_invariant", "all_gather_invariant"}
_CALLS = ("jaxpr", "call_jaxpr", "fun_jaxpr")


def depends(jaxpr: Any, inputs: Sequence[bool], axes: Sequence[str]) -> list[bool]:
    """Marks the results that depend on a marked input, or on the device's index along `axes`.

    Args:
      jaxpr: An open program.
      inputs: For each of its inputs, whether it differs between devices.
      axes: All axes over which devices may differ.

    Returns:
      One mark per result.
    """
    marks: dict[Any, bool] = dict.fromkeys(jaxpr.constvars, False)
    marks.update(zip(jaxpr.invars, inputs, strict=True))
    read = lambda atom: not isinstance(atom, Literal) and marks[atom]
    for eqn in jaxpr.eqns:
        outs = _equation(eqn, [read(v) for v in eqn.invars], axes)
        marks.update(zip(eqn.outvars, outs, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _equation(eqn: Any, ins: list[bool], axes: Sequence[str]) -> list[bool]:
    name, count = eqn.primitive.name, len(eqn.outvars)
    over = eqn.params.get("axes", eqn.params.get("axis_name"))
    if name == "axis_index":
        return [bool(set(names(over)) & set(axes))] * count
    grouped = eqn.params.get("axis_index_groups") is not None
    if name in _REDUCED and not grouped and set(axes) <= set(names(over)):
        return [False] * count
    if name == "cond":
        return _cond(eqn, ins, axes)
    if name == "scan":
        return _scan(eqn, ins, axes)
    if name == "while":
        return _while(eqn, ins, axes)
    for key in _CALLS:
        if key in eqn.params:
            inner, _ = open_program(eqn.params[key])
            if len(inner.invars) == len(ins) and len(inner.outvars) == count:
                return depends(inner, ins, axes)
    return [any(ins)] * count


def _cond(eqn: Any, ins: list[bool], axes: Sequence[str]) -> list[bool]:
    branches = [open_program(b)[0] for b in eqn.params["branches"]]
    outs = [depends(b, ins[1:], axes) for b in branches]
    return [ins[0] or any(column) for column in zip(*outs, strict=True)]


def _scan(eqn: Any, ins: list[bool], axes: Sequence[str]) -> list[bool]:
    inner, _ = open_program(eqn.params["jaxpr"])
    consts, carry, xs = scan_parts(eqn, ins)
    while True:
        outs = depends(inner, [*consts, *carry, *xs], axes)
        merged = [a or b for a, b in zip(carry, outs[: len(carry)], strict=True)]
        if merged == list(carry):
            return outs
        carry = merged


def _while(eqn: Any, ins: list[bool], axes: Sequence[str]) -> list[bool]:
    params = eqn.params
    first, second = params["cond_nconsts"], params["body_nconsts"]
    test, body = open_program(params["cond_jaxpr"])[0], open_program(params["body_jaxpr"])[0]
    for_test, for_body, carry = ins[:first], ins[first : first + second], ins[first + second :]
    while True:
        trip_count = depends(test, [*for_test, *carry], axes)[0]
        outs = depends(body, [*for_body, *carry], axes)
        merged = [a or b or trip_count for a, b in zip(carry, outs, strict=True)]
        if merged == list(carry):
            return merged
        carry = merged
