"""ZeRO together with tensor parallelism, on a mesh of data=4 and model=2: the same run as on one device.

    python examples/tensor_parallel.py

The matrices of this perceptron are sharded over "model", the first by columns and the second by rows, so a layer costs
one all-reduce of activations. `param_specs` declares this sharding.

jaxzero cuts another dimension of each matrix over "data". The compiler handles "model": no collective of jaxzero makes
a matrix whole over it. The loss is written for one device. Optimizers stay exact: the norm for clipping is over both
axes, and Muon orthogonalises whole matrices.

The program needs 8 devices. Without accelerators it makes eight virtual CPU devices.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxzero

jax.config.update("jax_num_cpu_devices", 8)  # has no effect on a machine with accelerators

STEPS, WIDTH, HIDDEN = 20, 64, 256
SPECS = {
    "in": {
        "w": P(None, "model"),
        "b": P("model"),
    },  # columns; the bias is not cut, because "model" shards its only dimension
    "out": {"w": P("model", None), "b": P()},  # rows
}


def init(key):
    """Parameters as for one device."""
    first, second = jax.random.split(key)
    return {
        "in": {"w": jax.random.normal(first, (WIDTH, HIDDEN)) / 8, "b": jnp.zeros(HIDDEN)},
        "out": {"w": jax.random.normal(second, (HIDDEN, WIDTH)) / 16, "b": jnp.zeros(WIDTH)},
    }


def loss(params, batch):
    """The mean over examples, written for one device."""
    x, y = batch
    hidden = jax.nn.gelu(x @ params["in"]["w"] + params["in"]["b"])
    return jnp.mean((hidden @ params["out"]["w"] + params["out"]["b"] - y) ** 2)


def on_one_device(inner, params, batch):
    """The run to compare with: plain JAX and Optax."""

    @jax.jit
    def step(params, state):
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, state = inner.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    state = jax.jit(inner.init)(params)
    for _ in range(STEPS):
        params, state, value = step(params, state)
    return params, float(value)


def on_the_mesh(zero, inner, params, batch):
    """The same run with jaxzero. The batch is cut over "data" alone: both halves of a model get the same examples."""
    tx, grad_fn = zero.optimizer(inner), zero.value_and_grad(loss)

    @jax.jit
    def step(params, state, batch):
        value, grads = grad_fn(params, batch)
        return *zero.apply(tx, grads, state, params), value

    params = zero.shard(params)
    state = tx.init(params)
    batch = jax.device_put(batch, NamedSharding(zero.mesh, P("data")))
    for _ in range(STEPS):
        params, state, value = step(params, state, batch)
    return params, state, float(value)


def main():
    """Trains at stages 2 and 3, prints the specs and the difference of the parameters from the run on one device."""
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    params = init(jax.random.key(0))
    x = np.random.default_rng(0).normal(size=(64, WIDTH)).astype(np.float32)
    batch = x, np.roll(x, 1, axis=1)
    clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-3))
    print(f"{'stage':7s}{'optimizer':12s}{'loss':>8s}{'one device':>12s}{'difference':>12s}")
    for stage, name, inner in [(2, "clip, adamw", clipped), (3, "muon", optax.contrib.muon(1e-2))]:
        zero = jaxzero.Zero(mesh, stage=stage, param_specs=SPECS)
        want, value = on_one_device(inner, params, batch)
        got, state, mine = on_the_mesh(zero, inner, params, batch)
        pairs = zip(jax.tree.leaves(zero.gather(got)), jax.tree.leaves(want), strict=True)
        worst = max(float(np.max(np.abs(np.asarray(a) - np.asarray(b)))) for a, b in pairs)
        print(f"{stage:<7d}{name:12s}{mine:8.4f}{value:12.4f}{worst:12.1e}")
        if stage == 2:
            moment = optax.tree_utils.tree_get(state, "mu")["out"]["w"]
            print(f"  parameter {got['out']['w'].sharding.spec}, its moment {moment.sharding.spec}")
    print(zero.plan(params, inner))
    print(zero.explain(inner, params))


if __name__ == "__main__":
    main()
