"""Open cases, group "norms and clipping": every norm is the global one, padding enters none."""

import itertools

import checks
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxzero

pytestmark = pytest.mark.grid(9)

SETTINGS = list(checks.SETTINGS)
BATCHES = checks.quadratic_batches()


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


@pytest.mark.parametrize("limit", [None, 1, 10**6])
@pytest.mark.parametrize("small", [4, 1, 3, 64])
@pytest.mark.parametrize("setting", SETTINGS)
def test_jz_031_global_norm_counts_every_element_once(setting, small, limit):
    """Whole leaves once, padding never: the norm of 64 + `small` + 1 ones."""
    params = {"split": jnp.zeros(64), "small": jnp.zeros(small), "scalar": jnp.zeros(())}
    ones = jax.tree.map(jnp.ones_like, params)
    zero = checks.make_zero(setting, bucket_bytes=limit)
    inner = optax.chain(optax.snapshot("norm", optax.tree.norm), optax.clip_by_global_norm(1.0), optax.sgd(1.0))
    got = checks.update_inside(zero, inner, params, lambda device, step: ones)
    norm = np.sqrt(65 + small)
    helpers.assert_all_shards_equal(got.state)
    np.testing.assert_allclose(optax.tree.get(got.state, "norm"), norm, rtol=1e-6)
    checks.assert_params_equal(got.params, jax.tree.map(lambda x: -x / norm, ones), rtol=1e-6)


@pytest.mark.parametrize(("setting", "way"), checks.CORNERS)
def test_jz_031_clipped_training(setting, way):
    """`clip_by_global_norm` that does clip, on leaves that do not divide."""
    params = {"a": normal(0, 13, 3), "b": normal(1, 3), "c": normal(2), "d": normal(3, 16, 2)}
    norm = optax.tree.norm(jax.grad(checks.quadratic)(params, BATCHES[0]))
    assert norm > 0.1
    for last in (optax.sgd(1.0), optax.adamw(1e-2)):
        checks.check(setting, optax.chain(optax.clip_by_global_norm(0.1), last), params, checks.quadratic, BATCHES, way)


@pytest.mark.parametrize("order", list(itertools.permutations(range(4)))[::5])
def test_jz_032_norm_does_not_depend_on_who_holds_what(order):
    """The shards' own norms are sqrt(20) and sqrt(100): sqrt(120), not their mean."""
    rows = np.array([[2.0, 0.0], [4.0, 0.0], [6.0, 0.0], [8.0, 0.0]], np.float32)[list(order)]
    assert np.isclose(np.linalg.norm(rows), np.sqrt(120))
    zero = jaxzero.Zero(helpers.make_mesh(2), stage=2)
    tx = zero.optimizer(optax.snapshot("norm", optax.tree.norm))
    params = {"w": jnp.zeros((4, 2))}
    _, state = jax.jit(tx.update)({"w": jnp.asarray(rows)}, tx.init(params), params)
    np.testing.assert_allclose(state.measurement["norm"], 10.954451, rtol=1e-6)
    got = checks.update_inside(
        zero, optax.snapshot("norm", optax.tree.norm), params, lambda d, s: {"w": rows * (1 + 0 * d)}
    )
    np.testing.assert_allclose(got.state.measurement["norm"], 10.954451, rtol=1e-6)


def clip_by_p_norm(p, limit):
    """A transformation of a user's own."""

    def update(updates, state, params=None):
        leaves = [jnp.abs(x.astype(jnp.float32)) for x in jax.tree.leaves(updates)]
        if p == np.inf:
            norm = jnp.max(jnp.stack([jnp.max(x) for x in leaves]))
        else:
            norm = sum(jnp.sum(x**p) for x in leaves) ** (1 / p)
        return jax.tree.map(lambda x: (x * jnp.minimum(1.0, limit / norm)).astype(x.dtype), updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


@pytest.mark.parametrize("p", [1, 2, 3, np.inf])
@pytest.mark.parametrize("setting", SETTINGS)
def test_jz_034_p_norms(setting, p):
    """One norm over all leaves, buckets and dtypes; no shard dominates it; most values are negative."""
    make = lambda seed, *shape: -jnp.abs(normal(seed, *shape)) - 0.1
    grads = {"a": make(0, 13, 3), "b": make(1, 16), "c": make(2, 3).astype(jnp.bfloat16), "d": make(3)}
    flat = np.concatenate([helpers.host(x).ravel() for x in jax.tree.leaves(grads)])
    norm = np.linalg.norm(flat, p)
    assert norm > 0.5
    zero = checks.make_zero(setting, bucket_bytes=64)
    params = jax.tree.map(jnp.zeros_like, grads)
    got = checks.update_inside(zero, optax.chain(clip_by_p_norm(p, 0.5), optax.scale(-1.0)), params, lambda d, s: grads)
    for k, g in grads.items():
        error = 2**-7 if g.dtype == jnp.bfloat16 else 2e-6
        np.testing.assert_allclose(helpers.host(got.params[k]), -0.5 / norm * helpers.host(g), rtol=error, err_msg=k)


@pytest.mark.parametrize("setting", SETTINGS)
def test_jz_034_least_element_and_products(setting):
    """Reductions in which a padding zero would show: minimum, product, all, any, mean, argmax and argmin."""

    def measure(updates):
        x = updates["x"]
        return {
            "min": jnp.min(x),
            "max of negative": jnp.max(-x),
            "product": jnp.prod(x),
            "all": jnp.all(x > 0.5),
            "any": jnp.any(x < 0.5),
            "mean": jnp.mean(x),
            "variance": jnp.var(x),
            "argmax": jnp.argmax(-x),
            "argmin": jnp.argmin(x),
            "count of zeros": jnp.sum(x == 0),
            "rows": jnp.min(x, axis=1),
            "columns": jnp.prod(x, axis=0),
        }

    grads = {"x": 1.0 + 0.1 * jnp.abs(normal(0, 7, 3))}
    got = checks.update_inside(
        checks.make_zero(setting), optax.snapshot("m", measure), jax.tree.map(jnp.zeros_like, grads), lambda d, s: grads
    )
    checks.assert_state_equal(got.state.measurement["m"], measure(grads), rtol=1e-5)


@pytest.mark.parametrize("way", checks.WAYS)
def test_jz_037_one_norm_for_all_stages(way):
    """A norm that the optimizer reports is the global one: on every device and at every stage."""
    params = {"a": normal(0, 13, 3), "b": normal(1, 3), "d": normal(3, 16, 2)}
    inner = optax.chain(optax.snapshot("norm", optax.tree.norm), optax.sgd(0.1))
    want = checks.reference(inner, params, checks.quadratic, BATCHES)
    norms = []
    for setting in SETTINGS:
        got = checks.train(checks.make_zero(setting), inner, params, checks.quadratic, BATCHES, way)
        helpers.assert_all_shards_equal(got.state)
        norms.append(float(optax.tree.get(got.state, "norm")))
    np.testing.assert_allclose(norms, float(optax.tree.get(want.state, "norm")), rtol=2e-6)
