"""jaxzero inside your own `shard_map`, where it is a plain Optax transformation.

    python examples/shard_map_by_hand.py

Inside `shard_map` you write the program of one device: its examples, its share of the state, and the collectives.
`jaxzero.zero2(inner, "data")` reads from the type of each gradient whether it is local, reduces local gradients, and
gathers the updates. Three lines differ from the global view, marked 1 to 3 below:

1. The specs of the state come from `zero.specs`.
2. The parameters are made varying before they are differentiated. Otherwise JAX sums the gradient over devices, and
   jaxzero refuses a gradient that is summed already.
3. The program takes the mean of the loss itself.

Without accelerators the program makes eight virtual CPU devices.
"""

import os
from typing import Any

os.environ.setdefault("NPROC", "32")  # eight devices on fewer CPU cores need more threads than cores

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import jaxzero

INNER = optax.chain(optax.clip_by_global_norm(1.0), optax.lamb(2e-2))  # two norms that need every share
STEPS = 30


def loss_fn(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """The mean over these examples."""
    return jnp.mean(jnp.square(jnp.tanh(x @ params["inner"] + params["bias"]) @ params["outer"] - y))


def main() -> None:
    """Train by hand and in the global view."""
    jax.config.update("jax_num_cpu_devices", 8)
    rng = np.random.default_rng(0)
    normal = lambda *shape: (rng.normal(size=shape) / np.sqrt(shape[0])).astype(np.float32)
    start = {"inner": normal(21, 50), "bias": normal(50), "outer": normal(50, 3)}  # no dimension has to divide
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    x, y = jax.device_put((normal(64, 21), normal(64, 3)), jax.NamedSharding(mesh, P("data")))
    zero = jaxzero.Zero(mesh, stage=2)
    start = zero.shard(start)

    tx = jaxzero.zero2(INNER, "data", mesh=mesh)
    state = tx.init(start)

    def one_device(params: Any, state: Any, x: jax.Array, y: jax.Array) -> Any:
        own = jax.lax.pcast(params, "data", to="varying")  # 2
        loss, grads = jax.value_and_grad(loss_fn)(own, x, y)
        updates, state = tx.update(grads, state, params)  # a reduce-scatter, the update of a share, an all-gather
        return optax.apply_updates(params, updates), state, jax.lax.pmean(loss, "data")  # 3

    specs = zero.specs(state)  # 1
    in_specs, out_specs = (P(), specs, P("data"), P("data")), (P(), specs, P())
    by_hand = jax.jit(jax.shard_map(one_device, mesh=mesh, in_specs=in_specs, out_specs=out_specs))

    @jax.jit
    def global_view(params: Any, state: Any, x: jax.Array, y: jax.Array) -> Any:
        loss, grads = zero.value_and_grad(loss_fn)(params, x, y)
        params, state = zero.apply(tx, grads, state, params)
        return params, state, loss

    ends = []
    for name, step in {"by hand": by_hand, "in the global view": global_view}.items():
        params, held, losses = start, state, []
        for _ in range(STEPS):
            params, held, loss = step(params, held, x, y)
            losses.append(float(loss))
        print(f"{name:20} loss {losses[0]:.5f} to {losses[-1]:.5f}")
        ends.append(params)
    apart = [
        float(jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b))) for a, b in zip(*map(jax.tree.leaves, ends), strict=True)
    ]
    print(f"parameters agree to {max(apart):.1e} of the largest in each leaf")
    moments = state[1][0].mu["inner"]
    print(f"of the {moments.size} numbers of a moment each device holds {moments.addressable_shards[0].data.size}")


if __name__ == "__main__":
    main()
