"""A loss that stands for one nobody has shown yet: a chain of layers that uses every parameter once.

Each parameter is used in the forward pass, in tree order, and again in the backward pass, to reach the layer
before it; of the first one nothing is asked there, as in any network whose first layer sees data. Stacked
leaves are scanned.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..sharding.leaves import Leaves


def loss(leaves: Leaves) -> Callable[..., Any]:
    """`loss(params, x)` over parameters of these shapes and any floating `x`; to be traced, not to be run."""

    def chain(params: Any, x: Any) -> Any:
        pairs = zip(leaves.leaves, jax.tree.leaves(params), strict=True)
        return _through(jnp.mean(x), [(leaf.layers, value) for leaf, value in pairs if leaf.trainable])

    return chain


def batch(devices: int) -> jax.ShapeDtypeStruct:
    """Examples for it: one for each device and micro-step."""
    return jax.ShapeDtypeStruct((devices,), jnp.float32)


def _through(h: Any, used: Sequence[tuple[int, Any]]) -> Any:
    """`h` through one layer after the other; neighbours that are stacked alike share a scan."""
    start = h.dtype
    for (lead, _), group in itertools.groupby(used, lambda pair: (pair[0], pair[0] and pair[1].shape[0])):
        values = [value for _, value in group]
        if lead:
            h, _ = lax.scan(functools.partial(_layer, lead), h, values)
        for x in () if lead else values:
            h = _as(h, x.dtype)
            # In plain `lax`, and few of it: there may be hundreds of these to trace.
            h = lax.add(h, lax.reduce_sum(lax.mul(x, lax.broadcast(h, x.shape)), range(x.ndim)))
    return _as(h, start)


def _layer(lead: int, h: Any, values: Sequence[Any]) -> tuple[Any, None]:
    return _through(h, [(lead - 1, x) for x in values]), None


def _as(h: Any, dtype: Any) -> Any:
    real = jnp.iscomplexobj(h) and not jnp.issubdtype(dtype, jnp.complexfloating)
    return lax.convert_element_type(lax.real(h) if real else h, dtype)
