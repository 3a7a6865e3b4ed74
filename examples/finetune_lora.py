"""Fine-tune a frozen Flax NNX model with LoRA: the base is split over all devices, and only the adapters have state.

    python examples/finetune_lora.py

A network learns scikit-learn's digits. Then the same digits are turned by a quarter, the network classifies few of
them, and LoRA adapters of rank 8 are trained in addition to its weights.

At stage 3 every parameter is stored split, also the frozen ones. `wrt=nnx.LoRAParam` keeps the base out of the
optimizer and out of the gradient. So the base takes an eighth of its size on each of eight devices and nothing else. At
the end the program shows that no bit of the base has changed. Without accelerators the program makes eight virtual CPU
devices.
"""

import os
from typing import Any

os.environ.setdefault("NPROC", "32")  # eight devices on fewer CPU cores need more threads than cores

import jax
import numpy as np
import optax
import sklearn.datasets
from flax import nnx

import jaxzero
import jaxzero.nnx

WIDTH, RANK, BATCH, STEPS = 256, 8, 128, 100
FROZEN = nnx.All(nnx.Param, nnx.Not(nnx.LoRAParam))


class Net(nnx.Module):
    """Pixels `[batch, 64]` in, scores of the ten digits out."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.inner: Any = nnx.Linear(64, WIDTH, rngs=rngs)
        self.outer: Any = nnx.Linear(WIDTH, 10, rngs=rngs)

    def __call__(self, pixels: jax.Array) -> jax.Array:
        """Scores `[batch, 10]`."""
        return self.outer(nnx.relu(self.inner(pixels)))

    def adapt(self, rngs: nnx.Rngs) -> None:
        """Add LoRA adapters to both layers."""
        self.inner = nnx.LoRA(64, RANK, WIDTH, base_module=self.inner, rngs=rngs)
        self.outer = nnx.LoRA(WIDTH, RANK, 10, base_module=self.outer, rngs=rngs)


def train(zero: jaxzero.Zero, model: Net, wrt: Any, pixels: np.ndarray, labels: np.ndarray) -> nnx.Optimizer:
    """Train the variables that `wrt` selects, on the first 1437 digits; the parameters of `model` are split."""
    optimizer = jaxzero.nnx.optimizer(zero, model, optax.adamw(2e-2), wrt=wrt)

    def loss_fn(model: Net, pixels: jax.Array, labels: jax.Array) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(model(pixels), labels).mean()

    @nnx.jit
    def step(model: Net, optimizer: nnx.Optimizer, pixels: Any, labels: Any) -> None:
        _, grads = jaxzero.nnx.value_and_grad(zero, loss_fn, wrt=wrt)(model, pixels, labels)
        optimizer.update(model, grads)

    print("compiling the first step", flush=True)
    rng = np.random.default_rng(0)
    for _ in range(STEPS):
        batch = rng.choice(1437, BATCH, replace=False)
        step(model, optimizer, pixels[batch], labels[batch])
    return optimizer


def accuracy(zero: jaxzero.Zero, model: Net, pixels: np.ndarray, labels: np.ndarray) -> float:
    """The accuracy on the 360 digits that are not in the training data."""
    scores = jaxzero.nnx.forward(zero, lambda model, pixels: model(pixels))(model, pixels[1437:])
    return float(np.mean(np.argmax(scores, axis=1) == labels[1437:]))


def held(tree: Any) -> int:
    """Bytes on one device."""
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


def main() -> None:
    """Train the base, then the adapters for another task."""
    jax.config.update("jax_num_cpu_devices", 8)
    digits = sklearn.datasets.load_digits()
    order = np.random.default_rng(0).permutation(1797)
    images, labels = (digits.images[order] / 16).astype(np.float32), digits.target[order].astype(np.int32)
    upright, turned = images.reshape(-1, 64), np.rot90(images, axes=(1, 2)).reshape(-1, 64)

    zero = jaxzero.Zero(jax.make_mesh((jax.device_count(),), ("data",)), stage=3)
    model = Net(nnx.Rngs(0))
    jaxzero.nnx.shard(zero, model)
    optimizer = train(zero, model, nnx.Param, upright, labels)
    print(f"the base: {accuracy(zero, model, upright, labels):.1%} of upright digits, ", end="")
    print(f"{accuracy(zero, model, turned, labels):.1%} of turned ones; {held(optimizer.opt_state):,} B of state")

    model.adapt(nnx.Rngs(1))
    before = zero.gather(nnx.state(model, FROZEN))
    jaxzero.nnx.shard(zero, model)  # splits the new adapters; split leaves stay as they are
    optimizer = train(zero, model, nnx.LoRAParam, turned, labels)
    print(f"with adapters: {accuracy(zero, model, turned, labels):.1%} of turned ones")

    adapters, base = nnx.state(model, nnx.LoRAParam), nnx.state(model, FROZEN)
    print(f"on each device: {held(base):,} B of the base, {held(adapters):,} B of adapters, ", end="")
    print(f"{held(optimizer.opt_state):,} B of state")
    after = zero.gather(base)
    same = all(map(np.array_equal, jax.tree.leaves(before), jax.tree.leaves(after)))
    print(f"the base is {'bit for bit what it was' if same else 'CHANGED'}")


if __name__ == "__main__":
    main()
