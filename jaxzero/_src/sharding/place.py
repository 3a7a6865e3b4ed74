"""Placing arrays on the mesh in the global view, and checking where they are."""

from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec, Sharding

from .._text import path_text
from .._types import AnyMesh, ArrayLike, DType, Path, PyTree
from .axes import Axes, names
from .layout import Shape, partition_spec


def is_traced(tree: PyTree) -> bool:
    """Whether a leaf of `tree` is being traced (under `jit`, `grad`, `vmap`, ...)."""
    return any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(tree))


#: A memory kind for each array; `None`: the device's memory for all.
Kinds = Sequence[str | None] | None
#: A spec for each array, or one for all.
Specs = Sequence[PartitionSpec] | PartitionSpec


def abstract(
    mesh: AnyMesh, shapes: Sequence[tuple[Shape, DType]], specs: Specs, kinds: Kinds = None
) -> list[jax.ShapeDtypeStruct]:
    """Abstract arrays of the given shapes and dtypes, each placed by its spec (or all by one)."""
    specs = [specs] * len(shapes) if isinstance(specs, PartitionSpec) else specs
    kinds = [None] * len(shapes) if kinds is None else kinds
    return [
        jax.ShapeDtypeStruct(shape, dtype, sharding=named_sharding(mesh, spec, len(shape), kind))
        for (shape, dtype), spec, kind in zip(shapes, specs, kinds, strict=True)
    ]


def named_sharding(mesh: AnyMesh, spec: PartitionSpec, ndim: int, kind: str | None = None) -> NamedSharding:
    """The sharding of an array of `ndim` dimensions, equal to the one that JAX gives to results with this spec.

    So arguments and results have equal shardings and one compiled program serves both. On an Explicit mesh the spec
    has an entry for each dimension; on an Auto mesh it names no axis of a single device.
    """
    if AxisType.Explicit in mesh.axis_types:
        spec = PartitionSpec(*spec, *[None] * (ndim - len(spec)))
    else:
        spec = partition_spec([tuple(a for a in names(part) if mesh.shape[a] > 1) for part in spec])
    return NamedSharding(mesh, spec, memory_kind=kind)


def put(x: ArrayLike, target: Sharding) -> jax.Array:
    """`x` placed as `target`. Over several processes each places its part; all must have the same value.

    `jax.device_put` sends all of `x` to every process to compare the values (seen with jax 0.10.2). It can do when
    a `device_put` of a NumPy array onto devices of two processes compiles no collective.
    """
    if target.is_fully_addressable:
        return jax.device_put(x, target)
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return x if x.sharding == target else jax.jit(lambda x: x, out_shardings=target)(x)
    assert isinstance(target, NamedSharding)
    dtype = jnp.result_type(x)
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        data = jax.random.key_data(x)
        spec = [*target.spec, *[None] * (data.ndim - len(target.spec))]
        sharding = NamedSharding(target.mesh, PartitionSpec(*spec), memory_kind=target.memory_kind)
        return jax.random.wrap_key_data(put(data, sharding), impl=jax.random.key_impl(x))
    host = np.asarray(x).astype(dtype, copy=False)
    return jax.make_array_from_callback(host.shape, target, lambda index: host[index])


def place_all(
    call: str,
    mesh: AnyMesh,
    paths: Sequence[Path] | None,
    arrays: Sequence[ArrayLike],
    specs: Specs,
    axes: Axes,
    kinds: Kinds = None,
) -> list[jax.Array]:
    """A flat list of arrays, each placed by its spec (or all by one) and in its memory kind."""
    rows = _rows(paths, arrays, specs, kinds)
    return [place(call, mesh, path, x, spec, axes.every, kind) for path, x, spec, kind in rows]


def place_traced(
    call: str,
    mesh: AnyMesh,
    paths: Sequence[Path] | None,
    arrays: Sequence[ArrayLike],
    specs: Specs,
    axes: Axes,
    kinds: Kinds = None,
) -> list[ArrayLike]:
    """As `place_all` for the traced arrays; constants are kept as they are, for a mesh that can hold no arrays."""
    return [
        place(call, mesh, path, x, spec, axes.every, kind) if isinstance(x, jax.core.Tracer) else x
        for path, x, spec, kind in _rows(paths, arrays, specs, kinds)
    ]


def _rows(
    paths: Sequence[Path] | None, arrays: Sequence[ArrayLike], specs: Specs, kinds: Kinds
) -> Iterator[tuple[Path, ArrayLike, PartitionSpec, str | None]]:
    """Path, array, spec and memory kind of each array."""
    return zip(
        [()] * len(arrays) if paths is None else paths,
        arrays,
        [specs] * len(arrays) if isinstance(specs, PartitionSpec) else specs,
        [None] * len(arrays) if kinds is None else kinds,
        strict=True,
    )


def place(
    call: str,
    mesh: AnyMesh,
    path: Path,
    x: ArrayLike,
    spec: PartitionSpec,
    own: Sequence[str],
    kind: str | None = None,
) -> jax.Array:
    """`x` placed as `spec` on the mesh, in memory `kind`; refuses a leaf that axes beside `own` and `spec` shard.

    Concrete arrays are moved. Traced ones stay in their memory kind; they are resharded here on an Explicit mesh, by
    the compiler on an Auto one.
    """
    check_placement(call, mesh, path, x, own, spec)
    ndim = np.ndim(x)
    if not isinstance(x, jax.core.Tracer):
        check_devices(call, mesh)
        return put(x, named_sharding(mesh, spec, ndim, kind))
    here, target = jax.typeof(x).sharding, named_sharding(mesh, spec, ndim)
    if AxisType.Explicit in mesh.axis_types and (here.mesh.empty or here.spec != target.spec):
        return jax.reshard(x, target)
    return x


def is_elsewhere(mesh: AnyMesh) -> bool:
    """Whether a mesh can hold no arrays: it is abstract, or of a machine that is not here (`topology`)."""
    if isinstance(mesh, AbstractMesh):
        return True
    return bool(mesh.local_devices) and not mesh.local_devices[0].addressable_memories()


def check_devices(call: str, mesh: AnyMesh) -> None:
    """Refuses a mesh that can hold no arrays."""
    if is_elsewhere(mesh):
        raise ValueError(
            f"{call}: the mesh of this Zero holds no arrays: it is abstract, or of a machine that is not here. Found "
            f"{mesh}; expected devices of this process. Fix: Zero(jax.make_mesh(...)), or jax.ShapeDtypeStruct leaves "
            "where plan, explain, tx.init and jit(step).lower take them."
        )


def check_placement(
    call: str, mesh: AnyMesh, path: Path, x: ArrayLike, own: Sequence[str], spec: PartitionSpec
) -> None:
    """Refuses an array that axes other than those of `own` and `spec` shard: it would be made whole over them."""
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


def used(spec: PartitionSpec) -> set[str]:
    """The axes that a spec names."""
    return {a for part in spec for a in names(part if part else None)}
