"""A function of split parameters as a program: traced at full shapes, planned, evaluated step by step."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._text import path_text
from ..comm.reduce import GradReducer
from ..fsdp import evaluate, schedule
from ..jaxpr import trace as jaxpr_trace
from ..jaxpr.flat import flatten, speaks_of_axes
from ..sharding.vma import abstract_varying, cast
from .accumulate import Terms
from .call import CallSpec
from .checks import check_effects


@dataclasses.dataclass(eq=False)
class SplitProgram:
    """A planned program of parameters and examples.

    Attributes:
      plan: When to gather what.
      program: The traced program.
      mean: How its gradients are sent.
    """

    plan: schedule.Schedule
    program: jaxpr_trace.Program
    mean: GradReducer

    @property
    def consts(self) -> list[Any]:
        """What the function closes over."""
        return self.program.consts

    def run(
        self, params: Sequence[Any], arrays: Sequence[Any], consts: Sequence[Any], typed: bool
    ) -> tuple[list[Any], dict[int, Any]]:
        """The results, flat, and by position the gradients as shares of sums over the shard axis."""
        return evaluate.evaluate(self.plan, [*consts, *params, *arrays], self.mean, typed)


class GradientProgram(SplitProgram):
    """A program whose results are `Terms`."""

    def step(self, params: Sequence[Any], consts: Sequence[Any], typed: bool) -> Callable[[list[Any]], Terms]:
        """One micro-step, inside a manual region."""

        def step(arrays: list[Any]) -> Terms:
            here = params
            if self.mean.steps > 1:
                here, arrays = evaluate.together(params, arrays)
            outs, sums = self.run(here, arrays, consts, typed)
            for position, layout in self.plan.grads.items():
                outs[position] = sums.get(position)
                if outs[position] is None:  # the loss does not use this parameter
                    aval = jax.tree.leaves(self.program.out)[position]
                    zero = jnp.zeros(layout.local_shape, self.mean.wire(aval.dtype))
                    outs[position] = cast(zero, self.mean.axes.every) if typed else zero
            return jax.tree.unflatten(jax.tree.structure(self.program.out), [jnp.asarray(x) for x in outs])

        return step


def trace(terms: Callable[..., Terms], setting: CallSpec, arrays: Sequence[Any], mean: GradReducer) -> GradientProgram:
    """Traces `terms(params, arrays)` at full shapes and plans when to gather and to reduce."""
    program = _traced("value_and_grad", terms, setting, arrays)
    if setting.manual and speaks_of_axes(program.jaxpr):
        # Its collectives, or what it closes over: autodiff must know that parameters and examples vary, too.
        program = _traced("value_and_grad", functools.partial(terms, trees=[]), setting, arrays, varying=True)
    leaves = jax.tree.leaves(program.out)
    trainable = [leaf for leaf in setting.leaves.leaves if leaf.trainable]
    start = len(leaves) - len(trainable)
    grads = {start + i: leaf.layout for i, leaf in enumerate(trainable) if leaf.layout is not None}
    return GradientProgram(_plan(program, setting, grads, turn=0), program, mean)


def trace_forward(fn: Callable[..., Any], setting: CallSpec, arrays: Sequence[Any]) -> SplitProgram:
    """Traces `fn(params, arrays)` at full shapes and plans when to gather."""
    program = _traced("forward", fn, setting, arrays)
    return SplitProgram(_plan(program, setting, {}, turn=None), program, GradReducer(setting.axes, setting.options))


def _traced(
    call: str, fn: Callable[..., Any], setting: CallSpec, arrays: Sequence[Any], varying: bool = False
) -> jaxpr_trace.Program:
    known, local = setting.abstract_params, setting.abstract_batch(arrays)
    if varying:
        known, local = abstract_varying(known, setting.axes.every), abstract_varying(local, setting.axes.every)
    program = jaxpr_trace.trace(fn, known, local, axis_env=setting.axis_env, mesh=setting.trace_mesh)
    check_effects(program.jaxpr, call)
    return program


def _plan(program: jaxpr_trace.Program, setting: CallSpec, grads: Any, turn: int | None) -> schedule.Schedule:
    flat = flatten(program.jaxpr)
    leaves = setting.leaves.leaves
    first = len(program.consts)
    held = flat.inputs[first : first + len(leaves)]
    used = {x for step in flat.steps for x in step.ins}.union(flat.outs)
    if leaves and turn is not None and used.isdisjoint(held):
        raise ValueError(
            f"value_and_grad: the loss uses no leaf of the parameters. Found none of "
            f"{[path_text(leaf.path) for leaf in leaves[:4]]} in its trace; expected a function of its first "
            "argument. Fix: use the argument, not parameters that the function closes over."
        )
    cut = [leaf.layout if setting.split else None for leaf in leaves]
    layouts = {v: layout for v, layout in zip(held, cut, strict=True) if layout is not None}
    return schedule.plan(flat, layouts, {}, grads, setting.options, turn=turn)
