"""Which leaves of optimizer state belong to parameters that pass through: they never change.

The structure that `inner.init` makes decides, not a name: `count` is a leaf of Adam's own and may be one of the
parameters too. So `init` is traced a second time, each parameter that passes through replaced by a node without
leaves. Where the state holds such a node, it holds a leaf of that parameter otherwise.
"""

import itertools
from collections.abc import Sequence

import jax
import optax

from .._types import Path, PyTree
from ..jaxpr.trace import trace
from ..sharding.axes import Axes
from ..sharding.leaves import Leaf, Leaves


@jax.tree_util.register_pytree_node_class
class _PassesThrough:
    """Stands for a parameter that passes through, in the tree from which `init` makes the state."""

    def tree_flatten(self) -> tuple[tuple[()], None]:
        """No leaves."""
        return (), None

    @classmethod
    def tree_unflatten(cls, aux: None, children: Sequence[PyTree]) -> "_PassesThrough":
        """The inverse of `tree_flatten`."""
        return cls()


def frozen_paths(
    inner: optax.GradientTransformation, params: Leaves, initial: PyTree, state: PyTree, axes: Axes
) -> frozenset[Path]:
    """The key paths of the leaves of `state` that belong to parameters that pass through.

    Args:
      inner: The optimizer.
      params: The parameters.
      initial: What `inner.init` makes of them, abstract.
      state: The same, or what it became where `update` adds leaves.
      axes: The mesh axes, whose names are bound in the trace.

    Returns:
      Their key paths; none where every parameter is trained.
    """
    if all(leaf.trainable for leaf in params.leaves):
        return frozenset()
    structural = _by_structure(inner, params, initial, axes)
    pairs = jax.tree_util.tree_leaves_with_path(state)
    paths = {path for path, _ in pairs}
    if structural is None:
        return frozenset(path for path in paths if _mirrors(path, paths, params.leaves))
    known = {path for path, _ in jax.tree_util.tree_leaves_with_path(initial)}
    grown = (path for path in paths - known if _mirrors(path, paths, params.leaves))
    return structural.intersection(paths).union(grown)


def _by_structure(
    inner: optax.GradientTransformation, params: Leaves, initial: PyTree, axes: Axes
) -> frozenset[Path] | None:
    """The same for the state that `init` makes; `None`: `init` refuses the tree without these parameters."""
    trained = [leaf.trace_aval() for leaf in params.leaves if leaf.trainable]

    def init(arrays: Sequence[jax.Array]) -> PyTree:
        left = iter(arrays)
        tree = [next(left) if leaf.trainable else _PassesThrough() for leaf in params.leaves]
        return inner.init(params.unflatten(tree))

    stands_for = lambda x: isinstance(x, _PassesThrough)
    try:
        marked = trace(init, trained, axis_env=zip(axes.every, axes.sizes, strict=True)).out
        counts: list[tuple[bool, int]] = []  # for each leaf of `marked`: is it a mark, and its leaves in `initial`
        count = lambda mark, part: counts.append((stands_for(mark), len(jax.tree.leaves(part))))
        jax.tree.map(count, marked, initial, is_leaf=stands_for)
    except Exception:  # noqa: BLE001 - a user's `init` may raise anything for a tree without some of its arrays
        return None
    paths = iter(path for path, _ in jax.tree_util.tree_leaves_with_path(initial))
    return frozenset(path for mark, many in counts for path in itertools.islice(paths, many) if mark)


def _mirrors(path: Path, paths: set[Path], params: Sequence[Leaf]) -> bool:
    """Whether a leaf of state is part of a tree like the parameters, at a parameter that passes through.

    The longest end of its path that is a parameter's counts, and beside it there must be a leaf of another one.
    """
    by_path = {leaf.path: leaf for leaf in params}
    for start in range(len(path) + 1):
        mine = by_path.get(path[start:])
        if mine is not None:
            others = (leaf.path for leaf in params if leaf.path != mine.path)
            return not mine.trainable and any(path[:start] + other in paths for other in others)
    return False
