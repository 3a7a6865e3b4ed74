"""What Optax promises of any transformation holds of a wrapped one: callers need not know that it is wrapped."""

import helpers
import jax
import jax.numpy as jnp
import nnx_models as models
import numpy as np
import optax
import pytest
from flax import nnx

import jaxzero

PARAMS = {"w": jnp.ones((16, 3)), "b": jnp.arange(3.0)}
GRADS = {"w": jnp.full((16, 3), 0.5), "b": jnp.ones(3)}


def wrap(inner, stage=2):
    zero = jaxzero.Zero(helpers.make_mesh(8), stage=stage)
    return zero, zero.optimizer(inner)


def test_it_is_a_transformation_with_extra_arguments():
    _, tx = wrap(optax.adam(1e-2))
    assert isinstance(tx, optax.GradientTransformationExtraArgs)
    init, update = tx  # a pair, as Optax's own
    assert optax.with_extra_args_support(tx) is tx
    abstract = init(jax.eval_shape(lambda: PARAMS))
    real = init(PARAMS)
    assert jax.tree.structure(abstract) == jax.tree.structure(real) == jax.tree.structure(optax.adam(1e-2).init(PARAMS))
    shape = lambda x: (x.shape, x.dtype, x.sharding)
    assert jax.tree.map(shape, abstract) == jax.tree.map(shape, real)
    updates, state = update(GRADS, real, PARAMS, value=jnp.float32(1))  # an extra argument that adam does not take
    assert jax.tree.structure(updates) == jax.tree.structure(PARAMS)
    assert jax.tree.map(shape, state) == jax.tree.map(shape, real)
    assert [(u.shape, u.dtype) for u in jax.tree.leaves(updates)] == [
        (p.shape, p.dtype) for p in jax.tree.leaves(PARAMS)
    ]


def test_tree_map_params():
    """It finds the leaves that belong to parameters, as they are stored; `logical` ones come from the parameters."""
    _, tx = wrap(optax.adamw(optax.linear_schedule(1e-2, 0.0, 10)))
    state = tx.init(PARAMS)
    pairs = optax.tree_map_params(
        tx, lambda s, p: (s.shape, p.shape), state, PARAMS, transform_non_params=lambda x: "no parameter's"
    )
    assert pairs[0].mu == pairs[0].nu == {"w": ((16, 3), (16, 3)), "b": ((8,), (3,))}
    assert pairs[0].count == pairs[2].count == "no parameter's"
    doubled = optax.tree_map_params(tx, lambda s: 2 * s, tx.update(GRADS, state, PARAMS)[1])
    updates, _ = tx.update(GRADS, doubled, PARAMS)
    inner = optax.adamw(optax.linear_schedule(1e-2, 0.0, 10))
    want = optax.tree_map_params(inner, lambda s: 2 * s, inner.update(GRADS, inner.init(PARAMS), PARAMS)[1])
    helpers.close(updates, inner.update(GRADS, want, PARAMS)[0])


@pytest.mark.parametrize("stage", [2, 3])
def test_tree_get_and_tree_set(stage):
    """A learning rate that is read and set between steps, without another compilation."""
    make = lambda: optax.inject_hyperparams(optax.adam)(optax.cosine_decay_schedule(1e-2, 10), b1=0.8)
    zero, tx = wrap(make(), stage)
    inner, params, want = make(), zero.shard(PARAMS), PARAMS
    state, state_ = tx.init(params), inner.init(PARAMS)
    step = jax.jit(lambda grads, state, params: zero.apply(tx, grads, state, params))
    for i in range(4):
        if i == 2:
            assert float(optax.tree.get(state, "b1")) == np.float32(0.8)
            like = optax.tree.get(state, "b1")
            state = optax.tree.set(state, b1=jax.device_put(jnp.float32(0.5), like.sharding))
            state_ = optax.tree.set(state_, b1=jnp.float32(0.5))
        params, state = step(zero.shard(GRADS) if stage == 3 else GRADS, state, params)
        updates, state_ = inner.update(GRADS, state_, want)
        want = optax.apply_updates(want, updates)
        for name, value in state_.hyperparams.items():
            assert float(state.hyperparams[name]) == float(value), name
        assert int(state.count) == int(optax.tree.get(state, "ScaleByAdamState").count) == i + 1
    assert step._cache_size() == 1
    helpers.close(zero.gather(params), want)


def test_extra_arguments_through_nnx():
    """`nnx.Optimizer.update` hands its keywords on: a scale that the value of the loss decides."""
    inner = optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(0.5, patience=1, rtol=0.9))
    kernels = []
    for tx in (inner, wrap(inner)[1]):
        model = models.Shared(nnx.Rngs(0), None)
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        update = nnx.jit(lambda model, optimizer, value: optimizer.update(model, nnx.state(model), value=value))
        for value in (1.0, 1.0, 1.0):
            update(model, optimizer, jnp.float32(value))
        kernels.append(np.asarray(model.down[...]))
        assert float(optax.tree.get(nnx.as_pure(optimizer.opt_state), "scale")) == 0.25
    helpers.close(kernels[1], kernels[0])
