"""Equations that hold inner programs."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

#: Equations that only call an inner program, and the parameter that holds it. The program of a gradient
#: has the custom rules resolved already; what is left of them is the function itself.
CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
}


_REMAT = {"remat2", "checkpoint"}


def inner_programs(eqn: Any) -> list[Any]:
    """The inner programs of an equation, open."""
    out = []
    for value in eqn.params.values():
        for x in value if isinstance(value, (tuple, list)) else (value,):
            if hasattr(x, "eqns"):
                out.append(x)
            elif hasattr(x, "jaxpr") and hasattr(x.jaxpr, "eqns"):
                out.append(x.jaxpr)
    return out


def nbytes(shape: Sequence[int], dtype: Any) -> int:
    """Bytes of an array, of keys too."""
    stored: Any = jax.dtypes.canonicalize_dtype(dtype, allow_extended_dtype=True)
    return int(np.prod(shape, dtype=object)) * stored.itemsize
