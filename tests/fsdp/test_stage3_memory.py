"""Stage 3 keeps little whole: what a compiled step holds per layer, and how many whole arrays stand at once."""

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxzero

WIDTH, LENGTH, VOCAB, HEADS = 128, 8, 96, 2


def blocks(layers):
    """Stacked blocks of a small GPT: abstract values, nothing is computed here."""
    shapes = {
        "qkv": (WIDTH, 3 * WIDTH),
        "out": (WIDTH, WIDTH),
        "up": (WIDTH, 4 * WIDTH),
        "down": (4 * WIDTH, WIDTH),
        "scale": (WIDTH,),
    }
    stacked = {k: jax.ShapeDtypeStruct((layers, *s), jnp.float32) for k, s in shapes.items()}
    return {"emb": jax.ShapeDtypeStruct((VOCAB, WIDTH), jnp.float32), "blocks": stacked}


def block(x, p):
    q, k, v = jnp.split((x * p["scale"] @ p["qkv"]).reshape(*x.shape[:2], HEADS, -1), 3, -1)
    a = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k), -1)
    x = x + jnp.einsum("bhqk,bkhd->bqhd", a, v).reshape(x.shape) @ p["out"]
    return x + jax.nn.gelu(x @ p["up"]) @ p["down"]


def loss(p, t):
    x, _ = jax.lax.scan(lambda x, w: (jax.checkpoint(block)(x, w), None), p["emb"][t], p["blocks"])
    return jnp.mean(jax.nn.logsumexp(x @ p["emb"].T, -1))


def temporary(mesh, layers, **options):
    """Temporary bytes per device of one compiled training step."""
    params, tokens = blocks(layers), jax.ShapeDtypeStruct((8, LENGTH), jnp.int32)
    zero = jaxzero.Zero(mesh, stage=3, **options).observe(loss, params, tokens)
    tx = zero.optimizer(optax.adamw(1e-3))
    split = jax.eval_shape(zero.shard, params)
    state = jax.eval_shape(tx.init, split)

    def step(params, state, tokens):
        value, grads = zero.value_and_grad(loss)(params, tokens)
        return *zero.apply(tx, grads, state, params), value

    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(split, state, tokens).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("options", [{}, {"prefetch": 0}])
def test_one_more_layer_costs_its_share_of_the_gradient_and_no_whole_array(mesh8, options):
    share = sum(x.size // x.shape[0] for x in blocks(1)["blocks"].values()) * 4 // 8
    sizes = {n: temporary(mesh8, n, **options) for n in (6, 12, 24)}
    assert (sizes[12] - sizes[6]) / 6 < 1.2 * share, sizes
    assert (sizes[24] - sizes[12]) / 12 < 1.2 * share, sizes
