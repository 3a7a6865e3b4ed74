"""Shard and replica axes, the context a call runs in, and the types of values inside a manual region."""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from .layout import partition_spec

AxisNames = str | Sequence[str]


def names(axis: AxisNames | None) -> tuple[str, ...]:
    """An axis argument as a tuple of names, outer first."""
    if axis is None:
        return ()
    return (axis,) if isinstance(axis, str) or not isinstance(axis, Sequence) else tuple(axis)


def path_text(path: Any) -> str:
    """A key path as users write it: ``layers/0/w``; the root is ``(root)``."""
    return jax.tree_util.keystr(path, simple=True, separator="/") or "(root)"


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
        """The shard axes as gathers and reduce-scatters take them: one hop per axis, or one for all.

        An axis of one device joins its neighbour: the compiler keeps a collective of one device.
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
    """Whether the call stands inside a user's `shard_map` over these axes; refuses half of it."""
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


def resolve(call: str, mesh: Any, shard: tuple[str, ...], replica: tuple[str, ...], manual: bool) -> Axes:
    """The axes with their sizes: from the bound axes inside a manual region, else from the mesh."""
    if manual:
        return Axes(shard, replica, tuple(lax.axis_size(a) for a in replica + shard))
    if mesh is None:
        raise ValueError(
            f"{call}: no mesh. Found mesh=None outside a shard_map over {shard}; expected a "
            "jax.sharding.Mesh. Fix: Zero(mesh, ...) or mesh=mesh, or call it inside shard_map."
        )
    return Axes(shard, replica, tuple(mesh.shape[a] for a in replica + shard))


def for_losses(mesh: Any, axes: Axes) -> AbstractMesh:
    """The mesh of a loss that is traced outside any region: its constraints may name axes of the compiler's."""
    return AbstractMesh((), ()) if mesh is None or set(mesh.axis_names) <= set(axes.every) else all_auto(mesh)


def all_auto(mesh: Any) -> AbstractMesh:
    """The mesh, without its devices and with the types of its axes left to the compiler."""
    return AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


# --- types of values inside a manual region ------------------------------------------------------


def varying(x: Any) -> frozenset[str]:
    """The manual axes over which `x` may differ between devices."""
    return jax.typeof(x).manual_axis_type.varying


def cast(x: Any, axes: Iterable[str]) -> Any:
    """`x` typed as varying over `axes` too; sends nothing."""
    need = tuple(sorted(set(axes) - varying(x)))
    return lax.pcast(x, need, to="varying") if need else x


def match(values: Sequence[Any]) -> list[Any]:
    """All values typed as varying over the union of their axes: a primitive bound by hand needs it."""
    types = [varying(x) for x in values]
    union = frozenset().union(*types)
    return [x if t == union else cast(x, union) for x, t in zip(values, types, strict=True)]


def abstract_varying(values: Sequence[jax.ShapeDtypeStruct], axes: Axes) -> list[jax.ShapeDtypeStruct]:
    """Abstract arrays typed as varying over all axes, for a trace inside a manual region."""
    here = NamedSharding(jax.sharding.get_abstract_mesh(), PartitionSpec())
    kind = jax.typeof(cast(jnp.zeros(()), axes.every)).manual_axis_type
    return [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here, manual_axis_type=kind) for x in values]


# --- placement in the global view ----------------------------------------------------------------


def x64() -> bool:
    """Whether 64-bit types are on: a traced program depends on it."""
    return bool(jnp.arange(0).dtype == np.int64)


def is_traced(tree: Any) -> bool:
    """Whether a leaf of `tree` is being traced (under `jit`, `grad`, `vmap`, ...)."""
    return any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(tree))


Kinds = Sequence[str | None] | None


def abstract(
    mesh: Any, shapes: Sequence[tuple[Any, Any]], specs: Any, kinds: Kinds = None
) -> list[jax.ShapeDtypeStruct]:
    """Abstract arrays of the given shapes and dtypes, each placed by its spec (or all by one)."""
    specs = [specs] * len(shapes) if isinstance(specs, PartitionSpec) else specs
    kinds = [None] * len(shapes) if kinds is None else kinds
    return [
        jax.ShapeDtypeStruct(shape, dtype, sharding=written(mesh, spec, len(shape), kind))
        for (shape, dtype), spec, kind in zip(shapes, specs, kinds, strict=True)
    ]


def written(mesh: Any, spec: PartitionSpec, ndim: int, kind: str | None = None) -> NamedSharding:
    """The placement of an array by its spec, written as JAX writes those of results: one program serves both.

    Of an Explicit mesh it writes an entry for each dimension, of an Auto one no axis of a single device.
    """
    if AxisType.Explicit in mesh.axis_types:
        spec = PartitionSpec(*spec, *[None] * (ndim - len(spec)))
    else:
        spec = partition_spec([tuple(a for a in names(part) if mesh.shape[a] > 1) for part in spec])
    return NamedSharding(mesh, spec, memory_kind=kind)


def put(x: Any, target: Any) -> jax.Array:
    """`x` placed, also on devices of other processes: every process then has the same value and places its part.

    `jax.device_put` would send the whole of it to all devices, to compare.
    """
    if target.is_fully_addressable:
        return jax.device_put(x, target)
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return x if x.sharding == target else jax.jit(lambda x: x, out_shardings=target)(x)
    dtype = jnp.result_type(x)
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        data = jax.random.key_data(x)
        spec = [*target.spec, *[None] * (x.ndim - len(target.spec)), None]
        sharding = NamedSharding(target.mesh, PartitionSpec(*spec), memory_kind=target.memory_kind)
        return jax.random.wrap_key_data(put(data, sharding), impl=jax.random.key_impl(x))
    host = np.asarray(x).astype(dtype, copy=False)
    return jax.make_array_from_callback(host.shape, target, lambda index: host[index])


def place_all(
    call: str,
    mesh: Any,
    paths: Sequence[Any] | None,
    arrays: Any,
    specs: Any,
    axes: Axes,
    kinds: Kinds = None,
    *,
    planned: bool = False,
) -> list[Any]:
    """A flat list of arrays, each placed by its spec (or all by one) and in its memory kind.

    Of a program that is `planned` for a mesh elsewhere constants have no place, and stay as they are.
    """
    paths = [()] * len(arrays) if paths is None else paths
    specs = [specs] * len(arrays) if isinstance(specs, PartitionSpec) else specs
    kinds = [None] * len(arrays) if kinds is None else kinds
    rows = zip(paths, arrays, specs, kinds, strict=True)
    return [
        x if planned and not isinstance(x, jax.core.Tracer) else place(call, mesh, path, x, spec, axes.every, kind)
        for path, x, spec, kind in rows
    ]


def place(
    call: str, mesh: Any, path: Any, x: Any, spec: PartitionSpec, own: Sequence[str], kind: str | None = None
) -> Any:
    """`x` placed as `spec` on the mesh, in memory `kind`; refuses a leaf that axes beside `own` and `spec` shard.

    Concrete arrays are moved; traced ones, in their own memory, are resharded on an Explicit mesh, and on an Auto one
    by the compiler.
    """
    check_placement(call, mesh, path, x, own, spec)
    ndim = np.ndim(x)
    if not isinstance(x, jax.core.Tracer):
        check_devices(call, mesh)
        return put(x, written(mesh, spec, ndim, kind))
    here, target = jax.typeof(x).sharding, written(mesh, spec, ndim)
    if AxisType.Explicit in mesh.axis_types and (here.mesh.empty or here.spec != target.spec):
        return jax.reshard(x, target)
    return x


def is_elsewhere(mesh: Any) -> bool:
    """Whether a mesh holds no arrays: it is abstract, or of a machine that is not here (`topology`)."""
    if isinstance(mesh, AbstractMesh):
        return True
    return bool(mesh.local_devices) and not mesh.local_devices[0].addressable_memories()


def check_devices(call: str, mesh: Any) -> None:
    """Refuses a mesh that serves for plans, programs and abstract arrays alone."""
    if is_elsewhere(mesh):
        raise ValueError(
            f"{call}: the mesh of this Zero holds no arrays: it is abstract, or of a machine that is not here. Found "
            f"{mesh}; expected devices of this process. Fix: Zero(jax.make_mesh(...)), or jax.ShapeDtypeStruct leaves "
            "where plan, explain, tx.init and jit(step).lower take them."
        )


def check_placement(call: str, mesh: Any, path: Any, x: Any, own: Sequence[str], spec: PartitionSpec) -> None:
    """Refuses an array that axes beside `own` and `spec` shard: it would be made whole over them."""
    found = getattr(jax.typeof(x) if isinstance(x, jax.core.Tracer) else x, "sharding", None)
    known = {*own, *used(spec), PartitionSpec.UNCONSTRAINED}
    if isinstance(found, NamedSharding) and (others := used(found.spec) - known):
        keep = "Zero(..., param_specs=jax.tree.map(lambda x: x.sharding.spec, params)), a tree of PartitionSpecs over "
        keep = keep + "the other axes, keeps it so; or " if others <= {*mesh.axis_names} else ""
        raise ValueError(
            f"{call}: leaf {path_text(path)!r} is already sharded over other mesh axes. Found {found.spec} on a mesh "
            f"of {dict(found.mesh.shape)}; expected it whole, or sharded over {tuple(own)} only. Fix: {keep}"
            "jax.device_put it with PartitionSpec() first."
        )


def used(spec: PartitionSpec) -> set[Any]:
    """The axes that a spec names."""
    return {a for part in spec for a in names(part if part else None)}
