"""Dead-code elimination: which variables, and which equations, some results need."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

from jax.extend.core import JaxprEqn, Var

from .compat import Literal

V = TypeVar("V", bound=Hashable)


def variables(atoms: Iterable[Var | Literal]) -> list[Var]:
    """The atoms that are no literals."""
    return [x for x in atoms if not isinstance(x, Literal)]


def needed(results: Iterable[V], reads: Callable[[V], Iterable[V]]) -> set[V]:
    """`results` and all variables that they depend on.

    Args:
      results: Variables.
      reads: Of a variable, those that it is computed from; none for an input.

    Returns:
      The variables.

    Examples:
      >>> computed_from = {"c": ["a", "b"], "b": ["a"], "d": ["c"]}
      >>> sorted(needed(["c"], lambda v: computed_from.get(v, [])))
      ['a', 'b', 'c']
    """
    pending, found = list(results), set[V]()
    while pending:
        v = pending.pop()
        if v not in found:
            found.add(v)
            pending += reads(v)
    return found


def needed_equations(eqns: Sequence[JaxprEqn], results: Iterable[Var | Literal]) -> tuple[list[JaxprEqn], set[Var]]:
    """The equations that some results need, in order, and all variables that they and the results read."""
    maker = {v: eqn for eqn in eqns for v in eqn.outvars}
    found = needed(variables(results), lambda v: variables(maker[v].invars) if v in maker else ())
    return [eqn for eqn in eqns if not found.isdisjoint(eqn.outvars)], found
