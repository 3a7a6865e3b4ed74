"""Which arguments of a function are given whole to every device, by position or by keyword."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclasses.dataclass(frozen=True)
class Whole:
    """The option `whole_argnums`, for one function.

    Attributes:
      positions: Positions of arguments, with the parameters as 0.
      names: The function's names of its arguments, by position, as far as they are known.
    """

    positions: tuple[int, ...]
    names: tuple[str, ...] = ()

    def holds(self, argument: int | str) -> bool:
        """Whether an argument, given by position or by keyword, is whole."""
        return self.position(argument) in self.positions

    def position(self, argument: int | str) -> int | None:
        """The position of an argument; `None` for a keyword that has none."""
        if isinstance(argument, int):
            return argument
        return self.names.index(argument) if argument in self.names else None


def whole_arguments(fn: Callable[..., Any], positions: tuple[int, ...]) -> Whole:
    """`whole_argnums` for `fn`, with the names of its arguments, as `jax.jit` reads `static_argnums`.

    Examples:
      >>> whole_arguments(lambda params, x, table: 0, (2,)).holds("table")
      True
    """
    try:
        given = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):  # some built-in callables have no signature
        given = []
    return Whole(positions, tuple(p.name for p in given if p.kind in _BY_POSITION))
