"""`forward`: a function of split parameters without gradients, for evaluation and generation."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from .._positions import replace_at
from .._text import path_text
from .._types import PyTree
from ..comm.reduce import GradReducer, Summand
from ..fsdp.evaluate import evaluate
from ..fsdp.schedule import schedule_gathers
from ..jaxpr import dependence
from ..jaxpr.flat import flatten
from ..jaxpr.trace import Program
from ..jaxpr.varying import Vary
from ..sharding.arguments import whole_arguments
from ..sharding.options import Options, gather_options, reduce_options
from ..sharding.vma import varying
from . import checks
from .call import CallSpec, traced_per_call
from .compiled import TracedCall, kept
from .program import share_layouts, trace_sharded

P = PartitionSpec
Array = jax.Array
CALL = "forward"


def forward(
    options: Options, fn: Callable[..., Any], whole_argnums: tuple[int, ...], fold_keys: bool
) -> Callable[..., Any]:
    """See `Zero.forward`; a new function each time, so that a new `jit` of it traces `fn` anew."""

    def trace(spec: CallSpec, arrays: Sequence[Array]) -> TracedCall[PyTree]:
        program = trace_sharded(CALL, functools.partial(spec.call, CALL, fn), spec, arrays)
        return TracedCall(program, functools.partial(_run, spec, dataclasses.replace(program, consts=[])))

    whole = whole_arguments(fn, whole_argnums)
    return traced_per_call(CALL, options, whole, fold_keys, trace, kept.of(fn, CALL))


def _run(
    spec: CallSpec, program: Program, params: Sequence[Array], arrays: Sequence[Array], consts: Sequence[Array]
) -> PyTree:
    """The results of one call, as users get them: scheduled and evaluated as a gradient program is."""
    flat = flatten(program.jaxpr)
    layouts = share_layouts(spec, program, flat)
    schedule = schedule_gathers(flat, layouts, {}, gather_options(spec.options, spec.axes))
    marks = [False] * len(spec.leaves.leaves) + spec.differs
    kinds = _kinds(program.out, dependence.depends(program.jaxpr, marks, spec.axes.every), spec, arrays)
    reducer = GradReducer(spec.axes, reduce_options(spec.options))

    def on_device(params: Sequence[Array], arrays: Sequence[Array], consts: Sequence[Array], vary: Vary) -> list[Array]:
        outs, _ = evaluate(schedule, [*consts, *params, *arrays], reducer, vary)
        return _results([jnp.asarray(x) for x in outs], kinds, reducer, spec)

    out_specs = [] if spec.manual else [P(spec.batch_axes) if kind == "examples" else P() for kind in kinds]
    outs = spec.on_devices(on_device, params, arrays, consts, out_specs, constrain_outputs=False)
    return jax.tree.unflatten(jax.tree.structure(program.out), outs)


def _kinds(out: PyTree, differs: Sequence[bool], spec: CallSpec, arrays: Sequence[Array]) -> list[str]:
    """For each result: the same on all devices, the mean over devices, or examples."""
    local = spec.abstract_batch(arrays)
    lengths = {x.shape[0] for a, x in zip(spec.arguments.arrays, local, strict=True) if a.cut}
    kinds = []
    for (path, x), mark in zip(jax.tree_util.tree_leaves_with_path(out), differs, strict=True):
        if not mark:
            kinds.append("same")
        elif x.shape == () and checks.is_mean(x.dtype):
            kinds.append("mean")
        elif x.shape and (x.shape[0] in lengths or spec.manual):
            kinds.append("examples")
        else:
            raise ValueError(
                f"{CALL}: result leaf {path_text(path)!r} of shape {x.shape} and dtype {x.dtype} depends on the device "
                f"and has no example dimension. Expected a leading dimension of {sorted(lengths)} examples (joined), "
                "a floating scalar (averaged), or a value equal on all devices. Fix: jax.lax.psum(..., axis names), "
                "or put the examples first."
            )
    return kinds


def _results(outs: Sequence[Array], kinds: Sequence[str], reducer: GradReducer, spec: CallSpec) -> list[Array]:
    """Means over devices; inside a user's `shard_map` values that are equal on all devices are typed so."""
    means = [i for i, kind in enumerate(kinds) if kind == "mean"]
    out = replace_at(outs, means, reducer.all_reduce([Summand(outs[i], outs[i].dtype) for i in means]))
    for i, kind in enumerate(kinds):
        over = tuple(a for a in spec.axes.every if spec.manual and a in varying(out[i]))
        if kind == "same" and over:
            out[i] = lax.all_gather(out[i], over, to="invarying")[0]
    return out
