"""`value_and_grad`: the gradient of the local loss, summed over microbatches, reduced and split as the stage says."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._types import PyTree
from ..jaxpr.varying import Vary
from ..sharding.arguments import whole_arguments
from ..sharding.leaves import is_key, wrap_padded
from ..sharding.options import Options
from . import scaled_loss
from .accumulate import Terms
from .aux import AuxSpec
from .call import CallSpec, cached_by_callable, compiled_per_call
from .checks import GradOptions
from .local_loss import CALL, LocalLoss
from .program import Watch, ignore, sharded_gradient, trace_gradient

Array = jax.Array


@cached_by_callable
def value_and_grad(
    options: Options, loss_fn: Callable[..., Any], how: GradOptions, whole_argnums: tuple[int, ...], fold_keys: bool
) -> Callable[..., Any]:
    """See `Zero.value_and_grad`; the same function for the same arguments, so that caches work."""

    def of(fn: Callable[..., Any]) -> Callable[..., Any]:
        run = functools.partial(mean_gradient, fn, how)
        return compiled_per_call(CALL, options, whole_arguments(fn, whole_argnums), fold_keys, run, how.accumulate)

    return scaled_loss.with_scale(of(loss_fn), of(scaled_loss.scaled(loss_fn, how)), how)


def mean_gradient(
    loss_fn: Callable[..., Any],
    how: GradOptions,
    spec: CallSpec,
    params: Sequence[Array],
    arrays: Sequence[Array],
    watch: Watch = ignore,
) -> tuple[PyTree, PyTree]:
    """Loss (and aux) and gradients of one call, as users get them; `watch` as for `sharded_gradient`."""
    loss = LocalLoss(loss_fn, how, spec)
    aux = loss.aux(arrays)
    program = trace_gradient(loss, arrays) if loss.reduces_in_backward else None
    # An effect has its order in the loss itself.
    if program is None or (not spec.split and any(eqn.effects for eqn in program.jaxpr.eqns)):
        terms = whole_gradient(loss, params, arrays, aux)
    else:
        terms = sharded_gradient(loss, program, params, arrays, aux, watch)
    return (terms.value, jax.tree.unflatten(aux.tree, terms.aux)) if how.has_aux else terms.value, _as_tree(
        loss, terms.grads
    )


def whole_gradient(loss: LocalLoss, params: Sequence[Array], arrays: Sequence[Array], aux: AuxSpec) -> Terms:
    """The mean loss, aux and gradients of whole parameters, which are reduced when all are there."""
    spec = loss.spec
    check = {"check": loss.check_types} if spec.manual else {}

    def on_device(params: Sequence[Array], arrays: Sequence[Array], consts: Sequence[Array], vary: Vary) -> Terms:
        params = [vary(x) for x in params]

        def microbatch(arrays: Sequence[Array]) -> Terms:
            terms = loss.differentiate(params, arrays, **check)
            return terms._replace(grads=loss.reduce_first(terms.grads)) if loss.reduces_each else terms

        return loss.mean(microbatch, arrays, vary, aux)

    return spec.on_devices(on_device, params, arrays, [], loss.out_specs(aux))


def _as_tree(loss: LocalLoss, grads: Sequence[Array]) -> PyTree:
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
