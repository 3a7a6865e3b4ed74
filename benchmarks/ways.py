"""One training step, written in every way that is compared: native JAX as users write it, and jaxzero."""

import pathlib
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxzero

sys.path.append(str(pathlib.Path(__file__).parent.parent / "examples"))
import models


class Way(NamedTuple):
    """How a step is written.

    Attributes:
      split: What native JAX splits, or the stage.
      remat: Whether `jax.checkpoint` is around each layer.
      stacked: Whether layers are stacked and scanned.
      reduce_dtype: The dtype in which jaxzero sums gradients.
    """

    split: str | int
    remat: bool
    stacked: bool
    reduce_dtype: Any = jnp.float32


#: Native JAX, then jaxzero.
WAYS = {
    "replicated": Way("replicated", False, False),
    "sharded state": Way("state", False, False),
    "FSDP": Way("fsdp", False, False),
    "FSDP + remat": Way("fsdp", True, False),
    "FSDP + remat + scan": Way("fsdp", True, True),
    "stage 1": Way(1, False, False),
    "stage 2": Way(2, False, False),
    "stage 3": Way(3, False, False),
    "stage 3 + remat": Way(3, True, False),
    "stage 3 + remat + scan": Way(3, True, True),
    "stage 3 + remat + scan, sums in bfloat16": Way(3, True, True, jnp.bfloat16),
}
#: For each way of jaxzero, the native way that splits the same arrays.
NATIVE_WAY = {
    "stage 1": "sharded state",
    "stage 2": "sharded state",
    "stage 3": "FSDP",
    "stage 3 + remat": "FSDP + remat",
    "stage 3 + remat + scan": "FSDP + remat + scan",
    "stage 3 + remat + scan, sums in bfloat16": "FSDP + remat + scan",
}

MakeModel = Callable[[models.How], models.Problem]


class Step(NamedTuple):
    """A step, to be lowered: its arguments are abstract and placed.

    Attributes:
      run: `run(params, state, tokens)` -> new parameters, new state, loss.
      shard: Whole parameters -> the parameters as this way stores them.
      init: Parameters -> state.
      params: The parameters.
      state: The state.
      tokens: The batch.
      options: Options of XLA.
    """

    run: Callable[..., Any]
    shard: Callable[[Any], Any]
    init: Callable[[Any], Any]
    params: Any
    state: Any
    tokens: Any
    options: dict[str, Any] | None = None

    def compile(self) -> Any:
        """The compiled step; parameters and state are donated."""
        lowered = jax.jit(self.run, donate_argnums=(0, 1)).lower(self.params, self.state, self.tokens)
        return lowered.compile(compiler_options=self.options)


def step(way: str, mesh: Mesh, model: MakeModel, inner: optax.GradientTransformation) -> Step:
    """One way to train.

    Args:
      way: A key of `WAYS`.
      mesh: One axis, `data`.
      model: A function of `models.How` that returns abstract parameters, loss and batch.
      inner: The optimizer.

    Returns:
      The step.
    """
    split, remat, stacked, reduce_dtype = WAYS[way]
    batch = NamedSharding(mesh, P("data"))
    native = isinstance(split, str)
    same = lambda x: x
    constrain = lambda x: jax.lax.with_sharding_constraint(x, batch)
    how = models.How(stacked, jax.checkpoint if remat else same, constrain if native else same)
    params, loss, tokens = model(how)
    tokens = jax.ShapeDtypeStruct(tokens.shape, tokens.dtype, sharding=batch)
    if native:
        return _native(split, mesh, loss, params, inner, tokens)
    zero = jaxzero.Zero(mesh, stage=split, reduce_dtype=reduce_dtype)
    return _ours(zero, loss, params, inner, tokens)


def count(model: MakeModel) -> int:
    """How many parameters a model has."""
    return sum(x.size for x in jax.tree.leaves(model(models.How())[0]))


def drawn(params: Any, seed: int = 0) -> Any:
    """Values of these shapes."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(0.05 * rng.standard_normal(x.shape, np.float32), x.dtype), params)


def _native(kind: str, mesh: Mesh, loss: Any, params: Any, inner: Any, tokens: Any) -> Step:
    """`jit` with shardings: arrays are cut along their first dimension that divides, never along the layer axis."""
    whole = NamedSharding(mesh, P())

    def divided(path: Any, x: Any) -> NamedSharding:
        stacked = isinstance(params["layers"], dict) and "layers" in jax.tree_util.keystr(path)
        for i, d in enumerate(x.shape):
            if d and d % mesh.size == 0 and not (stacked and i == 0):
                return NamedSharding(mesh, P(*[None] * i, "data"))
        return whole

    spread = lambda tree: jax.tree_util.tree_map_with_path(divided, tree)
    everywhere = lambda tree: jax.tree.map(lambda _: whole, tree)
    state = jax.eval_shape(inner.init, params)
    at = spread(params) if kind == "fsdp" else everywhere(params)
    state_at = everywhere(state) if kind == "replicated" else spread(state)
    pin = lambda tree, where: jax.tree.map(jax.lax.with_sharding_constraint, tree, where)

    def run(params: Any, state: Any, tokens: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, tokens)
        if kind == "state":
            grads = pin(grads, spread(grads))
        updates, state = inner.update(grads, state, params)
        return pin(optax.apply_updates(params, updates), at), pin(state, state_at), value

    return Step(run, lambda params: params, inner.init, _placed(params, at), _placed(state, state_at), tokens)


def _ours(zero: jaxzero.Zero, loss: Any, params: Any, inner: Any, tokens: Any) -> Step:
    mesh = zero.mesh
    if zero.stage == 3:
        zero = zero.observe(loss, params, tokens)
    tx = zero.optimizer(inner)
    stored = jax.eval_shape(zero.shard, params)
    specs = zero.specs(stored) if zero.stage == 3 else jax.tree.map(lambda _: P(), stored)
    stored = _placed(stored, jax.tree.map(lambda s: NamedSharding(mesh, s), specs))

    def run(params: Any, state: Any, tokens: Any) -> Any:
        value, grads = zero.value_and_grad(loss)(params, tokens)
        return *zero.apply(tx, grads, state, params), value

    return Step(run, zero.shard, tx.init, stored, tx.init(stored), tokens, zero.compiler_options() or None)


def _placed(tree: Any, shardings: Any) -> Any:
    put = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
    return jax.tree.map(put, tree, shardings)
