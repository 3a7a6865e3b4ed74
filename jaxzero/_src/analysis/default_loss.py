"""The loss of a plan without an observed one: a chain of layers that uses every parameter once.

Each parameter is used in the forward pass, in tree order, and again in the backward pass, for the gradient of the
layer before it. The first parameter is not used there, as in any network whose first layer takes data. Stacked leaves
are scanned.
"""

import functools
import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from .._types import DType, PyTree
from ..sharding.leaves import Leaves


def loss(leaves: Leaves) -> Callable[[PyTree, jax.Array], jax.Array]:
    """`loss(params, x)` for parameters of these shapes and any floating `x`; meant for tracing only."""

    def chain(params: PyTree, x: jax.Array) -> jax.Array:
        pairs = zip(leaves.leaves, jax.tree.leaves(params), strict=True)
        return _through(jnp.mean(x), [(leaf.layers, value) for leaf, value in pairs if leaf.trainable])

    return chain


def batch(devices: int) -> jax.ShapeDtypeStruct:
    """Abstract examples for the loss: one for each device and micro-step."""
    return jax.ShapeDtypeStruct((devices,), jnp.float32)


def _through(h: jax.Array, used: Sequence[tuple[int, jax.Array]]) -> jax.Array:
    """`h` through one layer after the other; neighbours with equal numbers of layers share a scan."""
    start = h.dtype
    for (lead, _), group in itertools.groupby(used, lambda pair: (pair[0], pair[0] and pair[1].shape[0])):
        values = [value for _, value in group]
        if lead:
            h, _ = lax.scan(functools.partial(_layer, lead), h, values)
        for x in () if lead else values:
            h = _as(h, x.dtype)
            # Few equations, written in `lax`: there may be hundreds of parameters to trace.
            h = lax.add(h, lax.reduce_sum(lax.mul(x, lax.broadcast(h, x.shape)), range(x.ndim)))
    return _as(h, start)


def _layer(lead: int, h: jax.Array, values: Sequence[jax.Array]) -> tuple[jax.Array, None]:
    return _through(h, [(lead - 1, x) for x in values]), None


def _as(h: jax.Array, dtype: DType) -> jax.Array:
    real = jnp.iscomplexobj(h) and not jnp.issubdtype(dtype, jnp.complexfloating)
    return lax.convert_element_type(lax.real(h) if real else h, dtype)
