"""Layouts of the leaves of a tree: parameters, gradients and optimizer state.

A state leaf has the layout of the parameter whose key path is a suffix of its own and whose shape is
equal; any other leaf has the default for its shape. So the layout is a pure function of key paths,
shapes, the number of shares and the options.
"""

import dataclasses
from collections.abc import Callable, Collection, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from .._dtypes import promotes
from .._text import path_text
from .._types import DType, HasShape, Path, PyTree
from .layout import EvenSplit, Layout, OtherAxes, Shape, default_split, even_split, is_split, partition_spec
from .overwritten import in_flax_collection


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One leaf of a tree of parameters or gradients.

    Attributes:
      path: Its key path.
      shape: Its logical shape.
      dtype: Its dtype.
      layout: How it is cut; `None`: it is whole.
      skipped: Whether it stays as it is although it could be trained (`unused="skip"`).
      other_axes: The other mesh axes that shard each dimension, cut or not; empty where none does.
      layers: How many leading dimensions count layers, inside each of which it is cut.
      overwritten: Whether its gradient is its next value; it is whole.
    """

    path: Path
    shape: Shape
    dtype: DType
    layout: Layout | None
    skipped: bool = False
    other_axes: OtherAxes = ()
    layers: int = 0
    overwritten: bool = False

    @property
    def cut(self) -> Layout:
        """The layout of a leaf that has one."""
        assert self.layout is not None
        return self.layout

    @property
    def trainable(self) -> bool:
        """Integer, bool, key, empty and skipped leaves pass through."""
        return not self.skipped and bool(jnp.issubdtype(self.dtype, jnp.inexact)) and 0 not in self.shape

    def spec(self, axes: tuple[str, ...] | None) -> PartitionSpec:
        """Its `PartitionSpec` when `axes` split it; `None`: when nothing does."""
        return spec_of(None if axes is None else self.layout, self.other_axes, axes)

    def trace_aval(self) -> jax.ShapeDtypeStruct:
        """The abstract array with which the inner optimizer is traced.

        As the leaf is, or int32 for what has no arithmetic with floats: a key, a bool, an integer below 8 bits.
        """
        integer = not jnp.issubdtype(self.dtype, jnp.inexact)
        plain = not (self.dtype == np.bool_ or is_key(self.dtype) or (integer and not promotes(self.dtype)))
        return jax.ShapeDtypeStruct(self.shape, self.dtype if plain else np.int32)


def spec_of(layout: Layout | None, other_axes: OtherAxes, axes: tuple[str, ...] | None) -> PartitionSpec:
    """The `PartitionSpec` of an array with this layout over `axes` (`None`: not split) and over other axes."""
    return partition_spec(other_axes) if layout is None or axes is None else layout.spec(axes)


def is_key(dtype: DType) -> bool:
    """Whether a dtype is that of typed PRNG keys."""
    return bool(jnp.issubdtype(dtype, jax.dtypes.prng_key))


def shape_dtype(x: PyTree) -> tuple[Shape, DType]:
    """Logical shape and dtype of a leaf in JAX; Python numbers and 64-bit NumPy arrays are legal leaves."""
    dtype = getattr(x, "dtype", None)
    if dtype is None or isinstance(x, (np.ndarray, np.generic)) and dtype != jax.dtypes.float0:
        dtype = jnp.result_type(x)
    return tuple(np.shape(x) if not hasattr(x, "shape") else x.shape), dtype


@dataclasses.dataclass(frozen=True)
class Leaves:
    """A tree of parameters or gradients, without its arrays.

    Attributes:
      leaves: In tree order; an `EvenSplit` is one leaf.
      tree: The structure of the plain tree.
    """

    leaves: tuple[Leaf, ...]
    tree: jax.tree_util.PyTreeDef

    def trace_avals(self) -> list[jax.ShapeDtypeStruct]:
        """Abstract arrays at logical shapes, for tracing."""
        return [leaf.trace_aval() for leaf in self.leaves]

    def unflatten(self, arrays: Sequence[PyTree]) -> PyTree:
        """A plain tree of `arrays`."""
        return jax.tree.unflatten(self.tree, arrays)


def leading(stacked: Callable[[Path], int] | None, path: Path) -> int:
    """How many leading dimensions of a leaf count layers; True from a predicate counts as 1."""
    return 0 if stacked is None else int(stacked(path))


def leaves_of(
    tree: PyTree,
    n: int,
    stacked: Callable[[Path], int] | None,
    other_axes: Callable[[Path, HasShape], OtherAxes] | None = None,
    *,
    shares: bool = False,
    overwrite: Callable[[Path], bool] = in_flax_collection,
) -> Leaves:
    """The leaves of a tree of parameters or gradients, whole or split.

    Args:
      tree: The tree.
      n: The number of shares.
      stacked: The leaves whose leading axis counts layers.
      other_axes: A function of path and abstract leaf: the other mesh axes that shard each dimension.
      shares: Whether plain arrays are this device's rows of parameters at rest (stage 3, inside a
        user's `shard_map`): then the logical shape is `n` times as long.
      overwrite: The leaves whose gradient is their next value.

    Returns:
      The leaves, at logical shapes.
    """
    out = []
    pairs, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_split)
    for path, x in pairs:
        shape, dtype = shape_dtype(x)
        others = other_axes(path, jax.ShapeDtypeStruct(shape, dtype)) if other_axes else ()
        leaf = Leaf(path, shape, dtype, None, other_axes=others)
        if leaf.trainable and overwrite(path):
            leaf = dataclasses.replace(leaf, overwritten=True)
        elif leaf.trainable:
            lead = leading(stacked, path)
            if shares and not is_split(x) and (cut := even_split(shape, 1, lead, other_axes=others)):
                shape = (*shape[: cut.lead], shape[cut.lead] * n, *shape[cut.lead + 1 :])
            layout = even_split(shape, n, lead, path_text(path), others)
            leaf = Leaf(path, shape, dtype, layout, other_axes=others, layers=lead if layout else 0)
        out.append(leaf)
    return Leaves(tuple(out), structure)


def skipping(leaves: Leaves, paths: Sequence[Path]) -> Leaves:
    """The leaves, those at `paths` and those that no optimizer updates marked as skipped."""
    known = set(paths)
    marked = (dataclasses.replace(leaf, skipped=leaf.overwritten or leaf.path in known) for leaf in leaves.leaves)
    return Leaves(tuple(marked), leaves.tree)


def owner(path: Path, shape: Shape | None, by_path: dict[Path, Leaf]) -> Leaf | None:
    """The parameter that a leaf elsewhere belongs to: the longest suffix of its path that is one."""
    for start in range(len(path) + 1):
        leaf = by_path.get(path[start:])
        if leaf is not None and (shape is None or leaf.shape == shape):
            return leaf
    return None


@dataclasses.dataclass(frozen=True)
class StateLeaf:
    """One leaf of optimizer state.

    Attributes:
      path: Its key path.
      shape: Its logical shape.
      dtype: Its dtype.
      layout: How it is cut; `None`: it is whole.
      frozen: Whether it belongs to a parameter that passes through (`optimizer/ownership.py`): it never changes.
      other_axes: The other mesh axes that shard the parameter that it belongs to.
      owner: The key path of the parameter like which it is cut, or its own.
    """

    path: Path
    shape: Shape
    dtype: DType
    layout: Layout | None
    frozen: bool
    other_axes: OtherAxes = ()
    owner: Path = ()

    @property
    def stored_shape(self) -> Shape:
        """The shape of the global array."""
        return self.layout.stored_shape if self.layout else self.shape

    def spec(self, axes: tuple[str, ...]) -> PartitionSpec:
        """Its `PartitionSpec` when `axes` split it."""
        return spec_of(self.layout, self.other_axes, axes)


def state_leaves(
    state: PyTree, params: Sequence[Leaf], n: int, frozen: Collection[Path] = frozenset()
) -> list[StateLeaf]:
    """The leaves of abstract optimizer state at logical shapes, as `inner.init` gives it.

    Args:
      state: The state.
      params: The leaves of the parameters. One whose path ends another's is a good guess of how to cut it; numbers do
        not depend on it.
      n: The number of shares.
      frozen: The paths of leaves that never change.

    Returns:
      The leaves, in tree order.
    """
    by_path = {leaf.path: leaf for leaf in params}
    out = []
    for path, x in jax.tree_util.tree_leaves_with_path(state):
        leaf, layout = owner(path, x.shape, by_path), None
        if leaf is not None:
            layout = leaf.layout
        elif jnp.issubdtype(x.dtype, jnp.inexact):
            layout = default_split(x.shape, n)
        mine = (path, ()) if leaf is None else (leaf.path, leaf.other_axes)
        out.append(StateLeaf(path, x.shape, x.dtype, layout, path in frozen, mine[1], mine[0]))
    return out


def wrap_padded(x: PyTree, layout: Layout | None) -> PyTree:
    """A stored parameter or gradient as users get it: a padded one in an `EvenSplit`."""
    return x if layout is None or layout.plain else EvenSplit(x, layout.shape)


def unwrap(x: PyTree) -> PyTree:
    """The inverse of `wrap_padded`."""
    return x.value if is_split(x) else x
