"""Where parameters, gradients and state stand: born, put in place, gathered, and their specs."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from . import collectives, mesh
from .layout import EvenSplit, Layout, even_split, is_split
from .mesh import Axes, path_text
from .options import Options
from .state import shape_dtype

P = PartitionSpec


def born(options: Options, init_fn: Callable[..., Any], *args: Any) -> Any:
    """Parameters computed on the mesh, whole on every device."""
    _outside(options, "init")
    return jax.jit(init_fn, out_shardings=NamedSharding(options.mesh, P()))(*args)


def shard(options: Options, params: Any) -> Any:
    """Every leaf replicated over the mesh."""
    _outside(options, "shard")
    place = lambda path, x: mesh.place("shard", options.mesh, path, x, P(), options.mesh.axis_names)
    return jax.tree_util.tree_map_with_path(place, params)


def gather(options: Options, tree: Any) -> Any:
    """Every leaf whole and replicated; padding is cut off."""
    axes, manual = options.context("gather")
    pairs, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_split)
    if manual:
        raise ValueError(
            "gather: called inside shard_map, where a plain leaf does not show whether it is a share. "
            "Expected the global view. Fix: return the tree with out_specs=zero.specs(tree) and gather "
            "it outside."
        )
    out = []
    for path, x in pairs:
        if not is_split(x):
            out.append(mesh.place("gather", options.mesh, path, x, P(), axes.every))
            continue
        layout = _layout("gather", options, path, x, axes)
        value = mesh.place("gather", options.mesh, path, x.value, layout.spec(axes.shard), axes.every)
        cut = lambda x, layout=layout: collectives.all_gather([x], [layout], axes.hops, bucket_bytes=None)[0]
        run = mesh.region(options.mesh, axes, cut, layout.spec(axes.shard), P())
        out.append(jax.jit(run)(value))
    return jax.tree.unflatten(structure, out)


def specs(options: Options, tree: Any) -> Any:
    """The spec of each array: that of its sharding, or by its stored shape."""
    axes, _ = options.context("specs")

    def spec(path: Any, x: Any) -> Any:
        if is_split(x):
            layout = _layout("specs", options, path, x, axes)
            return EvenSplit(layout.spec(axes.shard), x.shape)
        sharding = None if isinstance(x, jax.core.Tracer) else getattr(x, "sharding", None)
        if isinstance(sharding, NamedSharding) and axes.n > 1:  # over one device JAX drops the axis
            return _written(sharding.spec, axes)
        shape, _ = shape_dtype(x)
        lead = int(options.stacked is not None and bool(options.stacked(path)))
        stored = even_split(shape, axes.n, lead)
        return P() if stored is None or stored.kind == "flat" else stored.spec(axes.shard)

    return jax.tree_util.tree_map_with_path(spec, tree, is_leaf=is_split)


def _layout(call: str, options: Options, path: Any, x: EvenSplit, axes: Axes) -> Layout:
    """The layout of an `EvenSplit`; refuses one that was split for another mesh."""
    lead = x.value.ndim - 1 if hasattr(x.value, "ndim") else 0
    layout = even_split(x.shape, axes.n, lead)
    if layout is None or layout.kind != "flat" or tuple(x.value.shape) != layout.stored_shape:
        wanted = "a plain array" if layout is None or layout.kind != "flat" else layout.stored_shape
        raise ValueError(
            f"{call}: leaf {path_text(path)!r} is {x!r}; expected {wanted} over {axes.n} devices. It was "
            "split for another mesh. Fix: use the Zero that split it."
        )
    return layout


def _written(spec: PartitionSpec, axes: Axes) -> PartitionSpec:
    """A spec as layouts write it: JAX drops axes of one device from it, and Explicit meshes append `None`s."""
    sizes = dict(zip(axes.every, axes.sizes, strict=True))
    kept = tuple(a for a in axes.shard if sizes[a] > 1)
    parts = [axes.shard if part and mesh.names(part) == kept != axes.shard else part for part in spec]
    while parts and parts[-1] is None:
        parts.pop()
    return P(*parts)


def _outside(options: Options, call: str) -> None:
    _, manual = options.context(call)
    if manual:
        raise ValueError(
            f"{call}: called inside shard_map. Expected the global view. Fix: call it outside and pass its result in."
        )
