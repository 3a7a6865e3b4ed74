"""A model whose parameters the mesh axis "model" shards, its batches, and its optimizers."""

import checks
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from jax.sharding import PartitionSpec as P

SHAPES = {"emb": (12, 16), "w1": (16, 32), "b1": (32,), "w2": (32, 16), "b2": (16,), "odd": (13, 16), "scale": ()}
SPECS = {"emb": P("model"), "w1": P(None, "model"), "b1": P("model"), "w2": P("model", None), "b2": P()}
SPECS |= {"odd": P(None, "model"), "scale": P()}
OPTIMIZERS = {
    "adamw": optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2)),
    "lamb": optax.lamb(1e-2),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "muon": optax.contrib.muon(1e-2),
}


def tree(shapes=SHAPES):
    rng = np.random.default_rng(1)
    return {name: np.float32(0.3) * rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def loss(params, batch):
    tokens, target = batch
    x = params["emb"][tokens]
    x = jnp.tanh(x @ params["w1"] + params["b1"]) @ params["w2"] + params["b2"]
    return jnp.mean((x @ params["odd"].T * (1 + params["scale"]) - target) ** 2)


def batches(steps=5, size=16):
    rng = np.random.default_rng(0)
    return [(rng.integers(0, 12, size), rng.normal(size=(size, 13)).astype(np.float32)) for _ in range(steps)]


def placed(zero, batch):
    return checks.place(batch, zero.mesh, P(checks.axes_of(zero)))


def unpadded(stored, shape):
    """A state leaf of this logical shape, without its padding, which must be zero."""
    stored = np.asarray(stored)
    if stored.ndim == len(shape):
        kept = stored[tuple(slice(size) for size in shape)]
    else:
        kept = checks.logical(stored, np.empty(shape))
    assert np.count_nonzero(stored) == np.count_nonzero(kept)
    return kept
