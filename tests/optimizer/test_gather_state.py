"""Optimizer state at logical shapes, on devices and on the host; evaluation from it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import close, make_mesh
from jax.sharding import PartitionSpec as P

import jaxzero


def params_():
    key = jax.random.key(0)
    return {"w": jax.random.normal(key, (5, 3)), "rows": jnp.ones((16, 2)), "b": jnp.arange(7.0), "s": jnp.ones(())}


def loss(p, x):
    return jnp.mean((x @ p["w"]) ** 2) * p["s"] + jnp.sum(p["b"] ** 2) + jnp.mean(p["rows"] ** 2)


X = jnp.asarray(np.random.default_rng(0).normal(size=(48, 5)).astype(np.float32))


def run(zero, inner, steps=3):
    tx = zero.optimizer(inner)
    params = zero.shard(params_())
    state = tx.init(params)
    for _ in range(steps):
        _, grads = zero.value_and_grad(loss)(params, X)
        params, state = zero.apply(tx, grads, state, params)
    return tx, params, state


def unsharded(inner, steps=3):
    params = params_()
    state = inner.init(params)
    for _ in range(steps):
        updates, state = inner.update(jax.grad(loss)(params, X), state, params)
        params = optax.apply_updates(params, updates)
    return params, state


ZEROS = {
    "one": lambda: jaxzero.Zero(make_mesh(8), stage=1),
    "two": lambda: jaxzero.Zero(make_mesh(3), stage=2),
    "three": lambda: jaxzero.Zero(make_mesh(8), stage=3),
    "mics": lambda: jaxzero.Zero(make_mesh((2, 4), ("replica", "shard")), shard_axis="shard", replica_axis="replica"),
    "tensor": lambda: jaxzero.Zero(
        make_mesh((4, 2), ("data", "model")),
        stage=3,
        param_specs=lambda path, x: P("model") if x.shape == (16, 2) else P(),
    ),
    "alone": lambda: jaxzero.Zero(make_mesh(1), stage=2),
}


@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize("make", ZEROS)
def test_state_at_logical_shapes(make, host):
    zero, inner = ZEROS[make](), optax.adam(0.01)
    _, params, state = run(zero, inner)
    _, expected = unsharded(inner)
    whole = zero.gather(state, like=params, host=host)
    close(whole, expected, 1e-4)
    close(zero.gather(state[0].mu, like=params, host=host), expected[0].mu, 1e-4)
    assert all(isinstance(x, np.ndarray) if host else x.sharding.mesh == zero.mesh for x in jax.tree.leaves(whole))
    close(zero.gather(params, host=host), zero.gather(params))


@pytest.mark.parametrize("make", ["one", "two", "three", "mics"])
def test_state_that_is_not_like_parameters(make):
    zero, inner = ZEROS[make](), optax.adafactor(0.01, min_dim_size_to_factor=8, factored=True)
    n = zero.mesh.shape["shard" if make == "mics" else "data"]
    params = zero.shard({"w": jnp.asarray(np.random.default_rng(1).normal(size=(67, 71)).astype(np.float32))})
    tx = zero.optimizer(inner)
    state = tx.init(params)
    with pytest.raises(ValueError, match="gather: leaf '.*v_row/w' of stored shape .*optimizer=tx"):
        zero.gather(state, like=params)
    expected = inner.init({"w": jnp.ones((67, 71))})
    for optimizer in (tx, inner):
        shapes = jax.tree.map(jnp.shape, zero.gather(state, like=params, optimizer=optimizer))
        assert jax.tree.leaves(shapes) == jax.tree.leaves(jax.tree.map(jnp.shape, expected)), n


@pytest.mark.parametrize("make", ["one", "three", "mics"])
def test_under_jit(make):
    zero, inner = ZEROS[make](), optax.adam(0.01)
    tx, params, state = run(zero, inner)
    whole = jax.jit(lambda s, p: zero.gather(s, like=p, optimizer=tx))(state, params)
    close(whole, zero.gather(state, like=params))


def test_state_without_parameters_is_refused():
    zero = ZEROS["one"]()
    _, _, state = run(zero, optax.adam(0.01), 1)
    with pytest.raises(ValueError, match="gather: leaf '0' is optimizer state.*like=params"):
        zero.gather(state)
    with pytest.raises(ValueError, match="gather: leaf 'b' is optimizer state"):
        zero.gather(state[0].mu)
    with pytest.raises(ValueError, match="gather: leaf '0' is optimizer state"):
        ZEROS["three"]().gather(run(ZEROS["three"](), optax.adam(0.01), 1)[2])
    with pytest.raises(ValueError, match="gather: optimizer= without like="):
        zero.gather(state, optimizer=optax.adam(0.01))


@pytest.mark.parametrize("make", ["one", "two", "three", "mics"])
def test_schedule_free_evaluation(make):
    zero, inner = ZEROS[make](), optax.contrib.schedule_free_sgd(0.05)
    _, params, state = run(zero, inner)
    plain_params, plain_state = unsharded(inner)
    evaluated = optax.contrib.schedule_free_eval_params(zero.gather(state, like=params), zero.gather(params))
    close(evaluated, optax.contrib.schedule_free_eval_params(plain_state, plain_params), 1e-4)


@pytest.mark.parametrize("make", ["one", "two", "three", "mics", "tensor"])
def test_moving_average_of_parameters(make):
    """It is elementwise, so it is taken on the stored arrays; the forward pass takes it in place of the parameters."""
    zero, inner = ZEROS[make](), optax.adam(0.01)
    tx, params, mean = zero.optimizer(inner), zero.shard(params_()), zero.shard(params_())
    state, plain_params = tx.init(params), params_()
    plain_mean, plain_state = plain_params, inner.init(plain_params)
    for _ in range(3):
        _, grads = zero.value_and_grad(loss)(params, X)
        params, state = zero.apply(tx, grads, state, params)
        mean = jax.tree.map(lambda m, p: 0.9 * m + 0.1 * p, mean, params)
        updates, plain_state = inner.update(jax.grad(loss)(plain_params, X), plain_state, plain_params)
        plain_params = optax.apply_updates(plain_params, updates)
        plain_mean = jax.tree.map(lambda m, p: 0.9 * m + 0.1 * p, plain_mean, plain_params)
    close(zero.gather(mean), plain_mean, 1e-5)
    close(zero.forward(lambda p, x: x @ p["w"])(mean, X), X @ plain_mean["w"], 1e-5)
