"""ZeRO beside tensor parallelism, on a mesh of data=4 and model=2: the same run as on one device.

The matrices of this perceptron are sharded over "model": the first by columns, the second by rows, so a layer
costs one all-reduce of activations. `param_specs` says so. jaxzero cuts what is left of each over "data", and leaves
"model" to the compiler: no collective of its own makes a matrix whole over it. The loss is written for one device, and
optimizers stay exact: the norm for the clipping is over both axes, Muon orthogonalises whole matrices.

Run it with `python examples/tensor_parallel.py`. It needs 8 devices; without any it makes them of the CPU.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxzero

jax.config.update("jax_num_cpu_devices", 8)  # a machine with accelerators does not look at it

STEPS, WIDTH, HIDDEN = 20, 64, 256
SPECS = {
    "in": {"w": P(None, "model"), "b": P("model")},  # columns; its only dimension is taken: the bias is not cut
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
    """The mean over examples, with no word of devices."""
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
    """The same in jaxzero. The batch is cut over "data" alone: both halves of a model see the same examples."""
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
    """Trains at each stage, prints where things are and how far from one device the parameters end up."""
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
