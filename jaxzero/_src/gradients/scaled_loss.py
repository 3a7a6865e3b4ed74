"""The scaled loss of narrow floats: loss times scale, gradients divided by it."""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from .._types import ArrayLike, PyTree
from .checks import GradOptions


def scaled(loss_fn: Callable[..., Any], how: GradOptions) -> Callable[..., Any]:
    """The loss times a scale, which is one more argument: the last."""

    @functools.wraps(loss_fn)
    def times_scale(params: PyTree, *arguments: PyTree, **named: PyTree) -> PyTree:
        *batch, scale = arguments
        out = loss_fn(params, *batch, **named)
        value, *aux = out if how.has_aux else (out,)
        times = lambda x: x.astype(jnp.promote_types(x.dtype, scale.dtype)) * scale
        value = (times(value[0]), *value[1:]) if how.weighted else times(value)
        return (value, *aux) if how.has_aux else value

    return times_scale


def with_scale(plain: Callable[..., Any], times_scale: Callable[..., Any], how: GradOptions) -> Callable[..., Any]:
    """`grad_fn(params, *batch, loss_scale=None)`: gradients of the scaled loss, and the loss without the scale."""

    def grad_fn(params: PyTree, /, *batch: PyTree, loss_scale: ArrayLike | None = None, **named: PyTree) -> PyTree:
        if loss_scale is None:
            return plain(params, *batch, **named)
        if np.shape(loss_scale) or not jnp.issubdtype(jnp.result_type(loss_scale), jnp.floating):
            raise ValueError(
                f"value_and_grad: loss_scale has shape {np.shape(loss_scale)} and dtype "
                f"{jnp.result_type(loss_scale)}. Expected a floating scalar. Fix: loss_scale=state.loss_scale of "
                "jaxzero.dynamic_loss_scale."
            )
        scale = jnp.asarray(loss_scale)
        out, grads = times_scale(params, *batch, scale, **named)
        value, *aux = out if how.has_aux else (out,)
        value = value / scale
        return ((value, *aux) if how.has_aux else value), grads

    return grad_fn
