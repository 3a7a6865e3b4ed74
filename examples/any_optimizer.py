"""The same run with five optimizers, each compared with its unsharded run.

    python examples/any_optimizer.py

AdamW is elementwise. LAMB needs the norm of every layer, Muon the whole matrix, Adafactor the means of rows and
columns, Prodigy sums over all parameters. On a slice of a tensor each of these four would compute something else.
jaxzero traces the optimizer at full shapes and evaluates the trace on shares, so no optimizer needs a change.

The table shows the loss of both runs after the same steps, the difference of their parameters, and the bytes of state
on one device. Without accelerators the program makes eight virtual CPU devices.
"""

import os
import sys
from typing import Any

os.environ.setdefault("NPROC", "32")  # eight devices on fewer CPU cores need more threads than cores

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib

import jaxzero

STEPS = 20
OPTIMIZERS = {
    "AdamW": optax.adamw(1e-2),
    "LAMB": optax.lamb(1e-2),
    "Muon": optax.contrib.muon(2e-2),
    "Adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=8),
    "Prodigy": optax.contrib.prodigy(1.0, estim_lr0=1e-3),
}


def loss_fn(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """The mean over these examples."""
    hidden = jnp.tanh(x @ params["inner"] + params["bias"])
    return jnp.mean(jnp.square(hidden @ params["outer"] - y))


def draw() -> tuple[Any, Any, Any]:
    """Parameters whose shapes do not divide by 8, and a batch computed by a network of the same kind."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: (rng.normal(size=shape) / np.sqrt(shape[0])).astype(np.float32)
    shapes = {"inner": (21, 50), "bias": (50,), "outer": (50, 3)}
    params, truth = ({name: normal(*shape) for name, shape in shapes.items()} for _ in range(2))
    x = rng.normal(size=(64, 21)).astype(np.float32)
    y = jnp.tanh(x @ truth["inner"] + truth["bias"]) @ truth["outer"]
    return params, x, y


def unsharded(inner: optax.GradientTransformation, params: Any, x: Any, y: Any) -> Any:
    """Plain Optax on one device."""
    params, state = jax.tree.map(jnp.asarray, params), inner.init(params)

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
        updates, state = inner.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    for _ in range(STEPS):
        params, state, loss = step(params, state)
    return params, state, loss


def sharded(inner: optax.GradientTransformation, params: Any, x: Any, y: Any) -> Any:
    """The same run with jaxzero."""
    zero = jaxzero.Zero(jax.make_mesh((jax.device_count(),), ("data",)), stage=2)
    tx = zero.optimizer(inner)
    params = zero.shard(params)
    state = jax.jit(tx.init)(params)

    @jax.jit
    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        loss, grads = zero.value_and_grad(loss_fn)(params, x, y)
        params, state = zero.apply(tx, grads, state, params)
        return params, state, loss

    for _ in range(STEPS):
        params, state, loss = step(params, state, x, y)
    return params, state, loss


def main() -> int:
    """Print the table; 0 if every pair agrees."""
    jax.config.update("jax_num_cpu_devices", 8)
    batch = draw()
    print(f"{STEPS} steps   {'loss':>8} {'unsharded':>10} {'apart':>9}   state per device, unsharded")
    worst = 0.0
    for name, inner in OPTIMIZERS.items():
        params, state, loss = sharded(inner, *batch)
        params_, state_, loss_ = unsharded(inner, *batch)
        apart = max(float(jnp.max(jnp.abs(params[k] - v)) / jnp.max(jnp.abs(v))) for k, v in params_.items())
        here, there = (sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(s)) for s in (state, state_))
        print(f"{name:10} {float(loss):8.5f} {float(loss_):10.5f} {apart:9.1e}   {here:,} B, {there:,} B")
        worst = max(worst, apart)
    print(f"parameters agree to {worst:.1e} of the largest in each leaf")
    return int(worst > 1e-4)


if __name__ == "__main__":
    sys.exit(main())
