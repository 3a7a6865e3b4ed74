"""The types that signatures share."""

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import jax
from jax.sharding import AbstractMesh, Mesh

#: Arrays and `EvenSplit`s in containers that JAX has registered; the structure is the caller's.
PyTree = Any
#: The key path of a leaf, as `jax.tree_util.tree_flatten_with_path` gives it.
Path = tuple[Any, ...]
#: A mesh of devices, or one of sizes and names alone.
AnyMesh = Mesh | AbstractMesh
#: One mesh axis, or several, outer first.
AxisNames = str | Sequence[str]
#: What `json.dumps` takes: numbers, strings, `None`, lists and dicts of these.
JSON = Any
#: A NumPy dtype, or one of JAX's own: of typed keys, `float0`.
DType = Any
#: What JAX takes for an array: Python numbers, too, are legal leaves.
ArrayLike = jax.typing.ArrayLike
#: The type of an argument that is returned, moved or with another manual axis type.
T = TypeVar("T", bound=ArrayLike)


class HasShape(Protocol):
    """An array, a `jax.ShapeDtypeStruct` or an `EvenSplit`."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape."""
