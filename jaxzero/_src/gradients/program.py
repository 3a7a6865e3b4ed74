"""Stage 3: a function of split parameters is traced at full shapes, scheduled, and evaluated on shares."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._text import path_text
from ..comm.reduce import GradReducer
from ..fsdp.barriers import together
from ..fsdp.evaluate import evaluate, over_replicas
from ..fsdp.gradient_terms import zero_results
from ..fsdp.schedule import Schedule, schedule_gathers
from ..jaxpr import trace
from ..jaxpr.flat import Flat, Var, casts_to_varying, flatten
from ..jaxpr.trace import Program
from ..jaxpr.varying import Vary
from ..sharding.axes import abstract_auto
from ..sharding.layout import Layout
from ..sharding.options import gather_options
from ..sharding.vma import abstract_varying
from .accumulate import Terms
from .aux import AuxSpec
from .call import CallSpec
from .checks import check_effects, check_placements
from .local_loss import CALL, GradientSpec, LocalLoss
from .whole_stacks import warn_of_whole_stacks

Array = jax.Array
#: Reads a traced program and its schedule before they are evaluated.
Watch = Callable[[Program, Schedule], None]


def ignore(program: Program, schedule: Schedule) -> None:
    """A `Watch` that reads nothing."""


def sharded_gradient(
    loss: GradientSpec,
    program: Program,
    aux: AuxSpec,
    watch: Watch,
    params: Sequence[Array],
    arrays: Sequence[Array],
    consts: Sequence[Array],
) -> Terms:
    """The mean loss, aux and gradients, each of which is reduced where it is complete.

    Parameters are split at stage 3, and gathered where they are used; at stage 2 they are whole.

    Args:
      loss: How the results leave the devices.
      program: The result of `trace_gradient`.
      aux: How the leaves of aux are joined.
      watch: Called with the traced program and its schedule.
      params: Shares of the parameters, inside a user's `shard_map`; else the stored arrays.
      arrays: The arrays of the batch.
      consts: What the loss closes over.

    Returns:
      The means; gradients are shares, or stored arrays.
    """
    spec, reducer = loss.spec, loss.reducer
    flat = flatten(program.jaxpr)
    if spec.split:
        check_used(spec, program, flat)
    grads, options = grad_layouts(loss, program), gather_options(spec.options, spec.axes)
    schedule = schedule_gathers(flat, share_layouts(spec, program, flat), grads, options, loss_output=0)
    watch(program, schedule)
    done = frozenset(i - first_gradient(loss, program) for i in over_replicas(schedule, reducer))

    def on_device(shares: Sequence[Array], arrays: Sequence[Array], consts: Sequence[Array], vary: Vary) -> Terms:
        def microbatch(arrays: Sequence[Array]) -> Terms:
            here, arrays = (shares, arrays) if reducer.steps == 1 or not spec.split else together(shares, arrays)
            outs, grad_shares = evaluate(schedule, [*consts, *here, *arrays], reducer, vary)
            return as_terms(program, outs, zeros_like_missing(schedule, grad_shares, reducer, vary))

        return loss.mean(microbatch, arrays, vary, aux, done)

    return spec.on_devices(on_device, params, arrays, consts, loss.out_specs(aux))


def trace_gradient(loss: LocalLoss, arrays: Sequence[Array]) -> Program:
    """The gradient program of one device's examples of one microbatch, at full shapes: its results are `Terms`."""
    program = trace_sharded(CALL, loss.differentiate, loss.spec, arrays)
    if loss.spec.manual and casts_to_varying(program.jaxpr):
        # Its collectives, or what it closes over: autodiff must know that parameters and examples vary, too.
        checked = functools.partial(loss.differentiate, check=loss.check_types)
        program = trace_sharded(CALL, checked, loss.spec, arrays, varying=True)
    return program


def trace_sharded(
    call: str, fn: Callable[..., Any], spec: CallSpec, arrays: Sequence[Array], varying: bool = False
) -> Program:
    """The program of `fn(params, arrays)` at full parameter shapes and the shapes of one device's examples.

    Args:
      call: The name of the call, for errors.
      fn: The function.
      spec: The call.
      arrays: The arrays of the batch, of which only shapes and dtypes are read.
      varying: Whether all arguments are typed as varying, inside a user's `shard_map`.

    Returns:
      The program; refused if it places values over the library's axes, and at stage 3 if it has ordered effects.
    """
    known, local = spec.abstract_params, spec.abstract_batch(arrays)
    if varying:
        known, local = abstract_varying(known, spec.axes.every), abstract_varying(local, spec.axes.every)
    with _naming_placements(call, fn, spec, arrays), trace.naming_values(call):
        program = trace.trace(fn, known, local, axis_env=spec.axis_env, mesh=spec.trace_mesh)
    check_placements(call, program.jaxpr, spec.axes)
    if spec.split:
        check_effects(program.jaxpr, call)
        flat = flatten(program.jaxpr)
        warn_of_whole_stacks(call, spec, flat, {v: i for i, v in enumerate(param_inputs(spec, program, flat))})
    return program


@contextlib.contextmanager
def _naming_placements(call: str, fn: Callable[..., Any], spec: CallSpec, arrays: Sequence[Array]) -> Iterator[None]:
    """An error of JAX in a function that places values over the library's axes becomes one that says so."""
    try:
        yield
    except (ValueError, RuntimeError):
        program = None
        if spec.options.mesh is not None:
            with contextlib.suppress(Exception):  # as under plain `jit`: whole examples, the mesh set
                full = [jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)) for x in arrays]
                program = trace.trace(fn, spec.abstract_params, full, mesh=abstract_auto(spec.options.mesh))
        if program is not None:
            check_placements(call, program.jaxpr, spec.axes)
        raise


def check_used(spec: CallSpec, program: Program, flat: Flat) -> None:
    """Refuses a loss that uses no leaf of the parameters."""
    leaves, used = spec.leaves.leaves, {x for step in flat.steps for x in step.ins}.union(flat.outs)
    if leaves and used.isdisjoint(param_inputs(spec, program, flat)):
        raise ValueError(
            f"value_and_grad: the loss uses no leaf of the parameters. Found none of "
            f"{[path_text(leaf.path) for leaf in leaves[:4]]} in its trace; expected a function of its first "
            "argument. Fix: use the argument, not parameters that the function closes over."
        )


def check_observed(spec: CallSpec, program: Program) -> None:
    """With `unused="skip"`: refuses a loss that uses a leaf which the observed one does not.

    The optimizer leaves such a leaf as it is, whatever its gradient.
    """
    flat = flatten(program.jaxpr)
    used = {x for step in flat.steps for x in step.ins}.union(flat.outs)
    skipped = set(spec.options.observed.unused)
    pairs = zip(spec.leaves.leaves, param_inputs(spec, program, flat), strict=True)
    found = [path_text(leaf.path) for leaf, v in pairs if v in used and leaf.trainable and leaf.path in skipped]
    if found:
        raise ValueError(
            f"value_and_grad: unused='skip', and the loss uses {found[:4]}, which the observed loss does not: the "
            "optimizer would never update them. Expected the loss that was observed. Fix: observe each loss by itself, "
            "zero.observe(this_loss, params, *batch), with an optimizer of its own; or unused='zero'."
        )


def param_inputs(spec: CallSpec, program: Program, flat: Flat) -> list[Var]:
    """The inputs of a program that are the parameters."""
    first = len(program.jaxpr.constvars)
    return flat.inputs[first : first + len(spec.leaves.leaves)]


def share_layouts(spec: CallSpec, program: Program, flat: Flat) -> dict[Var, Layout]:
    """The inputs of a program that hold shares, with the layouts of these; none below stage 3."""
    layouts = [leaf.layout if spec.split else None for leaf in spec.leaves.leaves]
    pairs = zip(param_inputs(spec, program, flat), layouts, strict=True)
    return {v: layout for v, layout in pairs if layout is not None}


def first_gradient(loss: GradientSpec, program: Program) -> int:
    """The position of the first gradient among the results of a gradient program."""
    return len(jax.tree.leaves(program.out)) - len(loss.trainable)


def zero_gradients(loss: GradientSpec, program: Program) -> frozenset[int]:
    """The numbers of the gradients that are zeros."""
    start = first_gradient(loss, program)
    return frozenset(i - start for i in zero_results(flatten(program.jaxpr)) if i >= start)


def grad_layouts(loss: GradientSpec, program: Program) -> dict[int, Layout]:
    """The positions of the results of a gradient program that are gradients of split leaves, with their layouts."""
    start = first_gradient(loss, program)
    return {i: leaf.layout for i, leaf in enumerate(loss.trainable, start) if leaf.layout is not None}


def zeros_like_missing(
    schedule: Schedule, grad_shares: Mapping[int, Array], reducer: GradReducer, vary: Vary
) -> dict[int, Array]:
    """The shares of all gradients; zeros where the loss does not use a parameter."""
    zeros = lambda i, layout: vary(jnp.zeros(layout.local_shape, reducer.wire(schedule.grad_dtype(i))))
    return {i: grad_shares[i] if i in grad_shares else zeros(i, layout) for i, layout in schedule.grads.items()}


def as_terms(program: Program, outs: Sequence[Array | None], grad_shares: Mapping[int, Array]) -> Terms:
    """The results of a gradient program in its own structure, with shares in the places of split gradients."""
    leaves = [jnp.asarray(grad_shares.get(i, x)) for i, x in enumerate(outs)]
    return jax.tree.unflatten(jax.tree.structure(program.out), leaves)
