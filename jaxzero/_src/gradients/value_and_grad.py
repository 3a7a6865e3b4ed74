"""`value_and_grad`: the gradient of the local loss, summed over microbatches, reduced and split as the stage says."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._types import PyTree
from ..jaxpr.trace import Program
from ..jaxpr.varying import Vary, evaluate_program
from ..sharding.arguments import whole_arguments
from ..sharding.leaves import is_key, wrap_padded
from ..sharding.options import Options
from . import scaled_loss
from .accumulate import Terms
from .aux import AuxSpec
from .call import traced_per_call
from .checks import GradOptions
from .compiled import TracedCall, kept
from .local_loss import CALL, GradientSpec, LocalLoss
from .program import Watch, as_terms, check_observed, ignore, sharded_gradient, trace_gradient, zero_gradients

Array = jax.Array


def value_and_grad(
    options: Options, loss_fn: Callable[..., Any], how: GradOptions, whole_argnums: tuple[int, ...], fold_keys: bool
) -> Callable[..., Any]:
    """See `Zero.value_and_grad`; a new function each time, so that a new `jit` of it traces the loss anew."""
    programs = kept.of(loss_fn, CALL, dataclasses.replace(how, aux=None))

    def of(fn: Callable[..., Any]) -> Callable[..., Any]:
        trace = lambda spec, arrays: traced_gradient(LocalLoss(how, spec, fn), arrays)
        whole = whole_arguments(fn, whole_argnums)
        return traced_per_call(CALL, options, whole, fold_keys, trace, programs, how.accumulate)

    return scaled_loss.with_scale(of(loss_fn), of(scaled_loss.scaled(loss_fn, how)), how)


def traced_gradient(
    loss: LocalLoss, arrays: Sequence[Array], watch: Watch = ignore
) -> TracedCall[tuple[PyTree, PyTree]]:
    """A loss traced for one call; `watch` as for `sharded_gradient`."""
    program, aux = trace_gradient(loss, arrays), loss.aux(arrays)
    if loss.spec.options.unused == "skip":
        check_observed(loss.spec, program)
    alone = dataclasses.replace(program, consts=[])
    return TracedCall(program, functools.partial(mean_gradient, loss.gradient, alone, aux, watch), aux.joins)


def mean_gradient(
    loss: GradientSpec,
    program: Program,
    aux: AuxSpec,
    watch: Watch,
    params: Sequence[Array],
    arrays: Sequence[Array],
    consts: Sequence[Array],
) -> tuple[PyTree, PyTree]:
    """Loss (and aux) and gradients of one call, as users get them; arguments as for `sharded_gradient`."""
    # At stages 1 and 2 a loss may have effects in an order, which a schedule would not keep.
    if loss.reduces_in_backward and (loss.spec.split or not any(eqn.effects for eqn in program.jaxpr.eqns)):
        terms = sharded_gradient(loss, program, aux, watch, params, arrays, consts)
    else:
        terms = whole_gradient(loss, program, aux, params, arrays, consts)
    value = (terms.value, jax.tree.unflatten(aux.tree, terms.aux)) if loss.how.has_aux else terms.value
    return value, _as_tree(loss, terms.grads)


def whole_gradient(
    loss: GradientSpec,
    program: Program,
    aux: AuxSpec,
    params: Sequence[Array],
    arrays: Sequence[Array],
    consts: Sequence[Array],
) -> Terms:
    """The mean loss, aux and gradients of whole parameters, which are reduced when all are there."""
    zeros = zero_gradients(loss, program)

    def on_device(params: Sequence[Array], arrays: Sequence[Array], consts: Sequence[Array], vary: Vary) -> Terms:
        def microbatch(arrays: Sequence[Array]) -> Terms:
            outs = evaluate_program(program.jaxpr, consts, [vary(x) for x in (*params, *arrays)], vary)
            terms = as_terms(program, outs, {})
            return terms._replace(grads=loss.reduce_first(terms.grads)) if loss.reduces_each else terms

        return loss.mean(microbatch, arrays, vary, aux, zeros=zeros)

    return loss.spec.on_devices(on_device, params, arrays, consts, loss.out_specs(aux))


def _as_tree(loss: GradientSpec, grads: Sequence[Array]) -> PyTree:
    """Gradients in the structure of the parameters; zeros for leaves that are not trainable."""
    moved, layouts, out = iter(grads), iter(loss.layouts), []
    for leaf in loss.spec.leaves.leaves:
        if leaf.trainable:
            out.append(wrap_padded(next(moved), next(layouts)))
        elif is_key(leaf.dtype):
            out.append(np.zeros(leaf.shape, jax.dtypes.float0))
        else:
            out.append(jnp.zeros(leaf.shape, leaf.dtype))
    return loss.spec.leaves.unflatten(out)
