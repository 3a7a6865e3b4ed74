"""State and parameters at rest on the host: the same numbers, always in the same memory, bucket by bucket."""

import checks
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxzero
from jaxzero._src.jaxpr import trace
from jaxzero._src.optimizer import offload as optimizer_offload
from jaxzero._src.partition import values as partition_values
from jaxzero._src.sharding import host
from jaxzero._src.sharding.axes import Axes

BOTH = ("state", "params")
MESHES = {
    "8": ((8,), {}),
    "MiCS": (((2, 4), ("replica", "shard")), dict(shard_axis="shard", replica_axis="replica")),
    "nodes": (((2, 4), ("node", "local")), dict(shard_axis=("node", "local"))),
}
INNER = {
    "adamw": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)),
    "norm of updates": optax.chain(optax.adam(1e-2), optax.clip_by_global_norm(1e-3)),
    "lamb": optax.lamb(1e-2),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "MultiSteps": optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
    "muon": optax.contrib.muon(1e-2),
    "master weights": jaxzero.dynamic_loss_scale(jaxzero.master_weights(optax.adamw(1e-2)), initial_scale=8.0),
    "sgd": optax.sgd(1e-2),
}


def model(dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 4)
    return {
        "in": jax.random.normal(keys[0], (16, 24)).astype(dtype),
        "layers": jax.random.normal(keys[1], (2, 24, 24)).astype(dtype),
        "odd": jax.random.normal(keys[2], (13, 3)).astype(dtype),
        "s": jnp.asarray(1.5, dtype),
        "n": jnp.arange(3),
    }


def loss_fn(params, x):
    h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x @ params["in"], params["layers"])
    return jnp.mean(jnp.square(h.astype(jnp.float32) - params["s"])) + jnp.sum(params["odd"].astype(jnp.float32) ** 2)


def train(mesh, stage, offload, name, steps=3):
    """Steps of the whole loop, under one `jit` with donation."""
    shape, axes = MESHES[mesh]
    dtype = jnp.bfloat16 if name == "master weights" else jnp.float32
    zero = jaxzero.Zero(helpers.make_mesh(*shape), stage=stage, offload=offload, bucket_bytes=2048, **axes)
    x = jax.random.normal(jax.random.key(1), (16, 16)).astype(dtype)
    zero = zero.observe(loss_fn, model(dtype), x)
    x = checks.place(x, zero.mesh, P(zero.mesh.axis_names))
    # Integers stop Optax's own clipping.
    inner = optax.masked(INNER[name], lambda p: jax.tree.map(lambda x: jnp.issubdtype(x.dtype, jnp.floating), p))
    tx = zero.optimizer(inner)
    params = zero.init(lambda: model(dtype))
    state = jax.jit(tx.init)(params)
    grad_fn = zero.value_and_grad(loss_fn)

    def step(params, state, x):
        scale = optax.tree.get(state, "loss_scale")
        value, grads = grad_fn(params, x, loss_scale=scale)
        return *zero.apply(tx, grads, state, params), value

    step = jax.jit(step, donate_argnums=(0, 1))
    kinds = []
    for _ in range(steps):
        old, at_rest = jax.tree.leaves((params, state)), (params, state)
        kinds.append(jax.tree.map(lambda x: x.sharding.memory_kind, at_rest))
        params, state, value = step(params, state, x)
        assert all(x.is_deleted() for x in old if x.size > 3), "not donated"
    kinds.append(jax.tree.map(lambda x: x.sharding.memory_kind, (params, state)))
    assert step._cache_size() == 1
    return zero, params, state, value, kinds


def assert_bitwise(got, want):
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        for here, there in zip(a.addressable_shards, b.addressable_shards, strict=True):
            assert np.asarray(here.data).tobytes() == np.asarray(there.data).tobytes(), helpers.name(path)


@pytest.mark.grid(83)
@pytest.mark.parametrize("name", INNER)
@pytest.mark.parametrize("rest", [("state",), BOTH], ids=["state", "both"])
@pytest.mark.parametrize("stage", [3, 2, 1])
@pytest.mark.parametrize("mesh", MESHES)
def test_jz_086_the_same_numbers_in_the_same_memory(mesh, stage, rest, name):
    """Bitwise those without offload; memory kinds hold; one compilation; everything is donated; scalars stay."""
    _, *want, _ = train(mesh, stage, (), name)
    zero, *got, kinds = train(mesh, stage, rest, name)
    assert_bitwise(got, want)
    assert all(k == kinds[0] for k in kinds[1:])
    for what, tree, found in zip(("params", "state"), got[:2], kinds[0], strict=True):
        for x, kind in zip(jax.tree.leaves(tree), jax.tree.leaves(found), strict=True):
            large = x.size >= 64 and jnp.issubdtype(x.dtype, jnp.floating)
            if what not in rest or x.ndim == 0 or not jnp.issubdtype(x.dtype, jnp.floating):
                assert kind == "device", (what, x.shape)
            assert kind == "pinned_host" or not (large and what in rest), (what, x.shape)
    assert kinds_of(zero.gather(got[0])) == {"device"}


@pytest.mark.parametrize("stage", [2, 3])
def test_jz_086_shard_gather_forward_and_abstract_state(stage):
    """Every way in puts parameters and state on the host, traced or not; every way out brings them back."""
    zero = jaxzero.Zero(helpers.make_mesh(8), stage=stage, offload=BOTH)
    tx = zero.optimizer(optax.adam(1e-2))
    params = {"rows": jnp.ones((16, 4)), "odd": jnp.ones(13)}
    for split in (zero.shard(params), jax.jit(zero.shard)(params), zero.init(lambda: params)):
        assert kinds_of(split) == {"pinned_host"}
        for gather in (zero.gather, jax.jit(zero.gather)):
            whole = gather(split)
            assert kinds_of(whole) == {"device"}
            jax.tree.map(np.testing.assert_array_equal, whole, params)
    out = zero.forward(lambda p, x: x @ p["rows"] + p["odd"].sum())(split, jnp.ones((8, 16)))
    np.testing.assert_array_equal(out, 29.0)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), split)
    for state in (tx.init(split), tx.init(abstract)):
        assert state[0].mu["rows"].sharding.memory_kind == "pinned_host"
        assert state[0].count.sharding.memory_kind in ("device", None)
    # A state that somebody put on the device comes back to the host; updates are on the device.
    here = jax.tree.map(lambda x: jax.device_put(x, NamedSharding(zero.mesh, x.sharding.spec)), tx.init(split))
    updates, state = tx.update(jax.tree.map(jnp.ones_like, split), here, split)
    assert state[0].nu["odd"].sharding.memory_kind == "pinned_host"
    assert kinds_of(updates) == {"device"}
    # And a `Zero` without offload takes what is on the host, traced or not.
    plain = jaxzero.Zero(zero.mesh, stage=stage)
    step = lambda g, s, p: plain.apply(plain.optimizer(optax.adam(1e-2)), g, s, p)
    for apply in (step, jax.jit(step)):
        assert kinds_of(apply(updates, state, split)) == {"device"}


def kinds_of(tree):
    return {x.sharding.memory_kind for x in jax.tree.leaves(tree)}


@pytest.mark.parametrize("stage", [2, 3])
def test_jz_086_the_memory_holds_across_a_checkpoint(tmp_path, stage):
    """Saved from the host, read to the host; and to the device, by a `Zero` that keeps it there."""
    params, inner = {"rows": jnp.arange(64.0).reshape(16, 4), "odd": jnp.arange(13.0)}, optax.adam(1e-2)
    zero = jaxzero.Zero(helpers.make_mesh(8), stage=stage, offload=BOTH)
    tx = zero.optimizer(inner)
    split = zero.shard(params)
    split, state = zero.apply(tx, split, tx.init(split), split)
    jaxzero.save(tmp_path, 1, zero, split, state, inner).wait()
    for rest in (BOTH, ("state",), ()):
        here = jaxzero.Zero(helpers.make_mesh(8), stage=stage, offload=rest)
        back = jaxzero.restore(tmp_path, here, params, inner)
        assert_bitwise((back.params, back.opt_state), (split, state))
        assert kinds_of(back.params) == {"pinned_host" if "params" in rest else "device"}
        assert kinds_of(back.opt_state[0].mu) == {"pinned_host" if "state" in rest else "device"}
        assert back.opt_state[0].count.sharding.memory_kind == "device"


# --- what travels when ---------------------------------------------------------------------------


def cut(inner, bucket_bytes):
    """The segments of one update of a tree of four leaves, of 64 bytes of state each."""
    zero = jaxzero.Zero(helpers.make_mesh(8), offload=("state",), bucket_bytes=bucket_bytes)
    params = {k: jnp.ones((16, 4)) for k in "abcd"}
    calls = zero.optimizer(inner).calls
    state = calls.init(params)
    body = calls._trace_update(calls._read(True, params, state, params, {}))
    program = body.traced.program.jaxpr
    held = range(body.traced.grads, body.traced.grads + len(body.traced.state))
    held = [i for i in held if program.invars[i].aval.shape]
    program, _ = optimizer_offload.flat(program, body.traced.program.consts)
    return optimizer_offload.segments(program, held, body._leaf_groups())


def test_one_leaf_at_a_time():
    """Clipping, then Adam: `mu` and `nu` of one leaf are fetched, used and sent back before the next."""
    parts = cut(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)), bucket_bytes=None)
    assert [len(part.loads) for part in parts if part.loads] == [2, 2, 2, 2]
    assert all(len(part.results) == 3 for part in parts if part.loads)  # the parameter, mu, nu
    joined = cut(optax.adam(1e-2), bucket_bytes=4 * 4 * 8 * 2)
    assert [len(part.loads) for part in joined if part.loads] == [4, 4]


def test_what_depends_on_everything_comes_last():
    """A norm of all updates: moments come and go one by one, parameters are made at the end."""
    parts = cut(optax.chain(optax.adam(1e-2), optax.clip_by_global_norm(1e-3)), bucket_bytes=None)
    assert [len(part.loads) for part in parts if part.loads] == [2, 2, 2, 2]
    assert [len(part.results) for part in parts if part.loads][:3] == [2, 2, 2]
    everything = cut(optax.apply_if_finite(optax.adam(1e-2), 3), bucket_bytes=None)
    assert max(len(part.loads) for part in everything) == 8  # one `cond` takes all of it


def test_segments_are_the_program():
    """Evaluated part by part, a program with literals, unused inputs and passed-through ones gives its results."""

    def f(a, b, c, d):
        norm = jnp.sqrt(jnp.sum(a * a) + jnp.sum(b * b))
        return a / norm, b, b * 2 + a.sum(), 3.0, c + 1

    args = [jnp.arange(1.0, 4.0) * k for k in (1, 2, 3, 4)]
    program = trace.trace(f, *args).jaxpr
    held = [optimizer_offload.Held(x, lambda x: x) if i < 2 else x for i, x in enumerate(args)]
    ctx = partition_values.Context(Axes(("data",), (), (1,)), None, None)
    store = lambda positions, values: ctx.convert_all(values, [None] * len(values))
    for order in ([0, 1, 2, 3, 4], [2, 0, 4, 3, 1]):
        groups = [optimizer_offload.LeafGroup([0], order[:2]), optimizer_offload.LeafGroup([1], order[2:])]
        out = optimizer_offload.evaluate_by_group(ctx, program, [], held, groups, store)
        for i, want in enumerate(f(*args)):
            np.testing.assert_allclose(out[i], want, rtol=1e-6)


# --- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["state", ("states",), ("state", 3), ("gradients",), 3])
def test_unknown_names_are_refused(value):
    with pytest.raises(ValueError, match=checks.saying("Zero: offload=", "a tuple of names among", "Fix: offload=")):
        jaxzero.Zero(offload=value)


def test_a_backend_without_host_memory_is_refused(monkeypatch):
    monkeypatch.setattr(host, "PINNED_HOST", "other_host")
    expected = checks.saying(
        "Zero: offload=.'state',.", "cannot reach the host's memory", "pinned_host", "drop offload"
    )
    with pytest.raises(ValueError, match=expected):
        jaxzero.Zero(helpers.make_mesh(8), offload=("state",))


def test_inside_shard_map_is_refused(mesh8):
    zero = jaxzero.Zero(mesh8, offload=("state",))
    run = jax.shard_map(lambda p: zero.optimizer(optax.adam(1.0)).init(p), mesh=mesh8, in_specs=P(), out_specs=P())
    with pytest.raises(ValueError, match=checks.saying("init: offload=", "inside a shard_map", "Fix: call it outside")):
        run(jnp.ones(16))
