"""Checks of a tree of parameters; errors name the leaf and the fix."""

import jax
from jax.sharding import NamedSharding

from .._text import path_text
from .._types import PyTree
from .flax_boxes import check_boxes
from .layout import is_split, partition_spec
from .options import Options, other_axes
from .place import check_placement


def check_arrays(call: str, params: PyTree) -> None:
    """Refuses leaves that are no arrays."""
    for path, x in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_split):
        if not hasattr(x, "dtype") and not isinstance(x, (bool, int, float, complex)):
            raise ValueError(
                f"{call}: parameter leaf {path_text(path)!r} is a {type(x).__name__}. Expected an array or a number. "
                "Fix: keep it out of the parameters; of an Equinox module take eqx.partition(module, "
                "eqx.is_inexact_array)[0] and combine inside the loss."
            )


def check_params(call: str, options: Options, params: PyTree) -> None:
    """Refuses leaves that are no arrays, and leaves sharded over axes that are not this `Zero`'s, or in such boxes.

    At stages 1 and 2 these would be made whole over the other axes silently.
    """
    check_arrays(call, params)
    check_boxes(call, options, params)
    own = options.replica_axes + options.shard_axes
    for path, x in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_split):
        seen = not isinstance(x, jax.core.Tracer) and isinstance(getattr(x, "sharding", None), NamedSharding)
        if seen and options.mesh is not None:
            check_placement(call, options.mesh, path, x, own, partition_spec(other_axes(options, path, x)))
