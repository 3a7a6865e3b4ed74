"""Where parameters, gradients and state stand: born, put in place, gathered, and their specs."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from . import collectives, mesh
from ._compat import open_program
from .drawn import Drawn
from .flat_program import flatten
from .layout import EvenSplit, Layout, even_split, is_split
from .mesh import Axes, path_text
from .options import Options
from .state import bare, leading, leaves_of, shape_dtype, wear

P = PartitionSpec


def born(options: Options, init_fn: Callable[..., Any], *args: Any) -> Any:
    """Parameters computed on the mesh as they rest: whole at stages 1 and 2, cut at stage 3.

    Everything is one program whose results are placed from the start, so that the compiler computes
    each device's part of a random draw alone and no device holds a whole leaf.
    """
    _outside(options, "init")
    if options.stage < 3 and mesh.is_traced(args):
        return shard(options, init_fn(*args), "init")
    if options.stage < 3:
        return jax.jit(init_fn, out_shardings=NamedSharding(options.mesh, P()))(*args)
    axes, _ = options.context("init")
    cut = lambda *args: _cut(options, axes, init_fn(*args), _draws(init_fn, args))
    if mesh.is_traced(args):
        return shard(options, cut(*args), "init")
    specs_ = _specs_at_rest(options, axes, jax.eval_shape(cut, *args))
    placed = jax.tree.map(lambda spec: NamedSharding(options.mesh, spec), specs_)
    return jax.jit(cut, out_shardings=placed)(*args)


def _specs_at_rest(options: Options, axes: Axes, split: Any) -> Any:
    leaves = leaves_of(split, axes.n, options.stacked)
    stored = [P() if leaf.layout is None else leaf.layout.spec(axes.shard) for leaf in leaves.leaves]
    worn = [wear(spec, leaf.layout) for spec, leaf in zip(stored, leaves.leaves, strict=True)]
    return leaves.unflatten(worn)


def _draws(init_fn: Callable[..., Any], args: Any) -> Callable[[int, Layout], Any]:
    """By position, a parameter drawn at its stored shape; `None` where that cannot be."""
    program = jax.make_jaxpr(init_fn)(*args)
    flat = flatten(*open_program(program))
    drawn = Drawn(flat, jax.tree.leaves(args))
    return lambda position, layout: drawn.stored(flat.outs[position], layout)


def _cut(options: Options, axes: Axes, params: Any, draws: Callable[[int, Layout], Any]) -> Any:
    """Full parameters in their stored shapes."""
    leaves = leaves_of(params, axes.n, options.stacked)
    out = []
    for i, (leaf, x) in enumerate(zip(leaves.leaves, jax.tree.leaves(params, is_leaf=is_split), strict=True)):
        if leaf.layout is not None and not is_split(x):
            x = jnp.asarray(x)
            stored = draws(i, leaf.layout)
            x = wear(collectives.stored(x, leaf.layout) if stored is None else stored.astype(x.dtype), leaf.layout)
        out.append(x)
    return leaves.unflatten(out)


def shard(options: Options, params: Any, call: str = "shard") -> Any:
    """Every leaf as it rests: replicated over the mesh, or at stage 3 cut."""
    _outside(options, call)
    axes, _ = options.context(call)
    leaves = leaves_of(params, axes.n, options.stacked)
    out = []
    for leaf, x in zip(leaves.leaves, jax.tree.leaves(params, is_leaf=is_split), strict=True):
        if options.stage < 3 or leaf.layout is None:
            if is_split(x):
                raise ValueError(
                    f"{call}: leaf {path_text(leaf.path)!r} is an EvenSplit, but at stage {options.stage} "
                    "parameters are whole. Expected a plain array. Fix: zero.gather it first."
                )
            out.append(_put(call, options, leaf.path, x, P(), options.mesh.axis_names))
            continue
        if is_split(x):
            _layout(call, options, leaf.path, x, axes)
        stored = _stored(call, options, leaf.path, x, leaf.layout)
        stored = _put(call, options, leaf.path, stored, leaf.layout.spec(axes.shard), axes.every)
        out.append(wear(stored, leaf.layout))
    return leaves.unflatten(out)


def _stored(call: str, options: Options, path: Any, x: Any, layout: Layout) -> Any:
    if is_split(x) or layout.kind == "rows":
        return bare(x)
    sharding = getattr(jax.typeof(x) if isinstance(x, jax.core.Tracer) else x, "sharding", None)
    if isinstance(sharding, NamedSharding) and any(sharding.spec):
        x = mesh.place(call, options.mesh, path, x, P(), options.mesh.axis_names)
    return collectives.stored(jnp.asarray(x), layout)


def _put(call: str, options: Options, path: Any, x: Any, spec: P, own: Any) -> Any:
    """`mesh.place`, and for a traced array on an Auto mesh a constraint: here the placement is the point."""
    x = mesh.place(call, options.mesh, path, x, spec, own)
    if isinstance(x, jax.core.Tracer) and AxisType.Explicit not in options.mesh.axis_types:
        x = jax.lax.with_sharding_constraint(x, NamedSharding(options.mesh, spec))
    return x


def gather(options: Options, tree: Any) -> Any:
    """Every leaf whole and replicated; padding is cut off."""
    axes, manual = options.context("gather")
    if manual:
        return _gather_inside(options, axes, tree)
    pairs, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_split)
    out = []
    for path, x in pairs:
        if not is_split(x):
            out.append(_put("gather", options, path, x, P(), axes.every))
            continue
        layout = _layout("gather", options, path, x, axes)
        value = mesh.place("gather", options.mesh, path, x.value, layout.spec(axes.shard), axes.every)
        out.append(_gather_one(options.mesh, axes, layout)(value))
    return jax.tree.unflatten(structure, out)


@functools.lru_cache(maxsize=512)
def _gather_one(mesh_: Any, axes: Axes, layout: Layout) -> Callable[[Any], Any]:
    whole = lambda x: collectives.all_gather([x], [layout], axes.shard, bucket_bytes=None)[0]
    return jax.jit(mesh.region(mesh_, axes, whole, layout.spec(axes.shard), P()))


def _gather_inside(options: Options, axes: Axes, tree: Any) -> Any:
    """Inside a user's `shard_map` only stage 3 says what a plain leaf is: this device's rows."""
    if options.stage < 3:
        raise ValueError(
            "gather: called inside shard_map, where a plain leaf does not show whether it is a share. "
            "Expected the global view. Fix: return the tree with out_specs=zero.specs(tree) and gather "
            "it outside."
        )
    leaves = leaves_of(tree, axes.n, options.stacked, shares=True)
    out = [bare(x) for x in jax.tree.leaves(tree, is_leaf=is_split)]
    cut = [i for i, leaf in enumerate(leaves.leaves) if leaf.layout is not None]
    whole = collectives.all_gather(
        [out[i] for i in cut],
        [leaves.leaves[i].cut for i in cut],
        axes.shard,
        bucket_bytes=options.bucket_bytes,
    )
    for i, x in zip(cut, whole, strict=True):
        out[i] = x
    return leaves.unflatten(out)


def specs(options: Options, tree: Any) -> Any:
    """The spec of each array: that of its sharding, or by its stored shape."""
    axes, _ = options.context("specs")

    def spec(path: Any, x: Any) -> Any:
        if is_split(x):
            layout = _layout("specs", options, path, x, axes)
            return EvenSplit(layout.spec(axes.shard), x.shape)
        sharding = None if isinstance(x, jax.core.Tracer) else getattr(x, "sharding", None)
        if isinstance(sharding, NamedSharding) and axes.n > 1:  # over one device JAX drops the axis
            return _short(sharding.spec)
        shape, _ = shape_dtype(x)
        stored = even_split(shape, axes.n, leading(options.stacked, path))
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


def _short(spec: PartitionSpec) -> PartitionSpec:
    """Without the `None`s that Explicit meshes append."""
    parts = list(spec)
    while parts and parts[-1] is None:
        parts.pop()
    return P(*parts)


def _outside(options: Options, call: str) -> None:
    _, manual = options.context(call)
    if manual:
        raise ValueError(
            f"{call}: called inside shard_map. Expected the global view. Fix: call it outside and pass its result in."
        )
