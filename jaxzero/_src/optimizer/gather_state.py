"""Optimizer state, or any tree like the parameters, at logical shapes: replicated over the mesh or on the host."""

import jax
import numpy as np
import optax

from .._text import path_text
from .._types import ArrayLike, Path, PyTree
from ..comm import placement
from ..sharding.axes import Axes, names
from ..sharding.layout import Layout, is_split
from ..sharding.leaves import Leaf, Leaves, shape_dtype, state_leaves, unwrap
from ..sharding.options import Options, resolve_axes
from .trace import logical_state
from .wrapper import ShardedOptimizer, optimizer_leaves


def gather_state(
    options: Options, tree: PyTree, params: PyTree, tx: optax.GradientTransformation | None, host: bool
) -> PyTree:
    """See `Zero.gather`.

    Args:
      options: The options.
      tree: State of `tx.init`, or a part of it that is like the parameters.
      params: The parameters, whole, split or abstract.
      tx: The optimizer, wrapped or not, which knows the shape of every leaf; `None`: shapes are those of `params`.
      host: Whether NumPy arrays are returned.

    Returns:
      The tree, each leaf at its logical shape.

    Raises:
      ValueError: Inside `shard_map`, and for a leaf that may be padded and is not stored like its parameter.
    """
    placement.outside(options, "gather")
    axes, _ = resolve_axes(options, "gather")
    leaves, _ = optimizer_leaves(options, "gather", params, axes)
    pairs = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_split)
    layouts = _by_params(pairs, leaves, axes) if tx is None else _by_optimizer(tree, leaves, tx, axes)
    get = _on_host if host else placement.gather_array
    out = [get(options, axes, path, unwrap(x), layout) for (path, x), layout in zip(pairs, layouts, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(tree, is_leaf=is_split), out)


def _by_optimizer(tree: PyTree, params: Leaves, tx: optax.GradientTransformation, axes: Axes) -> list[Layout | None]:
    """The layouts of all state of one optimizer, as its `init` makes it."""
    inner = tx.calls.inner if isinstance(tx, ShardedOptimizer) and tx.calls else tx
    return [leaf.layout for leaf in state_leaves(logical_state(inner, params, tree, axes), params.leaves, axes.n)]


def _by_params(pairs: list[tuple[Path, PyTree]], params: Leaves, axes: Axes) -> list[Layout | None]:
    """The layouts of leaves that are stored like the parameter whose path ends theirs; `None` for others."""
    by_path = {leaf.path: leaf for leaf in params.leaves}
    out = []
    for path, x in pairs:
        shape, _ = shape_dtype(unwrap(x))
        ends = (by_path.get(path[start:]) for start in range(len(path) + 1))
        mine = next((leaf for leaf in ends if leaf is not None and _stored(leaf) == shape), None)
        if mine is None and (is_split(x) or _may_be_padded(unwrap(x), axes)):
            raise ValueError(
                f"gather: leaf {path_text(path)!r} of stored shape {shape} is not stored like a parameter of "
                "like=, so its logical shape is not known. Expected state of these parameters, or the optimizer, "
                "which knows it. Fix: zero.gather(state, like=params, optimizer=tx) with the whole state."
            )
        out.append(None if mine is None else mine.layout)
    return out


def _stored(leaf: Leaf) -> tuple[int, ...]:
    return leaf.layout.stored_shape if leaf.layout else leaf.shape


def _may_be_padded(x: ArrayLike, axes: Axes) -> bool:
    """Whether an array of no parameter may be flat and padded: a vector that is split, or may be."""
    if np.ndim(x) != 1 or axes.n == 1 or np.shape(x)[0] % axes.n:
        return False
    spec = getattr(getattr(x, "sharding", None), "spec", None)
    if isinstance(x, jax.core.Tracer) or spec is None:
        return np.shape(x)[0] > axes.n
    return any(a in axes.shard for part in spec for a in names(part if part else None))


def _on_host(options: Options, axes: Axes, path: Path, x: ArrayLike, layout: Layout | None) -> np.ndarray:
    """One leaf as a NumPy array; where all of it is in this process, no device holds it whole."""
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return np.asarray(placement.gather_array(options, axes, path, x, layout))
    stored = np.asarray(x)
    if layout is None or layout.plain:
        return stored
    if layout.kind == "rows":
        return stored[(*[slice(None)] * layout.lead, slice(layout.shape[layout.lead]))]
    inner = int(np.prod(layout.shape[layout.lead :], dtype=object))
    return stored[..., :inner].reshape(layout.shape)
