"""Gradient accumulation and weighted means: equal to one step over the whole batch, with the promised traffic."""

import checks
import helpers
import hlo
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxzero
from jaxzero._src.comm.reduce import GradReducer
from jaxzero._src.fsdp.reductions import Reductions
from jaxzero._src.gradients.compiled import kept

pytestmark = pytest.mark.grid(9)

SETTINGS = {
    "stage 1, 8": ((8,), dict(stage=1), {}),
    "stage 2, 8": ((8,), dict(stage=2), {}),
    "stage 2 once, 3": ((3,), dict(stage=2), dict(sync="once")),
    "stage 3, 3": ((3,), dict(stage=3), {}),
    "stage 1, MiCS": (((2, 4), ("replica", "shard")), dict(stage=1), {}),
    "stage 2, MiCS": (((2, 4), ("replica", "shard")), dict(stage=2), {}),
    "stage 2 once, MiCS": (((4, 2), ("replica", "shard")), dict(stage=2), dict(sync="once")),
    "stage 3, MiCS": (((2, 4), ("replica", "shard")), dict(stage=3), {}),
}


def make(setting, **more):
    shape, options, how = SETTINGS[setting]
    if len(shape) == 2:
        options = options | dict(shard_axis="shard", replica_axis="replica")
    return jaxzero.Zero(helpers.make_mesh(*shape), **options, **more), how


def params():
    k = jax.random.split(jax.random.key(0), 3)
    return {
        "w": jax.random.normal(k[0], (24, 6)) * 0.3,
        "odd": jax.random.normal(k[1], (5, 3)) * 0.3,
        "layers": jax.random.normal(k[2], (2, 6, 6)) * 0.3,
        "scale": jnp.float32(1.5),
        "count": jnp.arange(3),
    }


def logits(p, x):
    y, _ = lax.scan(lambda y, w: (jnp.tanh(y @ w), None), x @ p["w"], p["layers"])
    return p["scale"] * y[:, :5] @ p["odd"]


def loss(p, x, y):
    return jnp.mean(jnp.square(logits(p, x) - y))


def data(count=48):
    k = jax.random.split(jax.random.key(1), 2)
    return jax.random.normal(k[0], (count, 24)), jax.random.normal(k[1], (count, 3))


def split(zero, p):
    return zero.shard(p)


def reference(loss, p, *batch):
    value, grads = jax.jit(jax.value_and_grad(loss, allow_int=True))(p, *batch)
    return value, grads | {"count": jnp.zeros(3, jnp.int32)}


@pytest.mark.parametrize("setting", SETTINGS)
def test_gradients_equal_one_step_over_the_whole_batch(setting):
    zero, how = make(setting)
    steps = 2 if "MiCS" in setting else 3
    x, y = data(144)
    zero = zero.observe(loss, params(), x, y)
    value, grads = zero.value_and_grad(loss, accumulate=steps, **how)(zero.shard(params()), x, y)
    want_value, want = reference(loss, params(), x, y)
    np.testing.assert_allclose(value, want_value, rtol=2e-6)
    helpers.assert_all_shards_equal(grads)
    helpers.close(zero.gather(grads), want)


@pytest.mark.parametrize("setting", ["stage 1, MiCS", "stage 2, MiCS", "stage 3, MiCS", "stage 2 once, MiCS"])
def test_inside_shard_map(setting):
    zero, how = make(setting)
    x, y = data()
    rest = zero.shard(params())
    specs = zero.specs(rest)

    def local(p, x, y):
        value, grads = zero.value_and_grad(loss, accumulate=2, **how)(p, x, y)
        return value, {k: v for k, v in grads.items() if k != "count"}

    given = specs if zero.stage == 3 else P()
    out = {k: v for k, v in zero.specs(jaxzero.Zero(**options_at_3(zero)).shard(params())).items() if k != "count"}
    over = ("replica", "shard")
    run = jax.shard_map(local, mesh=zero.mesh, in_specs=(given, P(over), P(over)), out_specs=(P(), out))
    value, grads = jax.jit(run)(rest, *checks.place((x, y), zero.mesh, P(over)))
    want_value, want = reference(loss, params(), x, y)
    np.testing.assert_allclose(value, want_value, rtol=2e-6)
    helpers.assert_all_shards_equal(grads)
    helpers.close(zero.gather(grads), {k: v for k, v in want.items() if k != "count"})


def options_at_3(zero):
    return dict(mesh=zero.mesh, stage=3, shard_axis=zero.shard_axis, replica_axis=zero.replica_axis)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("steps", [1, 3])
def test_the_mean_of_device_numbers(setting, steps):
    """A gradient that is the device's number gives the mean number, whatever the mesh and the micro-steps."""
    zero, how = make(setting)
    size = zero.mesh.size
    numbers = jnp.repeat(jnp.arange(size, dtype=jnp.float32), steps)
    given = lambda p, x: jnp.mean(x) * (jnp.sum(p["a"]) + jnp.sum(p["b"]) + p["c"])
    p = {"a": jnp.ones((size * 2, 3)), "b": jnp.ones(5), "c": jnp.float32(1)}
    _, grads = zero.value_and_grad(given, accumulate=steps, **how)(zero.shard(p), numbers)
    for leaf in jax.tree.leaves(zero.gather(grads)):
        np.testing.assert_array_equal(leaf, np.full(leaf.shape, np.float32((size - 1) / 2)))


@pytest.mark.parametrize("setting", ["stage 1, 8", "stage 2, 8", "stage 2 once, MiCS", "stage 3, MiCS"])
def test_aux_and_whole_arguments(setting):
    zero, how = make(setting)
    x, y = data()

    def with_aux(p, x, y, factor):
        predicted = logits(p, x)
        aux = {"mean": jnp.mean(predicted), "half": jnp.mean(x).astype(jnp.bfloat16), "step": factor["n"] + 1}
        return factor["by"] * jnp.mean(jnp.square(predicted - y)), aux

    factor = {"by": jnp.full((3,), 2.0)[0], "n": jnp.arange(2)}
    run = zero.value_and_grad(with_aux, has_aux=True, accumulate=3, whole_argnums=3, **how)
    (value, aux), grads = run(zero.shard(params()), x, y, factor)
    want = reference(lambda p, *b: with_aux(p, *b)[0], params(), x, y, factor)
    np.testing.assert_allclose(value, want[0], rtol=2e-6)
    helpers.close(zero.gather(grads), want[1])
    np.testing.assert_allclose(aux["mean"], jnp.mean(logits(params(), x)), rtol=1e-4, atol=1e-6)
    assert aux["half"].dtype == jnp.bfloat16
    np.testing.assert_allclose(np.float32(aux["half"]), jnp.mean(x), atol=2e-2)
    np.testing.assert_array_equal(aux["step"], [1, 2])


def test_keys_differ_between_micro_steps(mesh8):
    """Every device and every micro-step draws its own noise; the same call draws the same."""
    zero = jaxzero.Zero(mesh8, stage=2)

    def drawn(p, x, key):
        return jnp.sum(p["a"] * x[:, None] * jax.random.normal(key, (x.shape[0], 1)))

    one = lambda chosen: jnp.zeros(16).at[chosen].set(1.0)
    run = zero.value_and_grad(drawn, accumulate=2)
    seen = {float(zero.gather(run({"a": jnp.ones(1)}, one(i), jax.random.key(3))[1])["a"][0]) for i in range(16)}
    assert len(seen) == 16
    again = zero.gather(run({"a": jnp.ones(1)}, one(5), jax.random.key(3))[1])["a"][0]
    assert float(again) in seen


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_every_device_and_micro_step_has_a_key_of_its_own(mesh8, impl, inside):
    """Two folds of an `unsafe_rbg` key commute: the device's number and then the micro-step's gave 23 keys of 32."""
    zero, key = jaxzero.Zero(mesh8, stage=3 if inside else 2), jax.random.key(7, impl=impl)
    loss = lambda p, x, key: (jnp.mean(x * p), jax.random.key_data(key)[None])
    grad_fn = zero.value_and_grad(loss, has_aux=True, aux="concat", accumulate=4)
    if inside:
        out_specs = ((P(), P("data")), P("data"))
        grad_fn = jax.shard_map(grad_fn, mesh=mesh8, in_specs=(P("data"), P("data"), P()), out_specs=out_specs)
    (_, found), _ = jax.jit(grad_fn)(zero.shard(jnp.ones(8)), jnp.ones((64, 8)), key)
    want = [jax.random.key_data(jax.random.fold_in(key, i)) for i in range(32)]
    assert len({tuple(map(int, x)) for x in found}) == 32
    np.testing.assert_array_equal(found, want)


def test_keys_that_a_user_has_folded_with_the_device(mesh8):
    """Inside `shard_map` a key may vary already."""
    zero, key = jaxzero.Zero(mesh8, stage=2), jax.random.key(7, impl="unsafe_rbg")
    loss = lambda p, x, key: (jnp.mean(x * p), jax.random.key_data(key)[None])

    def run(p, x):
        mine = jax.random.fold_in(key, jax.lax.axis_index("data"))
        return zero.value_and_grad(loss, has_aux=True, aux="concat", accumulate=4)(p, x, mine)[0][1]

    region = jax.shard_map(run, mesh=mesh8, in_specs=(P(), P("data")), out_specs=P("data"))
    found = jax.jit(region)(jnp.ones(8), jnp.ones((64, 8)))
    assert len({tuple(map(int, x)) for x in found}) == 32


@pytest.mark.parametrize("setting", ["stage 1, 8", "stage 2, 8", "stage 3, 3"])
def test_narrow_parameters_are_added_in_float32(setting):
    """1024 + 1 + 1 + ... is lost in bfloat16; the sum over micro-steps keeps it."""
    zero, how = make(setting)
    n = zero.mesh.size
    x = jnp.tile(jnp.array([1024.0, 1.0, 1.0, 1.0]), n)
    given = lambda p, x: jnp.mean(x) * jnp.sum(p.astype(jnp.float32))
    _, grads = zero.value_and_grad(given, accumulate=4, **how)(zero.shard(jnp.ones(16, jnp.bfloat16)), x)
    got = zero.gather(grads)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.float32(got), np.float32(jnp.bfloat16(1027 / 4)))


@pytest.mark.parametrize(
    ("setting", "dtype"),
    [
        ("stage 1, 8", jnp.float16),
        ("stage 2, MiCS", jnp.float16),
        ("stage 2 once, MiCS", jnp.bfloat16),
        ("stage 3, MiCS", jnp.float16),
    ],
)
def test_narrow_reductions_do_not_overflow(setting, dtype):
    """Divided before the sum: the sum of 8 x 3 gradients of 30000 does not fit float16, their mean does."""
    zero, how = make(setting, reduce_dtype=dtype)
    given = lambda p, x: jnp.mean(x) * jnp.sum(p)
    _, grads = zero.value_and_grad(given, accumulate=3, **how)(zero.shard(jnp.ones(16)), jnp.full(24, 30000.0))
    np.testing.assert_allclose(zero.gather(grads), np.full(16, 30000.0), rtol=1e-2)


# --- weighted means ------------------------------------------------------------------------------


def masked(p, x, y, mask):
    each = jnp.mean(jnp.square(logits(p, x) - y), 1)
    return jnp.sum(each * mask), jnp.sum(mask)


@pytest.mark.parametrize(
    ("setting", "steps"), [(s, k) for i, s in enumerate(SETTINGS) for k in (1, 3) if k == 3 or i % 3 == 0]
)
def test_weighted_means_are_exact(setting, steps):
    zero, how = make(setting)
    x, y = data(72)
    mask = (jnp.arange(72) % 7 < 2).at[:9].set(False)  # uneven: the first device has nothing
    run = zero.value_and_grad(masked, accumulate=steps, weighted=True, **how)
    value, grads = run(zero.shard(params()), x, y, mask)
    whole = lambda p, *batch: jnp.divide(*masked(p, *batch))
    want_value, want = reference(whole, params(), x, y, mask)
    np.testing.assert_allclose(value, want_value, rtol=2e-6)
    helpers.close(zero.gather(grads), want)
    means = zero.gather(zero.value_and_grad(lambda p, *b: whole(p, *b))(zero.shard(params()), x, y, mask + 0.01)[1])
    assert np.max(np.abs(means["odd"] - want["odd"])) > 1e-3, "here a mean of means would be right"


@pytest.mark.parametrize("setting", ["stage 1, 8", "stage 2, MiCS", "stage 3, 3"])
@pytest.mark.parametrize("reduce_dtype", [None, jnp.bfloat16])
def test_no_weight_at_all(setting, reduce_dtype):
    zero, how = make(setting, reduce_dtype=reduce_dtype)
    x, y = data()
    run = zero.value_and_grad(masked, accumulate=2, weighted=True, **how)
    value, grads = run(zero.shard(params()), x, y, jnp.zeros(48))
    assert float(value) == 0
    for leaf in jax.tree.leaves(zero.gather(grads)):
        np.testing.assert_array_equal(leaf, np.zeros(leaf.shape, leaf.dtype))


def test_weighted_with_aux_and_narrow_reduction(mesh8):
    zero = jaxzero.Zero(mesh8, stage=2, reduce_dtype=jnp.bfloat16)
    x, y = data()
    with_aux = lambda p, *b: (masked(p, *b), {"tokens": jnp.sum(b[2])})
    (value, aux), grads = zero.value_and_grad(with_aux, True, weighted=True)(params(), x, y, jnp.ones(48))
    want_value, want = reference(lambda p, *b: jnp.divide(*masked(p, *b)), params(), x, y, jnp.ones(48))
    np.testing.assert_allclose(value, want_value, rtol=1e-2)
    helpers.close(zero.gather(grads), want, 2e-2)
    np.testing.assert_allclose(aux["tokens"], 6.0, rtol=1e-2)  # the mean over devices


# --- traffic -------------------------------------------------------------------------------------


def traffic(setting, steps, **more):
    zero, how = make(setting, **more)
    p = {"a": jnp.ones((64, 256)), "b": jnp.ones((256, 64))}
    given = lambda p, x: jnp.mean(jnp.tanh(jnp.tanh(x @ p["a"]) @ p["b"]))
    p = checks.place(p, zero.mesh, P()) if zero.stage < 3 else zero.shard(p)
    run = jax.jit(zero.value_and_grad(given, accumulate=steps, **how))
    return hlo.collectives(run.lower(p, jnp.ones((48, 64))).compile().as_text())


SIZE = 2 * 64 * 256 * 4


@pytest.mark.parametrize(
    ("setting", "kind", "group", "times", "looped"),
    [
        ("stage 1, MiCS", "all-reduce", 8, 1, False),
        ("stage 2, MiCS", "reduce-scatter", 4, 3, True),
        ("stage 2 once, MiCS", "reduce-scatter", 2, 1, False),
        ("stage 3, MiCS", "reduce-scatter", 4, 3, True),
    ],
)
def test_what_is_sent(setting, kind, group, times, looped):
    rows = traffic(setting, 3, persist_bytes=0, chunk_bytes=None)
    assert SIZE * times <= hlo.nbytes(rows, kind, group=group, looped=looped, above=1024) <= SIZE * times + 64
    assert hlo.nbytes(rows, kind, looped=looped, above=1024) <= SIZE * times + 64, "more of the same kind"
    assert hlo.nbytes(rows, "all-reduce", looped=True) == 0
    if kind == "reduce-scatter":
        replicas = 8 // group
        assert hlo.nbytes(rows, "all-reduce", group=replicas, above=1024) == SIZE // group  # the share, once


def test_gathers_of_stage_3_are_twice_the_micro_steps():
    rows = traffic("stage 3, MiCS", 3, persist_bytes=0, chunk_bytes=None)
    inside = hlo.nbytes(rows, "all-gather", looped=True)
    assert SIZE * 3 <= inside <= 2 * SIZE * 3  # XLA:CPU may merge the forward's gather with the backward's
    assert hlo.nbytes(rows, "all-gather", looped=False) == 0


# --- optax.MultiSteps ----------------------------------------------------------------------------

STAGES = [(8, dict(stage=1)), (8, dict(stage=2)), (3, dict(stage=3))]


@pytest.mark.parametrize(("n", "options"), STAGES)
def test_jz_047_each_outer_step_is_the_mean_of_its_own_micro_steps(n, options):
    zero = jaxzero.Zero(helpers.make_mesh(n), **options)
    tx = zero.optimizer(optax.MultiSteps(optax.sgd(1.0), 4).gradient_transformation())
    p = zero.shard({"w": jnp.zeros((n, 2)), "odd": jnp.zeros(5)})
    state = tx.init(p)
    step = jax.jit(lambda g, s, p: zero.apply(tx, g, s, p))
    before = 0.0
    for outer in range(3):
        for micro in (1.0, 2.0, 4.0, 8.0):
            grads = jax.tree.map(lambda x, m=micro, o=outer: jnp.full_like(x, m * 10**o), p)
            p, state = step(_unpadded(grads, zero), state, p)
        after = before - 15 / 4 * 10**outer
        for leaf in jax.tree.leaves(zero.gather(p)):
            np.testing.assert_allclose(leaf, np.full(leaf.shape, after), rtol=1e-6)
        before = after


def _unpadded(grads, zero):
    """Gradients in split form whose padding is zero, as the library makes them."""
    return zero.shard(zero.gather(grads)) if zero.stage == 3 else grads


@pytest.mark.parametrize("setting", ["stage 1, MiCS", "stage 2, MiCS", "stage 3, MiCS"])
def test_jz_049_050_the_last_micro_step_crosses_devices_too(setting):
    """Device i has gradient i, then 100 i: the update is the mean over devices and micro-steps, on all replicas."""
    zero, _ = make(setting)
    numbers = jnp.stack([jnp.arange(8.0), 100 * jnp.arange(8.0)], 1).reshape(-1)
    given = lambda p, x: jnp.mean(x) * jnp.sum(p["w"]) + 0 * jnp.sum(p["odd"])
    tx = zero.optimizer(optax.sgd(1.0))
    p = zero.shard({"w": jnp.zeros((8, 2)), "odd": jnp.zeros(3)})
    _, grads = zero.value_and_grad(given, accumulate=2)(p, numbers)
    p, _ = zero.apply(tx, grads, tx.init(p), p)
    helpers.assert_all_shards_equal(p)
    np.testing.assert_allclose(zero.gather(p)["w"], np.full((8, 2), -3.5 * 101 / 2), rtol=1e-6)


@pytest.mark.parametrize(("n", "options"), STAGES)
def test_jz_052_the_accumulator_is_split(n, options):
    zero = jaxzero.Zero(helpers.make_mesh(n), **options)
    p = zero.shard({"w": jnp.ones((24, 64)), "odd": jnp.ones((5, 77))})
    size = (24 * 64 + 5 * 77) * 4
    state = zero.optimizer(optax.MultiSteps(optax.adam(1e-2), 4).gradient_transformation()).init(p)
    stored = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state))
    assert 3 * size / n <= stored <= 3 * (size / n + 2 * 4) + 64


# --- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (dict(accumulate=0), ("accumulate=0", "positive", "fix")),
        (dict(accumulate=True), ("accumulate=True", "positive", "fix")),
        (dict(accumulate=2.0), ("accumulate=2.0", "positive", "fix")),
        (dict(sync="never"), ("sync='never'", "each", "once", "fix")),
        (dict(accumulate_dtype=jnp.int32), ("accumulate_dtype", "floating", "fix")),
    ],
)
def test_options_that_do_not_fit(mesh8, how, words):
    with pytest.raises(ValueError, match=checks.saying("value_and_grad", *words)):
        jaxzero.Zero(mesh8).value_and_grad(loss, **how)


def test_sync_once_at_stage_3_names_both_options(mesh8):
    with pytest.raises(ValueError, match=checks.saying("sync='once'", "stage=3", "fix")):
        jaxzero.Zero(mesh8, stage=3).value_and_grad(loss, accumulate=2, sync="once")


def test_a_batch_that_does_not_divide_names_three_factors():
    zero, _ = make("stage 2, MiCS")
    with pytest.raises(
        ValueError, match=checks.saying("leading dimension 24", "4 shares", "2 replicas", "2 micro-steps")
    ):
        zero.value_and_grad(loss, accumulate=2)(params(), *data(24))


def test_a_local_batch_that_does_not_divide(mesh8):
    run = jax.shard_map(
        lambda p, x, y: jaxzero.Zero(stage=2).value_and_grad(loss, accumulate=2)(p, x, y)[0],
        mesh=mesh8,
        in_specs=(P(), P("data"), P("data")),
        out_specs=P(),
    )
    with pytest.raises(ValueError, match=checks.saying("leading dimension 3", "2 micro-steps")):
        jax.jit(run)(checks.place(params(), mesh8, P()), *checks.place(data(24), mesh8, P("data")))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (loss, ("weighted=True", "sum, weight", "fix")),
        (lambda p, x, y: (loss(p, x, y), jnp.ones(2)), ("weight has shape", "real scalar", "fix")),
        (lambda p, x, y: (loss(p, x, y)[None], 1), ("sum over examples", "fix")),
    ],
)
def test_weighted_losses_that_do_not_fit(mesh8, given, words):
    with pytest.raises(ValueError, match=checks.saying(*words)):
        jaxzero.Zero(mesh8).value_and_grad(given, weighted=True)(params(), *data())


# --- the plain wrapper ---------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_mics_in_a_shard_map_of_ones_own(stage):
    """Device i has gradient i: every replica steps by the mean, and each group holds all of the state."""
    mesh = helpers.make_mesh((2, 4), ("replica", "shard"))
    tx = jaxzero.mics(optax.sgd(1.0, momentum=0.9), "shard", "replica", stage=stage)
    zero = jaxzero.Zero(mesh, stage=stage, shard_axis="shard", replica_axis="replica")
    p = zero.shard({"w": jnp.zeros((8, 2)), "odd": jnp.zeros(5)})
    state = zero.optimizer(optax.sgd(1.0, momentum=0.9)).init(p)
    held = zero.specs(p) if stage == 3 else P()

    def step(p, state):
        number = lax.axis_index(("replica", "shard")).astype(jnp.float32)
        shapes = {"w": (8, 2), "odd": (5,)}
        updates, state = tx.update({k: jnp.full(s, number) for k, s in shapes.items()}, state, p)
        return optax.apply_updates(p, updates), state

    specs = (held, zero.specs(state))
    p, state = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=specs))(p, state)
    helpers.assert_all_shards_equal((p, state))
    assert state[0].trace["w"].addressable_shards[0].data.shape == (2, 2)
    jax.tree.map(lambda x: np.testing.assert_array_equal(x, np.full(x.shape, -3.5)), zero.gather(p))


def test_mics_with_one_axis_in_both_places(mesh24):
    with pytest.raises(ValueError, match=checks.saying("shard_axis", "replica_axis", "twice", "fix")):
        jaxzero.mics(optax.sgd(1.0), "shard", ("replica", "shard"), mesh=mesh24)


# --- mutations: each must be seen ----------------------------------------------------------------


def compare_with_the_mean(steps):
    """Device i has gradient i in each micro-step; the mean is 3.5."""
    zero, _ = make("stage 2, MiCS")
    given = lambda p, x: jnp.mean(x) * (jnp.sum(p["a"]) + jnp.sum(p["b"]))
    p = {"a": jnp.ones((16, 3)), "b": jnp.ones(5)}
    _, grads = zero.value_and_grad(given, accumulate=steps)(p, jnp.repeat(jnp.arange(8.0), steps))
    helpers.assert_all_shards_equal(grads)
    jax.tree.map(lambda x: np.testing.assert_array_equal(x, np.full(x.shape, 3.5)), zero.gather(grads))


def second_hop_in_the_loop(first, second):
    """Every micro-step crosses the replicas, and the sum does so again."""

    def hop(self, position, x):
        first(self, position, lax.psum(x, self.reducer.axes.replica))

    return hop, second


def second_hop_dropped(first, second):
    def hop(self, shares, layouts, dtypes, weight=None):
        return [self.receive(x, d, weight) for x, d in zip(shares, dtypes, strict=True)]

    return first, hop


def divided_twice(first, second):
    return first, lambda self, *rest: [x / self.count for x in second(self, *rest)]


def divided_by_one_micro_step(first, second):
    return first, lambda self, *rest: [x * self.steps for x in second(self, *rest)]


@pytest.mark.grid(1)
@pytest.mark.parametrize(
    "mutation", [second_hop_in_the_loop, second_hop_dropped, divided_twice, divided_by_one_micro_step]
)
def test_mutations_of_the_two_hops_show(monkeypatch, mutation):
    compare_with_the_mean(2)
    first, second = mutation(Reductions.add_share, GradReducer.all_reduce_replicas)
    monkeypatch.setattr(Reductions, "add_share", first)
    monkeypatch.setattr(GradReducer, "all_reduce_replicas", second)
    kept.cache_clear()  # else the compiled program from before
    with pytest.raises(AssertionError):
        compare_with_the_mean(2)
    kept.cache_clear()


def test_dropout_draws_by_microbatch(mesh8):
    """Documented at `accumulate`: keys are folded with the microbatch's number too, so other values are drawn."""
    zero = jaxzero.Zero(mesh8)
    key, x, w = jax.random.key(0), jnp.ones(16), jnp.float32(1.0)
    drawn = lambda w, x, key: jnp.mean(w * x * jax.random.normal(key, x.shape))
    found = [float(zero.value_and_grad(drawn, accumulate=k)(w, x, key)[0]) for k in (1, 2, 1, 2)]
    assert found[:2] == found[2:]
    assert abs(found[0] - found[1]) > 1e-3
    equal = lambda w, x, key: jnp.mean(w * x)  # without a draw they agree
    assert [float(zero.value_and_grad(equal, accumulate=k)(w, x, key)[0]) for k in (1, 2)] == [1.0, 1.0]


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("traced", [False, True])
def test_integer_leaves_are_left_unchanged(stage, traced, mesh8):
    """One behaviour for leaves without a gradient, where `jax.grad` raises: zeros, and no change by the step."""
    zero, inner = jaxzero.Zero(mesh8, stage=stage), optax.adamw(0.1)
    tx = zero.optimizer(inner)
    plain = {"w": jnp.arange(5.0), "n": jnp.arange(7), "flag": jnp.bool_(True), "key": jax.random.key(3)}
    loss = lambda p, x: jnp.mean((x * p["w"].sum() * p["n"].sum()) ** 2)
    x = jnp.arange(16.0)
    with pytest.raises(TypeError, match="int32"):
        jax.grad(loss)(plain | {"flag": jnp.float32(1), "key": jnp.float32(1)}, x)

    def step(params, state):
        _, grads = zero.value_and_grad(loss)(params, x)
        return grads, *zero.apply(tx, grads, state, params)

    params = zero.shard(plain)
    grads, new, _ = (jax.jit(step) if traced else step)(params, tx.init(params))
    assert (grads["n"].dtype, grads["flag"].dtype) == (jnp.int32, jnp.bool_)
    assert grads["key"].dtype == jax.dtypes.float0
    assert not np.any(grads["n"])
    assert not np.any(grads["flag"])
    for name in ("n", "flag"):
        np.testing.assert_array_equal(new[name], plain[name])
    np.testing.assert_array_equal(jax.random.key_data(new["key"]), jax.random.key_data(plain["key"]))
    want = jax.grad(lambda w: loss(plain | {"w": w}, x))(plain["w"])
    np.testing.assert_allclose(zero.gather(grads)["w"], want, rtol=1e-6)
