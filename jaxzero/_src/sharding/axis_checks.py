"""Checks of a mesh and of the axes that options name."""

from .._types import AnyMesh, AxisNames
from .axes import names


def check_axes(mesh: AnyMesh | None, shard_axis: AxisNames, replica_axis: AxisNames | None) -> None:
    """Refuses axes that are no strings, occur twice, or are not in the mesh."""
    shard, replica = names(shard_axis), names(replica_axis)
    for option, axes in (("shard_axis", shard), ("replica_axis", replica)):
        for axis in axes:
            if not isinstance(axis, str) or (mesh is not None and axis not in mesh.shape):
                found = None if mesh is None else dict(mesh.shape)
                raise ValueError(
                    f"Zero: {option}={axis!r} is not an axis of the mesh. Found mesh axes {found}; "
                    f"expected one of their names. Fix: pass {option}=<name> of one of them."
                )
    if not shard:
        raise ValueError("Zero: shard_axis is empty; expected the name of a mesh axis, or a tuple of names.")
    if len(set(shard + replica)) < len(shard + replica):
        raise ValueError(
            f"Zero: shard_axis={shard_axis!r} and replica_axis={replica_axis!r} name one axis twice. "
            "Expected different axes. Fix: give the state one axis to be split over and another to "
            "be repeated over."
        )


def check_hops(mesh: AnyMesh | None, shard: tuple[str, ...], hierarchical: bool | None) -> None:
    """Refuses `hierarchical` where there are no hops, and hops that would cross the slow axis last.

    `mesh` is a mesh, an abstract one, or `None`.
    """
    if hierarchical is not None and not isinstance(hierarchical, bool):
        raise ValueError(
            f"Zero: hierarchical={hierarchical!r}. Expected True, False, or None for True where shard_axis is a "
            "tuple. Fix: drop it."
        )
    if hierarchical and len(shard) < 2:
        raise ValueError(
            f"Zero: hierarchical=True with shard_axis={shard[0]!r}. Found one shard axis, over which there is one "
            "collective; expected a tuple of axes, outer first. Fix: shard_axis=('node', 'local') on a mesh with "
            "these axes, or drop hierarchical."
        )
    order = tuple(a for a in getattr(mesh, "axis_names", ()) if a in shard)
    if hierarchical is not False and len(order) == len(shard) and order != shard:
        raise ValueError(
            f"Zero: hierarchical={hierarchical!r} with shard_axis={shard!r}. Found mesh axes in the order {order}; "
            "expected the same order, outer first: the first hop must be the one between nodes, or more bytes cross "
            f"there than in one flat collective. Fix: shard_axis={order!r}, or hierarchical=False, which is right in "
            "any order."
        )


def check_types(call: str, mesh: AnyMesh) -> None:
    """Refuses a mesh with Auto and Explicit axes: no call places an array over both."""
    types = {name: kind.name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)}
    if len({*types.values()}) > 1:
        raise ValueError(
            f"{call}: the axes of the mesh are of different types. Found {types}; expected all Auto or all Explicit. "
            f"Fix: jax.make_mesh(sizes, names, axis_types=(jax.sharding.AxisType.Auto,) * {len(types)}), or call it in "
            "a shard_map of yours."
        )
