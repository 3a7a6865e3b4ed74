"""Statistics of split trees: a function of full arrays, evaluated on shares."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from .._text import path_text
from .._types import PyTree
from ..comm import placement
from ..jaxpr.trace import trace
from ..partition.evaluate import evaluate
from ..partition.values import Context, Value
from ..sharding import host, place, vma
from ..sharding.axes import Axes
from ..sharding.layout import is_split
from ..sharding.leaves import Leaf, Leaves, unwrap
from ..sharding.options import Options, param_leaves, resolve_axes
from ..sharding.regions import open_region
from . import checks, convert

P = PartitionSpec
Array = jax.Array


def measure(options: Options, f: Callable[..., PyTree], trees: Sequence[PyTree]) -> PyTree:
    """See `Zero.measure`."""
    axes, manual = resolve_axes(options, "measure")
    given = [_leaves(options, tree, axes, manual) for tree in trees]
    leaves = [leaf for one in given for leaf in one.leaves]
    arrays = [unwrap(x) for tree in trees for x in jax.tree.leaves(tree, is_leaf=is_split)]
    cut = [
        leaf.layout is not None and (_varies(x, axes) if manual else leaf.layout.plain or is_split(y))
        for leaf, x, y in zip(leaves, arrays, _stored_leaves(trees), strict=True)
    ]

    def flat(values: Sequence[Array]) -> PyTree:
        rest = iter(values)
        return f(*(one.unflatten([next(rest) for _ in one.leaves]) for one in given))

    avals = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
    program = trace(flat, avals, axis_env=list(zip(axes.every, axes.sizes, strict=True)))

    def on_device(arrays: Sequence[Array], consts: Sequence[Array]) -> list[Array]:
        ctx = Context(axes, options.bucket_bytes, None)
        arrays = [host.to_device(x) for x in arrays]
        trained = [i for i, leaf in enumerate(leaves) if leaf.trainable]
        values: list[Value] = list(arrays)
        shares = convert.parameters(
            ctx, [arrays[i] for i in trained], [leaves[i] for i in trained], [cut[i] for i in trained]
        )
        for i, value in zip(trained, shares, strict=True):
            values[i] = value
        out = evaluate(ctx, program.jaxpr, consts, values)
        return ctx.stored(ctx.convert_all(out, [None] * len(out)))

    tree = jax.tree.structure(program.out)
    if manual:
        _same_everywhere(leaves, arrays, cut, axes)
        checks.whole("measure", "an array that the function closes over", program.consts, axes)
        return jax.tree.unflatten(tree, on_device(arrays, program.consts))
    specs = [leaf.spec(axes.shard if is_cut else None) for leaf, is_cut in zip(leaves, cut, strict=True)]
    run = open_region(options.mesh, axes, on_device, (specs, P()), P(), constrain_outputs=False)
    paths = [leaf.path for leaf in leaves]
    placed = place.place_all("measure", options.mesh, paths, arrays, specs, axes)
    consts = place.place_all("measure", options.mesh, None, program.consts, P(), axes)
    out = run(placed, consts) if place.is_traced([placed, consts]) else jax.jit(run)(placed, consts)
    return jax.tree.unflatten(tree, out)


def _leaves(options: Options, tree: PyTree, axes: Axes, manual: bool) -> Leaves:
    """The leaves at logical shapes; inside `shard_map` a plain leaf that varies is this device's rows."""
    if not manual:
        placement.no_state("measure", options, tree, axes)
        return param_leaves(options, tree, axes.n)
    rows, whole = (param_leaves(options, tree, axes.n, shares=shares) for shares in (True, False))
    arrays = map(unwrap, jax.tree.leaves(tree, is_leaf=is_split))
    chosen = [a if _varies(x, axes) else b for x, a, b in zip(arrays, rows.leaves, whole.leaves, strict=True)]
    return Leaves(tuple(chosen), whole.tree)


def _stored_leaves(trees: Sequence[PyTree]) -> list[PyTree]:
    return [x for tree in trees for x in jax.tree.leaves(tree, is_leaf=is_split)]


def _varies(x: Array, axes: Axes) -> bool:
    return not vma.varying(x).isdisjoint(axes.shard)


def _same_everywhere(leaves: Sequence[Leaf], arrays: Sequence[Array], cut: Sequence[bool], axes: Axes) -> None:
    """Refuses what is neither a share nor equal on all devices: a gradient before its sum."""
    for leaf, x, is_cut in zip(leaves, arrays, cut, strict=True):
        checks.whole("measure", f"leaf {path_text(leaf.path)!r}", [] if is_cut else [jnp.asarray(x)], axes)
