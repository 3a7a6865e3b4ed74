"""Boxes around parameters, as `flax.linen.Partitioned`: which mesh axes they name, and what is inside."""

import difflib
import sys
from typing import Any

import jax

from .mesh import path_text
from .options import Options


def is_box(x: Any) -> bool:
    """Whether `x` is a `flax.linen.Partitioned` or of a kind of it; Flax need not be there."""
    return hasattr(type(x), "get_partition_spec") and hasattr(type(x), "unbox")


def opened(tree: Any) -> Any:
    """The tree without its boxes, as a user's function gets it: Flax takes either.

    A box constrains its value when the model reads it, and inside a manual region JAX refuses that.
    """
    return jax.tree.map(lambda x: x.value if is_box(x) else x, tree, is_leaf=is_box)


def check(call: str, options: Options, tree: Any) -> None:
    """Refuses boxes that name an axis other than those of `options`, which say how a leaf is cut."""
    mesh = options.mesh or jax.sharding.get_abstract_mesh()
    own = options.replica_axes + options.shard_axes
    for path, x in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_box):
        for name in _axes(x) if is_box(x) else ():
            if name in own:
                continue
            found = (
                f"{call}: parameter leaf {path_text(path)!r} is a {type(x).__name__} box with names={x.names}. "
                f"Found axis {name!r}; expected"
            )
            if name in mesh.axis_names:
                raise ValueError(
                    f"{found} only the axes of this Zero, {own}: a leaf sharded over another one is tensor parallel. "
                    "Fix: None in its place, or flax.linen.unbox(params)."
                )
            near = difflib.get_close_matches(str(name), mesh.axis_names, 1)
            raise ValueError(
                f"{found} one of the mesh axes {mesh.axis_names}. Fix: "
                + (f"did you mean {near[0]!r}? " if near else "")
                + "None for a dimension that is not sharded; logical names need flax.linen.with_logical_partitioning."
            )


def _axes(box: Any) -> list[Any]:
    """The mesh axes that a box names; logical names become those that Flax's rules give them."""
    names = box.names
    if hasattr(box, "rules"):
        names = sys.modules["flax.linen"].logical_to_mesh_axes(names, box.rules)
    return [a for part in names or () for a in (part if isinstance(part, tuple) else (part,)) if a is not None]
