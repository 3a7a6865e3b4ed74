"""Step time and temporary memory of one training step for several values of `bucket_bytes`.

    python benchmarks/buckets.py [rounds]

All settings run in one process and take turns, step by step. The time is the median ratio to `bucket_bytes=None`
in the same round. Virtual CPU devices share this machine's cores, so the figures show the cost of copies and calls
here. On GPU and TPU the compiler itself joins separate collectives, up to its own threshold.
"""

import os
import statistics
import sys
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")
import jax

jax.config.update("jax_num_cpu_devices", 8)
import jax.numpy as jnp
import numpy as np
import optax

import jaxzero

SIZES = {"None": None, "16 kB": 2**14, "64 kB": 2**16, "256 kB": 2**18, "1 MB": 2**20, "4 MB": 2**22}


def model(key, *, width=192, layers=8, vocab=3001):
    """A multilayer perceptron over an embedding, with small, medium and large leaves."""
    keys = iter(jax.random.split(key, 2 * layers + 1))
    params = {"embed": 0.02 * jax.random.normal(next(keys), (vocab, width))}
    for i in range(layers):
        params[f"layer {i}"] = {
            "up": 0.05 * jax.random.normal(next(keys), (width, 4 * width)),
            "down": 0.05 * jax.random.normal(next(keys), (4 * width, width)),
            "scale": jnp.ones(width),
            "shift": jnp.zeros(width),
        }
    return params


def loss_fn(params, tokens):
    """Predicts each token from the one before it."""
    x = params["embed"][tokens[:, :-1]]
    for name in sorted(k for k in params if k.startswith("layer")):
        p = params[name]
        x = x * p["scale"] + p["shift"]
        x = x + jnp.tanh(x @ p["up"]) @ p["down"]
    logits = jax.nn.log_softmax(x @ params["embed"].T)
    return -jnp.mean(jnp.take_along_axis(logits, tokens[:, 1:, None], -1))


def main(rounds=15):
    """Prints one row per bucket size."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    runs = {}
    for name, size in SIZES.items():
        zero = jaxzero.Zero(mesh, stage=2, bucket_bytes=size)
        tx = zero.optimizer(optax.adamw(1e-3))
        params = zero.init(model, jax.random.key(0))
        tokens = jax.random.randint(jax.random.key(1), (8, 17), 0, 3001)

        def step(params, state, tokens, zero=zero, tx=tx):
            value, grads = zero.value_and_grad(loss_fn)(params, tokens)
            params, state = zero.apply(tx, grads, state, params)
            return params, state, value

        state = tx.init(params)
        tokens = jax.device_put(tokens, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data")))
        compiled = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, tokens).compile()
        runs[name] = [compiled, params, state, tokens, []]
    for _ in range(rounds):
        for run in runs.values():
            start = time.perf_counter()
            run[1], run[2], _ = jax.block_until_ready(run[0](run[1], run[2], run[3]))
            run[4].append(time.perf_counter() - start)
    print(f"jax {jax.__version__}, 8 virtual CPU devices, {os.cpu_count()} cores, {rounds} rounds")
    for name, (compiled, *_, times) in runs.items():
        ratio = statistics.median(a / b for a, b in zip(times[2:], runs["None"][4][2:], strict=True))
        memory = compiled.memory_analysis().temp_size_in_bytes
        count = compiled.as_text().count("reduce-scatter(") + compiled.as_text().count("all-gather(")
        print(f"bucket {name:7s} step time x {ratio:.2f}   temporary {memory / 1e6:6.1f} MB   {count:3d} collectives")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
