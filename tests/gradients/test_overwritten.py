"""Leaves whose gradient is their next value: the scales and histories of FP8 products (JZ-203)."""

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec as P

import jaxzero

COLLECTION = "_overwrite_with_gradient"


class Model(nn.Module):
    """Two layers whose products are in FP8."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(13, dot_general_cls=nn.Fp8DirectDotGeneralOp)(x)
        return nn.Dense(4, dot_general_cls=nn.Fp8DirectDotGeneralOp)(jnp.tanh(x))


MODEL = Model()
#: Sorted by size: the largest examples are those of the last device and the last microbatch.
X = np.random.default_rng(0).normal(size=(48, 5)).astype(np.float32) * np.linspace(0.1, 20, 48)[:, None].astype("f")
PARAMS = jax.device_get(MODEL.init(jax.random.key(0), X))
#: What no device's mean has a factor in: all but the maxima of the gradients of outputs.
SAME = [
    f"{layer}/{name}"
    for layer in ("Dense_0", "Dense_1")
    for name in ("input_amax_history", "kernel_amax_history", "input_scale", "kernel_scale", "output_grad_scale")
]


def loss(params, x):
    return jnp.mean(jnp.square(MODEL.apply(params, x)))


def weighted(params, x):
    return jnp.sum(jnp.square(MODEL.apply(params, x))), jnp.float32(4 * x.shape[0])


def overwritten(tree):
    """The leaves of the collection by name."""
    ops = {layer: next(iter(ops.values())) for layer, ops in tree[COLLECTION].items()}
    return {f"{layer}/{name}": np.asarray(x) for layer, op in ops.items() for name, x in op.items()}


LAYOUTS = {
    "one": ((1,), {}),
    "3": ((3,), {}),
    "8": ((8,), {}),
    "mics": ((2, 4), dict(replica_axis="replica")),
    "hops": ((2, 4), dict(shard_axis=("replica", "shard"), regather="local")),
}


def make_zero(layout, stage):
    sizes, options = LAYOUTS[layout]
    names = ("replica", "shard")[-len(sizes) :]
    mesh = jax.make_mesh(sizes, names, devices=jax.devices()[: np.prod(sizes)])
    options = options if stage == 3 else {k: v for k, v in options.items() if k != "regather"}
    return jaxzero.Zero(mesh, stage=stage, **{"shard_axis": "shard", **options})


@pytest.mark.grid(7)
@pytest.mark.parametrize("how", [{}, dict(accumulate=2), dict(weighted=True), dict(loss_scale=8.0)], ids=str)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_largest_of_all_devices_and_microbatches(layout, stage, how):
    """The maxima were averaged over devices and divided by weights: 60.24 became 12.74."""
    zero, how = make_zero(layout, stage), dict(how)
    scale = how.pop("loss_scale", None)
    call = {} if scale is None else {"loss_scale": jnp.float32(scale)}
    fn = weighted if how.get("weighted") else loss
    _, grads = jax.jit(zero.value_and_grad(fn, **how))(zero.shard(PARAMS), X, **call)
    _, want = jax.value_and_grad(loss)(PARAMS, X)
    found, want = overwritten(zero.gather(grads)), overwritten(want)
    for name in SAME:
        np.testing.assert_array_equal(found[name], want[name], err_msg=name)
    assert found["Dense_0/input_amax_history"].max() == np.abs(X).max()
    helpers.assert_all_shards_equal(grads[COLLECTION])


@pytest.mark.parametrize(
    ("layout", "stage", "way"), [("8", 1, "update"), ("mics", 2, "apply"), ("mics", 3, "update"), ("8", 3, "apply")]
)
def test_a_step_puts_the_value_in_the_place_of_the_leaf(layout, stage, way):
    """The optimizer does not see such leaves: no decay, no state that moves, no part of a norm."""
    zero = make_zero(layout, stage)
    inner = optax.chain(optax.clip_by_global_norm(0.5), optax.add_decayed_weights(0.1), optax.sgd(1.0, momentum=0.9))
    tx = zero.optimizer(inner)

    @jax.jit
    def step(params, state, x):
        _, grads = zero.value_and_grad(loss)(params, x)
        if way == "apply":
            return (*zero.apply(tx, grads, state, params), grads)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, grads

    params = zero.shard(PARAMS)
    state = tx.init(params)
    plain, plain_state = PARAMS["params"], inner.init(PARAMS["params"])
    for _ in range(2):
        params, state, grads = step(params, state, X)
        own = jax.device_get(zero.gather(grads))
        for name, value in overwritten(zero.gather(params)).items():
            # An update is a difference, which rounds to the larger of both: scales start at 1.
            atol = 0 if way == "apply" else 1.2e-7
            np.testing.assert_allclose(value, overwritten(own)[name], rtol=0, atol=atol, err_msg=name)
        updates, plain_state = inner.update(own["params"], plain_state, plain)
        plain = optax.apply_updates(plain, updates)
        helpers.close(zero.gather(params)["params"], plain)


def predicate(path):
    return "amax" in jax.tree_util.keystr(path)


@jax.custom_vjp
def watched(x, amax):
    return x


watched.defvjp(
    lambda x, amax: (x, x), lambda x, g: (g, jnp.max(jnp.abs(x)))
)  # the gradient of amax is the largest value that passed


def small_loss(p, x):
    return jnp.mean(watched(x @ p["w"], p["amax"]) ** 2)


SMALL = {"w": jnp.linspace(-1, 1, 5), "amax": jnp.float32(0.5)}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_predicate_inside_shard_map(mesh24, stage):
    zero = jaxzero.Zero(mesh24, stage=stage, shard_axis="shard", replica_axis="replica", overwrite=predicate)
    tx = zero.optimizer(optax.sgd(1.0))
    params = zero.shard(SMALL)
    specs = zero.specs(params)

    def local(params, x):
        if stage == 3:
            _, grads = zero.value_and_grad(small_loss)(params, x)
        else:
            cast = lambda p: jax.lax.pcast(p, ("replica", "shard"), to="varying")
            grads = jax.grad(small_loss)(jax.tree.map(cast, params), x)
        return zero.apply(tx, grads, tx.init(params), params)[0]

    run = jax.shard_map(local, mesh=mesh24, in_specs=(specs, P(("replica", "shard"))), out_specs=specs)
    params = jax.jit(run)(params, X)
    want = np.abs(X @ np.asarray(SMALL["w"])).max()
    np.testing.assert_allclose(zero.gather(params)["amax"], want, rtol=1e-6)


def test_without_params_an_update_cannot_be_told(mesh8):
    zero = jaxzero.Zero(mesh8, overwrite=predicate)
    tx = zero.optimizer(optax.sgd(1.0))
    _, grads = zero.value_and_grad(small_loss)(SMALL, X)
    with pytest.raises(ValueError, match=r"update: leaf 'amax' is overwritten by its gradient.*Fix: tx.update\("):
        tx.update(grads, tx.init(SMALL))


def test_a_predicate_is_a_function(mesh8):
    with pytest.raises(ValueError, match=r"Zero: overwrite='amax'. Expected a predicate on key paths.*Fix: overwrite="):
        jaxzero.Zero(mesh8, overwrite="amax")
