"""Dynamic loss scaling: float16 gradients that neither vanish nor overflow.

The loss is multiplied by a scale before it is differentiated, and the gradient divided by it before the optimizer
sees it. The scale lives in the optimizer's state: it grows while gradients stay finite, and where one does not, the
whole step is left out and the scale shrinks.
"""

from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax

from .._dtypes import promote
from .._text import path_text
from .._types import ArrayLike, PyTree
from . import checks
from .trace import accepted
from .wrapper import ShardedOptimizer

#: The smallest and the largest scale that float32 holds.
_LEAST, _MOST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


class DynamicLossScaleState(NamedTuple):
    """State of `dynamic_loss_scale`; all counters are the same on every device.

    Attributes:
      loss_scale: What the next loss is to be multiplied by, float32.
      good_steps: Steps with finite gradients since the scale last changed, int32.
      skipped_steps: Steps left out so far, int32.
      inner_state: The state of the inner optimizer; a skipped step leaves it as it was.
    """

    loss_scale: jax.Array
    good_steps: jax.Array
    skipped_steps: jax.Array
    inner_state: PyTree


jax.export.register_namedtuple_serialization(DynamicLossScaleState, serialized_name="jaxzero.DynamicLossScaleState")


def dynamic_loss_scale(
    inner: optax.GradientTransformation,
    *,
    initial_scale: float = 2.0**15,
    growth_interval: int = 2000,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    min_scale: float = 1.0,
) -> optax.GradientTransformationExtraArgs:
    """Divides gradients by the loss scale in the state, skips steps that are not finite, and adapts the scale.

    Scale the loss with the same number: `grad_fn(params, batch, loss_scale=state.loss_scale)` of
    `zero.value_and_grad` does it and returns the true loss; elsewhere multiply the loss by hand. Gradients are
    divided in float32 by the scale that made them, so norms and clipping inside `inner` see the true gradient; the new
    scale is for the next step.

    If any element of any gradient is infinite or NaN, nothing moves: updates are zero, the inner state stays, so
    schedules do not advance, and the scale is multiplied by `backoff_factor`. The gradients are those of the whole
    program, so the decision is one for all devices. After `growth_interval` finite steps in a row the scale is
    multiplied by `growth_factor`.

    It is plain Optax. With float16 parameters keep master weights, in either order:
    `zero.optimizer(jaxzero.dynamic_loss_scale(jaxzero.master_weights(optax.chain(clip, adamw))))`. Inside
    `zero.optimizer` the finite check sends one number per device.

    Args:
      inner: Any Optax optimizer.
      initial_scale: The first scale.
      growth_interval: Finite steps in a row before the scale grows.
      growth_factor: By what it grows, above 1.
      backoff_factor: By what it shrinks after a skipped step, between 0 and 1.
      min_scale: It never shrinks below this.

    Returns:
      An `optax.GradientTransformationExtraArgs` with a `DynamicLossScaleState`. Updates of float16 parameters are
      float32 unless `inner` says otherwise.

    Raises:
      ValueError: For a number out of range, or an optimizer wrapped by jaxzero already.

    Examples:
      >>> import jax, jax.numpy as jnp, optax, jaxzero
      >>> zero = jaxzero.Zero(jax.make_mesh((8,), ("data",)))
      >>> tx = zero.optimizer(jaxzero.dynamic_loss_scale(jaxzero.master_weights(optax.sgd(0.25))))
      >>> params = jnp.ones(16, jnp.float16)
      >>> state = tx.init(params)
      >>> loss_fn = lambda p, x: jnp.mean(x * p.sum())
      >>> grad_fn = zero.value_and_grad(loss_fn)
      >>> batch = jnp.full(8, 2.0)
      >>> loss, grads = grad_fn(params, batch, loss_scale=state.loss_scale)
      >>> params, state = zero.apply(tx, grads, state, params)  # 2 x 32768 is too much for float16
      >>> float(loss), float(state.loss_scale), int(state.skipped_steps), float(params[0])
      (32.0, 16384.0, 1, 1.0)
      >>> loss, grads = grad_fn(params, batch, loss_scale=state.loss_scale)
      >>> params, state = zero.apply(tx, grads, state, params)
      >>> int(state.skipped_steps), float(params[0])
      (1, 0.5)

    References:
      Micikevicius et al., "Mixed Precision Training", 2018, section 3.2.
    """
    checks.inner_optimizer(inner, ShardedOptimizer, "dynamic_loss_scale")
    _check(initial_scale, growth_interval, growth_factor, backoff_factor, min_scale)

    def init(params: PyTree) -> DynamicLossScaleState:
        zero = lambda: jnp.zeros((), jnp.int32)  # no array twice: the state may be donated
        return DynamicLossScaleState(jnp.float32(initial_scale), zero(), zero(), inner.init(params))

    def update(
        grads: PyTree, state: DynamicLossScaleState, params: PyTree = None, **extra: Any
    ) -> tuple[PyTree, DynamicLossScaleState]:
        scale, finite = state.loss_scale, all_finite(grads)
        updates, inner_state = inner.update(
            unscaled(grads, scale, finite), state.inner_state, params, **accepted(inner, extra)
        )
        _check_structure(state.inner_state, inner_state)
        updates = jax.tree.map(lambda u: jnp.where(finite, u, jnp.zeros_like(u)), updates)
        inner_state = jax.tree.map(lambda new, old: _choose(finite, new, old), inner_state, state.inner_state)
        good = jnp.where(finite, state.good_steps + 1, 0)
        grown = scale * growth_factor
        grows = finite & (good >= growth_interval) & jnp.isfinite(grown)
        shrunk = jnp.maximum(scale * backoff_factor, min_scale)
        return updates, DynamicLossScaleState(
            jnp.where(grows, grown, jnp.where(finite, scale, shrunk)),
            jnp.where(grows, 0, good),
            state.skipped_steps + jnp.where(finite, 0, 1),
            inner_state,
        )

    return optax.GradientTransformationExtraArgs(init, update)


def all_finite(grads: PyTree) -> jax.Array:
    """Whether no element is infinite or NaN."""
    found = [jnp.all(jnp.isfinite(x)).reshape(1) for x in jax.tree.leaves(grads) if _floating(x)]
    return jnp.all(jax.lax.concatenate([jnp.ones(1, bool), *found], 0))  # in one: `jnp.stack` makes many of many


def unscaled(grads: PyTree, scale: jax.Array, finite: jax.Array) -> PyTree:
    """The gradients without the scale; zeros where the step is skipped, so that `inner` meets no NaN."""

    def divided(g: jax.Array) -> jax.Array:
        g = g.astype(promote(g.dtype, jnp.float32)) / scale
        return jnp.where(finite, g, jnp.zeros_like(g))

    return jax.tree.map(lambda g: divided(g) if _floating(g) else g, grads)


def _floating(x: ArrayLike) -> bool:
    return bool(jnp.issubdtype(jnp.result_type(x), jnp.inexact))


def _choose(finite: jax.Array, new: ArrayLike, old: ArrayLike) -> jax.Array:
    """The new state or the old, in the dtype of the old: gradients are wider here than `inner` may expect."""
    dtype = jnp.result_type(old)
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return jnp.where(finite, new, old)
    return jnp.where(finite, jnp.asarray(new).astype(dtype), old)


def _check_structure(old: PyTree, new: PyTree) -> None:
    before: Any = jax.tree.structure(old)
    if before != jax.tree.structure(new):
        names = lambda tree: {path_text(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)}
        raise ValueError(
            f"dynamic_loss_scale: the state of inner has other leaves after an update than before. Found "
            f"{sorted(names(new) ^ names(old))[:4]} in one of the two; expected the same in both, or a skipped step "
            "could not leave it as it was. Fix: put what grows (optax.monitor) around it: "
            "optax.chain(jaxzero.dynamic_loss_scale(inner), optax.monitor(...))."
        )


def _check(
    initial_scale: float, growth_interval: int, growth_factor: float, backoff_factor: float, min_scale: float
) -> None:
    number = lambda x: isinstance(x, (int, float, np.number)) and not isinstance(x, bool) and np.isfinite(x)
    ranges = {
        "initial_scale": (initial_scale, lambda x: _LEAST <= x <= _MOST, "a positive number that float32 holds"),
        "growth_interval": (growth_interval, lambda x: x >= 1 and x == int(x), "a positive int"),
        "growth_factor": (growth_factor, lambda x: x > 1, "a number above 1"),
        "backoff_factor": (backoff_factor, lambda x: 0 < x < 1, "a number between 0 and 1"),
        "min_scale": (min_scale, lambda x: _LEAST <= x <= initial_scale, "a positive number, initial_scale at most"),
    }
    for name, (value, fits, expected) in ranges.items():
        if not (number(value) and fits(value)):
            raise ValueError(
                f"dynamic_loss_scale: {name}={value!r}. Expected {expected}. Fix: leave it out for the default."
            )
