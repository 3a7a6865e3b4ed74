"""Parameters, gradients and state on the mesh: stored as options say, gathered, and their specs."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from .._positions import replace_at
from .._text import path_text
from .._types import AnyMesh, Path, PyTree
from ..sharding import checks, host, place, processes
from ..sharding.axes import Axes, names
from ..sharding.layout import EvenSplit, Layout, OtherAxes, even_split, is_split, partition_spec
from ..sharding.leaves import leading, shape_dtype, unwrap, wrap_padded
from ..sharding.options import Options, memory_kind, other_axes, param_leaves, resolve_axes
from ..sharding.regions import only, open_region
from . import collectives

P = PartitionSpec


def shard(options: Options, params: PyTree, call: str = "shard") -> PyTree:
    """Every leaf as it is stored: replicated over the mesh, or at stage 3 cut."""
    outside(options, call)
    axes, _ = resolve_axes(options, call)
    checks.check_params(call, options, params)
    leaves = param_leaves(options, params, axes.n)
    if not place.is_traced(params):
        processes.agree(call, options, processes.digests(params))
    out = []
    for leaf, x in zip(leaves.leaves, jax.tree.leaves(params, is_leaf=is_split), strict=True):
        if options.stage < 3 or leaf.layout is None:
            if is_split(x):
                raise ValueError(
                    f"{call}: leaf {path_text(leaf.path)!r} is an EvenSplit, but at stage {options.stage} "
                    "parameters are whole. Expected a plain array. Fix: zero.gather it first."
                )
            kind = memory_kind(options, "params", leaf.layout)
            out.append(_put(call, options, leaf.path, x, leaf.spec(None), axes.every, kind))
            continue
        if is_split(x):
            _layout(call, options, leaf.path, x, axes, leaf.other_axes)
        stored = _stored(call, options, leaf.path, x, leaf.layout, axes.every)
        kind = memory_kind(options, "params", leaf.layout)
        stored = _put(call, options, leaf.path, stored, leaf.layout.spec(axes.shard), axes.every, kind)
        out.append(wrap_padded(stored, leaf.layout))
    return leaves.unflatten(out)


def _stored(call: str, options: Options, path: Path, x: Any, layout: Layout, own: Sequence[str]) -> Any:
    if is_split(x) or layout.plain:
        return unwrap(x)
    sharding = getattr(jax.typeof(x) if isinstance(x, jax.core.Tracer) else x, "sharding", None)
    if isinstance(sharding, NamedSharding) and any(sharding.spec):
        x = place.place(call, options.mesh, path, x, partition_spec(layout.other_axes), own)
    return collectives.stored(jnp.asarray(x), layout)


def _put(call: str, options: Options, path: Path, x: Any, spec: P, own: Sequence[str], kind: str | None = None) -> Any:
    """`mesh.place`, and for a traced array on an Auto mesh a constraint: here the placement is the point."""
    if not isinstance(x, jax.core.Tracer):
        return place.place(call, options.mesh, path, x, spec, own, kind)
    x = place.place(call, options.mesh, path, host.to_device(x), spec, own)
    if AxisType.Explicit not in options.mesh.axis_types:
        x = jax.lax.with_sharding_constraint(x, NamedSharding(options.mesh, spec))
    return host.to_host(x) if kind else x


def gather(options: Options, tree: PyTree) -> PyTree:
    """Every leaf whole and replicated; padding is cut off."""
    axes, manual = resolve_axes(options, "gather")
    if manual:
        return _gather_inside(options, axes, tree)
    no_state("gather", options, tree, axes)
    leaves = param_leaves(options, tree, axes.n)
    out = []
    for leaf, x in zip(leaves.leaves, jax.tree.leaves(tree, is_leaf=is_split), strict=True):
        if not is_split(x):
            out.append(_put("gather", options, leaf.path, x, leaf.spec(None), axes.every))
            continue
        layout = _layout("gather", options, leaf.path, x, axes, leaf.other_axes)
        out.append(gather_array(options, axes, leaf.path, x.value, layout))
    return leaves.unflatten(out)


def gather_array(options: Options, axes: Axes, path: Path, x: jax.Array, layout: Layout | None) -> jax.Array:
    """One stored array whole and replicated; padding is cut off."""
    if layout is None or layout.plain:
        spec = P() if layout is None else partition_spec(layout.other_axes)
        return _put("gather", options, path, x, spec, axes.every)
    value = host.to_device(x) if isinstance(x, jax.core.Tracer) else x
    value = place.place("gather", options.mesh, path, value, layout.spec(axes.shard), axes.every)
    return _gather_one(options.mesh, axes, layout)(value)


def no_state(call: str, options: Options, tree: PyTree, axes: Axes) -> None:
    """Refuses optimizer state, whose flat leaves do not show their logical shapes."""
    of_optimizer = lambda x: type(x).__module__.startswith(("optax.", "jaxzero."))
    is_state = lambda x: isinstance(x, tuple) and of_optimizer(x) and not isinstance(x, optax.LookaheadParams)
    for path, x in jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: is_split(x) or is_state(x)):
        spec = getattr(getattr(x, "sharding", None), "spec", None) if not isinstance(x, jax.core.Tracer) else None
        split = axes.n > 1 and spec and any(a in axes.shard for part in spec for a in names(part if part else None))
        held = [y for y in jax.tree.leaves(x, is_leaf=is_split) if is_state(x) and not is_split(y) and jnp.ndim(y) == 1]
        if held or (options.stage == 1 and split and jnp.ndim(x) == 1 and not is_split(x)):
            raise ValueError(
                f"{call}: leaf {path_text(path)!r} is optimizer state, whose flat leaves do not show their logical "
                "shapes. Expected parameters or gradients. Fix: zero.gather(state, like=params), with optimizer=tx "
                "for state that is not like the parameters."
            )


@functools.lru_cache(maxsize=512)
def _gather_one(mesh: AnyMesh, axes: Axes, layout: Layout) -> Callable[[jax.Array], jax.Array]:
    whole = lambda x: collectives.all_gather([x], [layout], axes.hops, bucket_bytes=None)[0]
    return jax.jit(open_region(mesh, axes, whole, layout.spec(axes.shard), partition_spec(layout.other_axes)))


def _gather_inside(options: Options, axes: Axes, tree: PyTree) -> Any:
    """Inside a user's `shard_map` only stage 3 says what a plain leaf is: this device's rows."""
    if options.stage < 3:
        raise ValueError(
            "gather: called inside shard_map, where a plain leaf does not show whether it is a share. "
            "Expected the global view. Fix: return the tree with out_specs=zero.specs(tree) and gather "
            "it outside."
        )
    leaves = param_leaves(options, tree, axes.n, shares=True)
    out = [unwrap(x) for x in jax.tree.leaves(tree, is_leaf=is_split)]
    cut = [i for i, leaf in enumerate(leaves.leaves) if leaf.layout is not None]
    whole = collectives.all_gather(
        [out[i] for i in cut],
        [leaves.leaves[i].cut for i in cut],
        axes.hops,
        bucket_bytes=options.bucket_bytes,
    )
    return leaves.unflatten(replace_at(out, cut, whole))


def specs(options: Options, tree: PyTree) -> Any:
    """The spec of each array: that of its sharding, or by its stored shape."""
    axes, _ = resolve_axes(options, "specs")

    def spec(path: Path, x: Any) -> Any:
        if is_split(x):
            layout = _layout("specs", options, path, x, axes, other_axes(options, path, x))
            return EvenSplit(only(layout.spec(axes.shard), axes.every), x.shape)
        sharding = None if isinstance(x, jax.core.Tracer) else getattr(x, "sharding", None)
        if isinstance(sharding, NamedSharding) and axes.n > 1:  # over one device JAX drops the axis
            return _written(only(sharding.spec, axes.every), axes)
        shape, _ = shape_dtype(x)
        if shape and options.param_specs is not None and axes.n > 1:  # one share is the whole, whatever it is cut along
            raise ValueError(
                f"specs: leaf {path_text(path)!r} of shape {shape} shows no NamedSharding, and with param_specs its "
                "shape alone does not say how it is cut. Expected arrays, or abstract ones with shardings. Fix: "
                "zero.specs(tx.init(params)) outside jit; abstract params will do."
            )
        stored = even_split(shape, axes.n, leading(options.stacked, path))
        return P() if stored is None or stored.kind == "flat" else stored.spec(axes.shard)

    return jax.tree_util.tree_map_with_path(spec, tree, is_leaf=is_split)


def _layout(call: str, options: Options, path: Path, x: EvenSplit, axes: Axes, other_axes: OtherAxes) -> Layout:
    """The layout of an `EvenSplit`; refuses one that was split for another mesh."""
    lead, said = x.value.ndim - 1 if hasattr(x.value, "ndim") else 0, leading(options.stacked, path)
    one = even_split(x.shape, axes.n, said, other_axes=other_axes)
    if lead > said and one is not None and tuple(x.value.shape[lead - said :]) == one.stored_shape:
        raise ValueError(
            f"{call}: leaf {path_text(path)!r} is {x!r}, which has more dimensions than a leaf of this shape is stored "
            "in. It left a vmap, or its leading axis counts layers that this Zero does not know. Expected "
            f"{one.stored_shape}. Fix: jax.vmap(zero.gather)(tree) for what left a vmap; zero.observe(loss_fn, params, "
            "*batch) or stacked= for layers."
        )
    layout = even_split(x.shape, axes.n, leading(options.stacked, path) if other_axes else lead, other_axes=other_axes)
    if layout is None or layout.plain or tuple(x.value.shape) != layout.stored_shape:
        wanted = "a plain array" if layout is None or layout.plain else layout.stored_shape
        raise ValueError(
            f"{call}: leaf {path_text(path)!r} is {x!r}; expected {wanted} over {axes.n} devices. It was "
            "split for another mesh. Fix: use the Zero that split it."
        )
    return layout


def _written(spec: PartitionSpec, axes: Axes) -> PartitionSpec:
    """A spec as layouts write it: JAX drops axes of one device from it, and Explicit meshes append `None`s."""
    sizes = dict(zip(axes.every, axes.sizes, strict=True))
    kept = tuple(a for a in axes.shard if sizes[a] > 1)
    parts = [axes.shard if part and names(part) == kept != axes.shard else part for part in spec]
    while parts and parts[-1] is None:
        parts.pop()
    return P(*parts)


def outside(options: Options, call: str) -> None:
    """Refuses a call inside a user's `shard_map`."""
    _, manual = resolve_axes(options, call)
    if manual:
        raise ValueError(
            f"{call}: called inside shard_map. Expected the global view. Fix: call it outside and pass its result in."
        )
