"""Stage 3: parameters split at rest, gathered on use; gradients are those of the unsharded loss."""

import functools

import checks
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxzero

pytestmark = pytest.mark.grid(7)

KEY = jax.random.key(0)


def params():
    k = jax.random.split(KEY, 6)
    normal = lambda i, *shape: 0.3 * jax.random.normal(k[i], shape)
    return {
        "emb": normal(0, 37, 8),
        "w": normal(1, 8, 16),
        "v": normal(2, 16, 8),
        "b": normal(3, 16),
        "scale": jnp.float32(1.5),
        "layers": {"up": normal(4, 3, 8, 24), "down": normal(5, 3, 24, 8)},
        "count": jnp.arange(3),
    }


def body(x, p):
    return x + jnp.tanh(x @ p["w"] + p["b"]) @ p["v"]


def scanned(x, layers, wrap=lambda f: f):
    step = wrap(lambda x, w: (x + jax.nn.gelu(x @ w["up"]) @ w["down"], None))
    return jax.lax.scan(step, x, layers)[0]


@jax.custom_vjp
def special(x, w):
    return x @ w


special.defvjp(
    lambda x, w: (x @ w, (x, w)),
    lambda r, ct: (ct @ r[1].T, 2.0 * jnp.einsum("btd,bte->de", r[0], ct)),
)


def plain(p, t, wrap=lambda f: f):
    x = wrap(body)(p["emb"][t], p) * p["scale"]
    return jnp.mean(jnp.square(scanned(x, p["layers"], wrap) @ p["emb"].T))


def in_bfloat16(p, t):
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x, p)
    return plain(half, t).astype(jnp.float32)


def controlled(p, t):
    x = p["emb"][t]
    x = jax.vmap(lambda x: jax.lax.cond(x[0, 0] > 0, lambda x: x @ p["w"], lambda x: 2 * x @ p["w"], x))(x)
    x = jax.lax.cond(p["scale"] > 0, lambda x: x @ p["v"], lambda x: x @ (2 * p["v"]), x)
    x = jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 0.5), (0, jax.lax.stop_gradient(x)))[1] + x
    return jnp.mean(jnp.square(x)) * p["scale"]


def nested(p, t):
    x = p["emb"][t]
    inner = jax.grad(lambda x: jnp.sum(jnp.tanh(body(x, p))))(x)
    jax.debug.print("", ordered=False)
    return jnp.mean(jnp.square(special(inner + x, p["w"]))) + 0.01 * jnp.sum(jnp.square(p["v"]))


LOSSES = {
    "plain": plain,
    "remat": functools.partial(plain, wrap=jax.checkpoint),
    "dots saved": functools.partial(
        plain, wrap=functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)
    ),
    "control flow": controlled,
    "nested": nested,
}
OPTIONS = {
    "default": {},
    "no prefetch": dict(prefetch=0, persist_bytes=0, chunk_bytes=None),
    "one ahead": dict(prefetch=1, persist_bytes=0, chunk_bytes=512),
}


def expected(loss, p, t):
    return jax.jit(jax.value_and_grad(lambda p: loss(p, t), allow_int=True))(p)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", LOSSES)
def test_gradients_equal_the_unsharded_ones(name, options):
    loss, p, t = LOSSES[name], params(), jax.random.randint(KEY, (24, 5), 0, 37)
    value, want = expected(loss, p, t)
    for n in (8, 3, 1):
        zero = jaxzero.Zero(helpers.make_mesh(n), stage=3, **OPTIONS[options]).observe(loss, p, t)
        got_value, grads = zero.value_and_grad(loss)(zero.shard(p), t)
        got = zero.gather(grads)
        np.testing.assert_allclose(got_value, value, rtol=1e-5)
        helpers.close(
            {k: v for k, v in got.items() if k != "count"}, {k: v for k, v in want.items() if k != "count"}, 5e-6
        )


def test_half_precision_parameters_travel_narrow(mesh8):
    p, t = params(), jax.random.randint(KEY, (24, 5), 0, 37)
    zero = jaxzero.Zero(mesh8, stage=3, persist_bytes=0, chunk_bytes=None).observe(in_bfloat16, p, t)
    text = jax.jit(zero.value_and_grad(in_bfloat16)).lower(zero.shard(p), t).as_text()
    gathers = [line for line in text.splitlines() if "all_gather" in line]
    assert gathers
    assert all("bf16" in line for line in gathers)


def test_stacked_leaves_are_found_and_cut_inside_each_layer(mesh8):
    p, t = params(), jnp.zeros((8, 5), jnp.int32)
    zero = jaxzero.Zero(mesh8, stage=3).observe(plain, p, t)
    split = zero.shard(p)
    assert split["layers"]["up"].sharding.spec == P(None, "data")
    assert split["w"].sharding.spec == P("data")
    assert [helpers.name(path) for path in zero.observed.unused] == ["count"]


@pytest.mark.parametrize(
    "setting", [((8,), {}), (((2, 4), ("replica", "shard")), dict(shard_axis="shard", replica_axis="replica"))]
)
def test_training_equals_the_unsharded_run(setting):
    shape, axes = setting
    p, t = {k: v for k, v in params().items() if k != "count"}, jax.random.randint(KEY, (16, 5), 0, 37)
    zero = jaxzero.Zero(helpers.make_mesh(*shape), stage=3, **axes).observe(plain, p, t)
    inner = optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(1.0, momentum=0.9))
    tx = zero.optimizer(inner)
    split = zero.shard(p)
    state = jax.jit(tx.init)(split)

    @jax.jit
    def step(split, state, t):
        _, grads = zero.value_and_grad(plain)(split, t)
        return zero.apply(tx, grads, state, split)

    for _ in range(3):
        split, state = step(split, state, t)
    want = checks.reference(inner, p, plain, [t] * 3)
    assert step._cache_size() == 1
    helpers.close(zero.gather(split), want.params, 2e-5)


def test_whole_parameters_are_refused_by_name(mesh8):
    zero = jaxzero.Zero(mesh8, stage=3)
    with pytest.raises(ValueError, match=r"value_and_grad: parameter leaf 'emb' .*zero\.shard"):
        zero.value_and_grad(plain)(params(), jnp.zeros((8, 5), jnp.int32))


def test_init_places_what_shard_places(mesh8):
    zero = jaxzero.Zero(mesh8, stage=3)
    born, cut = zero.init(params), zero.shard(params())
    helpers.close(zero.gather(born), params(), 1e-6)  # drawn in one program, so fused otherwise
    assert jax.tree.map(lambda x: x.sharding.spec, born) == jax.tree.map(lambda x: x.sharding.spec, cut)
