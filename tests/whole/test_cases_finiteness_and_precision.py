"""Open cases, group "finiteness and precision"; JZ-035 and master weights are in their own files."""

import checks
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from jax.sharding import PartitionSpec as P

import jaxzero
from jaxzero._src.comm.reduce import GradReducer

pytestmark = pytest.mark.grid(9)

SETTINGS = list(checks.SETTINGS)


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("setting", SETTINGS)
def test_jz_053_all_skip_or_none(setting, bad):
    """One bad element, in each device's share in turn: nobody steps, and all counters agree."""
    params = {"a": normal(0, 10), "b": normal(1, 16, 2)}
    zero = checks.make_zero(setting)
    positions = [("a", (i,)) for i in range(0, 10, 3)] + [("b", (i, 1)) for i in range(1, 16, 5)]
    inner = optax.apply_if_finite(optax.sgd(1.0), 5)
    tx = zero.optimizer(inner)
    step = jax.jit(lambda g, s, p: zero.apply(tx, g, s, p))
    placed = checks.place(params, zero.mesh, P())
    start = jax.jit(tx.init)(placed)
    for name, index in positions:
        grads = {k: jnp.ones_like(x) for k, x in params.items()}
        grads[name] = grads[name].at[index].set(bad)
        after, state = step(checks.place(grads, zero.mesh, P()), start, placed)
        checks.assert_params_equal(after, params, rtol=0, atol=0)
        helpers.assert_all_shards_equal(state)
        assert int(state.notfinite_count) == int(state.total_notfinite) == 1
        assert not bool(state.last_finite)
    after, state = step(jax.tree.map(jnp.ones_like, placed), state, placed)
    assert int(state.notfinite_count) == 0
    checks.assert_params_equal(after, jax.tree.map(lambda x: x - 1, params), atol=0)


@pytest.mark.parametrize("setting", SETTINGS)
def test_jz_053_one_device_has_a_bad_gradient(setting):
    """The mean over devices is bad in one element: the decision is taken after the reduction."""
    params = {"a": normal(0, 10), "b": normal(1, 16, 2)}

    def make(device, step):
        good = jax.tree.map(jnp.ones_like, params)
        return good | {"a": good["a"].at[9].set(jnp.where(device == 1, jnp.inf, 1.0))}

    got = checks.update_inside(checks.make_zero(setting), optax.apply_if_finite(optax.sgd(1.0), 5), params, make)
    checks.assert_params_equal(got.params, params, rtol=0, atol=0)
    helpers.assert_all_shards_equal(got.state)
    assert int(got.state.notfinite_count) == 1


@pytest.mark.parametrize("value", [20000.0, 3e-7, 5.9604645e-8, 65504.0])
@pytest.mark.parametrize("setting", SETTINGS)
def test_jz_055_float16_gradients_reduced_in_float32(setting, value):
    """The sum of the devices' gradients overflows float16, and a share of the small one underflows it."""
    value = np.float16(value)
    params = {"h": jnp.zeros(8, jnp.float16), "odd": jnp.zeros(3, jnp.float16)}
    make = lambda device, step: jax.tree.map(
        lambda x: jnp.full(x.shape, value, jnp.float16) + 0 * device.astype(jnp.float16), params
    )
    got = checks.update_inside(checks.make_zero(setting), optax.sgd(1.0), params, make)
    for x in jax.tree.leaves(got.params):
        assert x.dtype == jnp.float16
        np.testing.assert_array_equal(np.asarray(x, np.float32), -np.float32(value))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("setting", SETTINGS)
def test_jz_055_reduce_dtype(setting, dtype):
    """A low-precision reduction divides before it adds: the mean of large float16 gradients is finite."""
    params = {"h": jnp.zeros(8, jnp.float16), "f": jnp.zeros(5)}
    make = lambda device, step: {"h": jnp.full(8, 20000.0, jnp.float16), "f": jnp.full(5, 20000.0)}
    got = checks.update_inside(checks.make_zero(setting, reduce_dtype=dtype), optax.sgd(1.0), params, make)
    for x in jax.tree.leaves(got.params):
        np.testing.assert_allclose(np.asarray(x, np.float32), -20000.0, rtol=0 if dtype == jnp.float32 else 2**-7)


@pytest.mark.parametrize("predivide", [None, 1, 8, 8**0.5])
@pytest.mark.parametrize("setting", SETTINGS)
def test_jz_055_predivide(setting, predivide):
    """Divided before, a float16 sum of 20000 stays finite; divided after, 3e-7 keeps its bits; in the middle, both."""
    params = {"large": jnp.zeros(8, jnp.float16), "small": jnp.zeros(3, jnp.float16), "f": jnp.zeros(16)}
    value = {"large": 20000.0, "small": float(np.float16(3e-7)), "f": 1.5}
    make = lambda device, step: {k: jnp.full(x.shape, value[k], x.dtype) for k, x in params.items()}
    zero = checks.make_zero(setting, reduce_dtype=jnp.float16, predivide=predivide)
    devices = zero.mesh.size
    got = checks.update_inside(zero, optax.sgd(1.0), params, make).params
    np.testing.assert_allclose(got["f"], -1.5, rtol=2**-9)
    overflows = (predivide or devices) < devices * 20000 / 65504
    np.testing.assert_allclose(np.float32(got["large"]), -np.inf if overflows else -20000, rtol=2**-9)
    np.testing.assert_allclose(np.float32(got["small"]), -value["small"], rtol={1: 0, 8**0.5: 0.2}.get(predivide, 0.7))


def predivided_gradients(stage, predivide, **how):
    """The mean gradient in float32, of which `predivide` must be no part."""
    params, batch = {"a": normal(0, 13, 3), "s": jnp.float32(1.5)}, checks.quadratic_batches(1)[0]
    mesh = helpers.make_mesh((2, 4), ("r", "s"))
    zero = jaxzero.Zero(mesh, stage=stage, shard_axis="s", replica_axis="r", predivide=predivide)
    batch_here = checks.place(batch, mesh, P(("r", "s")))
    value, grads = zero.value_and_grad(checks.quadratic, **how)(zero.shard(params), batch_here)
    helpers.close((value, checks.whole(grads)), jax.value_and_grad(checks.quadratic)(params, batch))


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("predivide", [3.0, 8])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_jz_055_predivide_divides_once_in_all(stage, predivide, accumulate):
    predivided_gradients(stage, predivide, accumulate=accumulate)


def test_jz_055_a_second_division_shows(monkeypatch):
    """The mutation: the whole count after a sum of terms that were divided before."""

    def receive(self, x, dtype, weight=None):
        return (x / self.count).astype(dtype)

    monkeypatch.setattr(GradReducer, "receive", receive)
    predivided_gradients(2, None)
    with pytest.raises(AssertionError):
        predivided_gradients(2, 4)


@pytest.mark.parametrize("predivide", [0, -1, float("inf"), float("nan"), True, "8"])
def test_jz_055_a_wrong_predivide_is_refused(predivide):
    with pytest.raises(ValueError, match=checks.saying("Zero: predivide=", "positive number, or None", "Fix:")):
        jaxzero.Zero(predivide=predivide)


@pytest.mark.parametrize("setting", SETTINGS)
def test_jz_055_bfloat16_gradients_keep_small_contributions(setting):
    """256 from one device and 1 from each other: bfloat16 sums lose the ones, float32 sums do not."""
    zero = checks.make_zero(setting)
    devices = int(np.prod(list(zero.mesh.shape.values())))
    params = {"h": jnp.zeros(16, jnp.bfloat16)}
    make = lambda device, step: {"h": jnp.full(16, jnp.where(device == 0, 256.0, 1.0), jnp.bfloat16)}
    got = checks.update_inside(zero, optax.sgd(1.0), params, make)
    want = jnp.bfloat16(-(256.0 + devices - 1) / devices)
    helpers.assert_all_shards_equal(got.params)
    np.testing.assert_array_equal(np.asarray(got.params["h"], np.float32), np.float32(want))


EXPONENTIAL = optax.stateless(lambda updates, params: jax.tree.map(jnp.exp, updates))
ZERO_OVER_ZERO = {
    "adam": lambda: optax.adam(1e-2),
    "adamw": lambda: optax.adamw(1e-2),
    "rmsprop": lambda: optax.rmsprop(1e-2),
    "adabelief": lambda: optax.adabelief(1e-2),
    "amsgrad": lambda: optax.amsgrad(1e-2),
    "nadam": lambda: optax.nadam(1e-2),
    "novograd": lambda: optax.novograd(1e-2),
    "adan": lambda: optax.adan(1e-2),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "adam, eps=0": lambda: optax.adam(1e-2, eps=0.0),
    "rms, eps=0": lambda: optax.chain(optax.scale_by_rms(eps=0.0), optax.scale(-1e-2)),
    "yogi": lambda: optax.yogi(1e-2),
    "division": lambda: optax.stateless_with_tree_map(lambda g, p: -1e-2 * g / p),
    "exponential": lambda: optax.chain(EXPONENTIAL, optax.trace(0.9), optax.scale(-1e-2)),
}


@pytest.mark.parametrize("name", ZERO_OVER_ZERO)
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32])
@pytest.mark.parametrize("setting", ["stage 1, 8", "MiCS 2x4"])
def test_jz_056_nothing_is_born_in_the_padding(setting, dtype, name):
    """0/0 in the padding is a NaN that no real element has: stored padding is zero, and a norm after it finite."""
    params = {"x": (1.0 + jnp.abs(normal(0, 10))).astype(dtype), "m": (1.0 + jnp.abs(normal(1, 5, 5))).astype(dtype)}
    grads = jax.tree.map(lambda x: jnp.ones_like(x) * jnp.asarray(0.5, dtype), params)
    inner = optax.chain(ZERO_OVER_ZERO[name](), optax.snapshot("norm", optax.tree.norm))
    zero = checks.make_zero(setting)
    want_params, want_state = helpers.reference_run(inner, params, [grads] * 2)
    assert all(np.isfinite(helpers.host(x)).all() for x in jax.tree.leaves((want_params, want_state)))
    got = checks.update_inside(zero, inner, params, lambda d, s: grads, steps=2)
    tolerance = 4e-3 if dtype == jnp.float16 else 2e-5
    checks.assert_params_equal(got.params, want_params, rtol=tolerance)
    checks.assert_state_equal(got.state, want_state, rtol=tolerance)  # the padding too: bitwise zero


DEBUG_NANS = """
import checks, helpers, jaxzero, jax.numpy as jnp, optax
jax.config.update("jax_debug_nans", True)
zero = jaxzero.Zero(helpers.make_mesh(8), stage=2)
params = {"x": jnp.ones(10), "y": jnp.ones((5, 3))}
inner = optax.chain(optax.adam(1e-2, eps=0.0), optax.clip_by_global_norm(1e-3))
for way in checks.WAYS:
    got = checks.train(zero, inner, params, checks.quadratic, checks.quadratic_batches(2), way)
print("finite")
"""


def test_jz_056_under_debug_nans():
    assert helpers.run_python(DEBUG_NANS).split() == ["finite"]


def test_jz_056_norm_of_nothing(mesh8):
    """`normalize_by_update_norm` on gradients that are all zero gives what Optax gives."""
    params = {"x": jnp.ones(10)}
    inner = optax.chain(optax.normalize_by_update_norm(eps=1e-6), optax.sgd(1.0))
    zero = jaxzero.Zero(mesh8, stage=2)
    got = checks.update_inside(zero, inner, params, lambda d, s: {"x": jnp.zeros(10)})
    checks.assert_params_equal(got.params, params, rtol=0, atol=0)
