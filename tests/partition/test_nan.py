"""A NaN on one device reaches every result that it reaches unsharded: XLA's maximum over devices drops it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxzero


def by_norm(norm):
    """Divides each leaf by a norm that is taken as a maximum or minimum of the whole tree."""

    def update(grads, state, params=None):
        del params
        value = norm([norm([x]) for x in jax.tree.leaves(grads)])
        return jax.tree.map(lambda x: x / value, grads), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def largest(values):
    return jnp.max(jnp.stack([jnp.max(x) for x in values]))


def smallest(values):
    return jnp.min(jnp.stack([jnp.min(x) for x in values]))


@pytest.mark.parametrize("norm", [largest, smallest])
@pytest.mark.parametrize("where", [None, 0, 7, 15])
def test_maximum_and_minimum_keep_nan(mesh8, norm, where):
    grads = {"rows": jnp.arange(1.0, 17.0), "flat": jnp.linspace(2.0, 3.0, 5)}
    if where is not None:
        grads["rows"] = grads["rows"].at[where].set(jnp.nan)
    tx = jaxzero.Zero(mesh8).optimizer(by_norm(norm))
    got, _ = tx.update(grads, tx.init(grads))
    want, _ = by_norm(norm).update(grads, optax.EmptyState())
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert np.isnan(got["flat"]).all() == (where is not None)


def test_nan_in_the_last_real_element_counts_and_padding_does_not(mesh8):
    """Padding divides zero by zero in this update; only the real NaN shows."""
    grads = {"flat": jnp.arange(1.0, 6.0), "other": jnp.ones(16)}
    inner = optax.stateless(lambda g, p: jax.tree.map(lambda x: x / jnp.max(x / x), g))
    tx = jaxzero.Zero(mesh8).optimizer(inner)
    got, _ = tx.update(grads, tx.init(grads), grads)
    np.testing.assert_array_equal(got["flat"], grads["flat"])
    grads["flat"] = grads["flat"].at[4].set(jnp.nan)
    got, _ = tx.update(grads, tx.init(grads), grads)
    assert np.isnan(got["flat"]).all()
