"""Gathering: leaves whose stored shape does not say how they are cut."""

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxzero


def test_a_leaf_that_left_a_vmap_is_refused():
    """Two members of a (2, 3) leaf are stored as one (2, 3) leaf of two layers is: both in shape (2, 8)."""
    zero = jaxzero.Zero(helpers.make_mesh(8), stage=3)
    members = jnp.arange(12.0).reshape(2, 2, 3)
    split = jax.vmap(lambda x: zero.shard({"w": x}))(members)
    assert (split["w"].value.shape, split["w"].shape) == ((2, 8), (2, 3))
    for call in (zero.gather, zero.specs):
        with pytest.raises(ValueError, match=r"leaf 'w' .*left a vmap.*Fix: jax.vmap\(zero.gather\)"):
            call(split)
    np.testing.assert_array_equal(jax.vmap(zero.gather)(split)["w"], members)


def test_a_layered_leaf_of_that_shape_is_gathered_by_the_zero_that_knows_it():
    zero = jaxzero.Zero(helpers.make_mesh(8), stage=3, stacked=lambda path: 1)
    x = jnp.arange(6.0).reshape(2, 3)
    split = zero.shard({"w": x})
    assert split["w"].value.shape == (2, 8)
    np.testing.assert_array_equal(zero.gather(split)["w"], x)
