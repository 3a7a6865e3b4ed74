"""Manual regions: over the axes of a `Zero`, and nested ones over the axes beside them that shard a leaf too.

In a region of the library all other mesh axes stay with the compiler, which carries a leaf's placement over
them through elementwise and matrix equations. Collectives and slices by device number it cannot: it would make the
leaf whole over the other axes first. So each of those runs in a nested region, manual over these axes too.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from .axes import Axes, names
from .layout import OtherAxes, partition_spec
from .vma import varying


def open_region(
    mesh: Any, axes: Axes, f: Callable[..., Any], in_specs: Any, out_specs: Any, *, told: bool = True, **options: Any
) -> Any:
    """`shard_map` over the library's axes, with the type check on unless asked: replicas provably agree.

    Explicit axes beside them are Auto inside: their types would follow every slice.

    Args:
      mesh: The mesh.
      axes: The axes over which the region is manual.
      f: What runs in it.
      in_specs: Specs of the arguments, over all axes of the mesh.
      out_specs: Specs of the results.
      told: Whether the compiler is told what they say of other axes; else it places results over these.
      **options: Of `jax.shard_map`.

    Returns:
      `f` of global arrays, to be called while tracing.
    """
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    explicit = tuple(a for a, t in types.items() if t == AxisType.Explicit and a not in axes.every)
    inside = _with_types(mesh, {**types, **dict.fromkeys(explicit, AxisType.Auto)}) if explicit else mesh
    own = lambda specs: jax.tree.map(lambda spec: only(spec, axes.every), specs, is_leaf=_is_spec)

    def run(*args: Any) -> Any:
        keywords = dict(in_specs=own(in_specs), out_specs=own(out_specs), axis_names={*axes.every})
        return jax.shard_map(f, mesh=inside, **keywords, **options)(*args)

    def run_told(*args: Any) -> Any:
        tell = lambda spec, x: lax.with_sharding_constraint(x, NamedSharding(mesh, spec))
        return jax.tree.map(tell, out_specs, run(*args), is_leaf=_is_spec)

    if not explicit:
        return run_told if told and set(mesh.axis_names) > set(axes.every) else run
    placed = jax.tree.map(lambda spec: NamedSharding(mesh, spec), out_specs, is_leaf=_is_spec)

    def run_auto(*args: Any) -> Any:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return jax.sharding.auto_axes(run, axes=explicit, out_sharding=placed)(*args)

    return run_auto


def _with_types(mesh: Any, types: dict[str, AxisType]) -> Any:
    """The same mesh, its axes of other types."""
    kinds = tuple(types.values())
    if isinstance(mesh, AbstractMesh):
        return AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=kinds)
    return Mesh(mesh.devices, mesh.axis_names, axis_types=kinds)


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)


def only(spec: PartitionSpec, kept: Sequence[str]) -> PartitionSpec:
    """The spec without other axes."""
    return partition_spec([tuple(a for a in names(part) if a in kept) for part in spec])


def within(other_axes: OtherAxes, f: Callable[..., jax.Array], x: jax.Array, *rest: jax.Array) -> jax.Array:
    """`f(x, *rest)`, in a nested region that is manual over the other mesh axes that shard `x`.

    Args:
      other_axes: These axes for each dimension of `x` and of the result; where there are none, no region is opened.
      f: Leaves the dimensions that they shard as they are.
      x: An array.
      *rest: Arrays that are the same along all of these axes.

    Returns:
      The result.
    """
    if not any(other_axes):
        return f(x, *rest)
    spec = partition_spec(other_axes)
    specs = (spec, *(PartitionSpec() for _ in rest))
    over = {a for axes in other_axes for a in axes}
    # Inside the region of a loss, the one that checks no types, a nested one cannot either.
    return jax.shard_map(f, in_specs=specs, out_specs=spec, axis_names=over, check_vma=_checked())(x, *rest)


def _checked() -> bool:
    """Whether the surrounding manual region checks types."""
    return bool(varying(lax.axis_index(jax.sharding.get_abstract_mesh().manual_axes[0])))
