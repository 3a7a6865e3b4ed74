"""`forward`: a function of split parameters without gradients, for evaluation and generation."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from .._text import path_text
from ..jaxpr import dependence
from ..sharding import vma
from ..sharding.flax_boxes import opened
from ..sharding.options import Options
from . import batch, checks
from . import program as gradients_program
from .call import CallSpec, wrap

P = PartitionSpec
CALL = "forward"


@functools.lru_cache(maxsize=64)
def forward(
    options: Options, fn: Callable[..., Any], whole_argnums: tuple[int, ...], fold_keys: bool
) -> Callable[..., Any]:
    """See `Zero.forward`; the same function for the same arguments, so that caches work."""
    return wrap(CALL, options, whole_argnums, fold_keys, functools.partial(_run, fn))


def _run(fn: Callable[..., Any], setting: CallSpec, params: Sequence[Any], arrays: Sequence[Any]) -> Any:
    call = lambda p, b: fn(opened(setting.leaves.unflatten(p)), *setting.arguments.rebuild(b))
    program = gradients_program.trace_forward(call, setting, arrays)
    marks = [False] * len(setting.leaves.leaves) + setting.dealt
    differs = dependence.depends(program.program.jaxpr, marks, setting.axes.every)
    kinds = _kinds(program.program.out, differs, setting, arrays)

    def body(params: Any, arrays: Any, consts: Any) -> list[Any]:
        arrays = batch.fold(setting.arguments.arrays, arrays, setting.axes)
        outs, _ = program.run(setting.fetched(params), arrays, consts, setting.manual)
        return _results([jnp.asarray(x) for x in outs], kinds, program, setting)

    if setting.manual:
        outs = body(params, arrays, program.consts)
    else:
        dealt = [P(setting.over) if kind == "examples" else P() for kind in kinds]
        run = setting.region(body, (setting.param_specs, setting.batch_specs, P()), dealt, told=False)
        outs = run(params, arrays, program.consts)
    return jax.tree.unflatten(jax.tree.structure(program.program.out), outs)


def _kinds(out: Any, differs: Sequence[bool], setting: CallSpec, arrays: Sequence[Any]) -> list[str]:
    """For each result: the same on all devices, the mean over devices, or examples."""
    local = setting.abstract_batch(arrays)
    lengths = {x.shape[0] for a, x in zip(setting.arguments.arrays, local, strict=True) if a.cut}
    kinds = []
    for (path, x), mark in zip(jax.tree_util.tree_leaves_with_path(out), differs, strict=True):
        if not mark:
            kinds.append("same")
        elif x.shape == () and checks.is_mean(x.dtype):
            kinds.append("mean")
        elif x.shape and (x.shape[0] in lengths or setting.manual):
            kinds.append("examples")
        else:
            raise ValueError(
                f"{CALL}: result leaf {path_text(path)!r} of shape {x.shape} and dtype {x.dtype} depends on the device "
                f"and has no example dimension. Expected a leading dimension of {sorted(lengths)} examples (joined), "
                "a floating scalar (averaged), or a value equal on all devices. Fix: jax.lax.psum(..., axis names), "
                "or put the examples first."
            )
    return kinds


def _results(outs: Sequence[Any], kinds: Sequence[str], program: Any, setting: CallSpec) -> list[Any]:
    """Means taken; inside a user's `shard_map`, what is the same on all devices typed so."""
    out = list(outs)
    means = [i for i, kind in enumerate(kinds) if kind == "mean"]
    done = program.mean.whole([out[i] for i in means], [out[i].dtype for i in means])
    for i, x in zip(means, done, strict=True):
        out[i] = x
    for i, kind in enumerate(kinds):
        over = tuple(a for a in setting.axes.every if setting.manual and a in vma.varying(out[i]))
        if kind == "same" and over:
            out[i] = lax.all_gather(out[i], over, to="invarying")[0]
    return out
