"""Flax NNX models, and their training with and without jaxzero."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import checks
import chex
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

import jaxzero
import jaxzero.nnx

MICS = (((2, 4), ("replica", "shard")), dict(shard_axis="shard", replica_axis="replica"))

SETTINGS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "stage 1": ((8,), dict(stage=1)),
    "stage 2": ((8,), dict(stage=2)),
    "stage 3": ((8,), dict(stage=3)),
    "MiCS": (MICS[0], MICS[1] | dict(stage=2)),
    "MiCS, stage 3": (MICS[0], MICS[1] | dict(stage=3)),
}


def make_zero(setting: str) -> jaxzero.Zero:
    shape, options = SETTINGS[setting]
    return jaxzero.Zero(helpers.make_mesh(*shape), **options)


class Normed(nnx.Module):
    """Batch statistics; the bias in front of them would have no gradient but rounding."""

    def __init__(self, rngs: nnx.Rngs, axis: Any) -> None:
        self.inner = nnx.Linear(5, 16, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(16, axis_name=axis, rngs=rngs)
        self.outer = nnx.Linear(16, 3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.outer(nnx.tanh(self.norm(self.inner(x))))


class Dropped(nnx.Module):
    """Dropout with the model's own `nnx.Rngs`."""

    def __init__(self, rngs: nnx.Rngs, axis: Any) -> None:
        self.inner = nnx.Linear(5, 16, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.outer = nnx.Linear(16, 3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.outer(self.dropout(nnx.tanh(self.inner(x))))


class Adapted(nnx.Module):
    """A base that stays as it is, with LoRA adapters."""

    def __init__(self, rngs: nnx.Rngs, axis: Any) -> None:
        b = nnx.initializers.normal(0.5)
        base = nnx.Linear(5, 64, rngs=rngs)
        self.inner = nnx.LoRA(5, 2, 64, base_module=base, b_initializer=b, rngs=rngs)
        self.outer = nnx.LoRA(64, 2, 3, base_module=nnx.Linear(64, 3, rngs=rngs), b_initializer=b, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.outer(nnx.tanh(self.inner(x)))


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + nnx.tanh(self.linear(x))


class Scanned(nnx.Module):
    """Three layers, stacked and walked over by `nnx.scan`."""

    def __init__(self, rngs: nnx.Rngs, axis: Any) -> None:
        self.inner = nnx.Linear(5, 8, rngs=rngs)
        self.layers = nnx.split_rngs(splits=3)(nnx.vmap(Layer, in_axes=0, out_axes=0))(rngs)
        self.outer = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        walk = nnx.scan(lambda layer, x: layer(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        return self.outer(walk(self.layers, self.inner(x)))


class Shared(nnx.Module):
    """One module at two places, and one `Param` at two places."""

    def __init__(self, rngs: nnx.Rngs, axis: Any) -> None:
        self.first = nnx.Linear(5, 5, rngs=rngs)
        self.again = self.first
        self.down = nnx.Param(jax.random.normal(rngs.params(), (5, 3)))
        self.up = self.down

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.again(nnx.tanh(self.first(x))) @ self.down[...]
        return nnx.tanh(x) @ self.up[...].T @ self.down[...]


class Annotated(nnx.Module):
    """Variables that carry metadata, which the mask of the optimizer reads."""

    def __init__(self, rngs: nnx.Rngs, axis: Any) -> None:
        ones = nnx.with_metadata(nnx.initializers.normal(0.5), decay=True, note="a kernel")
        self.inner = nnx.Linear(5, 16, kernel_init=ones, rngs=rngs)
        self.outer = nnx.Linear(16, 3, kernel_init=ones, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.outer(nnx.tanh(self.inner(x)))


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, what of it is trained, and whether its examples are drawn for each device."""

    model: Callable[..., nnx.Module]
    wrt: Any = nnx.Param
    drawn: bool = False


CASES = {
    "BatchNorm": Case(Normed),
    "Dropout": Case(Dropped, drawn=True),
    "LoRA": Case(Adapted, nnx.LoRAParam),
    "scan": Case(Scanned),
    "shared": Case(Shared),
    "metadata": Case(Annotated),
}


def batches(steps: int = 5) -> list[tuple[jax.Array, jax.Array]]:
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    return [(normal(16, 5), normal(16, 3)) for _ in range(steps)]


def mse(model: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean(jnp.square(model(x) - y))


@functools.cache
def unsharded(case: Case, inner: optax.GradientTransformation) -> tuple[nnx.Module, nnx.Optimizer, list[float]]:
    """Plain NNX on one device. Where draws depend on the device, the mean over what each would draw."""
    model = case.model(nnx.Rngs(0), None)
    optimizer = nnx.Optimizer(model, inner, wrt=case.wrt)

    def drawn(model: nnx.Module, x: jax.Array, y: jax.Array) -> jax.Array:
        graph, *states = nnx.split(model, nnx.Param, nnx.RngKey, ...)
        params, keys, rest = states
        losses = []
        for i, part in enumerate(zip(jnp.split(x, 8), jnp.split(y, 8), strict=True)):
            mine = jax.tree.map(lambda key, i=i: jax.random.fold_in(key, i), keys)
            losses.append(mse(nnx.merge(graph, params, mine, rest, copy=True), *part))
        model(x)  # counts the draw
        return jnp.mean(jnp.stack(losses))

    @nnx.jit
    def step(model: nnx.Module, optimizer: nnx.Optimizer, x: jax.Array, y: jax.Array) -> jax.Array:
        loss_fn = drawn if case.drawn else mse
        loss, grads = nnx.value_and_grad(loss_fn, argnums=nnx.DiffState(0, case.wrt))(model, x, y)
        optimizer.update(model, grads)
        return loss

    losses = [float(step(model, optimizer, x, y)) for x, y in batches()]
    return model, optimizer, losses


def plain(case: Case, inner: optax.GradientTransformation, zero: jaxzero.Zero) -> Any:
    """The same program with the optimizer wrapped and nothing else changed: parameters are whole."""
    model = case.model(nnx.Rngs(0), None)
    optimizer = nnx.Optimizer(model, zero.optimizer(inner), wrt=case.wrt)

    @nnx.jit
    def step(model: nnx.Module, optimizer: nnx.Optimizer, x: jax.Array, y: jax.Array) -> jax.Array:
        loss, grads = nnx.value_and_grad(mse, argnums=nnx.DiffState(0, case.wrt))(model, x, y)
        optimizer.update(model, grads)
        return loss

    losses = [float(step(model, optimizer, x, y)) for x, y in batches()]
    return model, optimizer, losses


def split(case: Case, inner: optax.GradientTransformation, zero: jaxzero.Zero, observed: bool = False) -> Any:
    """`zero.value_and_grad` over a function of the state; at stage 3 parameters are split at rest."""
    axes = checks.axes_of(zero)
    model = case.model(nnx.Rngs(0), axes)
    graph, *states = nnx.split(model, nnx.Param, nnx.BatchStat, ...)
    params, stats, rest = states

    def loss_fn(params: Any, stats: Any, rest: Any, x: jax.Array, y: jax.Array) -> Any:
        model = nnx.merge(graph, params, stats, rest)
        return mse(model, x, y), nnx.state(model, (nnx.BatchStat, nnx.RngCount))

    if observed:
        zero = zero.observe(loss_fn, params, stats, rest, *batches()[0], whole_argnums=1)
    nnx.update(model, zero.shard(params))
    optimizer = nnx.Optimizer(model, zero.optimizer(inner), wrt=case.wrt)
    grad_fn = zero.value_and_grad(loss_fn, has_aux=True, whole_argnums=1)

    @nnx.jit
    def step(model: nnx.Module, optimizer: nnx.Optimizer, x: jax.Array, y: jax.Array) -> jax.Array:
        params, stats, rest = nnx.state(model, nnx.Param, nnx.BatchStat, ...)
        (loss, changed), grads = grad_fn(params, stats, rest, x, y)
        nnx.update(model, changed)
        optimizer.update(model, grads)
        return loss

    losses = [float(step(model, optimizer, *checks.place(batch, zero.mesh, P(axes)))) for batch in batches()]
    nnx.update(model, zero.gather(nnx.state(model, nnx.Param)))
    return model, optimizer, losses


def drop_in(case: Case, inner: optax.GradientTransformation, zero: jaxzero.Zero) -> Any:
    """The unsharded program with the calls of `jaxzero.nnx` in place of Flax's."""
    axes = checks.axes_of(zero)
    model = case.model(nnx.Rngs(0), axes)
    zero = jaxzero.nnx.observe(zero, mse, model, *batches()[0])
    jaxzero.nnx.shard(zero, model)
    optimizer = jaxzero.nnx.optimizer(zero, model, inner, wrt=case.wrt)
    traces: list[None] = []

    @nnx.jit
    def step(model: nnx.Module, optimizer: nnx.Optimizer, x: jax.Array, y: jax.Array) -> jax.Array:
        traces.append(None)
        loss, grads = jaxzero.nnx.value_and_grad(zero, mse, wrt=case.wrt)(model, x, y)
        optimizer.update(model, grads)
        return loss

    losses = [float(step(model, optimizer, *checks.place(batch, zero.mesh, P(axes)))) for batch in batches()]
    assert len(traces) == 1  # nothing is on one device alone, and nothing moves
    nnx.update(model, zero.gather(nnx.state(model, nnx.Param)))
    return model, optimizer, losses


def compare(got: Any, want: Any, rtol: float = 5e-6) -> None:
    """Model, statistics, counts of draws, optimizer state, step and losses of two runs."""
    model, optimizer, losses = got
    model_, optimizer_, losses_ = want
    state, state_ = nnx.state(model), nnx.state(model_)
    chex.assert_trees_all_equal_structs(nnx.as_pure(state), nnx.as_pure(state_))
    helpers.close(nnx.as_pure(state), nnx.as_pure(state_), rtol)
    helpers.assert_all_shards_equal(nnx.as_pure(state))
    checks.assert_state_equal(nnx.as_pure(optimizer.opt_state), nnx.as_pure(optimizer_.opt_state), 4 * rtol)
    assert int(optimizer.step[...]) == int(optimizer_.step[...]) == len(losses)
    np.testing.assert_allclose(losses, losses_, rtol=1e-5)
