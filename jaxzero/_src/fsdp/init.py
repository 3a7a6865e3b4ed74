"""Parameters made on the mesh as they are stored: at stage 3 no device ever holds a whole leaf."""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import jax
from jax.sharding import PartitionSpec

from .._types import PyTree
from ..comm.placement import outside, shard
from ..jaxpr import trace
from ..partition.draws import ShardedDraws
from ..partition.evaluate import evaluate
from ..partition.values import Context
from ..sharding import checks, host, place, processes
from ..sharding.axes import all_auto
from ..sharding.leaves import shape_dtype, wrap_padded
from ..sharding.options import Options, memory_kind, param_leaves, resolve_axes
from ..sharding.regions import open_region

P = PartitionSpec
Array = jax.Array


def init_sharded(options: Options, init_fn: Callable[..., PyTree], *args: PyTree) -> PyTree:
    """The parameters `init_fn(*args)`, made on the mesh as they are stored: at stage 3 split, else whole."""
    outside(options, "init")
    traced = place.is_traced(args)
    if not traced:
        place.check_devices("init", options.mesh)
        processes.agree("init", options, processes.digests(args))
    if options.stage == 3:
        return _init_split(options, init_fn, args)
    if traced:
        with _naming_boxes(options, init_fn, args):
            params = init_fn(*args)
    else:
        params = _init_replicated(options, init_fn, args)
    return shard(options, params, "init") if traced or options.offload or place.is_traced(params) else params


def _init_split(options: Options, init_fn: Callable[..., PyTree], args: Sequence[PyTree]) -> PyTree:
    """Parameters of stage 3.

    The traced `init_fn` is evaluated on shares, as an optimizer is, and random draws of a leaf's shape are made
    share by share: no device holds a whole leaf, unless `init_fn` computes it from one.
    """
    axes, _ = resolve_axes(options, "init")
    arrays, tree = jax.tree.flatten(args)
    avals = [jax.ShapeDtypeStruct(*shape_dtype(x)) for x in arrays]
    here = jax.sharding.get_abstract_mesh()  # where the user has set one, a model may look for it
    with _naming_boxes(options, init_fn, args):
        init_flat = lambda xs: init_fn(*jax.tree.unflatten(tree, xs))
        program = trace.trace(init_flat, avals, mesh=here if here.empty else all_auto(options.mesh))
    checks.check_params("init", options, program.out)
    leaves = param_leaves(options, program.out, axes.n)
    layouts = [leaf.layout for leaf in leaves.leaves]
    kinds = [memory_kind(options, "params", layout) for layout in layouts]

    def on_device(arrays: Sequence[Array], consts: Sequence[Array]) -> list[Array]:
        sharded = ShardedDraws(layout for layout in layouts if layout is not None)
        ctx = Context(axes, options.bucket_bytes, None, sharded_draws=sharded)
        shares = ctx.stored(ctx.convert_all(evaluate(ctx, program.jaxpr, consts, arrays), layouts))
        return [host.to_host(x) if kind else x for x, kind in zip(shares, kinds, strict=True)]

    run = open_region(options.mesh, axes, on_device, (P(), P()), [leaf.spec(axes.shard) for leaf in leaves.leaves])
    placed = place.place_all("init", options.mesh, None, arrays, P(), axes)
    consts = place.place_all("init", options.mesh, None, program.consts, P(), axes)
    stored = run(placed, consts) if place.is_traced(placed) else jax.jit(run)(placed, consts)
    return leaves.unflatten([wrap_padded(x, layout) for x, layout in zip(stored, layouts, strict=True)])


@contextlib.contextmanager
def _naming_boxes(options: Options, init_fn: Callable[..., PyTree], args: Sequence[PyTree]) -> Iterator[None]:
    """An error of Flax that a box has an axis which the mesh lacks becomes one that names the box, too."""
    try:
        yield
    except ValueError:
        out = None
        with contextlib.suppress(Exception):  # `init_fn` may need the mesh, or numbers
            out = trace.trace(init_fn, *args).out
        checks.check_params("init", options, out)
        raise


def _init_replicated(options: Options, init_fn: Callable[..., PyTree], args: Sequence[PyTree]) -> PyTree:
    """Parameters of stages 1 and 2, equal on all devices."""
    with _naming_boxes(options, init_fn, args):
        out = jax.eval_shape(init_fn, *args)
    checks.check_params("init", options, out)
    leaves = param_leaves(options, out, 1)
    placed = leaves.unflatten([place.named_sharding(options.mesh, x.spec(None), len(x.shape)) for x in leaves.leaves])
    return jax.jit(init_fn, out_shardings=placed)(*args)
