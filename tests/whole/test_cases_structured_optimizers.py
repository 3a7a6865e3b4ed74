"""Open cases, group "structured optimizers, masks, hyper-parameters": full shapes decide, not shares."""

import itertools

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

pytestmark = pytest.mark.grid(5)

SETTINGS = list(checks.SETTINGS)
BATCHES = checks.quadratic_batches()


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


@pytest.mark.parametrize(
    ("setting", "shape"), [*itertools.product(SETTINGS, [(13, 6)]), ("stage 2, 8", (8, 8)), ("MiCS 2x4", (8, 16))]
)
def test_jz_038_muon_sees_matrices(setting, shape):
    """The update of a matrix is orthogonal: on a flat share Muon silently becomes Adam."""
    params = {"W": normal(0, *shape), "b": normal(1, 5)}
    grads = {"W": normal(2, *shape), "b": jnp.ones(5)}
    zero = checks.make_zero(setting)
    got = checks.update_inside(zero, optax.contrib.muon(0.1), params, lambda d, s: grads)
    singular = np.linalg.svd(helpers.host(got.params["W"] - params["W"]) / 0.1, compute_uv=False)
    # Optax scales the orthogonal matrix by sqrt(columns / rows) where it is wide
    singular /= max(1.0, shape[1] / shape[0]) ** 0.5
    assert np.all((singular > 0.5) & (singular < 1.5))
    adam = checks.update_inside(zero, optax.adam(0.1), params, lambda d, s: grads)
    assert np.max(np.abs(got.params["W"] - adam.params["W"])) > 0.01
    checks.check(setting, optax.contrib.muon(0.1), params, checks.quadratic, BATCHES)


@pytest.mark.parametrize("setting", SETTINGS)
def test_jz_040_muon_after_the_complete_reduction(setting):
    """Each device has another gradient of a matrix that straddles shares: the mean is orthogonalised."""
    params, grad = {"W": normal(0, 6, 6)}, normal(1, 6, 6)
    assert 36 % checks.world(setting) or 6 % checks.world(setting) or checks.world(setting) == 3
    zero = checks.make_zero(setting)
    noise = normal(2, 8, 6, 6)

    def make(device, step):
        return {"W": (device + 1) * grad + noise[device]}

    devices = int(np.prod(list(zero.mesh.shape.values())))
    mean = np.mean([make(i, 0)["W"] for i in range(devices)], axis=0)
    want = optax.contrib.muon(0.1)
    updates, _ = want.update({"W": jnp.asarray(mean)}, want.init(params), params)
    got = checks.update_inside(zero, optax.contrib.muon(0.1), params, make)
    checks.assert_params_equal(got.params, optax.apply_updates(params, updates))


@pytest.mark.parametrize("shape", [(256, 256), (127, 200), (128, 130), (3, 130, 128), (129,)])
@pytest.mark.parametrize("setting", ["stage 2, 8", "stage 2, 3"])
def test_jz_041_adafactor_stays_factored(setting, shape):
    """Row and column moments exist and are small; the edges of `min_dim_size_to_factor` are those of the full shape."""
    params = {"W": normal(0, *shape), "b": normal(1, 7)}
    inner = optax.adafactor(1e-2)
    got = checks.check(setting, inner, params, checks.quadratic, BATCHES)
    stored = sum(x.nbytes for x in jax.tree.leaves(got.state))
    full = sum(x.nbytes for x in jax.tree.leaves(inner.init(params)))
    assert stored <= full + 4 * 8 * len(jax.tree.leaves(got.state))  # padding of at most N - 1 elements each


@pytest.mark.parametrize("limit", [None, 1, 10**6])
@pytest.mark.parametrize("mask", ["ndim", "path"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_jz_043_decay_mask(setting, mask, limit):
    """`w` decays by exactly 0.1 and `b` by nothing, though both travel in one bucket."""
    by_path = lambda p: jax.tree_util.tree_map_with_path(lambda path, x: path[-1].key.startswith("w"), p)
    by_ndim = lambda p: jax.tree.map(lambda x: x.ndim > 1, p)
    inner = optax.adamw(1.0, weight_decay=0.1, mask=by_path if mask == "path" else by_ndim)
    params = {"w": jnp.ones((8, 8)), "b": jnp.ones(8), "nested": {"w2": jnp.ones((3, 3)), "b2": jnp.ones(3)}}
    still = jax.tree.map(jnp.zeros_like, params)
    got = checks.update_inside(checks.make_zero(setting, bucket_bytes=limit), inner, params, lambda d, s: still)
    decayed = np.float32(1) - np.float32(0.1)
    want = {
        "w": np.full((8, 8), decayed),
        "b": np.ones(8),
        "nested": {"w2": np.full((3, 3), decayed), "b2": np.ones(3)},
    }
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(helpers.host, got.params), want)


def test_jz_044_inject_hyperparams_inside(mesh8):
    """Hyper-parameters are whole scalars; a change between steps needs no compilation and equals Optax."""
    params = {"a": normal(0, 13, 3), "b": normal(1, 16)}
    inner = optax.inject_hyperparams(optax.adamw)(optax.linear_schedule(1e-2, 1e-3, 3), weight_decay=0.1, b2=0.99)
    grads = jax.grad(checks.quadratic)(params, BATCHES[0])

    def run(step, params, state):
        for i in range(4):
            if i == 2:
                state.hyperparams["b2"] = jnp.full_like(state.hyperparams["b2"], 0.5)
            params, state = step(params, state)
        return params, state

    def plain(params, state):
        updates, state = inner.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    zero = jaxzero.Zero(mesh8, stage=2)
    tx = zero.optimizer(inner)
    step = jax.jit(lambda params, state: zero.apply(tx, grads, state, params))
    placed = checks.place(params, mesh8, P())
    got = run(step, placed, jax.jit(tx.init)(placed))
    want = run(jax.jit(plain), params, inner.init(params))
    checks.assert_params_equal(got[0], want[0])
    checks.assert_state_equal(got[1], want[1])
    assert {k: v.dtype for k, v in got[1].hyperparams.items()} == {k: v.dtype for k, v in want[1].hyperparams.items()}
    assert all(v.sharding.is_fully_replicated for v in got[1].hyperparams.values())


@pytest.mark.parametrize("name", ["learning_rate", "weight_decay"])
def test_jz_044_inject_hyperparams_outside(mesh8, name):
    """`inject_hyperparams` may also stand around the wrapper."""
    params = {"a": normal(0, 13, 3), "b": normal(1, 16)}
    inner = lambda learning_rate, weight_decay: optax.adamw(learning_rate, weight_decay=weight_decay)
    zero = jaxzero.Zero(mesh8, stage=2)
    outside = optax.inject_hyperparams(
        lambda learning_rate, weight_decay: zero.optimizer(inner(learning_rate, weight_decay))
    )
    plain = optax.inject_hyperparams(inner)
    grads = jax.grad(checks.quadratic)(params, BATCHES[0])
    results = []
    for made in (outside, plain):
        tx = made(learning_rate=1e-2, weight_decay=0.1)
        state, p = tx.init(params), params
        step = jax.jit(lambda p, s, tx=tx: tx.update(grads, s, p))
        for i in range(3):
            if i == 1:
                state.hyperparams[name] = jnp.full_like(state.hyperparams[name], 0.05)
            updates, state = step(p, state)
            p = optax.apply_updates(p, updates)
        results.append(p)
    checks.assert_params_equal(*results)


def test_jz_044_hyperparameters_of_bfloat16_parameters(mesh8):
    """Optax gives injected hyper-parameters the dtype of the parameters; so does the sharded run, bit for bit."""
    params = {"a": normal(0, 13, 3).astype(jnp.bfloat16)}
    inner = optax.inject_hyperparams(optax.adafactor, static_args=("min_dim_size_to_factor",))(
        1e-2, min_dim_size_to_factor=4
    )
    got = jax.jit(jaxzero.Zero(mesh8, stage=2).optimizer(inner).init)(params)
    checks.assert_state_equal(got, inner.init(params), rtol=0)


def statistics(p):
    """A user's own preconditioner: `L = sum g g^T` per matrix, applied through its inverse square root."""

    def init(params):
        return {k: jnp.eye(x.shape[0]) for k, x in params.items()}

    def update(updates, state, params=None):
        state = {k: state[k] + g.reshape(g.shape[0], -1) @ g.reshape(g.shape[0], -1).T for k, g in updates.items()}

        def precondition(k, g):
            values, vectors = jnp.linalg.eigh(state[k])
            root = (vectors * values**-p) @ vectors.T
            return (root @ g.reshape(g.shape[0], -1)).reshape(g.shape)

        return {k: precondition(k, g) for k, g in updates.items()}, state

    return optax.GradientTransformation(init, update)


@pytest.mark.parametrize("way", ["value_and_grad, apply", "inside, update"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_jz_046_square_statistics(setting, way):
    """Shampoo-like state (n, n) beside a leaf (n, m): products, an eigendecomposition, shapes that do not divide."""
    params = {
        "a": normal(0, 5, 3),
        "b": normal(1, 6, 6),
        "c": normal(2, 8, 3),
        "d": normal(3, 7),
        "e": normal(4, 2, 3, 2),
    }
    checks.check(setting, optax.chain(statistics(0.25), optax.scale(-0.1)), params, checks.quadratic, BATCHES, way)


@pytest.mark.parametrize(("setting", "way"), checks.CORNERS)
def test_labels_see_full_shapes(setting, way):
    """Labels by dimension and by path: one group per kind of leaf, as unsharded."""
    label = lambda p: jax.tree.map(lambda x: {0: "scalar", 1: "vector"}.get(x.ndim, "matrix"), p)
    inner = optax.partition({"scalar": optax.sgd(0.1), "vector": optax.adam(1e-2), "matrix": optax.lamb(1e-2)}, label)
    params = {"a": normal(0, 13, 3), "b": normal(1, 3), "c": normal(2), "d": normal(3, 16)}
    checks.check(setting, inner, params, checks.quadratic, BATCHES, way)


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("outside", ["masked", "multi_transform"])
def test_static_masks_may_stand_outside_in_the_global_view(mesh8, outside, split):
    """Around the wrapper, on whole gradients and on split ones."""
    params = {"a": normal(0, 13, 3), "b": normal(1, 3), "d": normal(3, 16, 2)}
    zero = jaxzero.Zero(mesh8, stage=2)
    mask = {"a": True, "b": False, "d": True}
    if outside == "masked":
        make = lambda wrap: optax.masked(wrap(optax.adamw(1e-2)), mask)
    else:
        label = {"a": "x", "b": "y", "d": "x"}
        make = lambda wrap: optax.multi_transform({"x": wrap(optax.adamw(1e-2)), "y": wrap(optax.sgd(0.1))}, label)
    grad = jax.jit(jax.grad(checks.quadratic))
    split_grad = jax.jit(lambda p, batch: zero.value_and_grad(checks.quadratic)(p, batch)[1])
    results = []
    for tx, grad_fn in ((make(zero.optimizer), split_grad if split else grad), (make(lambda inner: inner), grad)):
        state, p = tx.init(params), params
        for batch in BATCHES:
            updates, state = jax.jit(tx.update)(grad_fn(p, batch), state, p)
            if outside == "masked" and grad_fn is split_grad:
                updates = zero.gather(updates)  # what the mask leaves out passes through as it came: split
            p = optax.apply_updates(p, updates)
        results.append(p)
    checks.assert_params_equal(*results)
