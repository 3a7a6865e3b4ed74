"""Options that are numbers: what NumPy and JAX hold as scalars is read as Python's own."""

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
