"""The plain Optax wrappers: a stage as one function call, inside `shard_map` or with a mesh."""

from typing import Any

import optax

from .mesh import AxisNames
from .zero import Zero


def zero1(
    inner: optax.GradientTransformation, axis_name: AxisNames = "data", *, mesh: Any = None, **options: Any
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer with its state split over `axis_name` (stage 1: gradients are all-reduced).

    Sends `2M(N-1)/N` bytes of gradients and `M(N-1)/N` of updates per device and step.

    Args:
      inner: Any Optax optimizer; the whole chain.
      axis_name: Mesh axis, or tuple of axes, over which state is split.
      mesh: The mesh, for calls outside `shard_map`; inside, sizes come from the bound axis.
      **options: Those of `Zero`, and `grads=` of `Zero.optimizer`.

    Returns:
      An `optax.GradientTransformationExtraArgs`.

    Raises:
      ValueError: For unknown options and axes.

    Examples:
      >>> import jax, jax.numpy as jnp, optax, jaxzero
      >>> tx = jaxzero.zero1(optax.adam(1e-3), "data", mesh=jax.make_mesh((8,), ("data",)))
      >>> state = tx.init({"w": jnp.ones(16)})
      >>> updates, state = tx.update({"w": jnp.ones(16)}, state)
      >>> updates["w"].shape
      (16,)

    References:
      Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020.
    """
    return _plain(1, inner, axis_name, mesh, options)


def zero2(
    inner: optax.GradientTransformation, axis_name: AxisNames = "data", *, mesh: Any = None, **options: Any
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer with state and gradients split over `axis_name` (stage 2: reduce-scatter).

    Sends `M(N-1)/N` bytes of gradients and `M(N-1)/N` of updates per device and step.

    Args:
      inner: Any Optax optimizer; the whole chain.
      axis_name: Mesh axis, or tuple of axes, over which state is split.
      mesh: The mesh, for calls outside `shard_map`; inside, sizes come from the bound axis.
      **options: Those of `Zero`, and `grads=` of `Zero.optimizer`.

    Returns:
      An `optax.GradientTransformationExtraArgs`.

    Raises:
      ValueError: For unknown options and axes.

    Examples:
      >>> import jax, jax.numpy as jnp, optax, jaxzero
      >>> from jax.sharding import PartitionSpec as P
      >>> mesh = jax.make_mesh((8,), ("data",))
      >>> tx = jaxzero.zero2(optax.sgd(1.0), "data")
      >>> def step(w, x):
      ...     grad = jax.grad(lambda w: jnp.mean(x * w))(jax.lax.pcast(w, "data", to="varying"))
      ...     updates, _ = tx.update(grad, tx.init(w), w)
      ...     return optax.apply_updates(w, updates)
      >>> run = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
      >>> x = jax.device_put(jnp.arange(16.0), jax.NamedSharding(mesh, P("data")))
      >>> float(run(jax.device_put(jnp.float32(9.0), jax.NamedSharding(mesh, P())), x))
      1.5

    References:
      Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020.
    """
    return _plain(2, inner, axis_name, mesh, options)


def zero3(
    inner: optax.GradientTransformation,
    axis_name: AxisNames = "data",
    *,
    mesh: Any = None,
    **options: Any,
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer with state, gradients and parameters split over `axis_name` (stage 3).

    Parameters and updates are shares; whole local gradients are reduce-scattered, shares are taken as they are.

    Args:
      inner: Any Optax optimizer; the whole chain.
      axis_name: Mesh axis, or tuple of axes, over which state is split.
      mesh: The mesh, for calls outside `shard_map`; inside, sizes come from the bound axis.
      **options: Those of `Zero`, and `grads=` of `Zero.optimizer`.

    Returns:
      An `optax.GradientTransformationExtraArgs`.

    Raises:
      ValueError: For unknown options and axes.

    Examples:
      >>> import jax, jax.numpy as jnp, optax, jaxzero
      >>> mesh = jax.make_mesh((8,), ("data",))
      >>> tx = jaxzero.zero3(optax.sgd(1.0), mesh=mesh)
      >>> w = jaxzero.Zero(mesh, stage=3).shard(jnp.ones(16))
      >>> updates, _ = tx.update(w, tx.init(w), w)
      >>> tuple(updates.sharding.spec)
      ('data',)
    """
    return _plain(3, inner, axis_name, mesh, options)


def _plain(stage: int, inner: Any, axis_name: AxisNames, mesh: Any, options: dict[str, Any]) -> Any:
    grads = options.pop("grads", "local")
    return Zero(mesh, stage=stage, shard_axis=axis_name, **options).optimizer(inner, grads=grads)
