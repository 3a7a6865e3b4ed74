"""What may be a loss: every callable that `jax.value_and_grad` takes."""

import dataclasses
import functools

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxzero


@dataclasses.dataclass
class Unhashable:
    """`eq` without `frozen`: Python gives it no hash."""

    scale: float

    def __call__(self, p, x):
        return self.scale * jnp.mean(jnp.square(x @ p["w"]))


@dataclasses.dataclass(frozen=True)
class HoldsArray:
    """Frozen, but its hash would be that of an array."""

    scale: jax.Array

    def __call__(self, p, x):
        return self.scale * jnp.mean(jnp.square(x @ p["w"]))


class Method:
    """A bound method is made anew at each access."""

    __hash__ = None

    def loss(self, p, x):
        return 3.0 * jnp.mean(jnp.square(x @ p["w"]))


LOSSES = {
    "a dataclass": lambda: Unhashable(3.0),
    "a frozen dataclass of an array": lambda: HoldsArray(jnp.float32(3)),
    "a method of an object without a hash": lambda: Method().loss,
    "a partial": lambda: functools.partial(lambda s, p, x: Unhashable(s)(p, x), 3.0),
    "jitted": lambda: jax.jit(lambda p, x: Unhashable(3.0)(p, x)),
}


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("name", LOSSES)
def test_any_callable_is_a_loss(mesh8, stage, name):
    loss, p, x = LOSSES[name](), {"w": jnp.ones((8, 3))}, jnp.arange(128.0).reshape(16, 8) / 99
    want = jax.value_and_grad(loss)(p, x)
    zero = jaxzero.Zero(mesh8, stage=stage)
    zero = zero.observe(loss, p, x)
    params = zero.shard(p)
    value, grads = zero.value_and_grad(loss)(params, x)
    np.testing.assert_allclose(value, want[0], rtol=1e-6)
    helpers.close(zero.gather(grads), want[1])
    np.testing.assert_allclose(zero.forward(loss)(params, x), want[0], rtol=1e-6)


def test_a_callable_that_was_changed_in_between(mesh8):
    """Each eager call traces it anew, with or without a hash."""
    loss, p, x = Unhashable(1.0), {"w": jnp.ones((8, 3))}, jnp.ones((16, 8))
    zero = jaxzero.Zero(mesh8, stage=2)
    first, _ = zero.value_and_grad(loss)(p, x)
    loss.scale = 5.0
    second, _ = zero.value_and_grad(loss)(p, x)
    assert second == 5 * first
