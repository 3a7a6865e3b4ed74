"""Equations that hold inner programs: which program it is, and which operands go where."""

from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, jaxprs_in_params
from numpy.typing import DTypeLike

from .compat import open_program
from .primitives import CALLS as CALLS

T = TypeVar("T")


def called_program(eqn: JaxprEqn) -> tuple[Jaxpr, list[jax.Array]] | None:
    """The program that an equation only calls, as (jaxpr, constants); `None` if the equation does more."""
    key = CALLS.get(eqn.primitive.name)
    return None if key is None else open_program(eqn.params[key])


def inner_programs(eqn: JaxprEqn) -> list[Jaxpr]:
    """All inner programs of an equation, open."""
    return list(jaxprs_in_params(eqn.params))


def while_parts(eqn: JaxprEqn, operands: Sequence[T]) -> tuple[list[T], list[T], list[T]]:
    """The operands of a `while` equation as (constants of the test, constants of the body, carry)."""
    first = eqn.params["cond_nconsts"]
    second = first + eqn.params["body_nconsts"]
    return list(operands[:first]), list(operands[first:second]), list(operands[second:])


def scan_options(eqn: JaxprEqn) -> dict[str, Any]:
    """The keyword arguments of `jax.lax.scan` that make a `scan` equation again."""
    return {key: eqn.params[key] for key in ("length", "reverse", "unroll")}


def nbytes(shape: Sequence[int], dtype: DTypeLike) -> int:
    """Bytes of an array, of keys too."""
    stored: Any = jax.dtypes.canonicalize_dtype(dtype, allow_extended_dtype=True)
    return int(np.prod(shape, dtype=object)) * stored.itemsize
