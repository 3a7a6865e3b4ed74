"""The self-test of `jaxzero doctor`: a training step at every stage equals plain Optax, on 8 virtual devices."""

import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxzero import Zero
from jaxzero._src._types import PyTree

DEVICES = 8
#: Largest difference from the unsharded run, of the largest parameter.
TOLERANCE = 1e-5


def main() -> int:
    """Runs two steps at each stage and prints one line; the status is 1 if numbers differ."""
    started = time.perf_counter()
    jax.config.update("jax_num_cpu_devices", DEVICES)
    wrong = [stage for stage in (1, 2, 3) if difference(stage) > TOLERANCE]
    if wrong:
        print(f"parameters differ from those of plain Optax at stage {wrong}", file=sys.stderr)
        return 1
    seconds = time.perf_counter() - started
    print(f"stages 1, 2, 3 on {DEVICES} virtual devices equal plain Optax ({seconds:.0f} s)")
    return 0


def difference(stage: int) -> float:
    """The largest difference between two sharded steps and two unsharded ones."""
    params: Any = {"w": jnp.linspace(-1.0, 1.0, 39).reshape(13, 3), "b": jnp.ones(3)}
    x = jnp.sin(jnp.arange(16.0 * 13)).reshape(16, 13)
    loss = lambda p, x: jnp.mean((jnp.tanh(x @ p["w"] + p["b"]) - 0.5) ** 2)
    inner = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))
    zero = Zero(jax.make_mesh((DEVICES,), ("data",)), stage=stage)
    tx: Any = zero.optimizer(inner)

    @jax.jit
    def sharded(params: PyTree) -> PyTree:
        params = zero.shard(params)
        state = tx.init(params)
        for _ in range(2):
            _, grads = zero.value_and_grad(loss)(params, x)
            params, state = zero.apply(tx, grads, state, params)
        return zero.gather(params)

    @jax.jit
    def plain(params: PyTree) -> PyTree:
        state = inner.init(params)
        for _ in range(2):
            updates, state = inner.update(jax.grad(loss)(params, x), state, params)
            params = optax.apply_updates(params, updates)
        return params

    ours, theirs = jax.device_get((sharded(params), plain(params)))
    return max(float(abs(a - b).max()) for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True))


if __name__ == "__main__":
    sys.exit(main())
