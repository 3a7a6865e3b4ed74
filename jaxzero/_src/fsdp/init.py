"""Parameters made on the mesh as they are stored: at stage 3 no device ever holds a whole leaf."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax

from ..comm.placement import P, outside, shard
from ..jaxpr import trace
from ..partition import draws, evaluate, values
from ..sharding import axes as sharding_axes
from ..sharding import checks, host, place, processes
from ..sharding.leaves import shape_dtype, wrap_padded
from ..sharding.options import Options, memory_kind, param_leaves, resolve_axes
from ..sharding.regions import open_region


def init_sharded(options: Options, init_fn: Callable[..., Any], *args: Any) -> Any:
    """Parameters computed on the mesh as they rest: whole at stages 1 and 2, cut at stage 3.

    At stage 3 the traced `init_fn` is evaluated on shares, as an optimizer is, and random draws of a leaf's
    shape are made share by share: no device holds a whole leaf, unless it is computed from one.
    """
    outside(options, "init")
    if not place.is_traced(args):
        place.check_devices("init", options.mesh)
        processes.agree("init", options, processes.digests(args))
    if options.stage < 3:
        if place.is_traced(args):
            with _naming_boxes(options, init_fn, args):
                params = init_fn(*args)
            return shard(options, params, "init")
        params = _init_replicated(options, init_fn, args)
        return shard(options, params, "init") if options.offload or place.is_traced(params) else params
    axes, _ = resolve_axes(options, "init")
    arrays, tree = jax.tree.flatten(args)
    avals = [jax.ShapeDtypeStruct(*shape_dtype(x)) for x in arrays]
    here = jax.sharding.get_abstract_mesh()  # where the user has set one, a model may look for it
    with _naming_boxes(options, init_fn, args):
        born_ = lambda xs: init_fn(*jax.tree.unflatten(tree, xs))
        program = trace.trace(born_, avals, mesh=here if here.empty else sharding_axes.all_auto(options.mesh))
    checks.check_params("init", options, program.out)
    leaves = param_leaves(options, program.out, axes.n)
    layouts = [leaf.layout for leaf in leaves.leaves]
    kinds = [memory_kind(options, "params", layout) for layout in layouts]

    def body(arrays: Any, consts: Any) -> list[Any]:
        born = draws.ShardedDraws(layout for layout in layouts if layout is not None)
        ctx = values.Context(axes, options.bucket_bytes, None, sharded_draws=born)
        rest = ctx.stored(ctx.convert_all(evaluate.evaluate(ctx, program.jaxpr, consts, arrays), layouts))
        return [host.to_host(x) if kind else x for x, kind in zip(rest, kinds, strict=True)]

    specs_ = [leaf.spec(axes.shard) for leaf in leaves.leaves]
    run = open_region(options.mesh, axes, body, (P(), P()), specs_)
    placed = place.place_all("init", options.mesh, None, arrays, P(), axes)
    consts = place.place_all("init", options.mesh, None, program.consts, P(), axes)
    stored = run(placed, consts) if place.is_traced(placed) else jax.jit(run)(placed, consts)
    return leaves.unflatten([wrap_padded(x, layout) for x, layout in zip(stored, layouts, strict=True)])


@contextlib.contextmanager
def _naming_boxes(options: Options, init_fn: Callable[..., Any], args: Any) -> Iterator[None]:
    """Names the box with an axis that the mesh lacks: as Flax constrains its value, JAX names the axis alone."""
    try:
        yield
    except ValueError:
        out = None
        with contextlib.suppress(Exception):  # it needs the mesh, or numbers
            out = trace.trace(init_fn, *args).out
        checks.check_params("init", options, out)
        raise


def _init_replicated(options: Options, init_fn: Callable[..., Any], args: Any) -> Any:
    with _naming_boxes(options, init_fn, args):
        out = jax.eval_shape(init_fn, *args)
    checks.check_params("init", options, out)
    leaves = param_leaves(options, out, 1)
    placed = leaves.unflatten([place.named_sharding(options.mesh, x.spec(None), len(x.shape)) for x in leaves.leaves])
    return jax.jit(init_fn, out_shardings=placed)(*args)
