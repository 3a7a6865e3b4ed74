"""The models that are measured: a GPT and a Llama in plain JAX, unrolled or scanned, and what native JAX needs of them.

A model is `(parameters, loss)`; `wrap` goes around each layer (`jax.checkpoint`), `constrain` around what flows between
them: native FSDP needs it to keep the batch sharded, jaxzero does not.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array
Model = tuple[Any, Callable[[Any, Array], Array]]
same = lambda x: x


def gpt(
    *,
    vocabulary: int,
    width: int,
    layers: int,
    length: int,
    heads: int,
    stacked: bool = False,
    wrap: Callable[..., Any] = same,
    constrain: Callable[[Array], Array] = same,
) -> Model:
    """A GPT with a tied embedding; abstract float32 parameters."""
    block = {
        "norms": (2, width),
        "qkv": (width, 3 * width),
        "out": (width, width),
        "up": (width, 4 * width),
        "bias": (4 * width,),
        "down": (4 * width, width),
    }
    params = {
        "words": _array(vocabulary, width),
        "places": _array(length, width),
        "layers": _layers(block, layers, stacked),
    }

    def layer(x: Array, p: Any) -> Array:
        batch, length, _ = x.shape
        qkv = (_standard(x) * p["norms"][0]) @ p["qkv"]
        q, k, v = jnp.split(qkv.reshape(batch, length, heads, -1), 3, -1)
        x = x + _attention(q, k, v).reshape(x.shape) @ p["out"]
        return constrain(x + jax.nn.gelu((_standard(x) * p["norms"][1]) @ p["up"] + p["bias"]) @ p["down"])

    def loss(params: Any, tokens: Array) -> Array:
        x = constrain(params["words"][tokens[:, :-1]] + params["places"])
        x = _through(wrap(layer), x, params["layers"])
        return _cross_entropy(x @ params["words"].T, tokens[:, 1:])

    return params, loss


def llama(
    *,
    vocabulary: int = 128256,
    width: int = 4096,
    hidden: int = 14336,
    layers: int = 32,
    heads: int = 32,
    groups: int = 8,
    stacked: bool = True,
    wrap: Callable[..., Any] = same,
    constrain: Callable[[Array], Array] = same,
) -> Model:
    """A Llama: grouped queries, rotary positions, gated networks; abstract bfloat16 parameters, 8.0 B by default."""
    narrow = width // heads * groups
    block = {
        "norms": (2, width),
        "query": (width, width),
        "key": (width, narrow),
        "value": (width, narrow),
        "out": (width, width),
        "gate": (width, hidden),
        "up": (width, hidden),
        "down": (hidden, width),
    }
    bf16 = jnp.bfloat16
    params = {
        "words": _array(vocabulary, width, dtype=bf16),
        "layers": _layers(block, layers, stacked, bf16),
        "head": _array(width, vocabulary, dtype=bf16),
    }

    def layer(x: Array, p: Any) -> Array:
        h = _root_mean_square(x) * p["norms"][0]
        split = lambda y, n: y.reshape(*y.shape[:2], n, -1)
        q, k = _rotated(split(h @ p["query"], heads)), _rotated(split(h @ p["key"], groups))
        v = split(h @ p["value"], groups)
        k, v = (jnp.repeat(y, heads // groups, 2) for y in (k, v))
        x = x + _attention(q, k, v).reshape(x.shape) @ p["out"]
        h = _root_mean_square(x) * p["norms"][1]
        return constrain(x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"])

    def loss(params: Any, tokens: Array) -> Array:
        x = constrain(params["words"][tokens[:, :-1]])
        x = _through(wrap(layer), x, params["layers"])
        return _cross_entropy(_root_mean_square(x) @ params["head"], tokens[:, 1:])

    return params, loss


def count(params: Any) -> int:
    """How many parameters there are."""
    return sum(x.size for x in jax.tree.leaves(params))


def drawn(params: Any, seed: int = 0) -> Any:
    """Values of these shapes."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(0.05 * rng.standard_normal(x.shape, np.float32), x.dtype), params)


def _array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _layers(block: dict[str, Any], layers: int, stacked: bool, dtype: Any = jnp.float32) -> Any:
    one = lambda *lead: {k: _array(*lead, *shape, dtype=dtype) for k, shape in block.items()}
    return one(layers) if stacked else [one() for _ in range(layers)]


def _through(layer: Callable[..., Array], x: Array, layers: Any) -> Array:
    if isinstance(layers, dict):
        return jax.lax.scan(lambda x, p: (layer(x, p), None), x, layers)[0]
    for p in layers:
        x = layer(x, p)
    return x


def _attention(q: Array, k: Array, v: Array) -> Array:
    length = q.shape[1]
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores.astype(jnp.float32), -1).astype(v.dtype), v)


def _standard(x: Array) -> Array:
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


def _root_mean_square(x: Array) -> Array:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-5)).astype(x.dtype)


def _rotated(x: Array) -> Array:
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1])[:, None] / 500000 ** (jnp.arange(half) / half)
    cos, sin = (f(angle)[None, :, None].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def _cross_entropy(logits: Array, targets: Array) -> Array:
    wide = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.mean(jnp.take_along_axis(wide, targets[..., None], -1))
