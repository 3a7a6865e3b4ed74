"""Boxes around parameters, as `flax.linen.Partitioned` and `flax.nnx.Param`: which mesh axes they name."""

import difflib
import sys
from collections.abc import Iterator
from typing import Any

import jax

from .._text import path_text
from .._types import Path, PyTree
from .layout import is_split
from .options import Options, other_axes


def is_box(x: object) -> bool:
    """Whether `x` is a `flax.linen.Partitioned` or of a subclass; Flax need not be installed."""
    return hasattr(type(x), "get_partition_spec") and hasattr(type(x), "unbox")


def opened(tree: PyTree) -> PyTree:
    """The tree without its boxes, as it is passed to a user's function; Flax models take both forms.

    A box adds a sharding constraint when the model reads its value, and JAX refuses that inside a manual region.
    """
    return jax.tree.map(lambda x: x.value if is_box(x) else x, tree, is_leaf=is_box)


def check_boxes(call: str, options: Options, tree: PyTree) -> None:
    """Refuses boxes that name an axis other than those of `options`, which determine how a leaf is cut.

    For an `nnx.Variable` only axes of the mesh are checked: Flax itself refuses others, or reads them as logical names.
    """
    mesh = options.mesh or jax.sharding.get_abstract_mesh()
    own = options.replica_axes + options.shard_axes
    for path, x in jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_annotated):
        box = is_box(x)
        for name in _axes(x):
            if name in own or not box and name not in mesh.axis_names or name in _kept(options, path, x):
                continue
            where = f"box with names={x.names}" if box else f"with out_sharding={x.get_metadata('out_sharding')}"
            found = f"{call}: parameter leaf {path_text(path)!r} is a {type(x).__name__} {where}. Found axis {name!r}; "
            if name in mesh.axis_names:
                raise ValueError(
                    f"{found}expected only the axes of this Zero, {own}, and those of its param_specs: a leaf sharded "
                    "over another one is tensor parallel. Fix: Zero(..., param_specs=flax."
                    f"{'linen' if box else 'nnx'}.get_partition_spec(params)) keeps it so; or None in its place."
                )
            near = difflib.get_close_matches(str(name), mesh.axis_names, 1)
            raise ValueError(
                f"{found}expected one of the mesh axes {mesh.axis_names}. Fix: "
                + (f"did you mean {near[0]!r}? " if near else "")
                + "None for a dimension that is not sharded; logical names need flax.linen.with_logical_partitioning."
            )


def _is_annotated(x: object) -> bool:
    return is_box(x) or _is_variable(x)


def _is_variable(x: object) -> bool:
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(x, nnx.Variable)


def _axes(x: Any) -> list[str]:
    """The mesh axes that a box names; logical names are replaced as Flax's rules say."""
    if _is_variable(x):
        parts = sys.modules["flax.nnx"].get_partition_spec(x).get_value()
    else:
        parts = x.names if is_box(x) else ()
        if hasattr(x, "rules"):
            parts = sys.modules["flax.linen"].logical_to_mesh_axes(parts, x.rules)
    return [a for part in parts or () for a in (part if isinstance(part, tuple) else (part,)) if a is not None]


def _kept(options: Options, path: Path, box: PyTree) -> Iterator[str]:
    """The other mesh axes that `param_specs` names for the leaves in a box."""
    for inner, leaf in jax.tree_util.tree_leaves_with_path(box, is_leaf=is_split):
        yield from (a for part in other_axes(options, (*path, *inner), leaf) for a in part)
