"""hpZ: the backward pass gathers inside the node only, from what the forward pass fetched; the same numbers."""

import checks
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxzero

pytestmark = pytest.mark.grid(5)

MESHES = {
    "2x4": ((2, 4), ("node", "local"), None),
    "2x2x2": ((2, 2, 2), ("replica", "node", "local"), "replica"),
    "8x1": ((8, 1), ("node", "local"), None),
    "1x4": ((1, 4), ("node", "local"), None),
}
LAYERS, WIDTH = 3, 16


def make(mesh, **options):
    shape, names, replica = MESHES[mesh]
    given = dict(shard_axis=("node", "local"), replica_axis=replica, persist_bytes=0, chunk_bytes=None)
    return jaxzero.Zero(helpers.make_mesh(shape, names), stage=3, **given | options)


def params():
    k = jax.random.split(jax.random.key(0), 4)
    return {
        "emb": jax.random.normal(k[0], (37, WIDTH)) * 0.3,
        "layers": jax.random.normal(k[1], (LAYERS, WIDTH, WIDTH)) * 0.3,
        "odd": jax.random.normal(k[2], (LAYERS, 5, 3)) * 0.3,
        "head": jax.random.normal(k[3], (WIDTH, 5)) * 0.3,
        "scale": jnp.float32(1.2),
    }


def loss(p, t, wrap=jax.checkpoint):
    @wrap
    def layer(x, w):
        a, b = w
        return x + jnp.tanh(x @ a), jnp.sum((x[..., :5] @ b.astype(jnp.bfloat16)).astype(jnp.float32), (-1, -2))

    x, more = lax.scan(layer, p["emb"][t], (p["layers"], p["odd"]))
    return jnp.mean(jnp.square(x @ p["head"])) * p["scale"] + 1e-3 * jnp.mean(more)


TOKENS = jax.random.randint(jax.random.key(1), (16, 5), 0, 37)


def gathers(zero, fn, *arguments):
    """Bytes of all gathers by mesh axis, each as often as it runs."""
    text = jax.jit(fn).lower(*arguments).compile().as_text()
    out: dict[tuple[str, ...], int] = {}
    for x in jaxzero.collectives(text, zero.mesh):
        if x.kind == "all-gather" and x.nbytes > 64:
            out[x.axes] = out.get(x.axes, 0) + x.nbytes * x.times
    return out


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("prefetch", [0, 2])
def test_gradients_are_bitwise_those_without(mesh, prefetch):
    results = []
    for regather in (None, "local", "never"):
        zero = make(mesh, regather=regather, prefetch=prefetch).observe(loss, params(), TOKENS)
        value, grads = zero.value_and_grad(loss)(zero.shard(params()), TOKENS)
        helpers.assert_all_shards_equal(grads)
        results.append((value, zero.gather(grads)))
    helpers.close(results[1][1], jax.jit(jax.grad(loss))(params(), TOKENS), 2e-2)  # the odd products are in bfloat16
    for other in results[1:]:
        jax.tree.map(np.testing.assert_array_equal, results[0], other)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint], ids=["plain", "remat"])
def test_one_gather_across_nodes_per_layer(wrap, accumulate):
    sent = {}
    given = lambda p, t: loss(p, t, wrap)
    for regather in (None, "local"):
        zero = make("2x2x2", regather=regather).observe(given, params(), TOKENS)
        run = zero.value_and_grad(given, accumulate=accumulate)
        sent[regather] = gathers(zero, run, zero.shard(params()), TOKENS)
    layers = LAYERS * WIDTH * WIDTH * 4 * accumulate  # `odd` is below what `gathers` counts
    merged = sent["local"]["local",] - sent[None]["local",]  # XLA:CPU may gather the last layer once for both passes
    assert sent["local"]["local",] >= 2 * layers
    assert merged in (0, layers // LAYERS)
    assert sent[None]["node",] - sent["local"]["node",] == layers // 2  # half of the whole crosses in one gather


def test_inside_shard_map():
    zero = make("2x4", regather="local").observe(loss, params(), TOKENS)
    split, axes = zero.shard(params()), ("node", "local")
    specs = zero.specs(split)
    run = jax.shard_map(zero.value_and_grad(loss), mesh=zero.mesh, in_specs=(specs, P(axes)), out_specs=(P(), specs))
    value, grads = jax.jit(run)(split, checks.place(TOKENS, zero.mesh, P(axes)))
    want_value, want = zero.value_and_grad(loss)(split, TOKENS)
    np.testing.assert_allclose(value, want_value, rtol=1e-6)
    helpers.close(zero.gather(grads), zero.gather(want))


def test_jz_083_nothing_is_kept_from_before_an_update():
    """A step of 1.0 moves the parameters far: evaluation and the next step see the new ones."""
    zero = make("2x4", regather="local").observe(loss, params(), TOKENS)
    tx = zero.optimizer(optax.sgd(1.0))
    split = zero.shard(params())
    state, plain = tx.init(split), params()
    run, evaluate = zero.value_and_grad(loss), zero.forward(loss)
    for _ in range(2):
        value, grads = run(split, TOKENS)
        split, state = zero.apply(tx, grads, state, split)
        want, plain_grads = jax.value_and_grad(loss)(plain, TOKENS)
        plain = jax.tree.map(lambda p, g: p - g, plain, plain_grads)
        np.testing.assert_allclose(value, want, rtol=2e-2)
        np.testing.assert_allclose(evaluate(split, TOKENS), loss(plain, TOKENS), rtol=2e-2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(shard_axis="data"), ("regather='local'", "shard_axis='data'", "fix")),
        (dict(shard_axis=("node", "local"), hierarchical=False), ("regather", "hierarchical=False", "fix")),
        (dict(shard_axis=("node", "local"), stage=2), ("regather='local'", "stage=2", "fix")),
        (dict(shard_axis=("node", "local"), regather="node"), ("regather='node'", "local", "fix")),
        (dict(regather="never", shard_axis="data", stage=2), ("regather='never'", "stage=2", "stage=3", "fix")),
    ],
)
def test_options_that_do_not_fit(options, words):
    with pytest.raises(ValueError, match=checks.saying("Zero", *words)):
        jaxzero.Zero(**dict(stage=3, regather="local") | options)
