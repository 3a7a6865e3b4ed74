"""What is refused of a tree of parameters, by leaf path, with the fix."""

from typing import Any

import jax
from jax.sharding import NamedSharding

from .._text import path_text
from . import flax_boxes
from .layout import is_split, partition_spec
from .options import Options, other_axes
from .place import check_placement


def arrays(call: str, params: Any) -> None:
    """Refuses leaves that are no arrays."""
    for path, x in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_split):
        if not hasattr(x, "dtype") and not isinstance(x, (bool, int, float, complex)):
            raise ValueError(
                f"{call}: parameter leaf {path_text(path)!r} is a {type(x).__name__}. Expected an array or a number. "
                "Fix: keep it out of the parameters; of an Equinox module take eqx.partition(module, "
                "eqx.is_inexact_array)[0] and combine inside the loss."
            )


def parameters(call: str, options: Options, params: Any) -> None:
    """Refuses leaves that are no arrays, and those that axes shard, or boxes name, which are not this `Zero`'s.

    At stages 1 and 2 these would be made whole over the other axes, without a word.
    """
    arrays(call, params)
    flax_boxes.check(call, options, params)
    own = options.replica_axes + options.shard_axes
    for path, x in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_split):
        seen = not isinstance(x, jax.core.Tracer) and isinstance(getattr(x, "sharding", None), NamedSharding)
        if seen and options.mesh is not None:
            check_placement(call, options.mesh, path, x, own, partition_spec(other_axes(options, path, x)))
