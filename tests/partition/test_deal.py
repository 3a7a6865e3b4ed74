"""Work on whole matrices is dealt out: the numbers are those of one device, and each matrix is worked on once."""

import helpers
import jax
import jax.numpy as jnp
import matrix_optimizers
import numpy as np
import pytest

import jaxzero

SHAPES = {"a": (16, 24), "b": (24, 16), "c": (16, 24), "odd": (7, 5), "odd2": (7, 5), "big": (33, 40), "bias": (11,)}
MESHES = {
    "stage 1, 8": ((8,), ("data",), dict(stage=1)),
    "stage 2, 3": ((3,), ("data",), dict(stage=2)),
    "stage 3, 8": ((8,), ("data",), dict(stage=3)),
    "stage 3, 3": ((3,), ("data",), dict(stage=3)),
    "MiCS 2x4": ((2, 4), ("replica", "shard"), dict(stage=2, shard_axis="shard", replica_axis="replica")),
    "tuple 2x4": ((2, 4), ("node", "local"), dict(stage=2, shard_axis=("node", "local"))),
}


def trees(shapes=SHAPES, steps=3):
    rng = np.random.default_rng(0)
    tree = lambda: {k: jnp.asarray(rng.standard_normal(s), jnp.float32) for k, s in shapes.items()}
    return tree(), [tree() for _ in range(steps)]


def zero_of(setting, **options):
    shape, names, fixed = MESHES[setting]
    return jaxzero.Zero(helpers.make_mesh(shape, names), **fixed | options)


def train(zero, inner, params, grads):
    """Parameters after some steps on given gradients, whole."""
    tx = zero.optimizer(inner)
    params = zero.shard(params)
    state = jax.jit(tx.init)(params)
    loss = lambda p, g: sum(jnp.vdot(x, y) for x, y in zip(jax.tree.leaves(p), jax.tree.leaves(g), strict=True))
    grad_fn = zero.value_and_grad(loss, whole_argnums=(1,))

    @jax.jit
    def step(params, state, g):
        _, grads = grad_fn(params, g)
        return zero.apply(tx, grads, state, params)

    for g in grads:
        params, state = step(params, state, g)
    helpers.assert_all_shards_equal(params)
    return jax.device_get(zero.gather(params)), state


@pytest.mark.grid(7)
@pytest.mark.parametrize("setting", MESHES)
@pytest.mark.parametrize("name", matrix_optimizers.OPTIMIZERS)
def test_equal_to_one_device(name, setting):
    params, grads = trees()
    inner = matrix_optimizers.OPTIMIZERS[name]()
    expected, _ = helpers.reference_run(inner, params, grads)
    got, _ = train(zero_of(setting), inner, params, grads)
    helpers.close(got, expected, 2e-4)
