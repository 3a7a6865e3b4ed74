"""The types that signatures share."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

#: Arrays and `EvenSplit`s in containers that JAX has registered; what is in it only the caller knows.
PyTree = Any
#: The key path of a leaf, as `jax.tree_util.tree_flatten_with_path` gives it.
Path = tuple[Any, ...]
#: A mesh of devices, or one of sizes and names alone.
AnyMesh = Mesh | AbstractMesh
#: One mesh axis, or several, outer first.
AxisNames = str | Sequence[str]
#: What JAX takes for an array: Python numbers, too, are legal leaves.
ArrayLike = jax.typing.ArrayLike
