"""Parameters of 16 bits, their gradients, and the comparison with their master weights."""

from typing import Any

import checks
import helpers
import jax
import jax.numpy as jnp
import numpy as np

import jaxzero

MICS = ((2, 4), ("replica", "shard"))
SETTINGS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "stage 1": ((8,), dict(stage=1)),
    "stage 2": ((8,), dict(stage=2)),
    "stage 3": ((8,), dict(stage=3)),
    "MiCS": (MICS, dict(stage=2, shard_axis="shard", replica_axis="replica")),
    "MiCS, stage 3": (MICS, dict(stage=3, shard_axis="shard", replica_axis="replica")),
}


def make_zero(setting, **options):
    shape, fixed = SETTINGS[setting]
    return jaxzero.Zero(helpers.make_mesh(*shape), **fixed | options)


def mixed(dtype=jnp.bfloat16, seed=0):
    """Rows, flat, a scalar, and a leaf that is wide already."""
    keys = jax.random.split(jax.random.key(seed), 4)
    return {
        "flat": jax.random.normal(keys[0], (13, 3)).astype(dtype),
        "rows": jax.random.normal(keys[1], (16, 6)).astype(dtype),
        "s": jnp.asarray(1.5, dtype),
        "wide": jax.random.normal(keys[2], (24,)),
    }


def gradients(steps, dtype=jnp.bfloat16):
    return [mixed(dtype, seed=10 + i) for i in range(steps)]


def masters(state):
    return [s for s in jax.tree.leaves(state, is_leaf=is_master) if is_master(s)]


def is_master(x):
    return type(x).__name__ == "MasterWeightsState"


def assert_rounded(params, state):
    """Every narrow parameter is its master, rounded; bit for bit."""
    found = dict(jax.tree_util.tree_leaves_with_path(params))
    (state,) = masters(state)
    kept = dict(jax.tree_util.tree_leaves_with_path(state.master))
    assert kept
    for path, m in kept.items():
        p = found[path]
        assert p.dtype.itemsize == 2
        assert m.dtype == jnp.float32
        m = checks.logical(m, p)
        np.testing.assert_array_equal(helpers.host(m.astype(p.dtype)), helpers.host(p))
