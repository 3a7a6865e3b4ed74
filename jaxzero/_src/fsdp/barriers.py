"""Barriers: what reads a result of one comes after all of its operands.

A barrier is `lax.optimization_barrier`: its results depend on all of its operands, so the compiler cannot move what
reads a result before what makes an operand. Every result of a barrier is used: else the compiler drops it.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import jax
from jax import lax

from .._positions import replace_at
from ..sharding.leaves import is_key

Array = jax.Array
T = TypeVar("T")


def barrier(data: Sequence[Any], later: T) -> tuple[list[Any], T]:
    """`data` and `later`, from one barrier; values of `data` that cannot enter it come back as they are."""
    held = [i for i, x in enumerate(data) if can_wait(x)]
    done, later = lax.optimization_barrier(([data[i] for i in held], later))
    return replace_at(data, held, done), later


def together(shares: Sequence[Array], data: Sequence[Array]) -> tuple[list[Array], list[Array]]:
    """Shares that wait for data: else the compiler gathers them once, for all microbatches, before the loop."""
    values, _ = barrier([*shares, *data], ())
    return values[: len(shares)], values[len(shares) :]


def can_wait(x: Any) -> bool:
    """Whether a value may enter a barrier."""
    return isinstance(x, Array) and x.size > 0 and not is_key(x.dtype) and x.dtype != jax.dtypes.float0
