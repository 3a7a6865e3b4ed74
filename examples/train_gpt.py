"""Train a small GPT on real text, its training state sharded over all devices.

    python examples/train_gpt.py
    python examples/train_gpt.py --optimizer muon --stage 1 --mesh 2x4 --data book.txt

The text is by default the source of Python's own standard library, cut into bytes. Without accelerators the program makes
eight virtual devices of the CPU. Everything that jaxzero does stands in `main`, between the two lines of dashes.
"""

import dataclasses
import difflib
import functools
import inspect
import json
import math
import os
import pathlib
import sys
import sysconfig
import time
from collections.abc import Callable
from typing import Any, Literal, NoReturn

os.environ.setdefault("NPROC", "32")  # eight devices on fewer CPU cores need more threads than cores

import flax.linen as nn
import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
import optax.contrib
import rich.console
import rich.progress
import rich.table
import tyro
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxzero

HEAD_WIDTH = 32
DROPOUT = 0.1
MOST_TEXT = 4_000_000  # bytes of the standard library: enough for any run of this size


@dataclasses.dataclass(frozen=True)
class Options:
    """Train a small GPT with the state of any Optax optimizer sharded over a mesh of devices."""

    stage: Literal[1, 2] = 2
    """ZeRO stage: 1 shards the optimizer state, 2 the gradients too."""
    mesh: str = ""
    """Devices: "8", or "2x4" for 2 replicas of 4 shards. Default: all there are."""
    optimizer: str = "adamw"
    """Any alias of optax or optax.contrib."""
    learning_rate: float | None = None
    """Default: the optimizer's own, or else 0.003."""
    clip: float = 1.0
    """Largest global norm of the gradient; 0 for no clipping."""
    steps: int = 200
    """Training steps."""
    batch: int = 32
    """Examples per step, over all devices."""
    length: int = 64
    """Bytes per example."""
    width: int = 128
    """Width of the model, a multiple of 32."""
    layers: int = 2
    """Transformer blocks."""
    seed: int = 0
    """Seed of parameters, batches, dropout and sample."""
    data: pathlib.Path | None = None
    """A file to learn. Default: the standard library's source text."""
    out: pathlib.Path = pathlib.Path("runs/train_gpt")
    """Folder for loss.png, metrics.json and sample.txt."""


def fail(message: str, status: int = 2) -> NoReturn:
    """End the program with one line."""
    print(f"train_gpt: {message}", file=sys.stderr)
    sys.exit(status)


# ---- the text


def read_text(path: pathlib.Path | None) -> bytes:
    if path is not None:
        try:
            return path.read_bytes()
        except OSError as error:
            fail(f"--data {path}: {error.strerror}")
    text = b""
    for file in sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += file.read_bytes()
        if len(text) > MOST_TEXT:
            break
    return text or fail("no source text of the standard library here: give a file with --data")


def unigram_entropy(tokens: np.ndarray) -> float:
    """The loss, in nats, of the best guess that ignores all context."""
    counts = np.bincount(tokens)
    share = counts[counts > 0] / tokens.size
    return float(-np.sum(share * np.log(share)))


def crops(tokens: np.ndarray, rng: np.random.Generator, batch: int, length: int) -> np.ndarray:
    """Random pieces of `length + 1` tokens."""
    starts = rng.integers(0, tokens.size - length, batch)
    return tokens[starts[:, None] + np.arange(length + 1)]


# ---- the model: nothing in it knows about devices


class Block(nn.Module):
    """Attention and a two-layer network, each added to the stream."""

    width: int

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Mix the positions, then the features."""
        mask = nn.make_causal_mask(x[..., 0])
        dropout = functools.partial(nn.Dropout, DROPOUT, deterministic=not train)
        attention = nn.MultiHeadDotProductAttention(self.width // HEAD_WIDTH)
        x = x + dropout()(attention(nn.LayerNorm()(x), mask=mask))
        hidden = nn.gelu(nn.Dense(4 * self.width)(nn.LayerNorm()(x)))
        return x + dropout()(nn.Dense(self.width)(hidden))


class GPT(nn.Module):
    """Bytes in, scores of the next byte out; the embedding is used at both ends."""

    vocabulary: int
    width: int
    layers: int
    length: int

    @nn.compact
    def __call__(self, tokens: jax.Array, train: bool = False) -> jax.Array:
        """Scores `[batch, length, vocabulary]` of the byte that follows each position."""
        embed = nn.Embed(self.vocabulary, self.width, embedding_init=nn.initializers.normal(0.02))
        position = self.param("position", nn.initializers.normal(0.02), (self.length, self.width))
        x = embed(tokens) + position
        for _ in range(self.layers):
            x = Block(self.width)(x, train)
        return embed.attend(nn.LayerNorm()(x))


def mean_loss(scores: jax.Array, targets: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(scores, targets).mean()


def sample(model: GPT, params: Any, start: jax.Array, key: jax.Array, count: int) -> jax.Array:
    """Continue `start`, a full window of tokens, by `count` tokens."""

    def next_token(window: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        scores = model.apply(params, window[None])[0, -1]
        token = jax.random.categorical(key, scores / 0.8).astype(window.dtype)
        return jnp.append(window[1:], token), token

    return jax.lax.scan(next_token, start, jax.random.split(key, count))[1]


# ---- the optimizer, by name


@functools.cache
def optimizers() -> dict[str, Callable[..., optax.GradientTransformation]]:
    """Every function of optax and optax.contrib that makes an optimizer from a learning rate alone."""
    found = {}
    for module in (optax.contrib, optax):
        for name, f in inspect.getmembers(module, inspect.isfunction):
            parameters = inspect.signature(f).parameters.values()
            needed = {p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD}
            if not name.startswith("scale_by_") and needed <= {"learning_rate"} <= {p.name for p in parameters}:
                found[name] = f
    return found


def make_optimizer(options: Options) -> optax.GradientTransformation:
    """The optimizer that was asked for, after clipping."""
    name = options.optimizer
    if name not in optimizers():
        near = difflib.get_close_matches(name, optimizers(), 1, 0) + ["adamw"]
        fail(f'--optimizer {name}: optax has no such optimizer; did you mean "{near[0]}"?')
    factory = optimizers()[name]
    rate = options.learning_rate
    if rate is None:
        default = inspect.signature(factory).parameters["learning_rate"].default
        rate = default if isinstance(default, float) else 3e-3
    inner = factory(learning_rate=rate)
    try:  # some need more than gradients: the value of the loss, or the loss function
        tiny = {"w": jnp.ones((2, 2))}
        jax.eval_shape(lambda p: inner.update(p, inner.init(p), p), tiny)
    except (TypeError, ValueError) as error:
        fail(f"--optimizer {name}: it needs more than the gradients ({str(error).splitlines()[0]})")
    return optax.chain(optax.clip_by_global_norm(options.clip), inner) if options.clip else inner


# ---- devices


def make_mesh(text: str) -> tuple[Mesh, str | None]:
    """The mesh, and the name of its replica axis if it has one."""
    devices = jax.devices()
    parts = (text or str(len(devices))).lower().split("x")
    if len(parts) > 2 or not all(p.isdecimal() and int(p) > 0 for p in parts):
        fail(f'--mesh {text}: expected a number of devices such as "8", or replicas x shards such as "2x4"')
    sizes = [int(p) for p in parts]
    if math.prod(sizes) > len(devices):
        fail(f"--mesh {text}: needs {math.prod(sizes)} devices, {len(devices)} are here ({devices[0].platform})")
    names = ("replica", "data")[-len(sizes) :]
    return Mesh(np.array(devices[: math.prod(sizes)]).reshape(sizes), names), "replica" if len(sizes) == 2 else None


def table_of_memory(zero: jaxzero.Zero, params: Any, grads: Any, state: Any) -> tuple[rich.table.Table, dict[str, Any]]:
    """What lives where between the parts of a step: bytes per device, beside those of a run that shards nothing."""

    def size(tree: Any) -> int:
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))

    def size_here(tree: Any, specs: Any) -> int:
        total = 0
        for x, spec in zip(jax.tree.leaves(tree), jax.tree.leaves(specs), strict=True):
            total += math.prod(NamedSharding(zero.mesh, spec).shard_shape(x.shape)) * x.dtype.itemsize
        return total

    whole = jax.tree.map(lambda _: P(), grads)
    rows = {
        "parameters": (size(params), size_here(params, jax.tree.map(lambda x: x.sharding.spec, params))),
        "gradients": (size(params), size_here(grads, zero.specs(grads) if zero.stage > 1 else whole)),
        "optimizer state": (0, size_here(state, jax.tree.map(lambda x: x.sharding.spec, state))),
    }
    return rows


def main(options: Options) -> None:
    pass
