"""A transformation that only reduces gradients: what follows it outside the wrapper sees the mean, whole."""

from typing import Any

import jax
import optax

from .._positions import replace_at
from .._text import path_text
from .._types import PyTree
from ..comm import placement, reduce
from ..sharding.axes import Axes
from ..sharding.layout import is_split
from ..sharding.leaves import Leaf, shape_dtype
from ..sharding.options import Options, param_leaves, resolve_axes
from . import checks

CALL = "reduce_gradients"


def transformation(options: Options) -> optax.GradientTransformationExtraArgs:
    """See `jaxzero.reduce_gradients`."""

    def update(grads: PyTree, state: PyTree, params: PyTree = None, **_: Any) -> tuple[PyTree, PyTree]:
        axes, manual = resolve_axes(options, CALL)
        if not manual:
            return placement.gather(options, grads), state
        return _mean(options, axes, grads, params), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


def _mean(options: Options, axes: Axes, grads: PyTree, params: PyTree) -> PyTree:
    """Inside a user's `shard_map`: the mean over devices of each device's own whole gradients."""
    if params is None:
        raise ValueError(
            f"{CALL}: update was called without params. Expected the parameters, which show that gradients are whole. "
            "Fix: tx.update(grads, state, params)."
        )
    checks.same_leaves(CALL, grads, params)
    by_path = {leaf.path: leaf for leaf in param_leaves(options, params, axes.n).leaves}
    given = param_leaves(options, grads, axes.n)
    arrays = jax.tree.leaves(grads, is_leaf=is_split)
    for leaf, x in zip(given.leaves, arrays, strict=True):
        _own_whole(by_path.get(leaf.path, leaf), x, axes)
    moved = [i for i, leaf in enumerate(given.leaves) if leaf.trainable and not leaf.overwritten]
    other_axes = [given.leaves[i].other_axes for i in moved]
    means = reduce.mean_whole([arrays[i] for i in moved], other_axes, axes, options)
    last = [i for i, leaf in enumerate(given.leaves) if leaf.overwritten]
    arrays = replace_at(arrays, last, reduce.overwrite_all([arrays[i] for i in last], axes))
    return given.unflatten(replace_at(arrays, moved, means))


def _own_whole(param: Leaf, x: Any, axes: Axes) -> None:
    """Refuses a gradient that is a share, or that is reduced already."""
    shape = shape_dtype(x)[0]
    if is_split(x) or shape != param.shape:
        raise ValueError(
            f"{CALL}: gradient leaf {path_text(param.path)!r} is {'an EvenSplit' if is_split(x) else shape}; expected "
            f"this device's own gradient of the parameter's shape {param.shape}. A share, as zero.value_and_grad gives "
            "it, is reduced already and does not show the whole gradient. Fix: take jax.grad of the loss here; or put "
            "the transformation that needs whole gradients inside zero.optimizer."
        )
    if param.trainable:
        checks.own(CALL, param, x, axes)
