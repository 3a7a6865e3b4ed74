"""Open cases of stage 3, each with its kind: what other libraries got wrong when parameters are split at rest."""

import functools

import checks
import helpers
import hlo
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import stage3_models as models
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxzero
from jaxzero import EvenSplit

pytestmark = pytest.mark.grid(11)

normal = models.normal
GLOBAL_WAYS = checks.WAYS[:2]
SGD_FIRST = [optax.sgd(1.0), optax.adamw(1e-2, weight_decay=0.1)]  # Adam hides a constant factor


def is_split(x):
    return isinstance(x, EvenSplit)


def any_stage(stage, mesh="8", **options):
    shape, names, fixed = models.MESHES[mesh]
    return jaxzero.Zero(helpers.make_mesh(shape, names), stage=stage, **fixed | options)


def agree(zero, inner, params, loss, batches, way=GLOBAL_WAYS[1], rtol=2e-5, **how):
    """Trains with and without jaxzero; parameters, state and losses must agree."""
    want = checks.reference(inner, params, loss, batches, **how)
    got = checks.train(zero, inner, params, loss, batches, way, **how)
    checks.assert_params_equal(got.params, want.params, rtol)
    checks.assert_state_equal(got.state, want.state, rtol)
    np.testing.assert_allclose(got.losses, want.losses, rtol=1e-5)
    return got


# --- JZ-001 --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", ["8", "MiCS"])
@pytest.mark.parametrize("way", GLOBAL_WAYS)
def test_jz_001_unused_leaf(mesh, way):
    """A leaf that the loss does not read has a zero gradient and is decayed as Optax decays it."""
    params = {"used": normal(0, 24), "unused": normal(1, 7), "rows": normal(2, 16, 2)}
    loss = lambda p, batch: checks.quadratic({"used": p["used"]}, batch)
    for inner in SGD_FIRST:
        got = agree(models.make_zero(mesh), inner, params, loss, checks.quadratic_batches(), way)
    for name in ("unused", "rows"):
        assert np.all(helpers.host(got.params[name]) != helpers.host(params[name]))  # the decay


@pytest.mark.parametrize("accumulate", [1, 2])
def test_jz_001_unused_leaf_has_an_exact_zero_gradient(accumulate):
    params = {"used": normal(0, 24), "unused": normal(1, 7), "rows": normal(2, 16, 2)}
    loss = lambda p, x, t: checks.quadratic({"used": p["used"]}, (x, t))
    batch = checks.quadratic_batches()[0][:2]
    batch = tuple(x[:48] for x in batch)
    zero = models.make_zero("8")
    _, grads = zero.value_and_grad(loss, accumulate=accumulate)(zero.shard(params), *batch)
    grads = models.whole(grads)
    np.testing.assert_array_equal(grads["unused"], np.zeros(7))
    np.testing.assert_array_equal(grads["rows"], np.zeros((16, 2)))
    helpers.close(grads, jax.grad(loss)(params, *batch))


@pytest.mark.parametrize("change", ["None", "removed"])
def test_jz_001_missing_gradient_is_refused(change):
    params = {"used": normal(0, 24), "unused": normal(1, 7)}
    zero = models.make_zero("8")
    tx, split = zero.optimizer(optax.adam(1e-2)), zero.shard(params)
    grads = split | {"unused": None} if change == "None" else {"used": split["used"]}
    with pytest.raises(ValueError, match=checks.saying("apply", "unused", "fix")):
        zero.apply(tx, grads, tx.init(split), split)


# --- JZ-004 --------------------------------------------------------------------------------------

EMPTY = {"w": (8, 8), "z": (0, 8), "z3": (2, 0, 3), "tail": (0,), "last": (5, 0)}


def empty_loss(p, x):
    """Reads every leaf, those without elements too."""
    y = x @ jnp.concatenate([p["w"], p["z"]]) + jnp.sum(p["z3"], (0, 1)).sum() + jnp.sum(p["tail"])
    return jnp.mean(jnp.square(y)) + jnp.mean(jnp.square(x[:, :5])) * jnp.size(p["last"])


@pytest.mark.parametrize("mesh", ["1", "3", "8", "MiCS"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_jz_004_zero_size_leaves_keep_their_shape(stage, mesh):
    """Shapes and dtypes are the same before and after each step; the next step takes what the last one gave."""
    params = {k: normal(i, *shape) for i, (k, shape) in enumerate(EMPTY.items())}
    zero = any_stage(stage, mesh)
    batches = [normal(i, 24, 8) for i in range(2)]
    split = zero.shard(params)
    shapes = lambda tree: [(x.shape, x.dtype) for x in jax.tree.leaves(tree, is_leaf=is_split)]
    assert shapes(split) == shapes(params)
    for inner in SGD_FIRST:
        tx = zero.optimizer(inner)
        state = tx.init(split)
        after = split
        for x in batches:
            _, grads = zero.value_and_grad(empty_loss)(after, x)
            assert shapes(grads) == shapes(params)
            after, state = zero.apply(tx, grads, state, after)
            assert shapes(after) == shapes(params)
        want = checks.reference(inner, params, empty_loss, batches)
        checks.assert_params_equal(zero.gather(after), want.params)


def test_jz_004_forward_and_gather_of_zero_size_leaves():
    params = {k: normal(i, *shape) for i, (k, shape) in enumerate(EMPTY.items())}
    zero, x = models.make_zero("8"), normal(9, 16, 8)
    split = zero.shard(params)
    assert shapes_of(zero.gather(split)) == EMPTY
    out = zero.forward(lambda p, x: (x @ p["w"], p["z"], p["z3"]))(split, x)
    helpers.close(out, (x @ params["w"], params["z"], params["z3"]))


def shapes_of(tree):
    return jax.tree.map(lambda x: x.shape, tree)


# --- JZ-013, JZ-014 ------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [4, 40])
@pytest.mark.parametrize("inner", [optax.sgd(0.05), optax.adam(1e-2)], ids=["sgd", "adam"])
def test_jz_013_tied_weights_at_every_stage(width, inner):
    """One leaf, used twice: loss curves of all stages, with and without padding."""
    params = {"E": normal(1, width, width, scale=width**-0.5), "mid": normal(2, width, width, scale=width**-0.5)}
    loss = lambda p, x: jnp.mean(jnp.square(x @ p["E"] @ p["mid"] @ p["E"].T - x[:, ::-1]))
    batches = [normal(3 + i % 3, 16, width) for i in range(20)]
    want = checks.reference(inner, params, loss, batches)
    assert want.losses[-3] < 0.95 * want.losses[0]
    for stage in (1, 2, 3):
        got = checks.train(any_stage(stage), inner, params, loss, batches)
        np.testing.assert_allclose(got.losses, want.losses, rtol=1e-5)
        checks.assert_params_equal(got.params, want.params, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(16, 2), (5, 3)], ids=["rows", "flat"])
@pytest.mark.parametrize("way", ["update", "apply"])
def test_jz_014_one_array_at_two_paths(shape, way):
    """Two paths are two parameters, at rest too; they may be one array on the way in."""
    e = jnp.ones(shape)
    zero = models.make_zero("8")
    split = jax.jit(zero.shard)({"emb": e, "head": e})
    tx = zero.optimizer(optax.sgd(0.1))
    loss = lambda p, x: jnp.mean(x) * (2 * jnp.sum(p["emb"]) + 3 * jnp.sum(p["head"]))

    step = jax.jit(checks.apply_step(zero, tx, loss, way), donate_argnums=(0, 1))
    after = zero.gather(step(zero.shard(split), tx.init(split), jnp.ones(8))[0])
    np.testing.assert_allclose(after["emb"], np.full(shape, 0.8), rtol=1e-6)
    np.testing.assert_allclose(after["head"], np.full(shape, 0.7), rtol=1e-6)


def test_jz_014_eager_shard_of_one_array_twice_can_be_donated():
    """Two leaves never share a buffer at rest."""
    e = jnp.ones((16, 2))
    split = models.make_zero("8").shard({"emb": e, "head": e})
    out = jax.jit(lambda t: jax.tree.map(lambda x: x + 1, t), donate_argnums=0)(split)
    np.testing.assert_array_equal(out["head"], np.full((16, 2), 2.0))


# --- JZ-017 --------------------------------------------------------------------------------------

LORA = {"base": (1024, 64), "A": (64, 4), "B": (4, 64), "odd": (37, 5)}
FROZEN = {"base": "frozen", "A": "train", "B": "train", "odd": "frozen"}


def lora_params():
    return {k: normal(i, *shape, scale=shape[-1] ** -0.5) for i, (k, shape) in enumerate(LORA.items())}


def lora_loss(p, x, stop=lambda w: w):
    base = jnp.tanh(x @ stop(p["base"])) + x[:, :37] @ stop(p["odd"]) @ jnp.ones((5, 64))
    return jnp.mean(jnp.square(base + base @ p["A"] @ p["B"] - 1))


def multi(inner):
    return optax.multi_transform({"train": inner, "frozen": optax.set_to_zero()}, FROZEN)


def masked(inner):
    train = {k: v == "train" for k, v in FROZEN.items()}
    return optax.chain(
        optax.masked(inner, train), optax.masked(optax.set_to_zero(), {k: not v for k, v in train.items()})
    )


def bytes_on(tree, device):
    """Bytes that a device holds of the arrays of a tree."""
    arrays = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]
    return sum(s.data.nbytes for x in arrays for s in x.addressable_shards if s.device == device)


@pytest.mark.parametrize("wrap", [multi, masked], ids=["multi_transform", "masked"])
@pytest.mark.parametrize("way", GLOBAL_WAYS)
def test_jz_017_frozen_base(wrap, way):
    """The base is split, has no moments, stays bitwise the same; the adapters train as unsharded."""
    params, batches = lora_params(), [normal(9 + i, 16, 1024) for i in range(3)]
    zero = models.make_zero("8")
    for inner in SGD_FIRST:
        got = agree(zero, wrap(inner), params, lora_loss, batches, way)
        for name in ("base", "odd"):
            np.testing.assert_array_equal(got.params[name], params[name])
        assert np.all(helpers.host(got.params["A"]) != helpers.host(params["A"]))
    split = zero.shard(params)
    held = bytes_on((split, got.state), zero.mesh.devices.flat[5])
    frozen, trained = 1024 * 64 / 8 + -(-37 * 5 // 8), 3 * (64 * 4 + 4 * 64) / 8
    assert held <= 4 * (frozen + trained) + 16  # and a count or two
    kept = [helpers.name(p) for p, _ in jax.tree_util.tree_leaves_with_path(got.state)]
    assert {"A", "B"} <= {name.rpartition("/")[2] for name in kept}
    assert not any("base" in name for name in kept)


def lora_step(zero, loss):
    tx = zero.optimizer(multi(optax.adam(1e-2)))
    split = zero.shard(lora_params())
    state = tx.init(split)

    def step(split, state, x):
        _, grads = zero.value_and_grad(loss)(split, x)
        return zero.apply(tx, grads, state, split)

    return hlo.collectives(jax.jit(step).lower(split, state, normal(9, 16, 1024)).compile().as_text())


@pytest.mark.parametrize("stopped", [True, False])
def test_jz_017_no_gradient_of_the_base_is_sent(stopped):
    """Whether the loss stops the gradient or the optimizer drops it; a chunk would tie it to others."""
    stop = lax.stop_gradient if stopped else lambda w: w
    zero = models.make_zero("8", chunk_bytes=None if not stopped else 2**20)
    rows = lora_step(zero, functools.partial(lora_loss, stop=stop))
    assert 0 < hlo.nbytes(rows, "reduce-scatter") <= 4 * 2 * (64 * 4 + 4 * 64)
    assert hlo.nbytes(rows, "all-gather") >= 4 * 1024 * 64  # the base is gathered for the forward pass


# --- JZ-071 --------------------------------------------------------------------------------------


def deep_loss(p, x, wrap=lambda f: f):
    return jnp.mean(jnp.square(lax.scan(wrap(lambda x, w: (jnp.tanh(x @ w), None)), x, p)[0]))


def temp_bytes(zero, loss, params, x):
    split = zero.shard(params)
    run = jax.jit(zero.value_and_grad(loss)).lower(split, x).compile()
    return run.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("options", list(models.OPTIONS))
def test_jz_071_gathered_weights_are_no_residuals(remat, options):
    """The backward pass gathers again: less than a quarter of the whole stack, with and without `jax.checkpoint`."""
    layers, width = 16, 256
    params, x = normal(0, layers, width, width, scale=width**-0.5), normal(1, 8, width)
    loss = functools.partial(deep_loss, wrap=jax.checkpoint) if remat else deep_loss
    zero = models.make_zero("8", **models.OPTIONS[options]).observe(loss, params, x)
    assert temp_bytes(zero, loss, params, x) < 0.25 * layers * width * width * 4
    _, grads = zero.value_and_grad(loss)(zero.shard(params), x)
    helpers.close(grads, jax.grad(loss)(params, x))


def test_jz_071_memory_per_layer_is_a_share():
    """Of 6 and 12 layers of two matrices: what one more layer takes."""
    width = 128

    def loss(p, x):
        return jnp.mean(lax.scan(lambda x, w: (x + jnp.tanh(x @ w["up"]) @ w["down"], None), x, p)[0] ** 2)

    def taken(layers):
        p = {k: normal(i, layers, *s, scale=0.05) for i, (k, s) in enumerate(SHAPES.items())}
        zero = models.make_zero("8", prefetch=0).observe(loss, p, x)
        return temp_bytes(zero, loss, p, x)

    SHAPES, x = {"up": (width, 4 * width), "down": (4 * width, width)}, normal(1, 8, width)
    share = 4 * 2 * 4 * width * width / 8
    activations = 4 * (width + 2 * 4 * width)  # of one example on each device
    assert (taken(12) - taken(6)) / 6 < 1.2 * share + activations


# --- JZ-088 --------------------------------------------------------------------------------------


def params_ema(decay):
    """An average of the parameters, kept as optimizer state."""

    def update(updates, state, params=None):
        new = optax.apply_updates(params, updates)
        return updates, optax.EmaState(state.count + 1, optax.incremental_update(new, state.ema, 1 - decay))

    return optax.GradientTransformation(lambda p: optax.EmaState(jnp.zeros((), jnp.int32), p), update)


EMAS = {"of updates": optax.ema(0.5, debias=True), "of parameters": params_ema(0.5)}
ODD = {"flat": (13, 3), "small": (3,), "rows": (16, 2), "s": ()}


@pytest.mark.parametrize("mesh", ["8", "3", "MiCS"])
@pytest.mark.parametrize("name", EMAS)
def test_jz_088_ema_is_kept_on_shares(name, mesh):
    """Exported after each step it equals the unsharded average; padding is zero; nothing is gathered for it."""
    params = {k: normal(i, *shape) for i, (k, shape) in enumerate(ODD.items())}
    inner = optax.chain(optax.sgd(0.5), EMAS[name])
    zero, batches = models.make_zero(mesh), checks.quadratic_batches(3)
    assert len(zero.explain(inner, params).crossings) == 0
    tx, split = zero.optimizer(inner), zero.shard(params)
    state, want, want_state = tx.init(split), params, inner.init(params)
    for batch in batches:
        _, grads = zero.value_and_grad(checks.quadratic)(split, batch)
        split, state = zero.apply(tx, grads, state, split)
        updates, want_state = inner.update(jax.grad(checks.quadratic)(want, batch), want_state, want)
        want = optax.apply_updates(want, updates)
        checks.assert_state_equal(state, want_state)
        average = optax.tree.get(state, "ema")
        worn = jax.tree.map(lambda a, p: EvenSplit(a, p.shape) if is_split(p) else a, average, split, is_leaf=is_split)
        checks.assert_params_equal(zero.gather(worn), optax.tree.get(want_state, "ema"))
        padded = {k: x for k, x in average.items() if x.shape != params[k].shape}
        for k, x in padded.items():
            assert not np.asarray(x)[params[k].size :].any()
        assert padded


def test_jz_088_ema_of_split_parameters_outside_the_optimizer():
    """`optax.incremental_update` of two trees at rest is elementwise: no collective, the same padding."""
    params = {k: normal(i, *shape) for i, (k, shape) in enumerate(ODD.items())}
    zero = models.make_zero("8")
    split, average = zero.shard(params), zero.shard(jax.tree.map(jnp.zeros_like, params))
    update = jax.jit(lambda new, old: optax.incremental_update(new, old, 0.25))
    assert hlo.collectives(update.lower(split, average).compile().as_text()) == []
    got = update(split, average)
    helpers.close(models.whole(got), jax.tree.map(lambda x: 0.25 * x, params), 1e-7)
    helpers.close(zero.gather(got), jax.tree.map(lambda x: 0.25 * x, params), 1e-7)


# --- JZ-092 --------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("rows", [16, 13])
def test_jz_092_gradients_of_a_few_rows(stage, rows):
    """Rows 1 and 5 are touched, the gradient of row 5 sums to zero; decay and momentum go on in all others."""
    params = {"E": normal(1, rows, 4)}
    ids = np.array([1, 5] * 8)
    weights = np.where(ids[:, None] == 5, [[1.0, -1, 1, -1]], [[2.0, 0.5, -1, 3]]).astype(np.float32)
    loss = lambda p, batch: 2 * jnp.mean(jnp.sum(p["E"][batch[0]] * batch[1], -1))
    want = np.zeros((rows, 4), np.float32)
    want[1], want[5] = weights[0], weights[1]
    zero = any_stage(stage)
    _, grads = zero.value_and_grad(loss)(zero.shard(params), (ids, weights))
    np.testing.assert_allclose(models.whole(grads)["E"], want, rtol=1e-6)
    for inner in SGD_FIRST:
        got = agree(zero, inner, params, loss, [(ids, weights)] * 3)
    assert np.all(helpers.host(got.params["E"]) != helpers.host(params["E"]))


# --- JZ-094 --------------------------------------------------------------------------------------

MODEL = {"flat": (13, 3), "rows": (16, 3), "bias": (3,), "s": ()}


def model_params():
    return {k: normal(i, *shape) for i, (k, shape) in enumerate(MODEL.items())}


@pytest.mark.parametrize("mesh", ["1", "3", "8", "MiCS"])
def test_jz_094_shapes_and_counts_are_logical(mesh):
    params = model_params()
    split = models.make_zero(mesh).shard(params)
    leaves = jax.tree.leaves(split, is_leaf=is_split)
    for name, shape in MODEL.items():
        x = split[name]
        assert (x.shape, x.ndim, x.size) == (shape, len(shape), int(np.prod(shape)))
        assert (x.dtype, x.nbytes) == (np.float32, 4 * int(np.prod(shape)))
    assert sum(x.size for x in leaves) == sum(x.size for x in jax.tree.leaves(params))
    if mesh == "8":
        assert is_split(split["flat"])
        assert repr(split["flat"]) == "EvenSplit(shape=(13, 3), stored=float32[40])"


@pytest.mark.parametrize("mesh", ["1", "3", "8", "MiCS"])
@pytest.mark.parametrize("traced", [False, True])
def test_jz_094_to_full_and_back_is_bit_identical(mesh, traced):
    zero = models.make_zero(mesh)
    params = model_params() | {"count": jnp.arange(3), "nan": jnp.array([0.0, -0.0, jnp.nan, jnp.inf, 1e-40])}
    split = zero.shard(params)
    again = (jax.jit(lambda s: zero.shard(zero.gather(s))) if traced else lambda s: zero.shard(zero.gather(s)))(split)
    assert jax.tree.structure(again) == jax.tree.structure(split)
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(split), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
    whole = zero.gather(split)
    helpers.assert_all_shards_equal(whole)
    for name, x in whole.items():
        assert np.asarray(x).tobytes() == np.asarray(params[name]).tobytes()


def test_jz_094_one_sub_tree_is_gathered_alone():
    zero = models.make_zero("8")
    params = {"a": model_params(), "b": model_params()}
    split = zero.shard(params)
    helpers.close(zero.gather(split["a"]), params["a"], 0)
    helpers.close(zero.gather({"one": split["b"]["flat"]}), {"one": params["b"]["flat"]}, 0)
    np.testing.assert_array_equal(zero.gather(split["b"]["flat"]), params["b"]["flat"])


def test_jz_094_edits_come_back_through_shard_alone():
    """What is gathered is a copy; `shard` of an edited copy gives parameters that every later call sees."""
    zero, x = models.make_zero("8"), normal(8, 16, 13)
    split = zero.shard(model_params())
    predict = zero.forward(lambda p, x: x @ p["flat"] + p["bias"])
    before = np.asarray(predict(split, x))
    full = zero.gather(split)
    full["flat"] = full["flat"].at[2, 1].add(1.0)
    np.testing.assert_array_equal(predict(split, x), before)
    edited = zero.shard(full)
    np.testing.assert_allclose(predict(edited, x), before + np.outer(x[:, 2], [0, 1, 0]), atol=1e-5)
    tx = zero.optimizer(optax.sgd(0.0))
    zeros = jax.tree.map(jnp.zeros_like, edited)
    after, _ = zero.apply(tx, zeros, tx.init(edited), edited)
    helpers.close(zero.gather(after), full, 0)


MISUSES = {
    "x @ leaf": lambda leaf: jnp.ones((2, 13)) @ leaf,
    "leaf @ x": lambda leaf: leaf @ jnp.ones((3, 2)),
    "leaf[0]": lambda leaf: leaf[0],
    "leaf.T": lambda leaf: leaf.T,
    "jnp.sum": lambda leaf: jnp.sum(leaf),
    "jnp.dot": lambda leaf: jnp.dot(jnp.ones((2, 13)), leaf),
    "leaf.astype": lambda leaf: leaf.astype(jnp.bfloat16),
    "leaf * 2": lambda leaf: leaf * 2,
    "2 * leaf": lambda leaf: 2 * leaf,
    "x * leaf": lambda leaf: jnp.ones((13, 3)) * leaf,
    "leaf + x": lambda leaf: leaf + jnp.ones((13, 3)),
    "leaf - leaf": lambda leaf: leaf - leaf,
    "leaf / x": lambda leaf: leaf / jnp.ones((13, 3)),
    "leaf ** 2": lambda leaf: leaf**2,
    "-leaf": lambda leaf: -leaf,
    "leaf > 0": lambda leaf: leaf > 0,
    "numpy": lambda leaf: np.asarray(leaf),
    "numpy sum": lambda leaf: np.sum(leaf),
    "einsum": lambda leaf: jnp.einsum("bi,io->bo", jnp.ones((2, 13)), leaf),
    "iteration": lambda leaf: list(leaf),
    "float": lambda leaf: float(leaf),
    "jax.nn": lambda leaf: jax.nn.relu(leaf),
}


@pytest.mark.parametrize("where", ["eager", "jit"])
@pytest.mark.parametrize("name", MISUSES)
def test_jz_094_a_split_leaf_is_no_array(name, where):
    """A model called on parameters at rest says what to do, and never computes with the padded array."""
    leaf = models.make_zero("8").shard(model_params())["flat"]
    use = MISUSES[name] if where == "eager" else jax.jit(MISUSES[name])
    words = ("EvenSplit", r"13, 3", r"zero\.gather", "value_and_grad|forward")
    with pytest.raises((ValueError, TypeError, AttributeError), match=checks.saying(*words)):
        use(leaf)


def test_jz_094_the_whole_model_on_split_parameters():
    split, x = models.make_zero("8").shard(models.gpt_params(layers=1)), models.tokens(37, 7)
    with pytest.raises((ValueError, TypeError, AttributeError), match=checks.saying("EvenSplit", r"zero\.gather")):
        models.gpt_loss(split, x)
    with pytest.raises((ValueError, TypeError, AttributeError), match=checks.saying("EvenSplit", r"zero\.gather")):
        jax.grad(models.gpt_loss)(split, x)


def test_jz_094_at_rest_is_a_plain_tree():
    """`tree.map`, `jit`, flattening and comparison see stored arrays; nothing is lost on the way."""
    split = models.make_zero("8").shard(model_params())
    twice = jax.tree.map(lambda x: 2 * x, split)
    assert shapes_of_leaves(twice) == shapes_of_leaves(split)
    helpers.close(models.whole(twice), jax.tree.map(lambda x: 2 * x, model_params()), 0)
    through = jax.jit(lambda t: t)(split)
    assert shapes_of_leaves(through) == shapes_of_leaves(split)
    assert jax.tree.leaves(split)[1].sharding.spec == P("data")


def shapes_of_leaves(tree):
    return [x.shape for x in jax.tree.leaves(tree, is_leaf=is_split)]
