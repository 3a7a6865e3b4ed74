"""Open cases, group "tree contents": what a parameter tree may hold."""

import functools

import checks
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jaxzero

pytestmark = pytest.mark.grid(9)

SETTINGS = list(checks.SETTINGS)
BOTH = [optax.sgd(1.0), optax.adamw(1e-2, weight_decay=0.1)]  # SGD first: Adam hides a constant factor
BATCHES = checks.quadratic_batches()


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


@pytest.mark.parametrize(("setting", "way"), checks.CORNERS)
def test_jz_001_unused_leaf(setting, way):
    """A leaf that the loss does not read has a zero gradient and is decayed as Optax decays it."""
    params = {"used": normal(0, 24), "unused": normal(1, 7)}
    loss = lambda p, batch: checks.quadratic({"used": p["used"]}, batch)
    for inner in BOTH:
        got = checks.check(setting, inner, params, loss, BATCHES, way)
    assert np.all(helpers.host(got.params["unused"]) != helpers.host(params["unused"]))  # the decay


@pytest.mark.parametrize("kind", ["removed", "None"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_jz_001_missing_gradient_is_refused(setting, kind):
    params = {"used": normal(0, 24), "unused": normal(1, 7)}
    grads = {"used": jnp.ones(24)} if kind == "removed" else {"used": jnp.ones(24), "unused": None}
    zero = checks.make_zero(setting)
    tx = zero.optimizer(optax.adam(1e-2))
    state = tx.init(params)
    with pytest.raises(ValueError, match=checks.saying("update", "unused", r"\(7,\)|7")):
        tx.update(grads, state, params)
    with pytest.raises(ValueError, match=checks.saying("apply", "unused")):
        zero.apply(tx, grads, state, params)


@pytest.mark.parametrize(("setting", "way"), checks.CORNERS)
@pytest.mark.parametrize(
    "params",
    [
        {"main": normal(0, 4, 4), "tail": jnp.zeros((4, 0))},
        {"head": jnp.zeros((0, 8)), "main": normal(0, 8, 8), "z3": jnp.zeros((2, 0, 3), jnp.bfloat16)},
    ],
    ids=["tail", "head"],
)
def test_jz_002_zero_size_leaves(params, setting, way):
    got = checks.check(setting, optax.adamw(1e-2, weight_decay=0.1), params, checks.quadratic, BATCHES, way)
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), params)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), got.params) == shapes


@pytest.mark.parametrize("world", [1, 8])
@pytest.mark.parametrize("params", [{}, {"only": jnp.zeros((4, 0))}, {"a": (), "b": {"only": jnp.zeros((0,))}}])
def test_jz_002_nothing_to_shard(world, params):
    """Trees without a single element, and the empty tree, go through init, gradients, update and apply."""
    zero = jaxzero.Zero(helpers.make_mesh(world), stage=2)
    tx = zero.optimizer(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)))
    state = jax.jit(tx.init)(params)
    loss = lambda p, batch: jnp.mean(batch) + sum(jnp.sum(x) for x in jax.tree.leaves(p))
    value, grads = jax.jit(zero.value_and_grad(loss))(params, np.arange(16.0, dtype=np.float32))
    assert float(value) == 7.5
    updates, _ = jax.jit(tx.update)(grads, state, params)
    assert jax.tree.map(jnp.shape, updates) == jax.tree.map(jnp.shape, params)
    after, state = jax.jit(functools.partial(zero.apply, tx))(grads, state, params)
    assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, params)
    assert int(optax.tree.get(state, "count")) == 1


@pytest.mark.parametrize("setting", SETTINGS)
def test_jz_004_zero_size_leaf_comes_back_with_its_shape(setting):
    """The parameters returned by a step go into the model again."""
    params = {"w": normal(0, 8, 8), "z": jnp.zeros((0, 8)), "z3": jnp.zeros((2, 0, 3))}

    def model(p, batch):
        rows = jnp.concatenate([p["w"], p["z"]])  # fails for a z of shape (0,)
        return checks.quadratic({"rows": rows, "none": jnp.sum(p["z3"], axis=(1, 2))}, batch)

    checks.check(setting, optax.sgd(1.0), params, model, BATCHES)


SIZES = (0, 1, 2, 3, 7, 8, 9, 15, 16, 17)


@pytest.mark.parametrize("world", [1, 2, 3, 5, 6, 7, 8])
@pytest.mark.parametrize("stage", [1, 2])
def test_jz_005_sizes_below_and_around_the_world(world, stage):
    params = {f"n{n}": normal(n, n) for n in SIZES} | {"scalar": jnp.float32(0.5), "row": normal(40, 1, 3)}
    batches = checks.quadratic_batches(size=840)
    zero = jaxzero.Zero(helpers.make_mesh(world), stage=stage)
    for inner in (optax.sgd(1.0), optax.adam(1e-2)):
        want = checks.reference(inner, params, checks.quadratic, batches)
        got = checks.train(zero, inner, params, checks.quadratic, batches)
        checks.assert_params_equal(got.params, want.params)
        checks.assert_state_equal(got.state, want.state)
    mu = optax.tree.get(got.state, "mu")
    for n in SIZES[1:]:
        assert {shard.data.size for shard in mu[f"n{n}"].addressable_shards} == {-(-n // world)}, n
    assert {shard.data.shape for shard in mu["scalar"].addressable_shards} == {()}


@pytest.mark.parametrize("shape", [(10,), (3, 3), (17,), (5, 2, 3), (8,), (1,)])
@pytest.mark.parametrize("setting", SETTINGS)
def test_jz_007_every_element_has_one_owner(setting, shape):
    """The shares of all devices, end to end, are the elements in row-major order and then zeros."""
    n = int(np.prod(shape))
    numbers = jnp.arange(1.0, n + 1).reshape(shape)
    zero = checks.make_zero(setting)
    got = checks.update_inside(zero, optax.trace(0.0), {"x": numbers}, lambda device, step: {"x": numbers})
    trace = optax.tree.get(got.state, "trace")["x"]
    owned = np.concatenate([share.ravel() for share in checks.shares(trace)])
    np.testing.assert_array_equal(owned[:n], np.arange(1.0, n + 1))
    assert not owned[n:].any()
    assert owned.size - n < checks.world(setting)
    np.testing.assert_array_equal(got.params["x"], 2 * numbers)


MIXED = {
    "w": normal(0, 8),
    "odd": normal(1, 5, 3),
    "steps": jnp.int32(3),
    "mask": jnp.arange(8) % 3 == 0,
    "q": jnp.arange(-8, 8, dtype=jnp.int8),
    "big": jnp.array([2**24 + 1], jnp.int32),
    "rng": jax.random.key(0),
    "rngs": jax.random.split(jax.random.key(1), 3),
}


def mixed_loss(p, batch):
    """Reads every leaf; only `w` and `odd` have gradients."""
    noise = jax.random.normal(p["rng"], (8,)) + p["rngs"].shape[0]
    w = jnp.where(p["mask"], p["w"], p["w"] * p["steps"]) + noise * p["big"][0].astype(jnp.float32) / 2**24
    return checks.quadratic({"odd": p["odd"], "w": w * p["q"][:8].astype(jnp.float32)}, batch)


def floats(tree):
    return {k: tree[k] for k in ("w", "odd")}


@pytest.mark.parametrize("inner", BOTH, ids=["sgd", "adamw"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_jz_008_ints_bools_keys(setting, inner):
    """Leaves that are not inexact come back bit for bit; the others train as if those were not there."""
    loss = lambda p, batch: mixed_loss(MIXED | p, batch)
    want = checks.reference(inner, floats(MIXED), loss, BATCHES)
    zero = checks.make_zero(setting)
    tx = zero.optimizer(inner)
    params, state = MIXED, tx.init(MIXED)

    @jax.jit
    def step(params, state, batch):
        _, grads = zero.value_and_grad(mixed_loss)(params, batch)
        return zero.apply(tx, grads, state, params)

    for batch in BATCHES:
        params, state = step(params, state, batch)
    checks.assert_params_equal(floats(params), want.params)
    helpers.assert_all_shards_equal(params)
    for name in MIXED.keys() - floats(MIXED).keys():
        assert params[name].dtype == MIXED[name].dtype
        np.testing.assert_array_equal(helpers.host(params[name]), helpers.host(MIXED[name]), err_msg=name)


@pytest.mark.parametrize("zeros", ["float0", "int"])
@pytest.mark.parametrize("way", ["update", "apply", "inside"])
def test_jz_008_gradients_of_integer_leaves(way, zeros):
    """What JAX gives for an integer leaf is accepted: `float0` of `allow_int=True`, or zeros of the leaf's dtype."""
    params = {k: MIXED[k] for k in ("w", "steps", "mask", "q", "big")}
    empty = lambda x: np.zeros(x.shape, jax.dtypes.float0) if zeros == "float0" else jnp.zeros_like(x)
    make = lambda: {k: jnp.ones_like(v) if k == "w" else empty(v) for k, v in params.items()}
    inner = optax.adamw(0.1, weight_decay=0.1)
    want = checks.reference(inner, {"w": params["w"]}, lambda p, _: jnp.sum(p["w"]), [np.zeros(8)])
    mesh = helpers.make_mesh(8)
    zero = jaxzero.Zero(mesh, stage=2)
    tx = zero.optimizer(inner)
    state = tx.init(params)
    if way == "apply":
        after, _ = zero.apply(tx, make(), state, params)
    elif way == "update":
        updates, _ = tx.update(make(), state, params)
        after = optax.apply_updates(params, updates)
    else:

        def local(params, state):
            grads = {k: checks.varying_where_it_is_not(g, ("data",)) if k == "w" else g for k, g in make().items()}
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        specs = zero.specs(state)
        after, _ = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(P(), specs), out_specs=(P(), specs)))(
            params, state
        )
    checks.assert_params_equal({"w": after["w"]}, want.params)
    for name in params.keys() - {"w"}:
        assert after[name].dtype == params[name].dtype, name
        np.testing.assert_array_equal(after[name], params[name], err_msg=name)


def test_jz_008_masks_see_the_integer_leaves():
    """The inner optimizer is traced with all leaves, so a mask or label tree keeps its structure."""
    params = {"w": normal(0, 8), "steps": jnp.int32(3), "b": normal(1, 3)}
    mask = {"w": True, "steps": False, "b": False}
    zero = jaxzero.Zero(helpers.make_mesh(8), stage=2)
    tx = zero.optimizer(optax.adamw(0.1, weight_decay=0.5, mask=mask))
    grads = {"w": jnp.zeros(8), "steps": jnp.int32(0), "b": jnp.zeros(3)}
    after, _ = zero.apply(tx, grads, tx.init(params), params)
    np.testing.assert_allclose(after["w"], 0.95 * params["w"], rtol=1e-6)
    np.testing.assert_array_equal(after["b"], params["b"])
    assert int(after["steps"]) == 3


@pytest.mark.parametrize(("setting", "way"), checks.CORNERS)
def test_jz_010_complex_leaves(setting, way):
    params = {"c": normal(0, 5) + 1j * normal(1, 5), "even": normal(2, 8, 2) * (1 + 2j), "r": normal(3, 3)}
    for inner in (optax.sgd(1.0), optax.adam(1.0), optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(1.0))):
        checks.check(setting, inner, params, checks.quadratic, BATCHES, way)


@pytest.mark.parametrize("setting", SETTINGS)
def test_jz_010_complex_numbers_are_not_pairs_of_reals(setting):
    """Adam divides by the magnitude; the norm of 3+4j is 5."""
    params = {"c": jnp.zeros(5, jnp.complex64), "r": jnp.zeros(3)}
    zero = checks.make_zero(setting)
    devices = int(np.prod(list(zero.mesh.shape.values())))

    def make(device, step):
        # the mean is 3+4j, each device's own is not: XLA:CPU aborts on sums of complex values that it knows to be equal
        share = 2 * (device + 1) / (devices + 1)
        return {"c": (share * jnp.full(5, 3 + 4j)).astype(jnp.complex64), "r": jnp.zeros(3)}

    got = checks.update_inside(zero, optax.adam(1.0), params, make)
    np.testing.assert_allclose(got.params["c"], np.full(5, -0.6 - 0.8j), rtol=1e-5)
    clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
    got = checks.update_inside(zero, clipped, params, make)
    np.testing.assert_allclose(got.params["c"], -np.full(5, 3 + 4j) / (5 * np.sqrt(5)), rtol=1e-6)


@pytest.mark.parametrize("shape", [(3, 3), (5, 2, 3), (7,), (4, 4)])
@pytest.mark.parametrize("world", [4, 8])
def test_jz_011_flat_order_is_row_major(world, shape):
    """State that copies parameters holds them in row-major order; a step of size 0 changes no bit of them."""
    params = {"x": normal(0, *shape)}
    zero = jaxzero.Zero(helpers.make_mesh(world), stage=2)
    inner = optax.contrib.schedule_free(optax.sgd(0.0), 0.0)
    tx = zero.optimizer(inner)
    state = jax.jit(tx.init)(params)
    np.testing.assert_array_equal(checks.logical(state.z["x"], params["x"]), params["x"])
    got = checks.train(zero, optax.sgd(0.0, momentum=0.9), params, checks.quadratic, BATCHES)
    np.testing.assert_array_equal(got.params["x"], params["x"])
    other = {"x": normal(9, *shape)}  # other parameters into the existing state
    after, _ = zero.apply(zero.optimizer(optax.sgd(0.0)), other, zero.optimizer(optax.sgd(0.0)).init(params), other)
    np.testing.assert_array_equal(after["x"], other["x"])


@pytest.mark.parametrize("hidden", [4, 40])
@pytest.mark.parametrize("inner", [optax.sgd(0.05), optax.adam(1e-2)], ids=["sgd", "adam"])
def test_jz_013_tied_weights_at_all_stages(hidden, inner):
    """One leaf used twice has one gradient, the sum of both; the loss curves of all stages are one curve."""
    params = {"E": normal(0, hidden, hidden) * 0.3, "mid": normal(1, hidden, hidden) * 0.3}

    def loss(p, batch):
        x, t = batch
        return jnp.mean(jnp.square(x @ p["E"] @ p["mid"] @ p["E"].T - t))

    rng = np.random.default_rng(0)
    batches = [tuple(rng.normal(size=(2, 24, hidden)).astype(np.float32)) for _ in range(20)]
    want = checks.reference(inner, params, loss, batches)
    for setting in SETTINGS:
        got = checks.train(checks.make_zero(setting), inner, params, loss, batches)
        np.testing.assert_allclose(got.losses, want.losses, rtol=1e-5, err_msg=setting)
        checks.assert_params_equal(got.params, want.params)
    grads = jax.grad(loss)(params, batches[0])
    helpers.close(checks.gradients(checks.make_zero(setting), params, loss, batches[0])[1], grads)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("n", [3, 16])
def test_jz_014_one_array_at_two_paths(setting, n):
    """Two paths are two parameters: they are not tied, and not one slot of a bucket."""
    shared = jnp.ones(n)
    params = {"emb": shared, "head": shared}
    make = lambda device, step: {"emb": jnp.full(n, 2.0), "head": jnp.full(n, 3.0)}
    got = checks.update_inside(checks.make_zero(setting), optax.sgd(0.1), params, make)
    np.testing.assert_array_max_ulp(got.params["emb"], np.full(n, np.float32(0.8)), maxulp=2)
    np.testing.assert_allclose(got.params["head"], np.full(n, 0.7), rtol=1e-6)
    zero = checks.make_zero(setting)
    tx = zero.optimizer(optax.sgd(0.1))
    after, _ = zero.apply(tx, make(0, 0), tx.init(params), params)
    np.testing.assert_allclose(after["emb"], np.full(n, 0.8), rtol=1e-6)
    np.testing.assert_allclose(after["head"], np.full(n, 0.7), rtol=1e-6)


def test_jz_014_shared_variables_of_nnx_have_one_slot():
    class Tied(nnx.Module):
        def __init__(self):
            self.emb = nnx.Param(jnp.ones((5, 3)))
            self.head = self.emb

    params = nnx.state(Tied(), nnx.Param)
    assert len(jax.tree.leaves(params)) == 1
    zero = jaxzero.Zero(helpers.make_mesh(8), stage=2)
    tx = zero.optimizer(optax.adam(0.1))
    state = tx.init(params)
    assert len(jax.tree.leaves(optax.tree.get(state, "mu"))) == 1
    after, _ = zero.apply(tx, jax.tree.map(jnp.ones_like, params), state, params)
    np.testing.assert_allclose(jax.tree.leaves(after)[0], np.full((5, 3), 0.9), rtol=1e-5)


def pointers(tree):
    """Every buffer of every device that a tree holds."""
    return [s.data.unsafe_buffer_pointer() for x in jax.tree.leaves(tree) for s in x.addressable_shards if x.size]


@pytest.mark.parametrize("jitted", [True, False])
@pytest.mark.parametrize(
    "inner",
    [
        optax.adam(1e-2),
        optax.contrib.schedule_free_adamw(1e-2),
        optax.chain(optax.adam(1e-2), optax.ema(0.9)),
        optax.contrib.dog(1e-2),
    ],
    ids=["adam", "schedule_free", "ema", "dog"],
)
def test_jz_016_state_shares_no_buffer(inner, jitted, mesh8):
    """Neither with the parameters nor with itself, so that both can be donated."""
    params = checks.place({"a": normal(0, 16), "b": normal(1, 5), "s": jnp.float32(1)}, mesh8, P())
    zero = jaxzero.Zero(mesh8, stage=2)
    tx = zero.optimizer(inner)
    state = (jax.jit(tx.init) if jitted else tx.init)(params)
    found = pointers((params, state))
    assert len(set(found)) == len(found)

    def step(params, state):
        return zero.apply(tx, jax.tree.map(jnp.ones_like, params), state, params)

    step = jax.jit(step, donate_argnums=(0, 1))
    for _ in range(2):
        old = (params, state)
        params, state = step(params, state)
        # a flag of dog's that its update only writes is no argument of the compiled step
        read = [x for x in jax.tree.leaves(old) if x.size > 1 or x.dtype == jnp.float32]
        assert all(x.is_deleted() for x in read)


def test_jz_016_aliased_parameters(mesh8):
    """A tree that holds one array twice works, eager and jitted; the two drift apart as in Optax."""
    x = checks.place(normal(0, 13), mesh8, P())
    params = {"a": x, "b": x}
    grads = {"a": jnp.ones(13), "b": 2 * jnp.ones(13)}
    zero = jaxzero.Zero(mesh8, stage=2)
    tx = zero.optimizer(optax.sgd(0.5))
    want = {"a": x - 0.5, "b": x - 1.0}
    checks.assert_params_equal(zero.apply(tx, grads, tx.init(params), params)[0], want)
    checks.assert_params_equal(jax.jit(functools.partial(zero.apply, tx))(grads, tx.init(params), params)[0], want)


@pytest.mark.parametrize("setting", SETTINGS)
def test_jz_017_frozen_base(setting):
    """LoRA: the frozen base has no optimizer state and keeps every bit; the adapters train as in Optax."""
    params = {"base": normal(0, 96, 8), "A": normal(1, 8, 4), "B": normal(2, 4, 9)}
    labels = {"base": "frozen", "A": "train", "B": "train"}
    inner = optax.partition({"train": optax.adam(1e-2), "frozen": optax.set_to_zero()}, labels)
    got = checks.check(setting, inner, params, checks.quadratic, checks.quadratic_batches(5))
    np.testing.assert_array_equal(got.params["base"], params["base"])
    n = checks.world(setting)
    held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(got.state) if x.ndim)
    assert held == 2 * 4 * (-(-8 * 4 // n) + -(-4 * 9 // n))
