"""Parameters that a step leaves as they are, since their update is zero in the traced program.

`optax.set_to_zero`, `optax.transforms.freeze` and `selective_transform` make zeros, and `apply_updates` adds them.
For `w` of shape (1024, 1024), frozen, the traced step ends with

    z = broadcast_in_dim 0.0        the update
    v = add w z                     the new parameter

Its result `v` is replaced by the input `w`. So no new `w` is gathered, and where nothing else reads the gradient of
`w`, it is not reduced.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn

from ..jaxpr import primitives as p
from ..jaxpr.compat import Literal, aval, literal_value
from ..jaxpr.flat import inlined
from ..jaxpr.needed import needed, needed_equations, variables
from ..jaxpr.trace import JaxprPart, Program

#: Of zeros they make zeros.
_KEEP_ZEROS = {p.BROADCAST, p.CONVERT, p.RESHAPE, p.SQUEEZE, p.TRANSPOSE, p.COPY, p.NEG}
_SUMS = {p.ADD, p.ADD_ANY, p.SUB}


def without_zero_updates(
    program: Program, results: Sequence[int], params: Sequence[int], passing: Mapping[int, int]
) -> tuple[Program, set[int]]:
    """Replaces new parameters that are equal to the old ones, and results that nobody reads.

    Args:
      program: The traced step.
      results: The positions of new parameters among its results.
      params: The positions of the same parameters among its inputs.
      passing: The positions of results that are dropped (their leaves pass through) -> those of inputs in their place.

    Returns:
      The program without the equations that are no longer needed, and the positions of the inputs that it reads.
    """
    jaxpr = program.jaxpr
    every = set(range(len(jaxpr.invars)))
    eqns, outs, _ = inlined(jaxpr, program.consts, remat=True)
    if any(eqn.effects for eqn in eqns):
        return program, every
    same = _copies(eqns)
    new = list(jaxpr.outvars)
    for result, place in passing.items():
        new[result] = outs[result] = jaxpr.invars[place]
    for result, param in zip(results, params, strict=True):
        if _copied(same, outs[result]) is jaxpr.invars[param]:
            new[result] = outs[result] = jaxpr.invars[param]
    made_by = {v: eqn for eqn in eqns for v in eqn.outvars}
    read = needed(variables(outs), lambda v: variables(made_by[v].invars) if v in made_by else ())
    inputs = {i for i in every if jaxpr.invars[i] in read}
    if new == list(jaxpr.outvars):
        return program, inputs
    left, _ = needed_equations(jaxpr.eqns, new)
    part = JaxprPart(list(jaxpr.constvars), list(jaxpr.invars), new, left)
    return dataclasses.replace(program, jaxpr=part), inputs


def _copies(eqns: Sequence[JaxprEqn]) -> dict[Any, Any]:
    """The results that are equal to another value, with that value; zeros are added to it."""
    zeros: set[Any] = set()
    same: dict[Any, Any] = {}
    is_zero = lambda x: not np.any(literal_value(x)) if isinstance(x, Literal) else x in zeros
    for eqn in eqns:
        name, ins = eqn.primitive.name, eqn.invars
        zero = [is_zero(x) for x in ins]
        scaled = name == p.MUL and any(zero[i] and _is_finite(ins[1 - i]) for i in range(2))
        if scaled or (name in _KEEP_ZEROS and len(ins) == 1 and zero[0]):
            zeros.update(eqn.outvars)
        elif name in _SUMS and any(zero):
            x = ins[0] if zero[1] else ins[1]
            if aval(x).shape == aval(eqn.outvars[0]).shape and (zero[1] or name != p.SUB):
                same[eqn.outvars[0]] = x
        elif name == p.CONVERT and aval(ins[0]).dtype == aval(eqn.outvars[0]).dtype:
            same[eqn.outvars[0]] = ins[0]
    return same


def _is_finite(x: Any) -> bool:
    """Whether a value is a number that the program spells out; zero times any other may be NaN."""
    return isinstance(x, Literal) and bool(np.all(np.isfinite(literal_value(x))))


def _copied(same: Mapping[Any, Any], x: Any) -> Any:
    """The value to which `x` is equal, through all copies."""
    while not isinstance(x, Literal) and x in same:
        x = same[x]
    return x
