"""Optimizers with no state or state of their own kind, gradients of another shape, and arrays that outlive a call."""

import re

import checks
import helpers
import jax
import jax.numpy as jnp
import optax
import pytest

import jaxzero

PARAMS = {"w": jnp.ones((16, 3)), "b": jnp.ones(3)}
PER_EXAMPLE = jax.tree.map(lambda x: jnp.stack([x] * 4), PARAMS)


@pytest.mark.parametrize("state", [None, {}, (), optax.EmptyState()], ids=repr)
@pytest.mark.parametrize("stage", [1, 3])
def test_a_state_without_leaves_is_what_the_caller_gives(stage, state):
    """As in Optax: `optax.scale` takes and returns anything."""
    zero = jaxzero.Zero(helpers.make_mesh(8), stage=stage)
    tx, params = zero.optimizer(optax.scale(-2.0)), zero.shard(PARAMS)
    updates, got = tx.update(params, state, params)
    _, applied = zero.apply(tx, params, state, params)
    assert (got, applied) == (state, state)
    helpers.close(zero.gather(updates), jax.tree.map(lambda x: -2.0 * x, PARAMS))


@pytest.mark.parametrize("made", [None, {}], ids=repr)
def test_an_optimizer_whose_init_returns_no_leaves(made):
    inner = optax.GradientTransformation(lambda p: made, lambda g, s, p=None: (jax.tree.map(jnp.negative, g), s))
    tx = jaxzero.Zero(helpers.make_mesh(8)).optimizer(inner)
    assert tx.init(PARAMS) == made
    updates, state = tx.update(PARAMS, tx.init(PARAMS), PARAMS)
    assert state == made
    helpers.close(updates, jax.tree.map(jnp.negative, PARAMS))


def test_a_state_of_another_structure_is_refused_by_structure():
    """Where no leaf tells them apart."""
    tx = jaxzero.Zero(helpers.make_mesh(8)).optimizer(optax.chain(optax.scale(1.0), optax.scale(2.0)))
    said = checks.saying(
        "update: the optimizer state has another structure", r"Found PyTreeDef\(None\); expected", "Fix: "
    )
    with pytest.raises(ValueError, match=said):
        tx.update(PARAMS, None, PARAMS)


@pytest.mark.parametrize("given", [True, False], ids=["params", "no params"])
def test_per_example_gradients_are_refused_with_their_mean(given):
    tx = jaxzero.Zero(helpers.make_mesh(8)).optimizer(optax.adam(1e-3))
    found = "gradient leaf 'b' has shape (4, 3)" if given else "state leaf '0/mu/b' has shape (8,)"
    said = (found, "per-example gradients", "jax.tree.map(lambda g: jnp.mean(g, 0), grads)")
    with pytest.raises(ValueError, match=checks.saying("update: ", *map(re.escape, said))):
        tx.update(PER_EXAMPLE, tx.init(PARAMS), PARAMS if given else None)


def keeping(where):
    """An optimizer that computes its step size once and keeps it in a closure."""
    kept = {}

    def init(params):
        if where == "init":
            kept["rate"] = jnp.arange(3.0)[1]
        return optax.EmptyState()

    def update(grads, state, params=None):
        if "rate" not in kept:
            kept["rate"] = jnp.arange(3.0)[1]
        return jax.tree.map(lambda g: g * kept["rate"], grads), state

    return optax.GradientTransformation(init, update)


@pytest.mark.parametrize("way", ["eager", "jit", "apply"])
@pytest.mark.parametrize("where", ["init", "update"])
def test_an_array_kept_in_a_closure_is_refused(where, way):
    """Alone and not jitted it runs; what a traced call computed ends with the call."""
    zero = jaxzero.Zero(helpers.make_mesh(8))
    tx = zero.optimizer(keeping(where))
    step = lambda g, s, p: zero.apply(tx, g, s, p) if way == "apply" else tx.update(g, s, p)
    state = tx.init(PARAMS)
    run = (
        (lambda: jax.jit(lambda *args: step(*args))(PARAMS, state, PARAMS))
        if way == "jit"
        else (lambda: step(PARAMS, state, PARAMS))
    )
    if where == "update":
        run()  # the first call makes the array
    said = checks.saying(
        r"optimizer: the optimizer uses an array float32\[\] that it computed in an earlier call",
        "Fix: return the array from init as part of the state",
    )
    with pytest.raises(ValueError, match=said):
        run()
