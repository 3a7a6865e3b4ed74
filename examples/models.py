"""Shapes of well-known models, to plan and to compile; no array is allocated.

    cd examples
    jaxzero plan models:llama_8b --mesh node=8,local=8 --stage 3
    jaxzero compile models:llama_8b --topology h100:8x8 --stage 3
    jaxzero compile models:gpt_3b --topology v5e:4x4 --stage 3

Each function returns abstract parameters, the loss and an abstract batch, as the command line expects. The benchmarks
use the same models; `how` selects the way in which a model is written.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Problem = tuple[Any, Callable[..., jax.Array], jax.ShapeDtypeStruct]


@dataclasses.dataclass(frozen=True)
class How:
    """How a model is written.

    Attributes:
      stacked: Whether its layers are stacked along a leading axis and scanned, or a list.
      wrap: The function that wraps each layer, for example `jax.checkpoint`.
      constrain: The function that is applied to the values between layers. Native JAX needs a sharding constraint there
        to keep the batch split; jaxzero does not.
    """

    stacked: bool = True
    wrap: Callable[..., Any] = jax.checkpoint
    constrain: Callable[[jax.Array], jax.Array] = lambda x: x

    def params(self, layers: int, block: dict[str, Any]) -> Any:
        """The abstract parameters of all layers, from those of one layer."""
        if not self.stacked:
            return [block] * layers
        return {name: jax.ShapeDtypeStruct((layers, *x.shape), x.dtype) for name, x in block.items()}

    def with_remat(self, remat: bool | None) -> "How":
        """The same with each layer under `jax.checkpoint` or not; `None`: as it is. `jaxzero fit` tries both."""
        same = lambda f: f
        return self if remat is None else dataclasses.replace(self, wrap=jax.checkpoint if remat else same)

    def through(self, layer: Callable[..., jax.Array], x: jax.Array, layers: Any) -> jax.Array:
        """The result of all layers for the input `x`."""
        run = self.wrap(lambda x, p: self.constrain(layer(x, p)))
        x = self.constrain(x)
        if self.stacked:
            return jax.lax.scan(lambda x, p: (run(x, p), None), x, layers)[0]
        for p in layers:
            x = run(x, p)
        return x


def llama_8b(texts: int = 64, how: How = How(), remat: bool | None = None) -> Problem:
    """8.0 B parameters in bfloat16: grouped queries, rotary positions, gated networks; texts of 2048 tokens."""
    how = how.with_remat(remat)
    return llama(128256, width=4096, hidden=14336, layers=32, heads=32, groups=8, batch=(texts, 2048), how=how)


def gpt_3b(texts: int = 32, how: How = How(), remat: bool | None = None) -> Problem:
    """3.4 B parameters in float32, the embedding also used as the output matrix; texts of 512 tokens."""
    how = how.with_remat(remat)
    return gpt(32000, width=4096, layers=16, heads=8, batch=(texts, 512), how=how)


# ---- Llama


def llama(
    vocabulary: int,
    *,
    width: int,
    hidden: int,
    layers: int,
    heads: int,
    groups: int,
    batch: tuple[int, int],
    how: How = How(),
) -> Problem:
    """A Llama."""
    weight = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    per_head = width // heads
    block = {
        "query": weight(width, width),
        "key": weight(width, groups * per_head),
        "value": weight(width, groups * per_head),
        "out": weight(width, width),
        "gate": weight(width, hidden),
        "up": weight(width, hidden),
        "down": weight(hidden, width),
        "norms": weight(2, width),
    }
    params = {
        "embed": weight(vocabulary, width),
        "layers": how.params(layers, block),
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
        x = how.through(layer, params["embed"][tokens[:, :-1]], params["layers"])
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
    """`x` divided by the root of its mean square, then scaled."""
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-5)).astype(x.dtype) * scale


# ---- GPT


def gpt(vocabulary: int, *, width: int, layers: int, heads: int, batch: tuple[int, int], how: How = How()) -> Problem:
    """A GPT without biases."""
    weight = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    block = {
        "norms": weight(2, width),
        "qkv": weight(width, 3 * width),
        "out": weight(width, width),
        "up": weight(width, 4 * width),
        "down": weight(4 * width, width),
    }
    params = {
        "embed": weight(vocabulary, width),
        "position": weight(batch[1], width),
        "layers": how.params(layers, block),
        "norm": weight(width),
    }

    def layer(x: jax.Array, p: Any) -> jax.Array:
        qkv = layer_norm(x, p["norms"][0]) @ p["qkv"]
        q, k, v = jnp.split(qkv.reshape(*x.shape[:2], heads, -1), 3, -1)
        x = x + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ p["out"]
        return x + jax.nn.gelu(layer_norm(x, p["norms"][1]) @ p["up"]) @ p["down"]

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        x = how.through(layer, params["embed"][tokens[:, :-1]] + params["position"], params["layers"])
        return cross_entropy(layer_norm(x, params["norm"]) @ params["embed"].T, tokens[:, 1:])

    return params, loss, jax.ShapeDtypeStruct((batch[0], batch[1] + 1), jnp.int32)


def layer_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Mean 0, variance 1, then scaled."""
    return jax.nn.standardize(x, epsilon=1e-5) * scale


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """The mean over all tokens, in float32."""
    wide = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.mean(jnp.take_along_axis(wide, targets[..., None], -1))
