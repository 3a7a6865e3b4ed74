"""Master weights: what is kept, what is rounded, what travels."""

import re

import checks
import helpers
import hlo
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from mixed_precision import SETTINGS, assert_rounded, gradients, make_zero, mixed

import jaxzero

ADAMW = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))
INNER = {
    "adamw": ADAMW,
    "lamb": optax.lamb(1e-2),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "muon": optax.contrib.muon(1e-2),
    "apply_if_finite": optax.apply_if_finite(optax.adam(1e-2), 3),
    "inject_hyperparams": optax.inject_hyperparams(optax.adamw)(optax.linear_schedule(1e-2, 1e-3, 3)),
}


def run(zero, tx, params, grads_list, way="apply"):
    """Steps on gradients that are given: the global mean already."""
    tx = zero.optimizer(tx)
    params = zero.shard(jax.tree.map(jnp.copy, params))  # donated below: no buffer may be shared with another leaf
    state = jax.jit(tx.init)(params)

    def step(grads, params, state):
        if way == "apply":
            return zero.apply(tx, grads, state, params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    step = jax.jit(step, donate_argnums=(1, 2))
    for grads in grads_list:
        params, state = step(checks.place(grads, zero.mesh, P()), params, state)
    assert step._cache_size() == 1
    return checks.Run(zero.gather(params), state, [])


# --- equal to the unsharded run ------------------------------------------------------------------


@pytest.mark.grid(83)
@pytest.mark.parametrize("name", INNER)
@pytest.mark.parametrize("way", ["apply", "update"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("setting", SETTINGS)
def test_equals_the_unsharded_run(setting, dtype, way, name):
    tx, grads = jaxzero.master_weights(INNER[name]), gradients(3, dtype)
    want_params, want_state = helpers.reference_run(tx, mixed(dtype), grads)
    got = run(make_zero(setting), tx, mixed(dtype), grads, way)
    checks.assert_state_equal(got.state, want_state)
    checks.assert_params_equal(got.params, want_params, rtol=2**-7 if dtype == jnp.bfloat16 else 2**-10)
    assert_rounded(got.params, got.state)
    assert_rounded(want_params, want_state)


@pytest.mark.grid(15)
@pytest.mark.parametrize("way", ["inside, update", "inside, apply", "value_and_grad, apply"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_training_on_a_loss_inside_and_outside(setting, way):
    """Adam's first moment stays within bfloat16's rounding of local gradients, and parameters are the masters."""
    loss = lambda p, batch: checks.quadratic(p, batch)
    tx, batches = jaxzero.master_weights(optax.sgd(1e-3, momentum=0.9)), checks.quadratic_batches(2)
    want = checks.reference(tx, mixed(), loss, batches)
    got = checks.train(make_zero(setting), tx, mixed(), loss, batches, way)
    checks.assert_state_equal(got.state, want.state, rtol=2**-7)
    assert_rounded(got.params, got.state)


def wrap(name):
    inner, labels = optax.adam(1e-2), {"flat": "a", "rows": "a", "s": "b", "wide": "b"}
    mw = jaxzero.master_weights
    return {
        "clip outside": lambda: optax.chain(optax.clip_by_global_norm(0.5), mw(inner)),
        "named": lambda: optax.named_chain(("zero_nans", optax.zero_nans()), ("adam", mw(inner))),
        "masked": lambda: optax.masked(mw(inner), {"flat": True, "rows": True, "s": False, "wide": False}),
        "partition": lambda: optax.partition({"a": mw(inner), "b": optax.sgd(0.1)}, labels),
        "MultiSteps": lambda: optax.MultiSteps(mw(inner), 2).gradient_transformation(),
        "around MultiSteps": lambda: mw(optax.MultiSteps(inner, 2).gradient_transformation()),
        "around masked": lambda: mw(optax.masked(inner, lambda p: jax.tree.map(lambda x: x.ndim > 0, p))),
    }[name]()


@pytest.mark.grid(15)
@pytest.mark.parametrize("setting", ["stage 2", "stage 3"])
@pytest.mark.parametrize(
    "name", ["clip outside", "named", "masked", "partition", "MultiSteps", "around MultiSteps", "around masked"]
)
def test_inside_any_chain(name, setting):
    tx, grads = wrap(name), gradients(4)
    want_params, want_state = helpers.reference_run(tx, mixed(), grads)
    got = run(make_zero(setting), tx, mixed(), grads)
    checks.assert_state_equal(got.state, want_state)
    checks.assert_params_equal(got.params, want_params, rtol=2**-7)


@pytest.mark.slow
def test_lookahead_and_extra_arguments(mesh8):
    """Parameters in pairs, whose gradients are single; a value that the inner optimizer asks for."""
    zero = jaxzero.Zero(mesh8)
    pair = optax.LookaheadParams.init_synced(mixed())
    got = run(zero, jaxzero.master_weights(optax.lookahead(optax.sgd(0.1), 2, 0.5)), pair, gradients(2))
    assert_rounded(got.params, got.state)
    tx = jaxzero.master_weights(optax.chain(optax.sgd(1.0), optax.contrib.reduce_on_plateau(0.5, 1, rtol=0.5)))
    params = checks.place(mixed(), mesh8, P())
    state = zero.optimizer(tx).init(params)
    for _ in range(3):
        params, state = zero.apply(zero.optimizer(tx), params, state, params, value=jnp.float32(1))
    assert float(state.inner_state[1].scale) < 1


# --- nothing is lost, nothing is kept twice ------------------------------------------------------


@pytest.mark.grid(5)
@pytest.mark.parametrize("setting", ["stage 3", "stage 1"])
def test_tiny_updates_are_not_lost(setting):
    """A hundred updates of 10^-4: each is less than half of the last bit of a bfloat16 one."""
    ones = jax.tree.map(jnp.ones_like, mixed())
    got = run(make_zero(setting), jaxzero.master_weights(optax.sgd(1e-4)), ones, [ones] * 100)
    for path, m in jax.tree_util.tree_leaves_with_path(got.state.master):
        np.testing.assert_allclose(checks.logical(m, ones[path[0].key]), 1 - 1e-2, rtol=2e-6)
    assert_rounded(got.params, got.state)
    assert float(got.params["s"]) < 1
    assert ones["s"] - jnp.bfloat16(1e-4) == 1, "without a copy nothing moves: else the test would show nothing"


@pytest.mark.slow
def test_the_run_is_that_of_float32():
    """The inner optimizer sees float32 only: on gradients given in bfloat16 the masters are a float32 run."""
    wide = lambda tree: jax.tree.map(lambda x: x.astype(jnp.float32), tree)
    want, _ = helpers.reference_run(ADAMW, wide(mixed()), map(wide, gradients(5)))
    got = run(make_zero("stage 2"), jaxzero.master_weights(ADAMW), mixed(), gradients(5))
    for path, m in jax.tree_util.tree_leaves_with_path(got.state.master):
        np.testing.assert_allclose(checks.logical(m, want[path[0].key]), want[path[0].key], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_rounding_is_exact_whatever_the_step(dtype, compiled):
    """Steps over seven orders of magnitude, through zero and into float16's subnormal numbers; plain Optax."""
    rng = np.random.default_rng(0)
    sizes = lambda: (rng.normal(size=4096) * 10.0 ** rng.uniform(-6, 1, 4096)).astype(np.float32)
    tx = jaxzero.master_weights(optax.sgd(1.0))
    step = lambda g, s, p: (lambda u, s: (optax.apply_updates(p, u), s))(*tx.update(g, s, p))
    step = jax.jit(step) if compiled else step
    params = jnp.asarray(sizes(), dtype)
    state = tx.init(params)
    for _ in range(4):
        before, grads = state.master, jnp.asarray(sizes(), dtype)
        params, state = step(grads, state, params)
        assert_rounded({"w": params}, state._replace(master={"w": state.master}))
        exact = np.float64(before) - np.float64(grads)
        scale = np.maximum(np.abs(np.float64(before)), np.abs(exact))
        assert np.max(np.abs(np.float64(state.master) - exact) / scale) <= 2.0**-23


@pytest.mark.grid(9)
@pytest.mark.parametrize("setting", SETTINGS)
def test_copies_are_split_and_only_of_narrow_parameters(setting):
    zero = make_zero(setting)
    tx = zero.optimizer(jaxzero.master_weights(optax.sgd(1.0)))
    state = jax.jit(tx.init)(zero.shard(mixed()))
    assert jax.tree.structure(state) == jax.tree.structure(jax.eval_shape(tx.init, zero.shard(mixed())))
    assert isinstance(state.master["wide"], optax.MaskedNode)
    shares = zero.mesh.shape["data" if "data" in zero.mesh.shape else "shard"]
    assert {k: x.addressable_shards[0].data.size for k, x in state.master.items() if k != "wide"} == {
        "flat": -(-39 // shares),
        "rows": 96 // shares,
        "s": 1,
    }
    for x in jax.tree.leaves(state):
        assert not x.weak_type


@pytest.mark.parametrize("stage", [1, 3])
def test_the_copy_is_set_after_parameters_were_replaced(stage):
    """As the docstring says: pretrained parameters, their copy, and the moments as they were."""
    zero = jaxzero.Zero(helpers.make_mesh(8), stage=stage)
    tx = zero.optimizer(jaxzero.master_weights(optax.sgd(2.0**-9, momentum=0.9)))
    put = lambda value: zero.shard({"w": jnp.full((5, 3), value, jnp.bfloat16)})
    grads = {"w": jnp.ones((5, 3), jnp.bfloat16)}
    step = jax.jit(lambda params, state: zero.apply(tx, grads, state, params))
    _, state = step(put(1.0), tx.init(put(1.0)))
    params = put(4.0)
    overwritten = zero.gather(step(params, state)[0])["w"]
    state = state._replace(master=tx.init(params).master)
    params, state = step(params, state)
    kept = zero.gather(state, like=params).master["w"]
    assert float(overwritten[0, 0]) < 1
    np.testing.assert_allclose(kept, 4 - 1.9 * 2.0**-9, rtol=1e-6)
    np.testing.assert_array_equal(np.asarray(zero.gather(params)["w"]), np.asarray(kept.astype(jnp.bfloat16)))
    assert step._cache_size() == 1


def test_wide_parameters_alone_have_no_copy():
    """The same numbers and one empty node more: code can be written once for both."""
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), mixed())
    grads = [wide] * 2
    with_, without = (run(make_zero("stage 2"), tx, wide, grads) for tx in (jaxzero.master_weights(ADAMW), ADAMW))
    assert not jax.tree.leaves(with_.state.master)
    jax.tree.map(np.testing.assert_array_equal, with_.params, without.params)


# --- what travels --------------------------------------------------------------------------------


def lowered_step(stage, dtype):
    """One training step of a model with two parameters."""
    zero = jaxzero.Zero(helpers.make_mesh(8), stage=stage)
    params = zero.shard({"w": jnp.ones((64, 64), dtype), "odd": jnp.ones((13, 5), dtype)})
    tx = zero.optimizer(jaxzero.master_weights(optax.adamw(1e-2)))
    grad_fn = zero.value_and_grad(lambda p, x: jnp.mean((x @ p["w"]) ** 2) + jnp.sum(p["odd"] ** 2))

    def step(params, state, x):
        return zero.apply(tx, grad_fn(params, x)[1], state, params)

    x = jax.ShapeDtypeStruct((8, 64), dtype, sharding=NamedSharding(zero.mesh, P("data")))
    return jax.jit(step).lower(params, jax.eval_shape(tx.init, params), x)


def gathered_bytes(lowered):
    return hlo.nbytes(hlo.collectives(lowered.compile().as_text()), "all-gather")


def gathered_dtypes(text):
    """The element types of the gathers of a program before it is compiled."""
    kinds = re.findall(r"stablehlo\.all_gather.*?-> tensor<([^>]*)>", text.replace("\n", " "))
    return {kind.split("x")[-1] for kind in kinds}


@pytest.mark.grid(5)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_half_of_the_bytes_are_gathered(stage):
    """New parameters at stages 1 and 2, each use at stage 3. (XLA on CPUs widens bfloat16 collectives, not float16.)"""
    wide, narrow = (gathered_bytes(lowered_step(stage, dtype)) for dtype in (jnp.float32, jnp.float16))
    assert wide > 0
    assert narrow == wide / 2
    assert gathered_dtypes(lowered_step(stage, jnp.bfloat16).as_text()) == {"bf16"}


# --- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int32, None, "no dtype"])
def test_a_narrow_copy_is_refused(dtype):
    expected = checks.saying("master_weights", "dtype=", "32 bits or more", "Fix: dtype=jnp.float32")
    with pytest.raises(ValueError, match=expected):
        jaxzero.master_weights(optax.sgd(1.0), dtype)


def test_a_dtype_that_jax_narrows_is_refused():
    with pytest.raises(ValueError, match=checks.saying("master_weights: dtype=", "makes float32 of it", "x64", "Fix:")):
        jaxzero.master_weights(optax.sgd(1.0), jnp.float64)


def test_misuse_is_refused(mesh8):
    tx = jaxzero.master_weights(optax.sgd(1.0))
    with pytest.raises(ValueError, match=checks.saying("master_weights", "without params", "Fix: tx.update")):
        tx.update(jnp.ones(2), tx.init(jnp.ones(2)))
    with pytest.raises(ValueError, match=checks.saying("master_weights: the inner optimizer is wrapped", "outermost")):
        jaxzero.master_weights(jaxzero.zero2(optax.sgd(1.0), mesh=mesh8))
    with pytest.raises(ValueError, match=checks.saying("master_weights: inner is a function")):
        jaxzero.master_weights(optax.adam)
