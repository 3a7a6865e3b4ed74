"""`zero.apply` of a transformation around the wrapped optimizer: exact, or refused where it does more."""

import checks
import helpers
import jax
import jax.numpy as jnp
import optax
import pytest
from stage3_models import normal

import jaxzero

PARAMS = {"a": normal(0, 13, 3), "b": normal(1, 3), "d": normal(3, 16, 2)}
LABELS = {"a": "x", "b": "y", "d": "x"}
BATCH = checks.quadratic_batches(1)[0]
same = lambda inner: inner

EXACT = {
    "inject_hyperparams": lambda wrap: optax.inject_hyperparams(lambda rate: wrap(optax.adamw(rate)))(rate=0.1),
    "multi_transform": lambda wrap: optax.multi_transform(
        {"x": wrap(optax.adamw(0.1)), "y": wrap(optax.sgd(0.1))}, LABELS
    ),
    "inject_hyperparams of multi_transform": lambda wrap: optax.inject_hyperparams(
        lambda rate: optax.multi_transform({"x": wrap(optax.adamw(rate)), "y": wrap(optax.set_to_zero())}, LABELS)
    )(rate=lambda count: 0.1 / (1 + count)),
    "chain of one": lambda wrap: optax.chain(wrap(optax.adamw(0.1))),
}
REFUSED = {
    "a clip before": (lambda tx: optax.chain(optax.clip(1.0), tx), "it changed gradient leaf 'a'"),
    "a scale after": (lambda tx: optax.chain(tx, optax.scale(0.5)), "its update of leaf 'a' is not that of a wrapped"),
    "a mask": (lambda tx: optax.masked(tx, {"a": True, "b": False, "d": True}), "its update of leaf 'b'"),
    "MultiSteps": (lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(), "it changed gradient leaf 'a'"),
}


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_hands_on_is_exact(stage, name):
    zero = jaxzero.Zero(helpers.make_mesh(8), stage=stage)
    tx, plain = EXACT[name](zero.optimizer), EXACT[name](same)
    params, want = zero.shard(PARAMS), PARAMS
    state, want_state = tx.init(params), plain.init(want)

    @jax.jit
    def step(params, state):
        _, grads = zero.value_and_grad(checks.quadratic)(params, BATCH)
        return zero.apply(tx, grads, state, params)

    for _ in range(2):
        params, state = step(params, state)
        updates, want_state = plain.update(jax.grad(checks.quadratic)(want, BATCH), want_state, want)
        want = optax.apply_updates(want, updates)
    checks.assert_params_equal(zero.gather(params), want)


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_does_more_is_refused(stage, name):
    """By what it changed, at every stage, as the step on shares cannot follow it."""
    zero = jaxzero.Zero(helpers.make_mesh(8), stage=stage)
    make, found = REFUSED[name]
    tx, params = make(zero.optimizer(optax.sgd(0.1))), zero.shard(PARAMS)
    _, grads = jax.eval_shape(zero.value_and_grad(checks.quadratic), params, BATCH)
    grads = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), grads)
    said = checks.saying("apply: tx is a transformation around", found, r"Fix: wrap the whole chain")
    with pytest.raises(ValueError, match=said):
        zero.apply(tx, grads, tx.init(params), params)


@pytest.mark.parametrize(
    "tx", [optax.adam(0.1), optax.chain(optax.clip(1.0)), None, "adam"], ids=["adam", "chain", "None", "a name"]
)
def test_what_holds_no_wrapped_optimizer_is_refused(tx):
    zero = jaxzero.Zero(helpers.make_mesh(8))
    state = tx.init(PARAMS) if hasattr(tx, "init") else ()
    with pytest.raises(ValueError, match=checks.saying("apply: tx is a .*, not what zero.optimizer returns")):
        zero.apply(tx, PARAMS, state, PARAMS)
