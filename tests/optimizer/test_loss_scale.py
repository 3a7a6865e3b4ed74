"""Dynamic loss scaling: what is divided, what is skipped, and that all devices decide alike."""

import functools

import checks
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from mixed_precision import SETTINGS, assert_rounded, gradients, make_zero, mixed
from mutating import mutated

import jaxzero
from jaxzero._src.comm import collectives
from jaxzero._src.optimizer import loss_scale

ADAMW = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(optax.linear_schedule(1e-2, 1e-3, 10)))
WAYS = ["outside", "inside"]


def loss_fn(params, batch):
    """A mean over examples; one of 1e6 makes one device's gradient infinite, in one element of `rows` alone."""
    wide = jnp.concatenate([jnp.ravel(x) for x in jax.tree.leaves(params)]).astype(jnp.float32)
    last_of_rows = jnp.arange(wide.size) == sum(params[k].size for k in ("flat", "rows")) - 1
    used = (batch[:, None] < 1e5) | last_of_rows
    return jnp.mean(jnp.square(used * (batch[:, None] * wide - 1)).sum(1))


def make_step(zero, tx, way):
    """A training step on a scaled loss, in the global view or in a user's own `shard_map`."""
    grad_fn, axes = zero.value_and_grad(loss_fn), checks.axes_of(zero)

    def step(params, state, batch):
        loss, grads = grad_fn(params, batch, loss_scale=state.loss_scale)
        return *zero.apply(tx, grads, state, params), loss

    if way == "outside":
        return lambda params, state: jax.jit(step)

    def inside(params, state):
        specs = zero.specs(params) if zero.stage == 3 else P(), zero.specs(state)
        return jax.jit(jax.shard_map(step, mesh=zero.mesh, in_specs=(*specs, P(axes)), out_specs=(*specs, P())))

    return inside


def overflow_on_one_device(setting, way):
    """Eight steps; in the fifth one example, on the second device, is huge. What each step leaves."""
    zero = make_zero(setting)
    tx = zero.optimizer(jaxzero.dynamic_loss_scale(jaxzero.master_weights(ADAMW), initial_scale=1024.0))
    params = zero.shard(mixed(jnp.float16))
    state = jax.jit(tx.init)(params)
    step, left = make_step(zero, tx, way)(params, state), []
    for i in range(8):
        batch = np.linspace(0.5, 1.0, 16, dtype=np.float32)
        if i == 4:
            batch[3] = 1e6
        params, state, loss = step(params, state, checks.place(batch, zero.mesh, P(checks.axes_of(zero))))
        helpers.assert_all_shards_equal((params, state))
        left.append((params, state, float(loss)))
    return left


def assert_skipped_once(left):
    skipped = [int(state.skipped_steps) for _, state, _ in left]
    assert skipped == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [float(state.loss_scale) for _, state, _ in left] == [1024.0] * 4 + [512.0] * 4
    assert [int(state.good_steps) for _, state, _ in left] == [1, 2, 3, 4, 0, 1, 2, 3]
    counts = [int(optax.tree.get_all_with_path(state, "count")[0][1]) for _, state, _ in left]
    assert counts == [1, 2, 3, 4, 4, 5, 6, 7], "the schedule went on in a step that was skipped"
    before, after = left[3][:2], left[4][:2]
    jax.tree.map(np.testing.assert_array_equal, (before[0], before[1].inner_state), (after[0], after[1].inner_state))


@pytest.mark.grid(11)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_overflow_on_one_device_skips_everywhere_once(setting, way):
    left = overflow_on_one_device(setting, way)
    assert_skipped_once(left)
    losses = [loss for *_, loss in left]
    assert np.isfinite(losses).all()
    assert losses[-1] < losses[0]
    zero = make_zero(setting)
    assert_rounded(zero.gather(left[-1][0]), left[-1][1])


# --- JZ-035: the scale that made the gradient is the scale that is taken out ----------------------

NORM = optax.chain(optax.snapshot("norm", optax.tree.norm), optax.sgd(1e-2))


def norms(setting, tx, scale_of, bad_step=None):
    """The norms that the optimizer sees, on gradients of a scaled loss."""
    zero = make_zero(setting)
    tx = zero.optimizer(tx)
    params = zero.shard(jax.tree.map(lambda x: x.astype(jnp.float32), mixed()))
    state = jax.jit(tx.init)(params)
    grad_fn, found = zero.value_and_grad(loss_fn), []

    @jax.jit
    def step(params, state, batch):
        _, grads = grad_fn(params, batch, loss_scale=scale_of(state))
        return zero.apply(tx, grads, state, params)

    for i in range(6):
        batch = np.linspace(0.5, 1.0 + i, 16, dtype=np.float32)
        params, state = step(params, state, checks.place(batch, zero.mesh, P(checks.axes_of(zero))))
        found.append(float(optax.tree.get(state, "norm")))
    return found


@pytest.mark.parametrize("setting", ["stage 2"])
def test_jz_035_norms_are_those_without_a_scale(setting):
    """The scale changes in every step; scales are powers of two, so nothing is rounded."""
    tx = jaxzero.dynamic_loss_scale(NORM, initial_scale=2.0**10, growth_interval=1)
    assert norms(setting, tx, lambda state: state.loss_scale) == norms(setting, NORM, lambda state: None)


# --- the scale -----------------------------------------------------------------------------------


def scales(bad, **options):
    """The scale after each of some steps, of which those in `bad` are not finite."""
    tx = jaxzero.dynamic_loss_scale(optax.sgd(1.0), **options)
    state, found = tx.init(jnp.ones(2)), []
    for i in range(8):
        _, state = tx.update(jnp.array([1.0, np.nan if i in bad else 1.0]), state)
        found.append(float(state.loss_scale))
    return found


def test_growth_and_back_off():
    base = dict(initial_scale=8.0, growth_interval=3)
    assert scales((), **base) == [8, 8, 16, 16, 16, 32, 32, 32]
    assert scales((2, 3), **base) == [8, 8, 4, 2, 2, 2, 4, 4]
    assert scales(range(8), **base, min_scale=2.0) == [4, 2, 2, 2, 2, 2, 2, 2]
    assert scales((4,), initial_scale=8.0, growth_interval=1, growth_factor=3.0, backoff_factor=0.25) == [
        *(24, 72, 216, 648),
        *(162, 486, 1458, 4374),
    ]
    assert scales((), initial_scale=2.0**127, growth_interval=1) == [2.0**127] * 8, "it never becomes infinite"


@pytest.mark.grid(15)
@pytest.mark.parametrize("order", ["scale(master)", "master(scale)"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_equals_the_unsharded_run(setting, order):
    """Plain Optax, in both orders, with a gradient that is not finite between finite ones."""
    scale, master = functools.partial(jaxzero.dynamic_loss_scale, initial_scale=8.0), jaxzero.master_weights
    tx = scale(master(ADAMW)) if order == "scale(master)" else master(scale(ADAMW))
    grads = gradients(4, jnp.float16)
    grads[1]["flat"] = grads[1]["flat"].at[12, 2].set(np.inf)
    want_params, want_state = helpers.reference_run(tx, mixed(jnp.float16), grads)
    zero = make_zero(setting)
    wrapped = zero.optimizer(tx)
    params = zero.shard(mixed(jnp.float16))
    state = jax.jit(wrapped.init)(params)
    step = jax.jit(lambda g, s, p: zero.apply(wrapped, g, s, p))
    for g in grads:
        params, state = step(checks.place(g, zero.mesh, P()), state, params)
    checks.assert_state_equal(state, want_state)
    checks.assert_params_equal(zero.gather(params), want_params, rtol=2**-10)
    assert int(optax.tree.get(state, "skipped_steps")) == 1
    assert step._cache_size() == 1


def test_small_gradients_survive():
    """1e-6 in float16 has four bits; scaled by 2^12 it has all of them. Divided in float32, not in float16."""
    tx = jaxzero.dynamic_loss_scale(jaxzero.master_weights(optax.sgd(1.0)), initial_scale=2.0**12)
    params = jnp.zeros(4, jnp.float16)
    value = np.float32(1.234e-6)
    _, state = tx.update(jnp.full(4, value * 2**12, jnp.float16), tx.init(params), params)
    np.testing.assert_allclose(state.inner_state.master, -value, rtol=2**-11)


def test_narrow_parameters_without_master_weights():
    """The inner state keeps its dtypes although gradients are divided in float32."""
    tx = jaxzero.dynamic_loss_scale(optax.adam(1e-2))
    params = jnp.ones(4, jnp.float16)
    state = tx.init(params)
    updates, after = tx.update(jnp.ones(4, jnp.float16), state, params)
    assert jax.tree.map(jnp.result_type, after) == jax.tree.map(jnp.result_type, state)
    assert optax.apply_updates(params, updates).dtype == jnp.float16


def test_jz_016_the_first_state_may_be_donated():
    """Without a mesh, too: no array stands in the state twice."""
    tx = jaxzero.dynamic_loss_scale(jaxzero.master_weights(optax.adam(1e-2)))
    params = {"a": jnp.ones(4, jnp.float16), "b": jnp.ones(3)}
    state = tx.init(params)
    arrays = jax.tree.leaves((params, state))
    assert len({x.unsafe_buffer_pointer() for x in arrays}) == len(arrays)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state):
        updates, state = tx.update(jax.tree.map(jnp.ones_like, params), state, params)
        return optax.apply_updates(params, updates), state

    _, state = step(*step(params, state))
    assert int(state.good_steps) == 2


def test_an_inner_state_that_grows(mesh8):
    """A skipped step could not leave it as it was, so it is refused inside; around the scale it is right."""
    monitor = optax.monitor({"norm": optax.tree.norm})
    params = {"w": jnp.ones(9)}
    for wrap in (lambda tx: tx, jaxzero.Zero(mesh8).optimizer):
        inside = wrap(jaxzero.dynamic_loss_scale(optax.chain(optax.sgd(0.5), monitor)))
        with pytest.raises(ValueError, match=r"dynamic_loss_scale: .*other leaves.*'1/measurements/norm'.*Fix: put"):
            inside.update(params, inside.init(params), params)
        around = wrap(optax.chain(jaxzero.dynamic_loss_scale(optax.sgd(2.0**15)), monitor))
        _, state = around.update(params, around.init(params), params)
        np.testing.assert_allclose(state[1].measurements["norm"], 3.0, rtol=1e-6)


# --- the loss ------------------------------------------------------------------------------------


@pytest.mark.grid(5)
@pytest.mark.parametrize("stage", [3, 2])
def test_the_scaled_loss(stage):
    """The loss comes back without the scale, aux was never scaled, gradients carry it: in every mode."""
    zero = make_zero(f"stage {stage}")
    params = zero.shard({"w": jnp.arange(1.0, 17.0), "b": jnp.ones(3)})
    batch = checks.place(np.linspace(0.5, 1.0, 32, dtype=np.float32), zero.mesh, P("data"))
    mean = lambda p, x: jnp.mean(jnp.square(x[:, None] * p["w"]).sum(1)) + p["b"].sum()
    with_aux = lambda p, x: (mean(p, x), {"x": x.mean()})
    weighted = lambda p, x: (mean(p, x) * x.sum(), x.sum())
    for loss, how in ((mean, {}), (with_aux, dict(has_aux=True)), (weighted, dict(weighted=True, accumulate=2))):
        grad_fn = zero.value_and_grad(loss, **how)
        want, grads = grad_fn(params, batch)
        value, scaled = grad_fn(params, batch, loss_scale=jnp.float32(256))
        jax.tree.map(np.testing.assert_array_equal, value, want)
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, 256 * b), scaled, grads)


def test_a_float16_loss_is_scaled_in_float32(mesh8):
    zero = jaxzero.Zero(mesh8)
    loss = lambda p, x: jnp.mean(x * p).astype(jnp.float16)
    value, grad = zero.value_and_grad(loss)(jnp.float16(4), jnp.ones(8, jnp.float16), loss_scale=2.0**15)
    assert float(value) == 4.0
    assert float(grad) == 2.0**15


# --- mutations: each comparison must fail for the error that it is there to catch -----------------


def device_0_decides(f):
    """A minimum over devices that is the first device's: the decision is local to it."""

    def wrong(values, axes, *, reduce=lax.psum, **how):
        if reduce is not lax.pmin:
            return f(values, axes, reduce=reduce, **how)
        return [lax.all_gather(x, axes, to="invarying")[0] for x in values]

    return wrong


def test_a_local_decision_shows(monkeypatch):
    with mutated(monkeypatch, "all_reduce", device_0_decides, collectives), pytest.raises(AssertionError):
        assert_skipped_once(overflow_on_one_device("stage 2", "outside"))


@pytest.mark.grid(5)
@pytest.mark.parametrize("wrong", ["left in", "the next one"])
def test_a_wrong_scale_shows(monkeypatch, wrong):
    factor = {"left in": lambda scale: scale, "the next one": lambda scale: scale / (2 * scale)}[wrong]
    change = lambda f: lambda grads, scale, finite: f(grads, scale / factor(scale), finite)
    with mutated(monkeypatch, "unscaled", change, loss_scale), pytest.raises(AssertionError):
        test_jz_035_norms_are_those_without_a_scale("stage 2")


# --- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("initial_scale", 0, "a positive number"),
        ("initial_scale", np.inf, "a positive number"),
        ("initial_scale", 1e39, "a positive number that float32 holds"),  # infinite: every step would be skipped
        ("initial_scale", 1e-46, "a positive number that float32 holds"),
        ("growth_interval", 1.5, "a positive int"),
        ("growth_interval", 0, "a positive int"),
        ("growth_factor", 1.0, "above 1"),
        ("backoff_factor", 1.0, "between 0 and 1"),
        ("backoff_factor", "half", "between 0 and 1"),
        ("min_scale", 2.0**40, "initial_scale at most"),
        ("min_scale", True, "a positive number"),
        ("min_scale", 1e-46, "a positive number"),
    ],
)
def test_numbers_out_of_range_are_refused(name, value, expected):
    with pytest.raises(ValueError, match=checks.saying("dynamic_loss_scale", name, expected, "Fix:")):
        jaxzero.dynamic_loss_scale(optax.sgd(1.0), **{name: value})


def test_misuse_is_refused(mesh8):
    with pytest.raises(ValueError, match=checks.saying("dynamic_loss_scale: the inner optimizer is wrapped")):
        jaxzero.dynamic_loss_scale(jaxzero.zero2(optax.sgd(1.0), mesh=mesh8))
    grad_fn = jaxzero.Zero(mesh8).value_and_grad(lambda p, x: jnp.mean(p * x))
    for scale in (jnp.ones(8), 3, jnp.int32(3)):
        with pytest.raises(ValueError, match=checks.saying("value_and_grad: loss_scale", "Expected a floating scalar")):
            grad_fn(jnp.float32(1), jnp.ones(8), loss_scale=scale)
