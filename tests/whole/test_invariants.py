"""What holds for every step: one compilation, complete donation, state as it was, equal replicas; what a step sends."""

import functools
import warnings

import checks
import chex
import helpers
import hlo
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxzero

pytestmark = pytest.mark.grid(9)

SETTINGS = list(checks.SETTINGS)
BATCHES = checks.quadratic_batches()
OPTIMIZERS = {
    "adamw": lambda: optax.adamw(1e-2),
    "bfloat16 moment": lambda: optax.adam(1e-2, mu_dtype=jnp.bfloat16),
    "lamb": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.lamb(1e-2)),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
    "inject": lambda: optax.inject_hyperparams(optax.adamw)(optax.cosine_decay_schedule(1e-2, 10)),
    "prodigy": lambda: optax.contrib.prodigy(),
    "muon": lambda: optax.contrib.muon(1e-2),
    "noise": lambda: optax.noisy_sgd(1e-2, key=jax.random.key(0)),
    "schedule free": lambda: optax.contrib.schedule_free_adamw(1e-2),
}


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def odd_params():
    return {
        "a": normal(0, 13, 5),
        "b": normal(1, 3),
        "even": normal(2, 24, 4),
        "half": normal(3, 9).astype(jnp.bfloat16),
        "s": jnp.float32(1.5),
    }


def weak(x):
    return getattr(jax.typeof(x), "weak_type", False)  # keys have no such thing


def kept_by_plain_optax(inner, start, batch):
    """State leaves that even an unsharded step does not consume: unused ones, and those it hands on as they are."""
    params = jax.tree.map(jnp.copy, start)
    state = jax.tree.map(jnp.copy, inner.init(params))

    def step(params, state, batch):
        updates, state = inner.update(jax.grad(checks.quadratic)(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    old = (params, state)
    jax.jit(step, donate_argnums=(0, 1))(params, state, batch)
    return {helpers.name(p) for p, x in jax.tree_util.tree_leaves_with_path(old) if not x.is_deleted()}


def signature(tree):
    """What must not change from step to step."""
    leaves = [
        (jax.typeof(x).str_short(), weak(x), x.sharding.spec, x.sharding.mesh, x.sharding.memory_kind, x.committed)
        for x in jax.tree.leaves(tree)
    ]
    return jax.tree.structure(tree), leaves


def padding(state, like):
    """All padding elements of a stored state, as bytes."""
    found = []
    for x, full in zip(jax.tree.leaves(state), jax.tree.leaves(like), strict=True):
        if x.shape != full.shape:
            assert x.ndim == 1
            found.append(helpers.host(x).reshape(-1)[full.size :].tobytes())
    return b"".join(found)


@pytest.mark.parametrize("way", [checks.WAYS[0], checks.WAYS[1], checks.WAYS[3]])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_ten_steps(name, way):
    """One compilation, every buffer donated, no warning; trees, shapes, dtypes, weak types and shardings stay."""
    setting = SETTINGS[(list(OPTIMIZERS).index(name) + checks.WAYS.index(way)) % len(SETTINGS)]
    zero, inner = checks.make_zero(setting), OPTIMIZERS[name]()
    mesh = zero.mesh
    axes = mesh.axis_names
    tx = zero.optimizer(inner)
    start = odd_params()
    if name in ("inject", "prodigy"):
        del start["half"]  # there Optax itself widens the state of bfloat16 parameters in the first steps
    params = checks.place(start, mesh, P())
    state = jax.jit(tx.init)(params)
    if way.startswith("inside"):

        def local(params, state, batch):
            grads = jax.grad(checks.quadratic)(checks.varying(params, axes), batch)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        specs = zero.specs(state)
        run = jax.shard_map(local, mesh=mesh, in_specs=(P(), specs, P(axes)), out_specs=(P(), specs))
    else:

        def run(params, state, batch):
            _, grads = zero.value_and_grad(checks.quadratic)(params, batch)
            if way.endswith("apply"):
                return zero.apply(tx, grads, state, params)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

    traces = []
    step = jax.jit(lambda *args: (traces.append(None), run(*args))[1], donate_argnums=(0, 1))
    before = signature((params, state))
    paths = [helpers.name(path) for path, _ in jax.tree_util.tree_leaves_with_path((params, state))]
    kept = kept_by_plain_optax(inner, start, BATCHES[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # "donated buffers were not usable"
        for batch in checks.quadratic_batches(10):
            old = (params, state)
            params, state = step(params, state, checks.place(batch, mesh, P(axes)))
            left = {helpers.name(p) for p, x in jax.tree_util.tree_leaves_with_path(old) if not x.is_deleted()}
            assert left <= kept, "not donated"
            now = signature((params, state))
            assert now[0] == before[0]
            for path, a, b in zip(paths, now[1], before[1], strict=True):
                assert a == b, path
    assert len(traces) == 1
    if not any(jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in jax.tree.leaves(state)):
        assert (
            step._cache_size() == 1
        )  # of keys JAX makes two entries by itself: their data lies at P(None), then at P()
    helpers.assert_all_shards_equal((params, state))
    assert not any(padding(state, jax.eval_shape(inner.init, start)))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_at_init(name, mesh8):
    """Eager, jitted and abstract `init` agree; the state lies on the whole mesh, `1/N` of it per device."""
    inner = OPTIMIZERS[name]()
    zero = jaxzero.Zero(mesh8, stage=2)
    tx = zero.optimizer(inner)
    eager, jitted = tx.init(odd_params()), jax.jit(tx.init)(odd_params())
    structs = jax.eval_shape(odd_params)
    abstract, shaped = tx.init(structs), jax.eval_shape(tx.init, structs)
    assert not any(isinstance(x, jax.Array) for x in jax.tree.leaves(abstract))
    for path, x in jax.tree_util.tree_leaves_with_path(jitted):
        assert isinstance(x.sharding, NamedSharding), helpers.name(path)
        assert len(x.sharding.device_set) == 8, helpers.name(path)
        assert not weak(x), helpers.name(path)
    shapes = lambda tree: jax.tree.map(lambda x: (x.shape, str(x.dtype)), tree)
    assert shapes(eager) == shapes(jitted) == shapes(abstract) == shapes(shaped)
    spec = lambda tree: [x.sharding.spec for x in jax.tree.leaves(tree)]
    assert spec(eager) == spec(jitted) == spec(abstract)
    assert jax.tree.leaves(zero.specs(jitted), is_leaf=lambda x: isinstance(x, P)) == spec(jitted)
    checks.assert_state_equal(eager, inner.init(odd_params()), rtol=1e-6)
    checks.assert_state_equal(jitted, inner.init(odd_params()), rtol=1e-6)


def test_jz_067_state_of_replicated_parameters_is_split(mesh8):
    """Moments take an eighth per device though the parameters are whole."""
    params = checks.place({"emb": jnp.ones((4096, 64)), "odd": jnp.ones((1001, 3))}, mesh8, P())
    state = jax.jit(jaxzero.Zero(mesh8, stage=1).optimizer(optax.adam(1e-3)).init)(params)
    held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state) if x.ndim)
    assert held == 2 * 4 * (4096 * 64 // 8 + -(-1001 * 3 // 8))


def test_jz_068_init_makes_no_whole_state(mesh8):
    """Temporary memory of a jitted `init` is far below one whole moment."""
    params = checks.place({"emb": jnp.ones((4096, 64))}, mesh8, P())
    tx = jaxzero.Zero(mesh8, stage=1).optimizer(optax.adam(1e-3))
    memory = jax.jit(tx.init).lower(params).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 4096 * 64 * 4 // 8


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("way", checks.WAYS[:4])
def test_bucket_settings_agree_bitwise(setting, way):
    """Buckets are transport: None, tiny, middling and huge give the same bits."""
    inner = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))
    runs = [
        checks.train(checks.make_zero(setting, bucket_bytes=limit), inner, odd_params(), checks.quadratic, BATCHES, way)
        for limit in (None, 1, 200, 2**30)
    ]
    for other in runs[1:]:
        for (path, a), b in zip(
            jax.tree_util.tree_leaves_with_path(runs[0][:2]), jax.tree.leaves(other[:2]), strict=True
        ):
            assert helpers.host(a).tobytes() == helpers.host(b).tobytes(), helpers.name(path)


@pytest.mark.parametrize("kind", ["uniform", "odd", "nested"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_gradients(setting, kind):
    """Loss and gradient of the whole batch: 5e-6 of each leaf's largest element."""
    params = {
        "uniform": {"w": normal(0, 16, 8)},
        "odd": odd_params(),
        "nested": [normal(0, 5), (normal(1, 1, 7), {"x": normal(2)}), normal(3, 0, 2)],
    }[kind]
    value, grads = jax.value_and_grad(checks.quadratic)(params, BATCHES[0])
    got = checks.gradients(checks.make_zero(setting), params, checks.quadratic, BATCHES[0])
    np.testing.assert_allclose(got[0], value, rtol=2e-6)
    half = {"half"} if kind == "odd" else set()  # a bfloat16 gradient is rounded to bfloat16, once
    drop = lambda tree: {k: v for k, v in tree.items() if k not in half} if half else tree
    helpers.close(drop(got[1]), drop(grads))
    for k in half:
        helpers.close(got[1][k], grads[k], 2**-8)


FLOAT64 = """
import itertools
import checks, helpers, jaxzero, jax.numpy as jnp, numpy as np, optax

def model(p, batch):
    x, t = batch
    def layer(x, w):
        return x + jnp.tanh(x @ w) @ w.T, None
    x, _ = jax.lax.scan(layer, x[:, None] * p["in"], p["layers"])
    return jnp.mean(jnp.square(jnp.sum(jnp.tanh(x) * p["out"], -1) * p["scale"] - t))

k = jax.random.split(jax.random.key(0), 4)
params = {"in": jax.random.normal(k[0], (5,)), "layers": jax.random.normal(k[1], (3, 5, 5)) / 3,
          "out": jax.random.normal(k[2], (5,)), "scale": jnp.float64(1.3)}
odd = {"a": jax.random.normal(k[3], (13, 3)), "b": jnp.ones(16), "c": jnp.ones((8, 2)), "s": jnp.float64(2)}
batches = [tuple(np.random.default_rng(i).normal(size=(2, 24))) for i in range(3)]
for loss, params in ((model, params), (checks.quadratic, odd)):
    assert all(x.dtype == jnp.float64 for x in jax.tree.leaves(params))
    want = jax.value_and_grad(loss)(params, batches[0])
    for setting in checks.SETTINGS:
        zero = checks.make_zero(setting)
        got = checks.gradients(zero, params, loss, batches[0])
        helpers.close(got, want, 1e-11)
        assert all(x.dtype == np.float64 for x in jax.tree.leaves(got[1]))
    optimizers = (optax.sgd(1.0), optax.chain(optax.clip_by_global_norm(0.1), optax.lamb(1e-2)))
    unsharded = [checks.reference(inner, params, loss, batches).params for inner in optimizers]
    for (inner, expected), way in itertools.product(zip(optimizers, unsharded), checks.WAYS):
        setting = list(checks.SETTINGS)[len(way) % 4]
        run = checks.train(checks.make_zero(setting), inner, params, loss, batches, way)
        helpers.close(run.params, expected, 1e-11)
print("equal")
"""


def test_float64_gradients():
    """At 1e-11: the comparison that catches real errors."""
    assert helpers.run_python(FLOAT64, x64=True).split() == ["equal"]


# --- what a step sends ---------------------------------------------------------------------------

LARGE = {"emb": (1001, 16), "w": (64, 64), "b": (64,)}


def large_params():
    return {k: jnp.ones(shape) for k, shape in LARGE.items()}


BYTES = sum(4 * int(np.prod(shape)) for shape in LARGE.values())


@pytest.mark.parametrize("way", ["update", "apply"])
def test_jz_073_stage_2_reduces_and_scatters(mesh8, way):
    """Gradients by reduce-scatter, parameters by all-gather, and no all-reduce but the loss's."""
    rows = hlo.step_collectives(jaxzero.Zero(mesh8, stage=2), optax.adamw(1e-3), large_params(), way)
    assert BYTES <= hlo.nbytes(rows, "reduce-scatter") <= 1.01 * BYTES
    assert BYTES <= hlo.nbytes(rows, "all-gather") <= 1.01 * BYTES
    assert hlo.count(rows, "all-reduce", above=64) == 0
    assert {row.kind for row in rows} <= {"reduce-scatter", "all-gather", "all-reduce"}


def test_stage_1_reduces_everywhere(mesh8):
    rows = hlo.step_collectives(jaxzero.Zero(mesh8, stage=1), optax.adamw(1e-3), large_params())
    assert BYTES <= hlo.nbytes(rows, "all-reduce") <= 1.01 * BYTES + 64
    assert hlo.count(rows, "reduce-scatter") == 0
    assert BYTES <= hlo.nbytes(rows, "all-gather") <= 1.01 * BYTES


def test_mics_sends_shares_across_replicas(mesh24):
    """Reduce-scatter and gather inside the group of 4, one all-reduce of the share across."""
    zero = jaxzero.Zero(mesh24, stage=2, shard_axis="shard", replica_axis="replica")
    rows = hlo.step_collectives(zero, optax.adamw(1e-3), large_params())
    assert BYTES <= hlo.nbytes(rows, "reduce-scatter") <= 1.01 * BYTES
    assert BYTES <= hlo.nbytes(rows, "all-gather") <= 1.01 * BYTES
    assert BYTES / 4 <= hlo.nbytes(rows, "all-reduce") <= 1.01 * BYTES / 4 + 64


def test_stage_2_inside_a_users_own_region(mesh8):
    """The same collectives where the user opened the `shard_map`."""
    zero = jaxzero.Zero(mesh8, stage=2)
    tx = zero.optimizer(optax.adamw(1e-3))
    params = checks.place(large_params(), mesh8, P())
    state = jax.jit(tx.init)(params)
    specs = zero.specs(state)

    def local(params, state, batch):
        grads = jax.grad(checks.quadratic)(checks.varying(params, ("data",)), batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    step = jax.shard_map(local, mesh=mesh8, in_specs=(P(), specs, P("data")), out_specs=(P(), specs))
    rows = hlo.collectives(jax.jit(step).lower(params, state, BATCHES[0]).compile().as_text())
    assert BYTES <= hlo.nbytes(rows, "reduce-scatter") <= 1.01 * BYTES
    assert BYTES <= hlo.nbytes(rows, "all-gather") <= 1.01 * BYTES
    assert hlo.count(rows, "all-reduce", above=64) == 0


@pytest.mark.parametrize("name", ["adamw", "lamb", "prodigy"])
def test_elementwise_optimizers_gather_nothing(mesh8, name):
    """Norms cross devices as scalars: beyond the new parameters nothing is gathered."""
    params = {k: jnp.ones(shape) for k, shape in LARGE.items()}
    rows = hlo.step_collectives(jaxzero.Zero(mesh8, stage=2), OPTIMIZERS[name](), params)
    assert BYTES <= hlo.nbytes(rows, "all-gather") <= 1.01 * BYTES
    assert hlo.count(rows, "all-reduce", above=256) == 0


def test_world_of_one_sends_nothing():
    zero = jaxzero.Zero(helpers.make_mesh(1), stage=2)
    text = hlo.compiled_step(zero, optax.adamw(1e-3), large_params()).as_text()
    rows = hlo.collectives(text)
    assert {row.group for row in rows} == {1}
    assert jaxzero.collectives(text).sent() == 0
    once = {"all-gather": BYTES, "reduce-scatter": BYTES, "all-reduce": 4}  # XLA keeps them as copies
    assert {kind: hlo.nbytes(rows, kind) for kind in once} == once
    assert hlo.instructions(text) > 10


# --- value_and_grad ------------------------------------------------------------------------------


def both_views(zero, loss_fn, params, batch, specs=None, **how):
    """The result of `value_and_grad` in the global view and inside a user's own region, as whole arrays."""
    mesh = zero.mesh
    axes = mesh.axis_names
    run = zero.value_and_grad(loss_fn, **how)
    outside = jax.jit(run)(params, *batch)

    def local(params, *batch):
        value, grads = run(params, *batch)
        tx = zero.optimizer(optax.sgd(-1.0))
        updates, _ = tx.update(grads, tx.init(params), params)
        return value, updates

    in_specs = tuple(specs) if specs else (P(axes),) * len(batch)
    inside = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(P(), *in_specs), out_specs=P()))(params, *batch)
    return (outside[0], checks.whole(outside[1])), (inside[0], checks.whole(inside[1]))


@pytest.mark.parametrize("setting", SETTINGS)
def test_has_aux(setting):
    """Floating leaves of aux are means over devices; others that agree come through as they are."""
    params = {"a": normal(0, 13, 3), "b": normal(1, 16)}

    def loss(p, batch):
        aux = {"mean": jnp.mean(batch[0]), "vector": jnp.mean(batch[1]) * jnp.arange(3.0), "count": jnp.int32(7)}
        return checks.quadratic(p, batch), (aux, None, jnp.sum(p["a"]))

    (value, aux), grads = jax.value_and_grad(loss, has_aux=True)(params, BATCHES[0])
    for (got_value, got_aux), got in both_views(checks.make_zero(setting), loss, params, [BATCHES[0]], has_aux=True):
        np.testing.assert_allclose(got_value, value, rtol=2e-6)
        assert jax.tree.structure(got_aux) == jax.tree.structure(aux)
        assert got_aux[0]["count"].dtype == jnp.int32
        helpers.close(got_aux, aux, 2e-6)
        helpers.close(got, grads)


def test_integers_in_aux_that_agree_after_a_psum(mesh8):
    """A count over the whole batch: the fix that the refusal proposes."""
    loss = lambda p, x: (jnp.sum(p) * jnp.mean(x), lax.psum(jnp.sum(x > 3), "data"))
    (_, hits), _ = jaxzero.Zero(mesh8).value_and_grad(loss, has_aux=True)(jnp.ones(3), jnp.arange(16.0))
    assert int(hits) == 12


@pytest.mark.parametrize("setting", SETTINGS)
def test_whole_argnums(setting):
    """An argument named there reaches every device whole; scalars always do."""
    params = normal(0, 5)
    weights = jnp.arange(7.0)  # does not divide by anything here

    def loss(p, batch, weights, scale):
        assert weights.shape == (7,)
        return checks.quadratic({"p": p * jnp.sum(weights) / 21}, batch) * scale

    value, grads = jax.value_and_grad(loss)(params, BATCHES[0], weights, 0.5)
    zero = checks.make_zero(setting)
    specs = (P(zero.mesh.axis_names), P(), P())
    batch = [BATCHES[0], weights, jnp.float32(0.5)]
    for got_value, got in both_views(zero, loss, params, batch, specs, whole_argnums=(2,)):
        np.testing.assert_allclose(got_value, value, rtol=2e-6)
        helpers.close(got, grads)
    run = zero.value_and_grad(lambda p, mask: jnp.mean(mask["m"]) * jnp.sum(p), whole_argnums=1)
    assert float(run(params, {"m": weights})[0]) == pytest.approx(3 * float(jnp.sum(params)), rel=1e-6)


@pytest.mark.parametrize("setting", SETTINGS)
def test_keys_are_folded_per_device(setting):
    """Dropout differs between devices, is the same from run to run, and can be made equal."""
    zero = checks.make_zero(setting)
    axes = checks.axes_of(zero)
    devices = int(np.prod(list(zero.mesh.shape.values())))
    loss = lambda p, x, key: jnp.mean(p * jax.random.normal(key, (4,))) + 0 * jnp.mean(x)
    key, x, params = jax.random.key(5), jnp.ones(devices), jnp.ones(4)

    def draws(**how):
        seen = lambda p, x, key: (loss(p, x, key), lax.all_gather(jax.random.normal(key, (4,)), axes))
        return zero.value_and_grad(seen, has_aux=True, **how)(params, x, key)[0][1]

    folded = np.asarray(draws())
    assert len({row.tobytes() for row in folded}) == devices
    np.testing.assert_array_equal(folded, draws())
    plain = np.asarray(draws(fold_keys=False))
    np.testing.assert_allclose(plain, np.tile(jax.random.normal(key, (4,)), (devices, 1)), rtol=1e-6)
    np.testing.assert_array_equal(np.asarray(draws(whole_argnums=(2,))), plain)
    value, grads = zero.value_and_grad(loss)(params, x, key)
    np.testing.assert_allclose(value, np.mean(folded), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(checks.whole(grads), np.mean(folded, 0) / 4, rtol=1e-5, atol=1e-6)


def test_arrays_of_keys_are_data(mesh8):
    """One key per example: cut like examples, not folded."""
    keys = jax.random.split(jax.random.key(0), 16)
    loss = lambda p, keys: jnp.mean(jax.vmap(lambda k: jax.random.normal(k, (3,)) @ p)(keys))
    value, grads = jax.value_and_grad(loss)(jnp.ones(3), keys)
    got = checks.gradients(jaxzero.Zero(mesh8), jnp.ones(3), loss, keys)
    np.testing.assert_allclose(got[0], value, rtol=1e-5)
    helpers.close(got[1], grads)


def scanned(p, batch):
    """A carry that starts as a constant and becomes varying; a while loop whose length differs between devices."""
    x, t = batch

    def body(carry, xt):
        return carry + jnp.sum(jnp.square(p["a"] * xt[0] - xt[1])), None

    total, _ = lax.scan(body, jnp.zeros(()), (x, t))
    turns, _ = lax.while_loop(lambda c: c[1] < jnp.max(x), lambda c: (c[0] + 1, c[1] * 2), (0, jnp.float32(1e-3)))
    return total / x.shape[0] + 0 * turns


@jax.custom_vjp
def doubled(x):
    return 2 * x


doubled.defvjp(lambda x: (2 * x, None), lambda _, ct: (2 * ct,))


def with_custom_rules(p, batch):
    x, t = batch
    h = jax.checkpoint(lambda a: jnp.tanh(doubled(a)[None] * x[:, None]))(p["a"])
    return jnp.mean(jnp.square(jax.nn.relu(h) - t[:, None]) + jax.nn.logsumexp(h, -1, keepdims=True))


def with_branches(p, batch):
    x, t = batch
    one = lambda x, t: lax.cond(x > 0, lambda: jnp.sum(p["a"]) * t, lambda: jnp.sum(jnp.square(p["a"])) * x)
    return jnp.mean(jax.lax.map(lambda xt: one(*xt), (x, t)))


@pytest.mark.parametrize("loss", [scanned, with_custom_rules, with_branches])
@pytest.mark.parametrize("setting", SETTINGS)
def test_user_code_runs_unmodified(setting, loss):
    """Programs written for one device, in the global view."""
    params = {"a": normal(0, 5), "unused": normal(1, 8)}
    value, grads = jax.value_and_grad(loss)(params, BATCHES[0])
    got_value, got = checks.gradients(checks.make_zero(setting), params, loss, BATCHES[0])
    np.testing.assert_allclose(got_value, value, rtol=5e-6)
    helpers.close(got, grads)


@pytest.mark.parametrize("setting", SETTINGS)
def test_axis_names_are_bound_in_the_loss(setting):
    """A user's own `lax.pmean` gives batch statistics their whole-batch meaning; without it they are the device's."""
    zero = checks.make_zero(setting)
    axes = checks.axes_of(zero)
    params = {"a": normal(0, 5), "b": normal(1, 16)}

    def loss(p, batch, mean=lambda x: x):
        x, t = batch
        center = mean(jnp.mean(x))
        return jnp.mean(jnp.square((x - center)[:, None] * p["a"] - t[:, None])) + jnp.mean(p["b"]) * mean(jnp.mean(t))

    value, grads = jax.value_and_grad(loss)(params, BATCHES[0])
    whole = lambda p, batch: loss(p, batch, lambda x: lax.pmean(x, axes))
    got_value, got = checks.gradients(zero, params, whole, BATCHES[0])
    np.testing.assert_allclose(got_value, value, rtol=5e-6)
    helpers.close(got, grads)
    local = checks.gradients(zero, params, loss, BATCHES[0])[1]
    with pytest.raises(AssertionError, match="a: differs"):
        helpers.close(local, grads)
    size = BATCHES[0][0].size // int(np.prod(list(zero.mesh.shape.values())))
    parts = [tuple(x[i : i + size] for x in BATCHES[0]) for i in range(0, BATCHES[0][0].size, size)]
    mean = jax.tree.map(lambda *g: sum(g) / len(g), *[jax.grad(loss)(params, part) for part in parts])
    helpers.close(local, mean)


@pytest.mark.parametrize("setting", SETTINGS)
def test_pmean_of_what_depends_on_parameters(setting):
    """Batch normalisation over all devices: the gradient flows through the user's own reduction."""
    zero = checks.make_zero(setting)
    axes = checks.axes_of(zero)
    params = {"a": normal(0, 5), "g": jnp.ones(5)}

    def loss(p, batch, mean=lambda x: x):
        x, t = batch
        h = jnp.tanh(x[:, None] * p["a"])
        center = mean(jnp.mean(h, 0))
        spread = mean(jnp.mean(jnp.square(h - center), 0))
        return jnp.mean(jnp.square((h - center) * lax.rsqrt(spread + 1e-3) * p["g"] - t[:, None]))

    value, grads = jax.value_and_grad(loss)(params, BATCHES[0])
    got_value, got = checks.gradients(zero, params, lambda p, b: loss(p, b, lambda x: lax.pmean(x, axes)), BATCHES[0])
    np.testing.assert_allclose(got_value, value, rtol=5e-6)
    helpers.close(got, grads, 2e-5)


# --- meshes --------------------------------------------------------------------------------------

MESHES = {
    "explicit 8": dict(shape=8, explicit=True),
    "explicit 3": dict(shape=3, explicit=True),
    "explicit 2x4": dict(shape=(2, 4), names=("replica", "shard"), explicit=True),
    "model axis behind": dict(shape=(4, 2), names=("data", "model")),
    "model axis in front": dict(shape=(2, 4), names=("model", "data")),
    "explicit model axis": dict(shape=(2, 4), names=("model", "data"), explicit=True),
    "two shard axes": dict(shape=(2, 4), names=("node", "local")),
    "shard axis of one": dict(shape=(8, 1), names=("replica", "shard")),
    "replica axis of one": dict(shape=(1, 8), names=("replica", "shard")),
    "both of one": dict(shape=(1, 1), names=("replica", "shard")),
    "replicas behind": dict(shape=(4, 2), names=("shard", "replica")),
}


def mesh_options(mesh):
    if "node" in mesh.axis_names:
        return dict(shard_axis=("node", "local"))
    return dict(shard_axis="shard", replica_axis="replica") if "shard" in mesh.axis_names else {}


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("name", MESHES)
def test_meshes(name, stage):
    """Explicit and Auto axes, axes that no leaf uses, tuples of axes, axes of size one."""
    spec = dict(MESHES[name])
    mesh = helpers.make_mesh(spec.pop("shape"), **spec)
    zero = jaxzero.Zero(mesh, stage=stage, **mesh_options(mesh))
    params = odd_params()
    del params["half"]
    inner = optax.chain(optax.clip_by_global_norm(0.1), optax.lamb(1e-2))
    want = checks.reference(inner, params, checks.quadratic, BATCHES)
    for way in ("value_and_grad, update", "value_and_grad, apply", "inside, update"):
        got = checks.train(zero, inner, params, checks.quadratic, BATCHES, way)
        checks.assert_params_equal(got.params, want.params)
        checks.assert_state_equal(got.state, want.state)
    helpers.close(
        checks.gradients(zero, params, checks.quadratic, BATCHES[0]),
        jax.value_and_grad(checks.quadratic)(params, BATCHES[0]),
    )


@pytest.mark.parametrize("placement", ["numpy", "one device", "replicated", "rows", "other mesh", "uncommitted"])
@pytest.mark.parametrize("explicit", [False, True])
def test_jz_085_any_placement_of_the_parameters(placement, explicit):
    """Parameters may come from anywhere; the result lies where the mesh is."""
    mesh = helpers.make_mesh(8, explicit=explicit)
    tree = {"w": np.arange(64, dtype=np.float32).reshape(16, 4), "b": np.ones(5, np.float32)}
    other = helpers.make_mesh(4)
    params = {
        "numpy": lambda: tree,
        "one device": lambda: jax.device_put(tree, jax.devices()[3]),
        "replicated": lambda: checks.place(tree, mesh, P()),
        "rows": lambda: checks.place({"w": tree["w"]}, mesh, P("data")) | checks.place({"b": tree["b"]}, mesh, P()),
        "other mesh": lambda: checks.place(tree, other, P()),
        "uncommitted": lambda: jax.tree.map(jnp.asarray, tree),
    }[placement]()
    zero = jaxzero.Zero(mesh, stage=2)
    tx = zero.optimizer(optax.adam(0.5))
    after, state = zero.apply(tx, jax.tree.map(np.ones_like, tree), tx.init(params), params)
    want = jax.tree.map(lambda x: jnp.asarray(x) - 0.5, tree)
    checks.assert_params_equal(after, want, rtol=1e-5)
    assert all(x.sharding.device_set == set(mesh.devices.flat) for x in jax.tree.leaves((after, state)))


@pytest.mark.parametrize("way", ["update", "apply"])
def test_jz_091_placement_of_the_parameters_stays(mesh8, way):
    """Parameters come out where they went in: whole, on all devices."""
    zero = jaxzero.Zero(mesh8, stage=2)
    tx = zero.optimizer(optax.adam(1e-2))
    params = checks.place({"w": jnp.ones((16, 4)), "b": jnp.ones(5)}, mesh8, P())
    state = tx.init(params)
    before = jax.tree.map(lambda x: x.sharding, params)
    for _ in range(3):
        grads = jax.tree.map(jnp.ones_like, params)
        if way == "apply":
            params, state = zero.apply(tx, grads, state, params)
        else:
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
        for x, was in zip(jax.tree.leaves(params), jax.tree.leaves(before), strict=True):
            assert x.sharding.is_equivalent_to(was, x.ndim)


@pytest.mark.parametrize("setting", SETTINGS)
def test_jz_092_rows_that_sum_to_zero(setting):
    """An embedding whose touched row has a gradient that sums to zero; untouched rows decay as in Optax."""
    params = {"emb": normal(0, 16, 4)}

    def loss(p, batch):
        rows = p["emb"][jnp.where(batch[0] > 0, 1, 5)]
        return jnp.mean(rows @ jnp.array([1.0, -1.0, 1.0, -1.0]) * (1 + jnp.abs(batch[1])))

    for inner in (optax.sgd(1.0), optax.adamw(1e-2, weight_decay=0.1)):
        checks.check(setting, inner, params, loss, BATCHES)
    grads = checks.gradients(checks.make_zero(setting), params, loss, BATCHES[0])[1]["emb"]
    assert {i for i, row in enumerate(grads) if row.any()} == {1, 5}


# --- trees of all kinds --------------------------------------------------------------------------


def test_python_and_numpy_scalars_are_leaves(mesh8):
    params = {"python": 1.5, "numpy": np.float32(2.0), "array": np.ones(3, np.float32)}
    zero = jaxzero.Zero(mesh8, stage=2)
    tx = zero.optimizer(optax.adam(0.5))
    after, _ = zero.apply(tx, {"python": 1.0, "numpy": np.float32(1.0), "array": np.ones(3)}, tx.init(params), params)
    np.testing.assert_allclose([after["python"], after["numpy"], *after["array"]], [1.0, 1.5, 0.5, 0.5, 0.5], rtol=1e-5)


def test_weak_types_do_not_recompile(mesh8):
    """Parameters made from Python scalars are weakly typed; the step is compiled once all the same."""
    zero = jaxzero.Zero(mesh8, stage=2)
    tx = zero.optimizer(optax.adam(1e-2))
    params = checks.place({"w": jnp.full((5,), 1.0), "s": jnp.asarray(1.0)}, mesh8, P())
    assert params["s"].weak_type
    state = jax.jit(tx.init)(params)
    step = jax.jit(lambda p, s: zero.apply(tx, {"w": jnp.ones(5), "s": jnp.float32(1)}, s, p))
    params, state = step(params, state)
    assert not any(weak(x) for x in jax.tree.leaves((params, state)))
    sizes = []
    for _ in range(3):
        params, state = step(params, state)
        sizes.append(step._cache_size())
    assert len(set(sizes)) == 1


def test_eager_calls_are_compiled_once(mesh8, caplog):
    """Without `jit` around it a step reuses what it compiled; the loss is traced at each call, as JAX does."""
    zero = jaxzero.Zero(mesh8, stage=2)
    tx = zero.optimizer(optax.adam(1e-2))
    params = {"w": jnp.ones((13, 3)), "b": jnp.ones(16)}
    state = tx.init(params)
    traced, compiled = [], []

    def loss(p, batch):
        traced.append(None)
        return checks.quadratic(p, batch)

    for batch in BATCHES:
        caplog.clear()
        with jax.log_compiles():
            _, grads = zero.value_and_grad(loss)(params, batch)
            params, state = zero.apply(tx, grads, state, params)
        compiled.append(sum("Finished XLA compilation" in record.message for record in caplog.records))
    assert len(BATCHES) <= len(traced) <= 2 * len(BATCHES)  # the loss, and at most once more for its shapes
    assert compiled[0] >= 2
    assert compiled[1:] == [0] * (len(BATCHES) - 1)


def test_zero_apply_equals_apply_updates(mesh8):
    """`zero.apply` is `update` and `apply_updates`, with one gather: bit for bit, for a factor that rounds nothing."""
    params = checks.place(odd_params(), mesh8, P())
    zero = jaxzero.Zero(mesh8, stage=2)
    tx = zero.optimizer(optax.sgd(0.5))
    state = tx.init(params)
    grads = jax.tree.map(lambda x: jnp.sin(x.astype(jnp.float32)).astype(x.dtype), params)
    updates, _ = jax.jit(tx.update)(grads, state, params)
    one = optax.apply_updates(params, updates)
    two, _ = jax.jit(functools.partial(zero.apply, tx))(grads, state, params)
    chex.assert_trees_all_equal(two, one, strict=True)
    helpers.assert_all_shards_equal(two)


@pytest.mark.parametrize("make", [jaxzero.zero1, jaxzero.zero2])
@pytest.mark.parametrize("mesh_given", [True, False])
def test_plain_wrappers_inside_shard_map(mesh8, make, mesh_given):
    """`zero1` and `zero2` need no mesh where the axis is bound."""
    inner = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))
    tx = make(inner, mesh=mesh8 if mesh_given else None)
    params = {"a": normal(0, 13, 3), "b": normal(1, 16)}
    want = checks.reference(inner, params, checks.quadratic, BATCHES)

    def local(params, batches):
        state = tx.init(params)
        for batch in batches:
            grads = jax.grad(checks.quadratic)(checks.varying(params, ("data",)), batch)
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
        return params

    run = jax.shard_map(local, mesh=mesh8, in_specs=(P(), P("data")), out_specs=P())
    checks.assert_params_equal(jax.jit(run)(params, BATCHES), want.params)
