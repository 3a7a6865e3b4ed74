"""Binding one equation of a traced program on values."""

from collections.abc import Sequence
from typing import Any

from ..sharding.vma import match
from .compat import bind_params

_SHARDINGS = {"sharding", "out_sharding"}


def bind(eqn: Any, ins: Sequence[Any], **changes: Any) -> list[Any]:
    """Runs the equation's primitive on arrays, with some of its parameters changed.

    A primitive bound by hand gets no casts from JAX, so all operands are typed alike first. A sharding
    among its parameters speaks of the mesh outside (the function closed over placed arrays): dropped. Not so
    what a loss asks for by `with_sharding_constraint`, over axes that are the compiler's.
    """
    functions, params = bind_params(eqn)
    if eqn.primitive.name != "sharding_constraint":
        params = {k: None if k in _SHARDINGS else v for k, v in params.items()}
    out = eqn.primitive.bind(*functions, *match(ins), **{**params, **changes})
    return list(out) if eqn.primitive.multiple_results else [out]
