"""State of weak type, as Python's numbers are: kept, so that narrow parameters get narrow updates."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import close, make_mesh

import jaxzero

PARAMS = {"w": jnp.ones((16, 4), jnp.bfloat16), "b": jnp.ones(5, jnp.bfloat16), "s": jnp.ones((), jnp.bfloat16)}


def weak_state() -> optax.GradientTransformation:
    """Momentum whose rate and decay are weakly typed: an array, a Python number, a large array."""

    def init(params):
        momentum = jax.tree.map(jnp.zeros_like, params)
        return {
            "rate": jnp.asarray(0.1),
            "decay": 0.5,
            "m": momentum,
            "many": jnp.broadcast_to(jnp.asarray(0.25), (128,)),
        }

    def update(grads, state, params=None):
        m = jax.tree.map(lambda m, g: m * state["decay"] + g, state["m"], grads)
        updates = jax.tree.map(lambda m: -(state["rate"] + jnp.mean(state["many"])) * m, m)
        return updates, state | {"rate": state["rate"] * 0.9, "m": m, "many": state["many"] * 0.5}

    return optax.GradientTransformation(init, update)


def types(tree):
    return [(jnp.asarray(x).dtype.name, jnp.asarray(x).weak_type) for x in jax.tree.leaves(tree)]


@pytest.mark.parametrize("n", [1, 3, 8])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_weak_types_are_those_of_the_unsharded_run(stage, n):
    zero, inner = jaxzero.Zero(make_mesh(n), stage=stage), weak_state()
    tx, params = zero.optimizer(inner), zero.shard(PARAMS)
    state, expected = tx.init(params), inner.init(PARAMS)
    assert types(state) == types(expected)
    assert types(tx.update(params, state, params)) == types(inner.update(PARAMS, expected))
    step = jax.jit(lambda g, s, p: zero.apply(tx, g, s, p))
    grads, whole = params, PARAMS
    for _ in range(3):
        params, state = step(grads, state, params)
        updates, expected = inner.update(PARAMS, expected)
        whole = optax.apply_updates(whole, updates)
    assert step._cache_size() == 1
    assert types(state) == types(expected)
    close(zero.gather(params), whole, 1e-2)


def test_a_scan_over_steps():
    zero = jaxzero.Zero(make_mesh(8))
    tx = zero.optimizer(weak_state())
    body = lambda carry, _: (zero.apply(tx, PARAMS, carry[1], carry[0]), None)
    (params, state), _ = jax.jit(lambda c: jax.lax.scan(body, c, None, length=3))((PARAMS, tx.init(PARAMS)))
    np.testing.assert_allclose(state["rate"], 0.1 * 0.9**3, rtol=1e-6)
    assert params["w"].dtype == jnp.bfloat16


def test_abstract_state_and_what_a_checkpoint_restores(tmp_path):
    zero, inner = jaxzero.Zero(make_mesh(8)), weak_state()
    tx = zero.optimizer(inner)
    state = tx.init(PARAMS)
    assert [x.weak_type for x in jax.tree.leaves(jax.eval_shape(tx.init, PARAMS))] == [w for _, w in types(state)]
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), PARAMS)
    assert [x.weak_type for x in jax.tree.leaves(tx.init(abstract))] == [w for _, w in types(state)]
    jaxzero.save(tmp_path, 1, zero, PARAMS, state, inner)
    restored = jaxzero.restore(tmp_path, zero, PARAMS, inner).opt_state
    assert types(restored) == types(state)


def test_explain_names_state_whose_dtype_changes():
    def update(grads, state, params=None):
        return grads, jax.tree.map(lambda m, g: m + jnp.float32(0.5) * g, state, grads)

    inner = optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params), update)
    report = jaxzero.Zero(make_mesh(8)).explain(inner, {"w": PARAMS["w"], "v": jnp.ones(8)})
    assert report.changed == (("w", "bfloat16", "float32"),)
    assert "state leaf 'w' is bfloat16 before the update and float32 after it" in str(report)
    assert jaxzero.Zero(make_mesh(8)).explain(weak_state(), PARAMS).changed == ()
