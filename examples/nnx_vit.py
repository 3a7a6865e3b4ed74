"""A small vision transformer in Flax NNX learns scikit-learn's digits, its parameters split over all devices.

    python examples/nnx_vit.py
    python examples/nnx_vit.py --stage 1 --steps 300

The model, the loss and the loop are plain NNX: modules, `nnx.Dropout` with its own `nnx.Rngs`, `nnx.Optimizer`.
jaxzero changes the five lines marked `<--`.

At stage 3 the parameters are stored split and gathered where the loss uses them. `jaxzero.nnx.forward` classifies
digits that are not in the training data, from the same split parameters. Without accelerators the program makes eight
virtual CPU devices.
"""

import os
import sys
from typing import Literal

os.environ.setdefault("NPROC", "32")  # eight devices on fewer CPU cores need more threads than cores

import jax
import numpy as np
import optax
import sklearn.datasets
import tyro
from flax import nnx

import jaxzero
import jaxzero.nnx

WIDTH, HEADS, LAYERS, PATCH, BATCH = 32, 2, 2, 2, 128


class Block(nnx.Module):
    """Attention and a two-layer network, each added to the stream."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm1, self.norm2 = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs), nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Mix the patches, then the features."""
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.down(nnx.gelu(self.up(self.norm2(x)))))


class ViT(nnx.Module):
    """From images `[batch, 8, 8]` to scores of the ten digits."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Linear(PATCH * PATCH, WIDTH, rngs=rngs)
        self.position = nnx.Param(0.02 * jax.random.normal(rngs.params(), ((8 // PATCH) ** 2, WIDTH)))
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.norm, self.head = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.Linear(WIDTH, 10, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Scores `[batch, 10]`."""
        patches = images.reshape(-1, 8 // PATCH, PATCH, 8 // PATCH, PATCH).swapaxes(2, 3)
        x = self.embed(patches.reshape(len(images), -1, PATCH * PATCH)) + self.position[...]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(axis=1))


def main(stage: Literal[1, 2, 3] = 3, steps: int = 150) -> None:
    """Train, and print the accuracy on digits that are not in the training data.

    Args:
      stage: ZeRO stage.
      steps: Training steps of 128 digits.
    """
    if steps < 1:
        print(f"nnx_vit: --steps {steps}: expected 1 or more", file=sys.stderr)
        sys.exit(2)
    jax.config.update("jax_num_cpu_devices", 8)
    digits = sklearn.datasets.load_digits()
    images, labels = (digits.images / 16).astype(np.float32), digits.target.astype(np.int32)
    order = np.random.default_rng(0).permutation(len(labels))
    held_out, training = order[:360], order[360:]

    zero = jaxzero.Zero(jax.make_mesh((jax.device_count(),), ("data",)), stage=stage)  # <--
    model = jaxzero.nnx.init(zero, lambda: ViT(nnx.Rngs(0)))  # <-- as it is stored at this stage
    inner = optax.adamw(optax.cosine_decay_schedule(1e-2, steps))
    optimizer = jaxzero.nnx.optimizer(zero, model, inner)  # <-- an nnx.Optimizer

    def loss_fn(model: ViT, images: jax.Array, labels: jax.Array) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(model(images), labels).mean()

    @nnx.jit
    def train_step(model: ViT, optimizer: nnx.Optimizer, images: jax.Array, labels: jax.Array) -> jax.Array:
        loss: jax.Array
        loss, grads = jaxzero.nnx.value_and_grad(zero, loss_fn)(model, images, labels)  # <--
        optimizer.update(model, grads)
        return loss

    print("compiling the first step", flush=True)
    rng = np.random.default_rng(1)
    for i in range(steps):
        batch = rng.choice(training, BATCH, replace=False)
        loss = train_step(model, optimizer, images[batch], labels[batch])
        if i == 0 or (i + 1) % 50 == 0:
            print(f"step {i + 1:4d}  loss {float(loss):.3f}")

    model.eval()  # no dropout from here on
    classify = jaxzero.nnx.forward(zero, lambda model, images: model(images))  # <--
    scores = classify(model, images[held_out])
    params = nnx.state(model, nnx.Param)
    accuracy = np.mean(np.argmax(scores, axis=1) == labels[held_out])
    count = lambda tree: sum(x.addressable_shards[0].data.size for x in jax.tree.leaves(tree))
    whole = sum(x.size for x in jax.tree.leaves(jax.eval_shape(zero.gather, params)))
    print(
        f"{whole:,} parameters; on each device {count(params):,}, and {count(optimizer.opt_state):,} numbers of state"
    )
    print(f"accuracy on {len(held_out)} digits that were not trained on: {accuracy:.1%}")


if __name__ == "__main__":
    tyro.cli(main)
