"""Memory of one training step on each of 2 x 8 H100, at stage 3 and with JAX's own sharding, compiled without them.

    python benchmarks/memory.py [plain] [remat] [scan]

Needs no GPU, only `pip install "jaxzero[cuda]"`. One AdamW step of the 3.4 B-parameter GPT of `overlap.py`, 32 x 512
tokens: its blocks in a Python loop (plain), with `jax.checkpoint` around each (remat), stacked and scanned as well
(scan). JAX's own sharding is `jit` with a `NamedSharding` of every parameter along its first dimension that divides,
never along the layers of a stack, and activations constrained to the batch: what is commonly called FSDP.
"""

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from overlap import LENGTH, PER_DEVICE, loss_of, model

import jaxzero

INNER = optax.adamw(1e-4)
Step = tuple[Callable[..., Any], Any, Any]


def placed(tree: Any, shardings: Any) -> Any:
    """Shapes with shardings."""
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings)


def ours(mesh: Mesh, wrap: Callable[..., Any], params: Any, tokens: Any) -> Step:
    """The step of `value_and_grad` and `apply`, and its parameters and state."""
    loss = loss_of(wrap)
    zero = jaxzero.Zero(mesh, stage=3).observe(loss, params, tokens)
    tx = zero.optimizer(INNER)
    split = jax.eval_shape(zero.shard, params)
    state = jax.eval_shape(tx.init, split)
    at_rest = lambda tree: placed(tree, jax.tree.map(lambda spec: NamedSharding(mesh, spec), zero.specs(tree)))

    def step(params: Any, state: Any, tokens: Any) -> Any:
        value, grads = zero.value_and_grad(loss)(params, tokens)
        return *zero.apply(tx, grads, state, params), value

    return step, at_rest(split), at_rest(state)


def native(mesh: Mesh, wrap: Callable[..., Any], params: Any, tokens: Any) -> Step:
    """The step that one would write with `NamedSharding`, and its parameters and state."""
    by_example = NamedSharding(mesh, P("data"))
    loss = loss_of(lambda block: wrap(lambda x, p: jax.lax.with_sharding_constraint(block(x, p), by_example)))

    def sharding(path: Any, x: Any) -> NamedSharding:
        layers = int("blocks" in jax.tree_util.keystr(path) and isinstance(params["blocks"], dict))
        cut = next((i for i in range(layers, x.ndim) if x.shape[i] and x.shape[i] % mesh.size == 0), None)
        return NamedSharding(mesh, P() if cut is None else P(*[None] * cut, "data"))

    state = jax.eval_shape(INNER.init, params)
    of_params, of_state = (jax.tree_util.tree_map_with_path(sharding, tree) for tree in (params, state))
    pin = lambda tree, shardings: jax.tree.map(jax.lax.with_sharding_constraint, tree, shardings)

    def step(params: Any, state: Any, tokens: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, tokens)
        updates, state = INNER.update(grads, state, params)
        return pin(optax.apply_updates(params, updates), of_params), pin(state, of_state), value

    return step, placed(params, of_params), placed(state, of_state)


def main(*rows: str) -> None:
    """Prints the table."""
    mesh = Mesh(jaxzero.topology("h100:2x8"), ("data",))
    tokens = jax.ShapeDtypeStruct(
        (mesh.size * PER_DEVICE, LENGTH + 1), jnp.int32, sharding=NamedSharding(mesh, P("data"))
    )
    zero = jaxzero.Zero(mesh)
    print(f"jax {jax.__version__}, GB on each of {mesh.size} GPUs: between steps, and in all")
    print(f"{'model':6s} {'native':>16s} {'jaxzero':>16s} {'ratio':>6s}")
    for name, wrap, stacked in (
        ("plain", lambda f: f, False),
        ("remat", jax.checkpoint, False),
        ("scan", jax.checkpoint, True),
    ):
        if rows and name not in rows:
            continue
        needed = []
        for make in (native, ours):
            step, params, state = make(mesh, wrap, model(stacked), tokens)
            program = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, tokens).compile()
            needed.append(zero.memory(program))
        columns = " ".join(f"{m.arguments / 1e9:8.2f}{m.total / 1e9:8.2f}" for m in needed)
        print(f"{name:6s} {columns} {needed[1].total / needed[0].total:6.2f}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
