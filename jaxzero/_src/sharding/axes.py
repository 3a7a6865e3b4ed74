"""Shard and replica axes with their sizes, from the mesh or from the surrounding manual region."""

import dataclasses
import math
from collections.abc import Sequence

import jax
from jax import lax
from jax.sharding import AbstractMesh, AxisType

from .._types import AnyMesh, AxisNames
from .vma import varying


def names(axis: AxisNames | None) -> tuple[str, ...]:
    """An axis argument as a tuple of names, outer first."""
    if axis is None:
        return ()
    return (axis,) if isinstance(axis, str) or not isinstance(axis, Sequence) else tuple(axis)


@dataclasses.dataclass(frozen=True)
class Axes:
    """The axes that one `Zero` works over, with their sizes.

    Attributes:
      shard: Names of the axes that split the state, outer first.
      replica: Names of the axes over which the split state is repeated.
      sizes: Devices along each axis of `every`.
      hierarchical: Whether several shard axes are gathered one after the other.
    """

    shard: tuple[str, ...]
    replica: tuple[str, ...]
    sizes: tuple[int, ...]
    hierarchical: bool = True

    @property
    def n(self) -> int:
        """Number of shares."""
        return math.prod(self.sizes[len(self.replica) :])

    @property
    def r(self) -> int:
        """Number of replicas."""
        return math.prod(self.sizes[: len(self.replica)])

    @property
    def every(self) -> tuple[str, ...]:
        """All axes, the replica axes first: the batch is cut over them in this order."""
        return self.replica + self.shard

    @property
    def hops(self) -> tuple[str | tuple[str, ...], ...]:
        """The shard axes in the order of hops: one hop per axis, or one for all axes.

        An axis of one device joins its neighbour: the compiler keeps a collective of one device (jax 0.10.2 and
        0.12.0.1). That can go when an `all_gather` over an axis of size 1 is no longer in the compiled text.
        """
        joined: list[list[str]] = [[]]
        count = 1
        for axis, size in zip(self.shard, self.sizes[len(self.replica) :], strict=True):
            if self.hierarchical and count > 1 and size > 1:
                joined.append([])
                count = 1
            joined[-1].append(axis)
            count *= size
        return tuple(hop[0] if len(hop) == 1 else tuple(hop) for hop in joined)


def in_manual_region(call: str, shard: tuple[str, ...], replica: tuple[str, ...]) -> bool:
    """Whether the call stands inside a user's `shard_map` over these axes; refuses one over some of them only."""
    manual = set(jax.sharding.get_abstract_mesh().manual_axes)
    inside = manual.intersection(shard + replica)
    if inside and inside != set(shard + replica):
        missing = sorted(set(shard + replica) - inside)
        raise ValueError(
            f"{call}: called inside a shard_map that is manual over {sorted(inside)} but not over "
            f"{missing}. Expected all of {shard + replica}. Fix: add {missing} to the axis_names of "
            "that shard_map, or call it outside."
        )
    if inside and not varying(lax.axis_index(shard)).issuperset(shard):
        raise ValueError(
            f"{call}: the surrounding shard_map has check_vma=False, so local and reduced gradients "
            "cannot be told apart. Expected check_vma=True (the default). Fix: drop check_vma=False, "
            "or call it outside shard_map, where jaxzero opens the region itself."
        )
    return bool(inside)


def resolve(call: str, mesh: AnyMesh | None, shard: tuple[str, ...], replica: tuple[str, ...], manual: bool) -> Axes:
    """The axes with their sizes: from the bound axes inside a manual region, else from the mesh."""
    if manual:
        return Axes(shard, replica, tuple(lax.axis_size(a) for a in replica + shard))
    if mesh is None:
        raise ValueError(
            f"{call}: no mesh. Found mesh=None outside a shard_map over {shard}; expected a "
            "jax.sharding.Mesh. Fix: Zero(mesh, ...) or mesh=mesh, or call it inside shard_map."
        )
    return Axes(shard, replica, tuple(mesh.shape[a] for a in replica + shard))


def for_losses(mesh: AnyMesh | None, axes: Axes) -> AbstractMesh:
    """The mesh for tracing a loss outside any region: the one of the region in which its program is evaluated.

    Sharding constraints in the loss may name the other axes. A nested `shard_map` over these axes, and the inner
    programs of a scan that is differentiated again, keep the mesh under which they were traced.
    """
    if mesh is None or set(mesh.axis_names) <= set(axes.every):
        return AbstractMesh((), ())
    known = mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh  # it knows the kind of device
    return known.update_axis_types({a: AxisType.Manual if a in axes.every else AxisType.Auto for a in mesh.axis_names})


def abstract_auto(mesh: AnyMesh) -> AbstractMesh:
    """The mesh without its devices, whose kind it knows, as `jax.set_mesh` has it; all axes of type Auto."""
    known = mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh
    return known.update_axis_types(dict.fromkeys(mesh.axis_names, AxisType.Auto))


def all_auto(mesh: AnyMesh) -> AbstractMesh:
    """The mesh without its devices, all axes of type Auto."""
    return AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))
