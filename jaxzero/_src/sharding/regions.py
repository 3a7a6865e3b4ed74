"""Manual regions over the axes of a `Zero`, and nested ones over the other mesh axes that shard a leaf.

Inside a region of the library all other mesh axes are Auto: the compiler propagates a leaf's sharding over them
through elementwise and matrix equations. It cannot do that for collectives and slices by device number, and would
gather the leaf over the other axes first. So each of those runs in a nested region that is manual over these axes too.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from .._types import AnyMesh, PyTree
from .axes import Axes, names
from .layout import OtherAxes, partition_spec
from .vma import varying


def open_region(
    mesh: AnyMesh,
    axes: Axes,
    f: Callable[..., PyTree],
    in_specs: PyTree,
    out_specs: PyTree,
    *,
    constrain_outputs: bool = True,
    **options: Any,
) -> Callable[..., PyTree]:
    """`jax.shard_map` over the library's axes; with the type check on (the default) replicas provably agree.

    Other axes that are Explicit are Auto inside: otherwise every slice would need a sharding over them.

    Args:
      mesh: The mesh.
      axes: The axes over which the region is manual.
      f: What runs in it.
      in_specs: Specs of the arguments, over all axes of the mesh.
      out_specs: Specs of the results.
      constrain_outputs: Whether results are constrained to `out_specs` over the other axes; else the compiler decides.
      **options: Of `jax.shard_map`.

    Returns:
      `f` of global arrays, to be called while tracing.
    """
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    explicit = tuple(a for a, t in types.items() if t == AxisType.Explicit and a not in axes.every)
    inside = _with_types(mesh, {**types, **dict.fromkeys(explicit, AxisType.Auto)}) if explicit else mesh
    own = lambda specs: jax.tree.map(lambda spec: only(spec, axes.every), specs, is_leaf=_is_spec)

    def mapped(*args: PyTree) -> PyTree:
        keywords = dict(in_specs=own(in_specs), out_specs=own(out_specs), axis_names={*axes.every})
        return jax.shard_map(f, mesh=inside, **keywords, **options)(*args)

    def constrained(*args: PyTree) -> PyTree:
        constrain = lambda spec, x: lax.with_sharding_constraint(x, NamedSharding(mesh, spec))
        return jax.tree.map(constrain, out_specs, mapped(*args), is_leaf=_is_spec)

    if not explicit:
        return constrained if constrain_outputs and set(mesh.axis_names) > set(axes.every) else mapped
    placed = jax.tree.map(lambda spec: NamedSharding(mesh, spec), out_specs, is_leaf=_is_spec)

    def with_auto_axes(*args: PyTree) -> PyTree:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return jax.sharding.auto_axes(mapped, axes=explicit, out_sharding=placed)(*args)

    return with_auto_axes


def _with_types(mesh: AnyMesh, types: dict[str, AxisType]) -> AnyMesh:
    """The same mesh with other types of axes."""
    kinds = tuple(types.values())
    if isinstance(mesh, AbstractMesh):
        return AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=kinds)
    return Mesh(mesh.devices, mesh.axis_names, axis_types=kinds)


def _is_spec(x: object) -> bool:
    return isinstance(x, PartitionSpec)


def only(spec: PartitionSpec, kept: Sequence[str]) -> PartitionSpec:
    """The spec without axes that are not in `kept`."""
    return partition_spec([tuple(a for a in names(part) if a in kept) for part in spec])


def within(other_axes: OtherAxes, f: Callable[..., jax.Array], x: jax.Array, *operands: jax.Array) -> jax.Array:
    """`f(x, *operands)`, in a nested region that is manual over the other mesh axes that shard `x`.

    Args:
      other_axes: These axes for each dimension of `x` and of the result; where there are none, no region is opened.
      f: A function that keeps the dimensions that they shard.
      x: An array.
      *operands: Arrays that are equal along all of these axes.

    Returns:
      The result.
    """
    if not any(other_axes):
        return f(x, *operands)
    spec = partition_spec(other_axes)
    specs = (spec, *(PartitionSpec() for _ in operands))
    over = {a for axes in other_axes for a in axes}
    # The region of a loss does not check types, and a nested region inside it cannot either.
    return jax.shard_map(f, in_specs=specs, out_specs=spec, axis_names=over, check_vma=_checked())(x, *operands)


def _checked() -> bool:
    """Whether the surrounding manual region checks types."""
    return bool(varying(lax.axis_index(jax.sharding.get_abstract_mesh().manual_axes[0])))
