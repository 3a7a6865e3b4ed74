"""Options that are numbers: what NumPy and JAX hold as scalars is read as Python's own."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np


def python_scalar(value: Any) -> Any:
    """A NumPy or JAX scalar as Python's `int`, `float` or `bool`; everything else unchanged.

    Options come from configuration files, `np.prod` and `len(...) // np.int64(8)`. Python's own numbers also compare,
    hash and serialize to JSON in one way.

    Examples:
      >>> python_scalar(np.int64(4)), python_scalar(np.bool_(True)), python_scalar("4"), python_scalar(None)
      (4, True, '4', None)
    """
    scalar = isinstance(value, (np.generic, np.ndarray, jax.Array)) and not isinstance(value, jax.core.Tracer)
    return value.item() if scalar and np.ndim(value) == 0 else value


def is_int(value: Any, least: int) -> bool:
    """Whether it is an `int` of at least `least`; a `bool` is none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def positions(whole_argnums: int | Sequence[int]) -> tuple[int, ...]:
    """The option `whole_argnums` as a tuple of ints; refuses anything else."""
    given = python_scalar(whole_argnums)
    try:
        found = tuple(map(python_scalar, (given,) if isinstance(given, int) else given))
    except TypeError:
        found = (None,)
    if not all(isinstance(i, int) for i in found):
        raise ValueError(
            f"Zero: whole_argnums={whole_argnums!r}. Expected positions of the loss's arguments, an int or a tuple of "
            "ints. Fix: for example whole_argnums=2, or whole_argnums=() for none."
        )
    return found
