"""Flax NNX models as arguments of losses: split before a call of `Zero`, merged inside it, updated after it.

`Zero` differentiates functions of parameters. An NNX model has other variables too, and they go separate ways:

    nnx.Param                       the parameters, gathered where they are used at stage 3
    nnx.RngKey                      folded with the device's index, so that each device draws its own dropout
    all others (statistics, counts) whole on every device; what the loss changes comes back and is stored in the model
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import NamedSharding

from ._types import PyTree
from .gradients.compiled import calling
from .sharding.place import is_traced
from .zero import Zero

#: The parts of a model among the arguments of a function: parameters, graph, other variables, keys.
PARTS = 4


def init(zero: Zero, make: Callable[[], Any]) -> Any:
    """A model whose parameters are made as they are stored: at stage 3 no device ever holds them whole.

    Args:
      zero: The `Zero`.
      make: Returns the model; runs under `jit`, so it must not print or read files.

    Returns:
      The model, an ordinary `nnx.Module`. Sends nothing.

    Raises:
      ValueError: As `Zero.init`.

    Examples:
      >>> import jax, jaxzero, jaxzero.nnx
      >>> from flax import nnx
      >>> zero = jaxzero.Zero(jax.make_mesh((8,), ("data",)), stage=3)
      >>> model = jaxzero.nnx.init(zero, lambda: nnx.Linear(16, 4, rngs=nnx.Rngs(0)))
      >>> model.kernel.get_value().addressable_shards[0].data.shape
      (2, 4)
    """
    graph, _ = nnx.split(nnx.eval_shape(make))
    params = zero.init(lambda: nnx.state(make(), nnx.Param))
    model = nnx.merge(graph, params, jax.jit(lambda: nnx.state(make(), nnx.Not(nnx.Param)))())
    shard(zero, model)
    return model


def shard(zero: Zero, model: Any) -> None:
    """Moves a model onto the mesh, in place: parameters as they are stored at this stage, all other variables whole.

    Args:
      zero: The `Zero`.
      model: The model; variables that are on the mesh already stay as they are.

    Raises:
      ValueError: As `Zero.shard`.

    Examples:
      >>> import jax, jaxzero, jaxzero.nnx
      >>> from flax import nnx
      >>> zero = jaxzero.Zero(jax.make_mesh((8,), ("data",)), stage=3)
      >>> model = nnx.Linear(5, 3, rngs=nnx.Rngs(0))
      >>> jaxzero.nnx.shard(zero, model)
      >>> model.kernel.get_value()
      EvenSplit(shape=(5, 3), stored=float32[16])
    """
    nnx.update(model, zero.shard(nnx.state(model, nnx.Param)))
    _place_others(zero, model)


def optimizer(zero: Zero, model: Any, inner: optax.GradientTransformation, *, wrt: Any = nnx.Param) -> nnx.Optimizer:
    """`nnx.Optimizer(model, zero.optimizer(inner), wrt=wrt)`, its step on the mesh too.

    Flax makes the step on one device, where it would make the second training step compile again.

    Args:
      zero: The `Zero`.
      model: The model, after `shard`.
      inner: The optimizer, not wrapped.
      wrt: The parameters to train, a filter of NNX.

    Returns:
      An ordinary `nnx.Optimizer`. Sends nothing.

    Raises:
      ValueError: As the `init` of what `Zero.optimizer` returns.

    Examples:
      >>> import jax, optax, jaxzero, jaxzero.nnx
      >>> from flax import nnx
      >>> zero = jaxzero.Zero(jax.make_mesh((8,), ("data",)), stage=3)
      >>> model = nnx.Linear(16, 4, rngs=nnx.Rngs(0))
      >>> jaxzero.nnx.shard(zero, model)
      >>> optimizer = jaxzero.nnx.optimizer(zero, model, optax.adamw(1e-3))
      >>> optimizer.opt_state[0].mu["kernel"].get_value().addressable_shards[0].data.shape
      (2, 4)
    """
    made = nnx.Optimizer(model, zero.optimizer(inner), wrt=wrt)
    _place_others(zero, made)
    return made


def observe(zero: Zero, loss_fn: Callable[..., Any], model: Any, *batch: PyTree) -> Zero:
    """`Zero.observe` for a loss of a model: finds layers that `nnx.scan` stacks. Call it before `shard`.

    Args:
      zero: The `Zero`.
      loss_fn: `loss_fn(model, *batch)`, as for `value_and_grad`.
      model: The model, its parameters whole; or abstract, from `nnx.eval_shape`.
      *batch: The rest of its arguments, global, concrete or abstract.

    Returns:
      The `Zero` that `Zero.observe` returns. Sends nothing.

    Raises:
      ValueError: As `Zero.observe`.

    Examples:
      >>> import jax, jax.numpy as jnp, jaxzero, jaxzero.nnx
      >>> from flax import nnx
      >>> zero = jaxzero.Zero(jax.make_mesh((8,), ("data",)), stage=3)
      >>> model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
      >>> zero = jaxzero.nnx.observe(zero, lambda model, x: jnp.mean(model(x) ** 2), model, jnp.ones((8, 4)))
      >>> len(zero.observed.order)
      2
    """
    loss = _loss(loss_fn, False, nnx.Param)
    return zero.observe(lambda *args: loss(*args)[0], *_split(model), *batch, whole_argnums=2)


def value_and_grad(
    zero: Zero, loss_fn: Callable[..., Any], has_aux: bool = False, *, wrt: Any = nnx.Param, **options: Any
) -> Callable[..., Any]:
    """`nnx.value_and_grad` for a model that is stored as `zero` says; sends what `Zero.value_and_grad` sends.

    The loss is the one of the unsharded program: `loss_fn(model, *batch)`, a mean over the examples. It runs on each
    device with that device's examples. Statistics and counts that it changes are stored in the model: integers must be
    equal on all devices, floating values become the mean over devices.

    Args:
      zero: The `Zero`.
      loss_fn: The loss of the unsharded program.
      has_aux: Whether it returns `(loss, aux)`.
      wrt: The parameters to differentiate, a filter of NNX; the others are frozen.
      **options: As for `Zero.value_and_grad`; in `whole_argnums` the model is 0.

    Returns:
      `grad_fn(model, *batch) -> (loss, grads)` or `((loss, aux), grads)`, as `nnx.value_and_grad`; `grads` is an
      `nnx.State` for `optimizer.update(model, grads)`, split from stage 2 on.

    Raises:
      ValueError: As `Zero.value_and_grad`.

    Examples:
      >>> import jax, jax.numpy as jnp, optax, jaxzero, jaxzero.nnx
      >>> from flax import nnx
      >>> zero = jaxzero.Zero(jax.make_mesh((8,), ("data",)), stage=3)
      >>> model = nnx.Linear(5, 3, rngs=nnx.Rngs(0))
      >>> jaxzero.nnx.shard(zero, model)
      >>> optimizer = jaxzero.nnx.optimizer(zero, model, optax.adamw(1e-1))
      >>> loss_fn = lambda model, x: jnp.mean(model(x) ** 2)
      >>> loss, grads = jaxzero.nnx.value_and_grad(zero, loss_fn)(model, jnp.ones((8, 5)))
      >>> _ = optimizer.update(model, grads)
      >>> after, _ = jaxzero.nnx.value_and_grad(zero, loss_fn)(model, jnp.ones((8, 5)))
      >>> bool(after < loss)
      True
    """
    if options.get("aux") is not None:
        options["aux"] = _with_changes(options["aux"])
    positions = _moved(options.pop("whole_argnums", ()))
    grad_fn = zero.value_and_grad(_loss(loss_fn, bool(has_aux), wrt), True, whole_argnums=positions, **options)

    def call(model: Any, *batch: Any, **more: Any) -> Any:
        (value, (aux, changed)), grads = grad_fn(*_split(model), *batch, **more)
        nnx.update(model, nnx.from_flat_state(changed))
        return (value, aux) if has_aux else value, nnx.split_state(grads, wrt, ...)[0]

    return call


def forward(zero: Zero, fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """A function of a model that is stored as `zero` says, without gradients: evaluation, sampling.

    Sends what `Zero.forward` sends. The model does not change: what `fn` changes in it is dropped.

    Args:
      zero: The `Zero`.
      fn: `fn(model, *batch)`, written for the unsharded model.
      **options: As for `Zero.forward`; in `whole_argnums` the model is 0.

    Returns:
      `f(model, *batch)`, whose results are joined as those of `Zero.forward`.

    Raises:
      ValueError: As `Zero.forward`.

    Examples:
      >>> import jax, jax.numpy as jnp, jaxzero, jaxzero.nnx
      >>> from flax import nnx
      >>> zero = jaxzero.Zero(jax.make_mesh((8,), ("data",)), stage=3)
      >>> model = nnx.Linear(5, 3, rngs=nnx.Rngs(0))
      >>> jaxzero.nnx.shard(zero, model)
      >>> jaxzero.nnx.forward(zero, lambda model, x: model(x))(model, jnp.ones((8, 5))).shape
      (8, 3)
    """
    positions = _moved(options.pop("whole_argnums", ()))
    call = zero.forward(_function(fn), whole_argnums=positions, **options)
    return lambda model, *batch: call(*_split(model), *batch)


# --- a model as arguments, and back --------------------------------------------------------------


def _split(model: Any) -> tuple[Any, ...]:
    """The parameters of a model, its graph, all other variables but keys, the keys."""
    graph, *states = nnx.split(model, nnx.Param, nnx.RngKey, ...)
    params, keys, others = states
    return params, graph, others, jax.tree.map(_scalars, keys)


def _merge(graph: Any, params: Any, others: Any, keys: Any) -> Any:
    return nnx.merge(graph, params, jax.tree.map(_stack, keys, is_leaf=lambda x: isinstance(x, list)), others)


def _scalars(keys: jax.Array) -> Any:
    """Nested lists of scalar keys: `Zero` folds scalar keys, and cuts arrays of keys (those of `nnx.split_rngs`)."""
    return [_scalars(key) for key in keys] if keys.ndim else keys


def _stack(keys: Any) -> jax.Array:
    return jnp.stack([_stack(key) for key in keys]) if isinstance(keys, list) else keys


def _loss(loss_fn: Callable[..., Any], has_aux: bool, wrt: Any) -> Callable[..., Any]:
    """The loss as a function of the parts of a model; its aux is the user's, and the variables that changed."""

    @functools.wraps(loss_fn)
    def loss(params: Any, graph: Any, others: Any, keys: Any, *batch: Any) -> Any:
        trained, frozen = nnx.split_state(params, wrt, ...)
        before = _values(others)
        model = _merge(graph, nnx.merge_state(trained, jax.lax.stop_gradient(frozen)), others, keys)
        out = loss_fn(model, *batch)
        value, aux = out if has_aux else (out, None)
        after = _values(nnx.state(model, nnx.Not(nnx.Any(nnx.Param, nnx.RngKey))))
        changed = {path: x for path, x in after.items() if path in before and x is not before[path]}
        return value, (aux, changed)

    return calling(loss_fn, loss)


def _function(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Any function of a model as a function of the parts of the model."""

    @functools.wraps(fn)
    def call(params: Any, graph: Any, others: Any, keys: Any, *batch: Any) -> Any:
        return fn(_merge(graph, params, others, keys), *batch)

    return calling(fn, call)


def _values(state: Any) -> dict[Any, Any]:
    """The array of each variable by its path. A variable is changed if its array is another object."""
    return {path: x.get_value() if isinstance(x, nnx.Variable) else x for path, x in nnx.to_flat_state(state)}


def _with_changes(aux: Any) -> Any:
    """How aux is joined, where the changed variables stand beside the user's aux."""
    if not callable(aux) or isinstance(aux, tuple):
        return (aux, None)
    return lambda path, x: aux(path[1:], x) if path[0].idx == 0 else None


def _moved(whole_argnums: int | Sequence[int]) -> tuple[int, ...]:
    """Positions behind the parts of the model; its other variables, position 2, are whole too."""
    given = (whole_argnums,) if isinstance(whole_argnums, int) else tuple(whole_argnums)
    return (2, *(i + PARTS - 1 if i > 0 else i for i in given))


def _place_others(zero: Zero, thing: Any) -> None:
    """Makes whole on every device what is neither a parameter nor on the mesh: statistics, keys, counts."""
    whole = Zero(zero.mesh, stage=1, shard_axis=zero.shard_axis, replica_axis=zero.replica_axis)
    others = nnx.state(thing, nnx.Not(nnx.Param))
    away = [x for x in jax.tree.leaves(others) if not _on_mesh(x, zero)]
    if away:
        moved = iter(whole.shard(away))
        nnx.update(thing, jax.tree.map(lambda x: x if _on_mesh(x, zero) else next(moved), others))


def _on_mesh(x: Any, zero: Zero) -> bool:
    """Whether an array needs no move: under a trace nothing is moved."""
    return is_traced(x) or (isinstance(x.sharding, NamedSharding) and x.sharding.mesh == zero.mesh)
