"""Parameters of 8 bits and fewer, which JAX does not promote: trained, and frozen beside adapters."""

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxzero

#: Two examples a device, so that this device's own gradient is exact in 8 bits.
X = np.random.default_rng(0).integers(0, 3, (16, 5)).astype(np.float32)


def loss(params, x):
    base = jax.lax.stop_gradient(params["base"]).astype(jnp.float32)
    return jnp.sum(x @ params["w"].astype(jnp.float32) + x @ base * params["a"]) / len(x)


def parameters(dtype, trained):
    draw = np.random.default_rng(1).integers(0, 3, (5, 7)).astype(np.float32)
    return {"base": jnp.asarray(draw, dtype), "w": jnp.asarray(draw[::-1], trained), "a": jnp.ones(7)}


@pytest.mark.parametrize(
    ("dtype", "trained", "stage", "shape", "accumulate"),
    [
        ("float8_e4m3fn", "float8_e4m3fn", 1, (2, 4), 1),
        ("float8_e5m2", "float8_e5m2", 2, (8,), 2),
        ("float8_e4m3fn", "float8_e5m2", 3, (2, 4), 2),
        ("float4_e2m1fn", "float8_e4m3fn", 3, (3,), 1),
        ("int4", "float8_e4m3fn", 2, (8,), 1),
    ],
)
def test_a_step_equals_the_unsharded_one(dtype, trained, stage, shape, accumulate):
    """A sum is taken in float32 and rounded once, so narrow gradients and parameters are equal bit for bit."""
    names = ("replica", "data")[-len(shape) :]
    zero = jaxzero.Zero(helpers.make_mesh(shape, names), stage=stage, replica_axis="replica" if shape[1:] else None)
    params = parameters(dtype, trained)
    tx = zero.optimizer(optax.sgd(1.0))

    @jax.jit
    def step(params, x):
        grads = zero.value_and_grad(loss, accumulate=accumulate)(params, x)[1]
        return grads, zero.apply(tx, grads, tx.init(params), params)[0]

    x = X[: 2 * zero.mesh.size]
    grads, new = step(zero.shard(params), x)
    grads, new = zero.gather(grads), zero.gather(new)
    want = jax.grad(loss, allow_int=True)(params, x)
    assert {k: x.dtype for k, x in new.items()} == {k: x.dtype for k, x in params.items()}
    helpers.close(grads["a"], want["a"])
    np.testing.assert_array_equal(helpers.host(grads["w"]), helpers.host(want["w"]))
    np.testing.assert_array_equal(helpers.host(new["w"]), helpers.host(params["w"] - want["w"]))
    assert np.any(helpers.host(grads["w"]))
    assert not np.any(helpers.host(grads["base"]))
    assert grads["base"].dtype == dtype
    assert np.asarray(new["base"]).tobytes() == np.asarray(params["base"]).tobytes()
    helpers.assert_all_shards_equal((grads, new))


def test_master_weights_of_8_bit_floats():
    """`apply` adds a float32 update to an 8-bit parameter; `optax.apply_updates` refuses to."""
    zero = jaxzero.Zero(helpers.make_mesh(8), stage=3)
    tx = zero.optimizer(jaxzero.master_weights(jaxzero.dynamic_loss_scale(optax.sgd(2**-5), initial_scale=8.0)))
    params = {"w": jnp.ones((5, 3), jnp.float8_e4m3fn)}
    params, state = zero.shard(params), tx.init(zero.shard(params))
    step = jax.jit(lambda p, s: zero.apply(tx, jax.tree.map(lambda x: jnp.full_like(x, 8), p), s, p))
    for _ in range(3):
        params, state = step(params, state)
    got = zero.gather(params)["w"]
    np.testing.assert_array_equal(np.asarray(zero.gather(state, like=params).master["w"]), 1 - 3 / 32)
    np.testing.assert_array_equal(np.asarray(got), np.asarray(jnp.full((5, 3), 1 - 3 / 32).astype(jnp.float8_e4m3fn)))
    assert got.dtype == jnp.float8_e4m3fn
    assert float(got[0, 0].astype(jnp.float32)) < 1
