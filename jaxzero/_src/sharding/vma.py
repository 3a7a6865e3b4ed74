"""Over which manual axes a value may vary: reading, casting and matching these types."""

from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from .._types import ArrayLike, T


def varying(x: ArrayLike) -> frozenset[str]:
    """The manual axes over which `x` may differ between devices."""
    return jax.typeof(x).manual_axis_type.varying


def cast(x: T, axes: Iterable[str]) -> T:
    """`x` typed as varying over `axes` too; sends nothing."""
    need = tuple(sorted(set(axes) - varying(x)))
    return lax.pcast(x, need, to="varying") if need else x


def match(values: Sequence[T]) -> list[T]:
    """All values typed as varying over the union of their axes: a primitive bound by hand needs it."""
    types = [varying(x) for x in values]
    union = frozenset().union(*types)
    return [x if t == union else cast(x, union) for x, t in zip(values, types, strict=True)]


def abstract_varying(values: Sequence[jax.ShapeDtypeStruct], axes: Iterable[str]) -> list[jax.ShapeDtypeStruct]:
    """Abstract arrays typed as varying over `axes`, for a trace inside a manual region."""
    here = NamedSharding(jax.sharding.get_abstract_mesh(), PartitionSpec())
    kind = jax.typeof(cast(jnp.zeros(()), axes)).manual_axis_type
    return [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here, manual_axis_type=kind) for x in values]
