"""Whether two pieces of traced programs are the same program: keys that are equal only if they are."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..jaxpr.calls import called_program
from ..jaxpr.compat import Literal, open_program


def key(eqns: Sequence[Any], invars: Sequence[Any], outvars: Sequence[Any], consts: Sequence[Any] = ()) -> Any:
    """A hashable key of a program: its equations over numbered variables, with shapes, dtypes and literals.

    Args:
      eqns: The equations.
      invars: The variables that it takes; their order counts.
      outvars: The variables that it gives.
      consts: Constants that it is closed over; equal only if they are the same objects.

    Returns:
      Equal keys mean equal results for equal inputs. Programs that differ in nothing but the order of independent
      equations have different keys.
    """
    numbers: dict[Any, int] = {v: i for i, v in enumerate(invars)}

    def atom(v: Any) -> Any:
        return _literal(v) if isinstance(v, Literal) else numbers[v]

    rows = []
    for eqn in eqns:
        ins = tuple(map(atom, eqn.invars))
        numbers.update({v: len(numbers) + i for i, v in enumerate(eqn.outvars)})
        rows.append((eqn.primitive.name, ins, _params(eqn)))
    avals = tuple((v.aval.shape, str(v.aval.dtype)) for v in invars)
    return avals, tuple(rows), tuple(map(atom, outvars)), tuple(map(id, consts))


def _literal(v: Any) -> Any:
    x = np.asarray(v.val)
    return "literal", str(v.aval.dtype), v.aval.shape, x.tobytes() if x.dtype != object else str(v.val)


def _params(eqn: Any) -> Any:
    called = called_program(eqn)
    if called is not None:  # the name of a function and its rules of differentiation have no part in its results
        jaxpr, consts = called
        return key(jaxpr.eqns, [*jaxpr.constvars, *jaxpr.invars], jaxpr.outvars, consts)
    return tuple((k, _value(v)) for k, v in sorted(eqn.params.items()))


def _value(x: Any) -> Any:
    if hasattr(x, "eqns") or hasattr(getattr(x, "jaxpr", None), "eqns"):
        jaxpr, consts = open_program(x)
        return key(jaxpr.eqns, [*jaxpr.constvars, *jaxpr.invars], jaxpr.outvars, consts)
    if isinstance(x, (tuple, list)):
        return tuple(map(_value, x))
    if isinstance(x, (np.ndarray, np.generic)):
        return str(x.dtype), x.shape, x.tobytes()
    try:
        hash(x)
    except TypeError:
        return id(x)
    return x
