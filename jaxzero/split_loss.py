"""The gradient of a loss over split parameters: traced, planned, evaluated, reduced."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from . import dependence, gather_on_use, partition, schedule, synchronise
from .flat_program import check_effects, flatten
from .mesh import Axes
from .options import Options
from .state import Leaves


@dataclasses.dataclass(eq=False)
class GradientProgram:
    """A planned gradient program: `(params, arrays) -> (loss, aux, gradients)`."""

    plan: schedule.Schedule
    program: partition.Program
    leaves: Leaves
    axes: Axes
    options: Options

    @property
    def out(self) -> Any:
        """The abstract results."""
        return self.program.out

    @property
    def consts(self) -> list[Any]:
        """What the loss closes over."""
        return self.program.consts

    def differs(self, arrays: Sequence[bool], axes: Axes) -> list[bool]:
        """Which results depend on the device; first the loss, then the leaves of aux."""
        marks = [False] * len(self.leaves.leaves) + list(arrays)
        return dependence.depends(self.program.jaxpr, marks, axes.every)

    def run(self, params: Sequence[Any], arrays: Sequence[Any], consts: Sequence[Any], typed: bool) -> Any:
        """Inside a manual region: the mean loss, aux as the other stages give it, and shares of the gradients."""
        axes, options = self.axes, self.options
        outs, sums = gather_on_use.evaluate(self.plan, [*consts, *params, *arrays], axes, options, typed)
        trainable = [leaf for leaf in self.leaves.leaves if leaf.trainable]
        first = len(outs) - len(trainable)
        cut = sorted(sums)
        shares = synchronise.finish([sums[i] for i in cut], [trainable[i - first].dtype for i in cut], axes, options)
        grads: list[Any] = list(outs[first:])
        for i, x in zip(cut, shares, strict=True):
            grads[i - first] = x
        for i, leaf in enumerate(trainable):
            if leaf.layout is not None and first + i not in sums:
                grads[i] = jnp.zeros(leaf.layout.local_shape, leaf.dtype)
        value, *aux = outs[:first]
        means = [j for j, x in enumerate(aux) if jnp.issubdtype(jnp.result_type(x), jnp.inexact)]
        rest = [i for i, leaf in enumerate(trainable) if leaf.layout is None]
        together = [jnp.asarray(x) for x in (value, *(aux[j] for j in means), *(grads[i] for i in rest))]
        done = synchronise.mean_whole(together, axes, options)
        for j, x in zip(means, done[1:], strict=False):
            aux[j] = x
        for i, x in zip(rest, done[1 + len(means) :], strict=True):
            grads[i] = x
        return done[0], aux, grads


def trace(
    local: Callable[..., Any], leaves: Leaves, arrays: Sequence[Any], axes: Axes, options: Options
) -> GradientProgram:
    """Traces `local(params, arrays) -> (loss, aux, gradients)` at full shapes, and plans it."""
    known = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves.leaves]
    env = list(zip(axes.every, axes.sizes, strict=True))
    program = partition.trace(local, known, list(arrays), axis_env=env)
    check_effects(program.jaxpr, "value_and_grad")
    flat = flatten(program.jaxpr)
    first = len(program.consts)
    layouts = {
        v: leaf.layout
        for v, leaf in zip(flat.inputs[first : first + len(known)], leaves.leaves, strict=True)
        if leaf.layout is not None
    }
    trainable = [leaf for leaf in leaves.leaves if leaf.trainable]
    start = len(flat.outs) - len(trainable)
    grads = {start + i: leaf.layout for i, leaf in enumerate(trainable) if leaf.layout is not None}
    return GradientProgram(schedule.plan(flat, layouts, {}, grads, options, turn=0), program, leaves, axes, options)
