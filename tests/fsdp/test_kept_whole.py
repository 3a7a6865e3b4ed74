"""`regather="never"` and `persist_bytes`: one gather per step, in scans too; the same numbers."""

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxzero

LAYERS, WIDTH = 5, 16
TOKENS = jax.random.randint(jax.random.key(1), (16, 5), 0, 40)
ALONE = dict(persist_bytes=0, chunk_bytes=None)


def params():
    k = jax.random.split(jax.random.key(0), 4)
    return {
        "emb": jax.random.normal(k[0], (40, WIDTH)) * 0.3,
        "layers": jax.random.normal(k[1], (LAYERS, WIDTH, WIDTH)) * 0.3,
        "out": jax.random.normal(k[2], (LAYERS, 8, WIDTH)) * 0.3,
        "head": jax.random.normal(k[3], (WIDTH, 8)) * 0.3,
    }


def scanned(p, t, wrap=jax.checkpoint):
    body = wrap(lambda x, w: (x + jnp.tanh(x @ w[0])[..., :8] @ w[1], None))
    x, _ = lax.scan(body, p["emb"][t], (p["layers"], p["out"]))
    return jnp.mean(jnp.square(x @ p["head"]))


def unrolled(p, t):
    body = jax.checkpoint(lambda x, a, b: x + jnp.tanh(x @ a)[..., :8] @ b)
    x = p["emb"][t]
    for a, b in zip(p["layers"], p["out"], strict=True):
        x = body(x, a, b)
    return jnp.mean(jnp.square(x @ p["head"]))


def nested(p, t):
    """Two scans, one in the other, over `layers` of shape (LAYERS, 4, 4, WIDTH)."""
    inner = jax.checkpoint(lambda x, a: (x + jnp.tanh(x[..., :4] @ a), None))
    x, _ = lax.scan(lambda x, w: lax.scan(inner, x, w), p["emb"][t], p["layers"])
    return jnp.mean(jnp.square(x @ p["head"]))


LOSSES = {"scan": (scanned, 2), "scan, no remat": (lambda p, t: scanned(p, t, lambda f: f), 0), "nested": (nested, 2)}
LOSSES["unrolled"] = (unrolled, 2)


def compiled_gradient(mesh, loss, given, **options):
    zero = jaxzero.Zero(mesh, stage=3, **ALONE | options).observe(loss, given, TOKENS)
    split = zero.shard(given)
    return zero, jax.jit(zero.value_and_grad(loss)).lower(split, TOKENS).compile(), split


def gathered(zero, compiled):
    found = jaxzero.collectives(compiled, zero.mesh)
    return sum(x.nbytes * x.times for x in found if x.kind == "all-gather")


@pytest.mark.parametrize("name", LOSSES)
def test_one_gather_per_step(mesh8, name):
    (loss, prefetch), given = LOSSES[name], params()
    if name == "nested":
        del given["out"]
        given["layers"] = given["layers"].reshape(LAYERS, 4, 4, WIDTH)
    zero, compiled, split = compiled_gradient(mesh8, loss, given, regather="never", prefetch=prefetch)
    assert gathered(zero, compiled) == sum(x.nbytes for x in given.values())
    value, grads = compiled(split, TOKENS)
    helpers.assert_all_shards_equal(grads)
    want_value, want = jax.jit(jax.value_and_grad(loss))(given, TOKENS)
    np.testing.assert_allclose(value, want_value, rtol=1e-6)
    helpers.close(zero.gather(grads), want)


def test_persist_bytes_count_all_layers(mesh8):
    """`out` is kept with its layers together, or gathered twice; an evaluation alone stacks nothing."""
    given = params()
    size, whole = given["out"].nbytes, sum(x.nbytes for x in given.values())
    kept = [gathered(*compiled_gradient(mesh8, scanned, given, persist_bytes=n)[:2]) for n in (size - 1, size)]
    assert kept[0] - kept[1] in (size, size * (LAYERS - 1) // LAYERS)  # XLA may gather the last layer once for both
    zero = jaxzero.Zero(mesh8, stage=3, regather="never", **ALONE).observe(scanned, given, TOKENS)
    forward = jax.jit(zero.forward(scanned)).lower(zero.shard(given), TOKENS).compile()
    assert gathered(zero, forward) == whole
    stack = f"f32[{LAYERS},{WIDTH},{WIDTH}]"
    assert stack not in forward.as_text()
    assert stack in compiled_gradient(mesh8, scanned, given, regather="never")[1].as_text()
    plan = zero.plan(given)
    assert sum(x.nbytes for x in plan.traffic if x.kind == "all-gather") == whole * 7 // 8
    assert any("regather='never'" in note for note in plan.notes)
