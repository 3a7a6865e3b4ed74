"""A whole training step of abstract arguments, lowered for the devices of a mesh: gradient, update, donation."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from .._types import PyTree
from ..analysis import planned_traffic
from ..sharding.options import param_leaves, resolve_axes
from ..zero import Zero


def lower_step(
    zero: Zero,
    loss: Callable[..., PyTree],
    params: PyTree,
    batch: Sequence[PyTree],
    inner: optax.GradientTransformation,
    accumulate: int = 1,
    whole: Sequence[int] = (),
) -> jax.stages.Lowered:
    """One training step, lowered.

    Args:
      zero: How state is split, with a mesh of devices; one that has observed the loss.
      loss: The loss.
      params: Abstract parameters, whole.
      batch: The rest of its arguments, abstract.
      inner: The optimizer.
      accumulate: Micro-steps.
      whole: Positions of arguments that are no examples, as `whole_argnums`.

    Returns:
      The lowered step: `(params, state, *batch)` to new parameters, new state and loss.
    """
    tx = zero.optimizer(inner)
    grad_fn = zero.value_and_grad(loss, accumulate=accumulate, whole_argnums=tuple(whole))

    def step(params: PyTree, state: PyTree, *batch: PyTree) -> PyTree:
        value, grads = grad_fn(params, *batch)
        return *zero.apply(tx, grads, state, params), value

    stored = stored_params(zero, params)
    over = P((*zero.replica_axes, *zero.shard_axes))
    dealt = lambda i, x: P() if i in whole or not x.shape else over
    placed = [jax.tree.map(lambda x, i=i: _placed(zero, x, dealt(i, x)), b) for i, b in enumerate(batch, 1)]
    return jax.jit(step, donate_argnums=(0, 1)).lower(stored, tx.init(stored), *placed)


def stored_params(zero: Zero, params: PyTree) -> PyTree:
    """Abstract parameters as they are stored between steps, with their shardings."""
    axes, _ = resolve_axes(zero, "compile")
    stored = planned_traffic.stored_params(zero, param_leaves(zero, params, axes.n))
    specs = zero.specs(stored) if zero.stage == 3 else jax.tree.map(lambda x: P(), stored)
    return jax.tree.map(lambda x, spec: _placed(zero, x, spec), stored, specs)


def tokens_of(batch: Sequence[PyTree], whole: Sequence[int] = ()) -> tuple[int, str] | None:
    """How much a batch holds: tokens, if its largest array of integers has two dimensions or more; else examples."""
    found = [x for i, b in enumerate(batch, 1) if i not in whole for x in jax.tree.leaves(b) if x.shape]
    texts = [x for x in found if len(x.shape) > 1 and jnp.issubdtype(x.dtype, jnp.integer)]
    if texts:
        return max(x.shape[0] * x.shape[1] for x in texts), "tokens"
    return (found[0].shape[0], "examples") if found else None


def _placed(zero: Zero, x: jax.ShapeDtypeStruct, spec: P) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(zero.mesh, spec))
