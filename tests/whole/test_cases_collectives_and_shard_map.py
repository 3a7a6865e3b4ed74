"""Open cases, group "collectives and shard_map" (JZ-073 stands in test_invariants.py, with the other counts)."""

import checks
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxzero

SETTINGS = list(checks.SETTINGS)
BATCHES = checks.quadratic_batches()


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


PARAMS = {"a": normal(0, 13, 3), "b": normal(1, 3), "even": normal(2, 24, 2), "s": jnp.float32(1.5)}


@pytest.mark.parametrize("setting", SETTINGS)
def test_jz_074_the_sum_over_devices_is_taken_once(setting):
    """Gradient of ones on every device: the mean is one, not the number of devices."""
    zero = checks.make_zero(setting)
    ones = jax.tree.map(jnp.ones_like, PARAMS)
    got = checks.update_inside(zero, optax.sgd(1.0), PARAMS, lambda device, step: ones)
    checks.assert_params_equal(got.params, jax.tree.map(lambda x: x - 1, PARAMS), rtol=1e-6, atol=1e-6)
    loss = lambda p, batch: sum(jnp.sum(x) for x in jax.tree.leaves(p)) + 0 * jnp.sum(batch)
    _, grads = checks.gradients(zero, PARAMS, loss, np.ones(8 * 3, np.float32))
    helpers.close(grads, ones, 1e-6)


@pytest.mark.parametrize("way", checks.WAYS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_jz_074_sgd_in_every_way(setting, way):
    """The whole comparison with SGD at rate 1: a constant factor cannot hide."""
    checks.check(setting, optax.sgd(1.0), PARAMS, checks.quadratic, BATCHES, way, rtol=5e-6, atol=5e-6)


@pytest.mark.parametrize("setting", SETTINGS)
def test_jz_074_mixed_trees_of_local_and_split_gradients(setting):
    """Each leaf is read as what it is: this device's own, or a share that is reduced already."""
    zero = checks.make_zero(setting)
    axes = checks.axes_of(zero)
    tx = zero.optimizer(optax.sgd(1.0))
    params = {k: PARAMS[k] for k in ("a", "b", "even")}
    state = tx.init(params)

    def local(params, state, batch):
        own = jax.grad(checks.quadratic)(checks.varying(params, axes), batch)
        _, split = zero.value_and_grad(checks.quadratic)(params, batch)
        updates, state = tx.update({"a": split["a"], "b": own["b"], "even": split["even"]}, state, params)
        return optax.apply_updates(params, updates), state

    specs = zero.specs(state)
    run = jax.shard_map(local, mesh=zero.mesh, in_specs=(P(), specs, P(axes)), out_specs=(P(), specs))
    got, _ = jax.jit(run)(params, state, BATCHES[0])
    want = checks.reference(optax.sgd(1.0), params, checks.quadratic, BATCHES[:1])
    checks.assert_params_equal(got, want.params)


@pytest.mark.parametrize("setting", SETTINGS)
def test_jz_074_parameters_may_vary_by_type(setting):
    """Parameters that were cast for `jax.grad` may be handed to `update` as they are."""
    zero = checks.make_zero(setting)
    axes = checks.axes_of(zero)
    inner = optax.adamw(1e-2, weight_decay=0.1)
    tx = zero.optimizer(inner)
    state = tx.init(PARAMS)

    def local(params, state, batch):
        params_ = checks.varying(params, axes)
        updates, state = tx.update(jax.grad(checks.quadratic)(params_, batch), state, params_)
        return optax.apply_updates(params, updates), state

    specs = zero.specs(state)
    run = jax.shard_map(local, mesh=zero.mesh, in_specs=(P(), specs, P(axes)), out_specs=(P(), specs))
    got, _ = jax.jit(run)(PARAMS, state, BATCHES[0])
    checks.assert_params_equal(got, checks.reference(inner, PARAMS, checks.quadratic, BATCHES[:1]).params)


@pytest.mark.parametrize("stage", [1, 2])
def test_jz_076_results_are_whole_by_type(mesh8, stage):
    """Updates and parameters leave a checked region with `out_specs=P()`; state with its own specs."""
    zero = jaxzero.Zero(mesh8, stage=stage)
    tx = zero.optimizer(optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2)))
    state = tx.init(PARAMS)
    specs = zero.specs(state)
    seen = []

    def local(params, state, batch):
        grads = jax.grad(checks.quadratic)(checks.varying(params, ("data",)), batch)
        updates, state = tx.update(grads, state, params)
        seen.extend(jax.typeof(x).manual_axis_type.varying for x in jax.tree.leaves(updates))
        return updates, state

    run = jax.shard_map(local, mesh=mesh8, in_specs=(P(), specs, P("data")), out_specs=(P(), specs), check_vma=True)
    jax.jit(run)(PARAMS, state, BATCHES[0])
    assert seen == [frozenset()] * len(PARAMS)


@pytest.mark.parametrize("setting", SETTINGS)
def test_init_inside_a_users_own_region(setting):
    """State born inside `shard_map` is the state born outside."""
    zero = checks.make_zero(setting)
    tx = zero.optimizer(optax.adafactor(1e-2, min_dim_size_to_factor=2, momentum=0.9))
    outside = jax.jit(tx.init)(PARAMS)
    specs = zero.specs(outside)
    born = jax.jit(jax.shard_map(tx.init, mesh=zero.mesh, in_specs=P(), out_specs=specs))(PARAMS)
    checks.assert_state_equal(born, outside, rtol=0)
    for a, b in zip(jax.tree.leaves(born), jax.tree.leaves(outside), strict=True):
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)


def test_a_scan_over_steps_inside_one_region(mesh8):
    """Ten steps in one `lax.scan` in one region: state keeps its types, so it may be a carry."""
    zero = jaxzero.Zero(mesh8, stage=2)
    inner = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))
    tx = zero.optimizer(inner)
    batches = checks.quadratic_batches(10)
    stacked = jax.tree.map(lambda *x: np.stack(x), *batches)

    def local(params, stacked):
        def step(carry, batch):
            params, state = carry
            grads = jax.grad(checks.quadratic)(checks.varying(params, ("data",)), batch)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        return lax.scan(step, (params, tx.init(params)), stacked)[0][0]

    run = jax.shard_map(local, mesh=mesh8, in_specs=(P(), P(None, "data")), out_specs=P())
    got = jax.jit(run)(PARAMS, stacked)
    checks.assert_params_equal(got, checks.reference(inner, PARAMS, checks.quadratic, batches).params)


def test_a_scan_over_steps_in_the_global_view(mesh8):
    zero = jaxzero.Zero(mesh8, stage=2)
    inner = optax.adamw(1e-2)
    tx = zero.optimizer(inner)
    batches = checks.quadratic_batches(5)
    stacked = jax.tree.map(lambda *x: np.stack(x), *batches)

    @jax.jit
    def run(params, stacked):
        def step(carry, batch):
            _, grads = zero.value_and_grad(checks.quadratic)(carry[0], batch)
            return zero.apply(tx, grads, carry[1], carry[0]), None

        return lax.scan(step, (params, tx.init(params)), stacked)[0][0]

    want = checks.reference(inner, PARAMS, checks.quadratic, batches)
    checks.assert_params_equal(run(PARAMS, stacked), want.params)
