"""Binding one equation of a traced program on values."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
from jax.extend.core import JaxprEqn

from .._types import ArrayLike
from ..sharding.vma import match
from .compat import bind_params
from .primitives import SHARDING_CONSTRAINT

_SHARDINGS = {"sharding", "out_sharding"}


def bind(eqn: JaxprEqn, ins: Sequence[ArrayLike], **changes: Any) -> list[jax.Array]:
    """The results of an equation's primitive on arrays, with some of its parameters changed.

    JAX inserts no casts where a primitive is bound by hand, so all operands are typed alike first. A sharding among
    the parameters is one over the mesh outside (the function closed over placed arrays), so it is dropped; not so the
    one of `with_sharding_constraint`, which a loss asks for over axes that are the compiler's. The result
    has the equation's name stack (`jax.named_scope`), so profiles show the regions that a loss names.
    """
    functions, params = bind_params(eqn)
    if eqn.primitive.name != SHARDING_CONSTRAINT:
        params = {k: None if k in _SHARDINGS else v for k, v in params.items()}
    with _scope(eqn):
        out = eqn.primitive.bind(*functions, *match(ins), **{**params, **changes})
    return list(out) if eqn.primitive.multiple_results else [out]


def _scope(eqn: JaxprEqn) -> AbstractContextManager[Any]:
    name = str(eqn.source_info.name_stack)
    return jax.named_scope(name) if name else nullcontext()
