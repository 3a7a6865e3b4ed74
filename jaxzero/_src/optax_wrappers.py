"""The plain Optax wrappers: a stage as one function call, inside `shard_map` or with a mesh."""

from typing import Any

import optax

from ._types import AnyMesh, AxisNames
from .optimizer import reduce_gradients as reducing
from .zero import Zero


def zero1(
    inner: optax.GradientTransformation, axis_name: AxisNames = "data", *, mesh: AnyMesh | None = None, **options: Any
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
    inner: optax.GradientTransformation, axis_name: AxisNames = "data", *, mesh: AnyMesh | None = None, **options: Any
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
    mesh: AnyMesh | None = None,
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


def mics(
    inner: optax.GradientTransformation,
    shard_axis: AxisNames,
    replica_axis: AxisNames,
    *,
    mesh: AnyMesh | None = None,
    **options: Any,
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer with its state split inside groups and repeated across them (MiCS).

    What the stage sends stays inside the group of `p` devices; across the `r` groups goes one all-reduce of the
    share, `2(M/p)(r-1)/r` bytes per device and step. A tuple of shard axes, `("node", "local")`, is gathered in hops.

    Args:
      inner: Any Optax optimizer; the whole chain.
      shard_axis: Mesh axis, or tuple of axes (outer first), over which state is split.
      replica_axis: Mesh axis or axes over which it is repeated.
      mesh: The mesh, for calls outside `shard_map`; inside, sizes come from the bound axes.
      **options: Those of `Zero`, `stage=` (2) among them, and `grads=` of `Zero.optimizer`.

    Returns:
      An `optax.GradientTransformationExtraArgs`.

    Raises:
      ValueError: For unknown options and axes, and for one axis in both places.

    Examples:
      >>> import jax, jax.numpy as jnp, optax, jaxzero
      >>> mesh = jax.make_mesh((2, 4), ("replica", "shard"))
      >>> tx = jaxzero.mics(optax.adam(1e-3), "shard", "replica", mesh=mesh)
      >>> state = tx.init({"w": jnp.ones((16, 2))})
      >>> state[0].mu["w"].addressable_shards[0].data.shape
      (4, 2)

    References:
      Zhang et al., "MiCS: Near-linear Scaling for Training Gigantic Model on Public Cloud", 2022.
    """
    stage = options.pop("stage", 2)
    return _plain(stage, inner, shard_axis, mesh, options | {"replica_axis": replica_axis})


def reduce_gradients(
    axis_name: AxisNames = "data", *, mesh: AnyMesh | None = None, **options: Any
) -> optax.GradientTransformationExtraArgs:
    """Makes gradients the whole mean over devices, for transformations that stand between it and a wrapped optimizer.

    Inside your `shard_map` it all-reduces each device's own gradients, `2M(N-1)/N` bytes per device and step; the
    wrapper behind it then needs `grads="reduced"`. Called on global arrays it gathers split gradients, `M(N-1)/N`.
    Whole gradients are in memory, as at stage 1. Transformations that can stand inside the wrapper cost less there.

    Args:
      axis_name: Mesh axis, or tuple of axes, over which gradients are averaged.
      mesh: The mesh, for calls outside `shard_map`.
      **options: Those of `Zero`: `replica_axis`, `reduce_dtype`, `predivide`, `bucket_bytes`.

    Returns:
      An `optax.GradientTransformationExtraArgs` without state; its `update` needs `params` inside `shard_map`.

    Raises:
      ValueError: By leaf path, for gradients that are shares or are reduced already.

    Examples:
      >>> import jax, jax.numpy as jnp, optax, jaxzero
      >>> from jax.sharding import PartitionSpec as P
      >>> mesh = jax.make_mesh((8,), ("data",))
      >>> wrapped = jaxzero.zero2(optax.sgd(1.0), "data", grads="reduced")
      >>> tx = optax.chain(jaxzero.reduce_gradients("data"), optax.clip_by_global_norm(1.0), wrapped)
      >>> def step(w, x):
      ...     grad = jax.grad(lambda w: jnp.mean(x * w))(jax.lax.pcast(w, "data", to="varying"))
      ...     updates, _ = tx.update(grad, tx.init(w), w)
      ...     return optax.apply_updates(w, updates)
      >>> run = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
      >>> x = jax.device_put(jnp.arange(16.0), jax.NamedSharding(mesh, P("data")))  # the mean gradient is 7.5
      >>> float(run(jax.device_put(jnp.float32(9.0), jax.NamedSharding(mesh, P())), x))
      8.0
    """
    return reducing.transformation(Zero(mesh, shard_axis=axis_name, **options))


def _plain(
    stage: int,
    inner: optax.GradientTransformation,
    axis_name: AxisNames,
    mesh: AnyMesh | None,
    options: dict[str, Any],
) -> optax.GradientTransformationExtraArgs:
    grads = options.pop("grads", "local")
    return Zero(mesh, stage=stage, shard_axis=axis_name, **options).optimizer(inner, grads=grads)
