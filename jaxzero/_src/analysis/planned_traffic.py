"""The traffic of a plan: which leaves share a bucket or a chunk, and what one step sends."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._types import Path, PyTree
from ..comm.collectives import bucketed
from ..comm.placement import shard
from ..comm.reduce import GradReducer
from ..fsdp.observe import ObservedLoss
from ..fsdp.schedule import Schedule
from ..gradients.call import CallSpec, traced_per_call
from ..gradients.checks import GradOptions
from ..gradients.compiled import Programs, TracedCall
from ..gradients.local_loss import LocalLoss
from ..gradients.program import param_inputs
from ..gradients.value_and_grad import traced_gradient
from ..jaxpr.collectives import Sent, total
from ..jaxpr.flat import Var
from ..jaxpr.trace import Program
from ..optimizer.trace import naming_missing_extra
from ..optimizer.wrapper import wrap
from ..sharding.arguments import whole_arguments
from ..sharding.axes import Axes
from ..sharding.layout import Layout
from ..sharding.leaves import Leaf, Leaves
from ..sharding.options import Options, reduce_options, resolve_axes
from . import default_loss

CALL = "plan"


def loss_of(options: Options, leaves: Leaves, how: GradOptions) -> ObservedLoss:
    """The observed loss, without aux, or the default loss."""
    seen = options.observed and options.observed.loss
    if seen is None:
        axes, _ = resolve_axes(options, CALL)
        return ObservedLoss(default_loss.loss(leaves), (default_loss.batch(axes.n * axes.r * how.accumulate),), {}, ())
    value = functools.wraps(seen.fn)(lambda *args, **named: jax.tree.leaves(seen.fn(*args, **named))[0])
    return dataclasses.replace(seen, fn=value)


# --- buckets and chunks --------------------------------------------------------------------------


def buckets(options: Options, leaves: Leaves, axes: Axes) -> dict[Path, int]:
    """The number of the collective that reduces each gradient, by key path; empty at stage 3, which has chunks."""
    if options.stage == 3:
        return {}
    moving = [leaf for leaf in leaves.leaves if leaf.trainable and (options.stage == 1 or leaf.layout)]
    wire = GradReducer(axes, reduce_options(options)).wire
    values = [jax.ShapeDtypeStruct(leaf.shape, wire(leaf.dtype)) for leaf in moving]
    layouts = [
        leaf.cut if options.stage == 2 else Layout(leaf.shape, 1, "flat", other_axes=leaf.other_axes) for leaf in moving
    ]
    if options.stage == 1:  # the loss travels first
        values, layouts = [jax.ShapeDtypeStruct((), jnp.float32), *values], [Layout((), 1, "flat"), *layouts]
    groups = bucketed(values, layouts, options.bucket_bytes)
    first = len(values) - len(moving)
    return {moving[i - first].path: number for number, group in enumerate(groups) for i in group if i >= first}


def reductions(schedule: Schedule, leaves: Leaves) -> dict[Path, int]:
    """The number of the collective that reduces each gradient, by key path, where a schedule reduces them."""
    trainable = [leaf for leaf in leaves.leaves if leaf.trainable]
    start = len(schedule.flat.outs) - len(trainable)
    together = {position: schedule.groups.get(position, [position])[0] for position in sorted(schedule.grads)}
    order = {first: number for number, first in enumerate(dict.fromkeys(together.values()))}
    return {trainable[position - start].path: order[first] for position, first in together.items()}


def repeated(schedule: Schedule, leaves: Leaves) -> dict[Path, int]:
    """How often the gradient of a leaf is reduced in a step, by key path, where that is more than once."""
    trainable = [leaf for leaf in leaves.leaves if leaf.trainable]
    start = len(schedule.flat.outs) - len(trainable)
    return {trainable[p - start].path: count for p, count in schedule.reductions.items() if count > 1}


def chunks(schedule: Schedule, held: dict[Var, Leaf]) -> dict[Path, int]:
    """The number of the gather before the first use of each leaf, by key path; `held`: the leaf of each input."""
    out: dict[Path, int] = {}
    for number, members in enumerate(_gathered(schedule, held)):
        for leaf in members:
            out.setdefault(leaf.path, number)
    order = {number: i for i, number in enumerate(sorted(set(out.values())))}
    return {path: order[number] for path, number in out.items()}


def _gathered(schedule: Schedule, held: dict[Var, Leaf]) -> Iterator[list[Leaf]]:
    """The leaves of each gather, in order; gathers in a scan's body come at the position of the scan."""
    after = {number: step for number, step in enumerate(schedule.flat.steps) if step in schedule.scans}
    done = 0
    for number in range(len(schedule.flat.steps) + 1):
        while done < len(schedule.gathers) and schedule.gathers[done].step <= number:
            yield [held[p.source] for p in schedule.gathers[done].params]
            done += 1
        if number in after:
            scan = schedule.scans[after[number]]
            inner = {v: held[outer] for v, outer in scan.outer_param_of.items()}
            yield from _gathered(scan.body, inner)


# --- bytes ---------------------------------------------------------------------------------------


def stored_params(options: Options, leaves: Leaves) -> PyTree:
    """Abstract parameters as they are stored between steps."""
    whole = leaves.unflatten([jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves.leaves])
    return jax.eval_shape(lambda p: shard(options, p, CALL), whole)


class Traced(NamedTuple):
    """What the traces of one training step show.

    Attributes:
      traffic: What each device sends, by phase, axes and kind.
      chunks: Stage 3: the number of the gather of each leaf, by key path.
      buckets: Stages 1 and 2: the number of the collective that reduces each gradient.
      repeated: Stage 3: the gradients that are reduced more than once, and how often.
    """

    traffic: tuple[Sent, ...]
    chunks: dict[Path, int]
    buckets: dict[Path, int]
    repeated: dict[Path, int]


def trace(
    options: Options, leaves: Leaves, inner: optax.GradientTransformation | None, stored: PyTree, how: GradOptions
) -> Traced:
    """What one training step sends, its chunks and buckets, read from traces of `value_and_grad` and `apply`.

    Args:
      options: The options.
      leaves: The parameters.
      inner: The optimizer; without one only the gather of new parameters is counted.
      stored: Abstract parameters as they are stored between steps.
      how: How the loss is differentiated.

    Returns:
      What was found.
    """
    loss = loss_of(options, leaves, how)
    gathered_by: dict[Path, int] = {}
    reduced_by: dict[Path, int] = {}
    several: dict[Path, int] = {}

    def trace(spec: CallSpec, arrays: Sequence[jax.Array]) -> TracedCall[PyTree]:
        def watch(program: Program, schedule: Schedule) -> None:
            held = dict(zip(param_inputs(spec, program, schedule.flat), leaves.leaves, strict=True))
            gathered_by.update(chunks(schedule, held))
            if options.stage < 3:
                reduced_by.update(reductions(schedule, leaves))
            else:
                several.update(repeated(schedule, leaves))

        return traced_gradient(LocalLoss(how, spec, loss.fn), arrays, watch)

    whole = whole_arguments(loss.fn, loss.whole_argnums)
    grad_fn = traced_per_call(CALL, options, whole, True, trace, Programs(), how.accumulate)
    backward, (_, grads) = jax.make_jaxpr(grad_fn, return_shape=True)(stored, *loss.batch, **loss.named)
    tx: Any = wrap(options, optax.sgd(0.0) if inner is None else inner, False)
    apply = lambda g, s, p: tx.calls.apply(g, s, p, {})
    with naming_missing_extra(CALL, "zero.plan(params) for a plan without the optimizer."):
        update = jax.make_jaxpr(apply)(grads, tx.init(stored), stored)
    sizes = dict(options.mesh.shape)
    traffic = total("gradient", backward.jaxpr, sizes) + total("update", update.jaxpr, sizes)
    joined = reduced_by or buckets(options, leaves, resolve_axes(options, CALL)[0])
    return Traced(traffic, gathered_by, joined, several)
