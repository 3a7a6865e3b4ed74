"""Fixtures: meshes of both kinds, and strict arithmetic."""

from collections.abc import Callable, Iterator

import helpers
import jax
import pytest
from jax.sharding import Mesh


@pytest.fixture
def mesh() -> Callable[..., Mesh]:
    """A factory: `mesh(3)`, `mesh((2, 4), ("replica", "shard"), explicit=True)`."""
    return helpers.make_mesh


@pytest.fixture
def mesh8() -> Mesh:
    return helpers.make_mesh(8)


@pytest.fixture
def mesh24() -> Mesh:
    return helpers.make_mesh((2, 4), ("replica", "shard"))


@pytest.fixture
def explicit8() -> Mesh:
    return helpers.make_mesh(8, explicit=True)


@pytest.fixture
def explicit24() -> Mesh:
    return helpers.make_mesh((2, 4), ("replica", "shard"), explicit=True)


@pytest.fixture
def strict() -> Iterator[None]:
    """No implicit promotion. For the library's own arithmetic: Optax and Flax fail under it unsharded."""
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield
