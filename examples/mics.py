"""Keep gathers and reduce-scatters inside fast groups of devices (MiCS), compared with one split over all devices.

    python examples/mics.py

The eight devices form two groups of four, like two nodes.

* Split over all eight: each device stores an eighth, and each microbatch sums gradients over the slow link between the
  groups.
* `replica_axis="group"`: the split stays inside a group, and the groups repeat it. Each device stores a quarter. Only
  one all-reduce of that quarter per step uses the slow link, after the last of four microbatches.

Both runs have the same numbers. The plans show what each device sends over which mesh axis, before anything runs.
Without accelerators the program makes eight virtual CPU devices.
"""

import os
from typing import Any

os.environ.setdefault("NPROC", "32")  # eight devices on fewer CPU cores need more threads than cores

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxzero

INNER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
ACCUMULATE, STEPS = 4, 20


def loss_fn(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """The mean over these examples."""
    return jnp.mean(jnp.square(jnp.tanh(x @ params["inner"]) @ params["outer"] - y))


def train(zero: jaxzero.Zero, params: Any, x: Any, y: Any) -> tuple[list[float], Any]:
    """Losses and optimizer state of a few steps."""
    tx = zero.optimizer(INNER)
    params = zero.shard(params)
    state = jax.jit(tx.init)(params)
    grad_fn = zero.value_and_grad(loss_fn, accumulate=ACCUMULATE)

    @jax.jit
    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        loss, grads = grad_fn(params, x, y)
        params, state = zero.apply(tx, grads, state, params)
        return params, state, loss

    losses = []
    for _ in range(STEPS):
        params, state, loss = step(params, state, x, y)
        losses.append(float(loss))
    return losses, state


def main() -> None:
    """Train both ways, and print the plans."""
    jax.config.update("jax_num_cpu_devices", 8)
    rng = np.random.default_rng(0)
    normal = lambda *shape: np.asarray(rng.normal(size=shape) / 8, np.float32)
    params, x, y = {"inner": normal(64, 256), "outer": normal(256, 10)}, 8 * normal(128, 64), normal(128, 10)

    mesh = jax.make_mesh((2, jax.device_count() // 2), ("group", "local"))
    ways = {
        "split over all devices": jaxzero.Zero(mesh, stage=2, shard_axis=("group", "local")),
        "MiCS": jaxzero.Zero(mesh, stage=2, shard_axis="local", replica_axis="group"),
    }
    curves = []
    for name, zero in ways.items():
        losses, state = train(zero, params, x, y)
        curves.append(losses)
        plan = zero.plan(params, INNER, accumulate=ACCUMULATE)
        crossing = sum(row.nbytes for row in plan.traffic if "group" in row.axes)
        held = sum(a.addressable_shards[0].data.nbytes for a in jax.tree.leaves(state))
        print(f"{name}: loss {losses[0]:.5f} to {losses[-1]:.5f}, {held:,} B of state on each device")
        print(f"across the link between groups each device sends {crossing:,} B per step")
    print(f"\n{plan}\nthe two loss curves differ by {max(abs(a - b) for a, b in zip(*curves, strict=True)):.1e}")


if __name__ == "__main__":
    main()
