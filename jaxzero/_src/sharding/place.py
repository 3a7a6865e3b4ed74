"""Putting arrays in their place in the global view, and checking the place that they have."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from .._text import path_text
from .axes import Axes, names
from .layout import partition_spec


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
