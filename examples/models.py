"""Shapes of well-known models, to plan and to compile; nothing here is ever allocated.

    cd examples
    jaxzero plan models:llama_8b --mesh node=8,local=8 --stage 3
    jaxzero compile models:llama_8b --topology h100:8x8 --stage 3
    jaxzero compile models:gpt_3b --topology v5e:4x4 --stage 3

Each function returns what the command line expects: abstract parameters, the loss, and an abstract batch.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Problem = tuple[Any, Callable[..., jax.Array], jax.ShapeDtypeStruct]


def llama_8b() -> Problem:
    """8.0 B parameters in bfloat16: grouped queries, rotary positions, gated networks; 64 texts of 2048 tokens."""
    return llama(vocabulary=128256, width=4096, hidden=14336, layers=32, heads=32, groups=8, batch=(64, 2048))


def gpt_3b() -> Problem:
    """3.4 B parameters in float32, the embedding used at both ends; 32 texts of 512 tokens."""
    return gpt(vocabulary=50257, width=2048, layers=65, heads=16, batch=(32, 512))


# ---- Llama


def llama(
    vocabulary: int, width: int, hidden: int, layers: int, heads: int, groups: int, batch: tuple[int, int]
) -> Problem:
    """A Llama whose layers are scanned, each inside `jax.checkpoint`."""
    weight = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    per_head = width // heads
    params = {
        "embed": weight(vocabulary, width),
        "layers": {
            "query": weight(layers, width, width),
            "key": weight(layers, width, groups * per_head),
            "value": weight(layers, width, groups * per_head),
            "out": weight(layers, width, width),
            "gate": weight(layers, width, hidden),
            "up": weight(layers, width, hidden),
            "down": weight(layers, hidden, width),
            "norms": weight(layers, 2, width),
        },
        "norm": weight(width),
        "head": weight(width, vocabulary),
    }

    def layer(x: jax.Array, p: Any) -> jax.Array:
        h = rms_norm(x, p["norms"][0])
        split = lambda y, n: y.reshape(*y.shape[:2], n, per_head)
        q, k = (rotate(split(h @ p[name], n)) for name, n in (("query", heads), ("key", groups)))
        mixed = jax.nn.dot_product_attention(q, k, split(h @ p["value"], groups), is_causal=True)
        x = x + mixed.reshape(x.shape) @ p["out"]
        h = rms_norm(x, p["norms"][1])
        return x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        x = params["embed"][tokens[:, :-1]]
        x, _ = jax.lax.scan(lambda x, p: (jax.checkpoint(layer)(x, p), None), x, params["layers"])
        return cross_entropy(rms_norm(x, params["norm"]) @ params["head"], tokens[:, 1:])

    return params, loss, jax.ShapeDtypeStruct((batch[0], batch[1] + 1), jnp.int32)


def rotate(x: jax.Array) -> jax.Array:
    """Rotary positions."""
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1])[:, None] / 500000 ** (jnp.arange(half) / half)
    cos, sin = (f(angle)[None, :, None].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Divided by the root of the mean square."""
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-5)).astype(x.dtype) * scale


# ---- GPT


def gpt(vocabulary: int, width: int, layers: int, heads: int, batch: tuple[int, int]) -> Problem:
    """A GPT whose layers are scanned, each inside `jax.checkpoint`."""
    weight = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    dense = lambda n, m: {"w": weight(layers, n, m), "b": weight(layers, m)}
    norm = lambda *stack: {"scale": weight(*stack, width), "bias": weight(*stack, width)}
    blocks = {
        "norms": [norm(layers), norm(layers)],
        "qkv": dense(width, 3 * width),
        "out": dense(width, width),
        "up": dense(width, 4 * width),
        "down": dense(4 * width, width),
    }
    params = {
        "embed": weight(vocabulary, width),
        "position": weight(batch[1], width),
        "layers": blocks,
        "norm": norm(),
    }
    affine = lambda x, p: x @ p["w"] + p["b"]

    def layer(x: jax.Array, p: Any) -> jax.Array:
        qkv = affine(layer_norm(x, p["norms"][0]), p["qkv"])
        q, k, v = jnp.split(qkv.reshape(*x.shape[:2], heads, -1), 3, -1)
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + affine(mixed.reshape(x.shape), p["out"])
        return x + affine(jax.nn.gelu(affine(layer_norm(x, p["norms"][1]), p["up"])), p["down"])

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        x = params["embed"][tokens[:, :-1]] + params["position"]
        x, _ = jax.lax.scan(lambda x, p: (jax.checkpoint(layer)(x, p), None), x, params["layers"])
        return cross_entropy(layer_norm(x, params["norm"]) @ params["embed"].T, tokens[:, 1:])

    return params, loss, jax.ShapeDtypeStruct((batch[0], batch[1] + 1), jnp.int32)


def layer_norm(x: jax.Array, p: Any) -> jax.Array:
    """Mean 0, variance 1, then scale and bias."""
    return jax.nn.standardize(x, epsilon=1e-5) * p["scale"] + p["bias"]


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """The mean over all tokens, in float32."""
    wide = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.mean(jnp.take_along_axis(wide, targets[..., None], -1))
