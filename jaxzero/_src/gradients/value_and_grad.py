"""`value_and_grad`: the gradient of the local loss, summed over micro-steps, reduced and split as the stage says."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from ..comm.reduce import GradReducer
from ..jaxpr import dependence, trace
from ..sharding import vma
from ..sharding.flax_boxes import opened
from ..sharding.leaves import is_key, wrap_padded
from ..sharding.options import Options
from . import accumulate, batch, checks, scaled_loss
from . import program as gradients_program
from .accumulate import Terms
from .call import CallSpec, wrap
from .checks import GradOptions

P = PartitionSpec
CALL = "value_and_grad"


@functools.lru_cache(maxsize=64)
def value_and_grad(
    options: Options,
    loss_fn: Callable[..., Any],
    how: GradOptions,
    whole_argnums: tuple[int, ...],
    fold_keys: bool,
) -> Callable[..., Any]:
    """See `Zero.value_and_grad`; the same function for the same arguments, so that caches work."""

    def of(loss: Callable[..., Any]) -> Callable[..., Any]:
        return wrap(CALL, options, whole_argnums, fold_keys, functools.partial(_run, loss, how), how.accumulate)

    return scaled_loss.with_scale(of(loss_fn), of(scaled_loss.scaled(loss_fn, how)), how)


def _run(loss_fn: Callable[..., Any], how: GradOptions, setting: CallSpec, params: Any, arrays: Any) -> Any:
    return Gradient(loss_fn, how, setting)(params, arrays)


@dataclasses.dataclass(frozen=True)
class Gradient:
    """The gradient of one loss in one setting."""

    loss_fn: Callable[..., Any]
    how: GradOptions
    setting: CallSpec

    def __call__(self, params: Sequence[Any], arrays: Sequence[Any]) -> Any:
        """Loss (and aux) and gradients, as users get them."""
        if self.setting.manual:
            terms, tree = self._inside(params, arrays)
        else:
            terms, tree = self._outside(params, arrays)
        value = (terms.value, jax.tree.unflatten(tree, terms.aux)) if self.how.has_aux else terms.value
        return value, self._assemble(terms.grads)

    def _outside(self, params: Any, arrays: Any) -> tuple[Terms, Any]:
        """The global view: a region of the library's own around the loss."""
        setting = self.setting
        program = self.program(arrays) if setting.split else None
        tree = self._aux_tree(program, arrays)

        def body(params: Any, arrays: Any, consts: Any) -> Any:
            arrays = batch.fold(setting.arguments.arrays, arrays, setting.axes)
            params = setting.fetched(params)
            step = self._local_step(params) if program is None else program.step(params, consts, False)
            return self._reduced(step, arrays, typed=False)

        trainable = [leaf for leaf in setting.leaves.leaves if leaf.trainable]
        cut = [
            leaf.spec(setting.axes.shard if layout else None)
            for leaf, layout in zip(trainable, self._layouts, strict=True)
        ]
        out_specs = Terms(P(), None, P(), cut)  # type: ignore[arg-type]
        run = setting.region(body, (setting.param_specs, setting.batch_specs, P()), out_specs)
        return run(params, arrays, [] if program is None else program.consts), tree

    def _inside(self, params: Any, arrays: Any) -> tuple[Terms, Any]:
        """Inside a user's `shard_map`: types say what is local; every stage gives shares."""
        setting, trees = self.setting, []
        arrays = batch.fold(setting.arguments.arrays, arrays, setting.axes)
        if setting.split:
            program = self.program(arrays)
            trees.append(self._aux_tree(program, arrays))
            step = program.step(params, program.consts, True)
        else:
            params = [vma.cast(x, setting.axes.every) for x in params]
            step = self._local_step(params, trees)
        return self._reduced(step, arrays, typed=True), trees[0]

    # --- one micro-step ---

    def _terms(self, params: Sequence[Any], arrays: Sequence[Any], trees: list[Any] | None = None) -> Terms:
        """Loss, weight, aux and gradients of the given examples; only trainable leaves have one."""
        leaves = self.setting.leaves
        trainable = [i for i, leaf in enumerate(leaves.leaves) if leaf.trainable]

        def of(values: list[Any]) -> tuple[Any, Any]:
            merged = list(params)
            for i, x in zip(trainable, values, strict=True):
                merged[i] = x
            out = self.loss_fn(opened(leaves.unflatten(merged)), *self.setting.arguments.rebuild(arrays))
            value, weight, aux = checks.check(CALL, out, self.how)
            return value, (weight, aux)

        given = [params[i] for i in trainable]
        (value, (weight, aux)), grads = jax.value_and_grad(of, has_aux=True)(given)
        flat, tree = jax.tree.flatten(aux)
        if trees is not None:
            checks.check_types(CALL, value, aux, self.setting.axes)
            trees[:] = [tree]
        return Terms(value, weight, flat, grads)

    def _local_step(self, params: Sequence[Any], trees: list[Any] | None = None) -> Callable[[list[Any]], Terms]:
        """A micro-step over whole parameters; from stage 2 on its gradients leave it reduced."""

        def step(arrays: list[Any]) -> Terms:
            terms = self._terms(params, arrays, trees)
            return terms._replace(grads=self._first_hop(terms.grads)) if self._summed else terms

        return step

    def program(self, arrays: Sequence[Any]) -> gradients_program.GradientProgram:
        """The gradient program at full parameter shapes and the shapes of one micro-step's examples."""
        return gradients_program.trace(self._terms, self.setting, arrays, self._mean)

    # --- what leaves the loss ---

    @property
    def _mean(self) -> GradReducer:
        return GradReducer(self.setting.axes, self.setting.options, self.how.accumulate)

    @property
    def _summed(self) -> bool:
        """Whether gradients leave each micro-step as shares of a sum over the shard axis."""
        return self.setting.options.stage == 3 or (self.setting.options.stage == 2 and self.how.sync == "each")

    @property
    def _layouts(self) -> list[Any]:
        """How the gradients are cut that are returned: at stage 1 in the global view they are whole."""
        whole = self.setting.options.stage == 1 and not self.setting.manual
        return [None if whole else leaf.layout for leaf in self.setting.leaves.leaves if leaf.trainable]

    def _first_hop(self, grads: Sequence[Any]) -> list[Any]:
        mean, out = self._mean, list(grads)
        cut = [i for i, layout in enumerate(self._layouts) if layout is not None]
        hop = mean.all_reduce_then_slice if self.setting.options.stage == 1 else mean.reduce_scatter_shares
        for i, x in zip(cut, hop([grads[i] for i in cut], [self._layouts[i] for i in cut]), strict=True):
            out[i] = x
        return out

    def _reduced(self, step: Callable[[list[Any]], Terms], arrays: Sequence[Any], typed: bool) -> Terms:
        """Everything that leaves a loss: the sum over micro-steps, and the mean over devices, once."""
        how, mean, axes = self.how, self._mean, self.setting.axes
        kinds = self.setting.arguments.arrays
        sums, like = accumulate.run(step, kinds, arrays, axes, how.accumulate, how.accumulate_dtype, typed)
        weight = None if sums.weight is None else mean.total(sums.weight)
        grads = list(sums.grads if self._summed else self._first_hop(sums.grads))
        leaves = [leaf for leaf in self.setting.leaves.leaves if leaf.trainable]
        dtypes = [leaf.dtype for leaf in leaves]
        cut = [i for i, layout in enumerate(self._layouts) if layout is not None]
        layouts = [leaves[i].cut for i in cut]
        shares = mean.all_reduce_replicas([grads[i] for i in cut], layouts, [dtypes[i] for i in cut], weight)
        for i, x in zip(cut, shares, strict=True):
            grads[i] = x
        rest = [i for i, layout in enumerate(self._layouts) if layout is None]
        aux = list(sums.aux)
        means = [j for j, x in enumerate(like.aux) if checks.is_mean(x.dtype)]
        together = [sums.value, *(grads[i] for i in rest), *(aux[j] for j in means)]
        into = [like.value.dtype, *(dtypes[i] for i in rest), *(like.aux[j].dtype for j in means)]
        weights = [weight] * (1 + len(rest)) + [None] * len(means)
        other_axes = [(), *(leaves[i].other_axes for i in rest), *(() for _ in means)]
        value, *done = mean.whole(
            [vma.cast(x, axes.every) if typed else x for x in together], into, weights, other_axes
        )
        for i, x in zip(rest, done, strict=False):
            grads[i] = x
        for j, x in zip(means, done[len(rest) :], strict=True):
            aux[j] = x
        return Terms(value, None, aux, grads)

    def _assemble(self, grads: Sequence[Any]) -> Any:
        moved, layouts, out = iter(grads), iter(self._layouts), []
        for leaf in self.setting.leaves.leaves:
            if leaf.trainable:
                out.append(wrap_padded(next(moved), next(layouts)))
            elif is_key(leaf.dtype):
                out.append(np.zeros(leaf.shape, jax.dtypes.float0))
            else:
                out.append(jnp.zeros(leaf.shape, leaf.dtype))
        return self.setting.leaves.unflatten(out)

    # --- aux ---

    def _aux_tree(self, program: Any, arrays: Any) -> Any:
        """The structure of aux; refuses leaves that are no means and differ between devices."""
        setting = self.setting
        if not self.how.has_aux:
            return jax.tree.structure(None)
        leaves, rebuild = setting.leaves, setting.arguments.rebuild
        aux_of = lambda p, b: checks.check(CALL, self.loss_fn(opened(leaves.unflatten(p)), *rebuild(b)), self.how)[2]
        known, local = setting.abstract_params, setting.abstract_batch(arrays)
        traced = trace.trace(aux_of, known, local, axis_env=setting.axis_env, mesh=setting.trace_mesh)
        marks = [False] * len(leaves.leaves) + setting.dealt
        checks.check_aux(CALL, traced.out, dependence.depends(traced.jaxpr, marks, setting.axes.every))
        return jax.tree.structure(traced.out)
