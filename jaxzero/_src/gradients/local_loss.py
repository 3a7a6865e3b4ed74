"""The loss of one device: differentiated on its own examples, added over microbatches, averaged over devices."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from .._positions import replace_at
from .._types import PyTree
from ..comm.reduce import GradReducer, Summand, overwrite_all
from ..jaxpr import dependence, trace
from ..jaxpr.varying import Vary
from ..sharding.layout import Layout
from ..sharding.leaves import Leaf
from ..sharding.options import reduce_options
from ..sharding.vma import abstract_varying, varying
from . import checks
from .accumulate import Joins, Terms, add_up
from .aux import NO_AUX, AuxSpec, aux_spec, over_devices
from .call import CallSpec
from .checks import GradOptions

P = PartitionSpec
Array = jax.Array
CALL = "value_and_grad"


def _no_check(value: Array) -> None:
    """No types to check."""


@dataclasses.dataclass(frozen=True)
class GradientSpec:
    """How the results of a loss leave the devices in one call: reduced and split.

    Attributes:
      how: How the loss is differentiated.
      spec: The call.
    """

    how: GradOptions
    spec: CallSpec

    @property
    def trainable(self) -> list[Leaf]:
        """The leaves that have a gradient."""
        return [leaf for leaf in self.spec.leaves.leaves if leaf.trainable]

    @property
    def layouts(self) -> list[Layout | None]:
        """The layouts of the gradients that are returned: at stage 1 in the global view they are whole."""
        whole = self.spec.options.stage == 1 and not self.spec.manual
        return [None if whole else leaf.layout for leaf in self.trainable]

    @property
    def overwritten(self) -> list[int]:
        """The numbers of the gradients that are the next values of their leaves."""
        return [i for i, leaf in enumerate(self.trainable) if leaf.overwritten]

    def out_specs(self, aux: AuxSpec) -> Terms:
        """Where the results are, in the global view."""
        pairs = zip(self.trainable, self.layouts, strict=True)
        grads: Any = [leaf.spec(self.spec.axes.shard if layout else None) for leaf, layout in pairs]
        replicated: Any = P()
        return Terms(replicated, None, aux.specs(self.spec.batch_axes), grads)

    @property
    def reducer(self) -> GradReducer:
        """What sums over devices."""
        return GradReducer(self.spec.axes, reduce_options(self.spec.options), self.how.accumulate)

    @property
    def reduces_each(self) -> bool:
        """Whether gradients leave each microbatch as shares of a sum over the shard axis."""
        return self.spec.options.stage == 3 or (self.spec.options.stage == 2 and self.how.sync == "each")

    @property
    def reduces_in_backward(self) -> bool:
        """Whether a gradient is reduced where it is complete: at stage 3, and at stage 2 in the global view."""
        return self.spec.split or (self.reduces_each and not self.spec.manual)

    def reduce_first(self, grads: Sequence[Array]) -> list[Array]:
        """Shares of sums over the shard axis, of the gradients that are cut."""
        reducer, layouts = self.reducer, self.layouts
        cut = [i for i, layout in enumerate(layouts) if layout is not None]
        reduce = reducer.all_reduce_then_slice if self.spec.options.stage == 1 else reducer.reduce_scatter
        shares = reduce([grads[i] for i in cut], [layout for layout in layouts if layout is not None])
        return replace_at(grads, cut, shares)

    def mean(
        self,
        step: Callable[[list[Array]], Terms],
        arrays: Sequence[Array],
        vary: Vary,
        aux: AuxSpec,
        over_replicas: frozenset[int] = frozenset(),
        zeros: frozenset[int] = frozenset(),
    ) -> Terms:
        """Everything that leaves a loss: the sum over microbatches, and the mean over devices, once.

        Args:
          step: The results of one microbatch.
          arrays: This device's arrays of the batch.
          vary: As for `evaluate`.
          aux: How the leaves of aux are joined.
          over_replicas: The numbers of the gradients that are summed over replicas already.
          zeros: The numbers of the gradients that are zeros; whole ones are not summed.

        Returns:
          The means; gradients as `layouts` says, aux as the list of its leaves.
        """
        how, reducer, last = self.how, self.reducer, self.overwritten
        kinds = self.spec.arguments.arrays
        sums, one = add_up(step, kinds, arrays, how.accumulate, how.accumulate_dtype, vary, Joins(aux.joins, last))
        weight = None if sums.weight is None else reducer.total(sums.weight)
        grads = sums.grads if self.reduces_each else self.reduce_first(sums.grads)
        dtypes = [jnp.result_type(x) for x in jax.tree.leaves(one.aux)]
        means = [i for i, join in enumerate(aux.joins) if join == "mean"]
        rows = list(zip(grads, self.trainable, self.layouts, strict=True))
        zero = [i for i in zeros if self.layouts[i] is None]
        summed = [i for i in range(len(grads)) if i not in last and i not in zero]
        value, *done = reducer.finish(
            [
                Summand(sums.value, one.value.dtype, weight=weight),
                *(
                    Summand(x, leaf.dtype, layout, weight, leaf.other_axes, i in over_replicas)
                    for i, (x, leaf, layout) in ((i, rows[i]) for i in summed)
                ),
                *(Summand(sums.aux[i], dtypes[i]) for i in means),
            ],
            vary,
        )
        leaves = replace_at(sums.aux, means, done[len(summed) :])
        others = [i for i, join in enumerate(aux.joins) if join not in ("mean", "concat")]
        axes = self.spec.axes
        joined = [over_devices(aux.joins[i], jnp.asarray(leaves[i]), dtypes[i], axes) for i in others]
        new = replace_at(grads, summed, done[: len(summed)])
        new = replace_at(new, zero, [jnp.zeros(self.trainable[i].shape, self.trainable[i].dtype) for i in zero])
        new = replace_at(new, last, overwrite_all([grads[i] for i in last], axes))
        return Terms(value, None, replace_at(leaves, others, joined), new)


@dataclasses.dataclass(frozen=True)
class LocalLoss(GradientSpec):
    """A user's loss in one call.

    Attributes:
      fn: `fn(params, *batch)`.
    """

    fn: Callable[..., Any]

    @property
    def gradient(self) -> GradientSpec:
        """The call without the loss and what it closes over."""
        return GradientSpec(dataclasses.replace(self.how, aux=None), self.spec)

    def call(self, params: Sequence[Array], arrays: Sequence[Array]) -> tuple[Array, Array | None, PyTree]:
        """The loss, its weight and aux (`None` without), from whole parameters and one device's examples."""
        return checks.split_result(CALL, self.spec.call(CALL, self.fn, params, arrays), self.how)

    def differentiate(
        self, params: Sequence[Array], arrays: Sequence[Array], check: Callable[[Array], None] = _no_check
    ) -> Terms:
        """Loss, weight, aux and gradients of one device's examples of one microbatch.

        Args:
          params: Whole parameters.
          arrays: The arrays of the batch.
          check: Refuses a loss by its type.

        Returns:
          The results; gradients have the parameters' shapes, and are those of this device alone.
        """
        trainable = [i for i, leaf in enumerate(self.spec.leaves.leaves) if leaf.trainable]

        def of(values: list[Array]) -> tuple[Array, tuple[Array | None, PyTree]]:
            value, weight, aux = self.call(replace_at(params, trainable, values), arrays)
            return value, (weight, aux)

        (value, (weight, aux)), grads = jax.value_and_grad(of, has_aux=True)([params[i] for i in trainable])
        check(value)
        return Terms(value, weight, aux, grads)

    def check_types(self, value: Array) -> None:
        """Inside a user's `shard_map`: refuses a loss that is reduced already."""
        checks.check_types(CALL, value, self.spec.axes)

    def aux(self, arrays: Sequence[Array]) -> AuxSpec:
        """How each leaf of aux is joined; refuses such as cannot be told."""
        if not self.how.has_aux:
            return NO_AUX
        local, kinds = self.spec.abstract_batch(arrays), self.spec.arguments.arrays
        differs = [d or bool(varying(x)) for d, x in zip(self.spec.differs, arrays, strict=True)]
        program = self._trace_aux(local)
        marks = [False] * len(self.spec.leaves.leaves) + differs
        depends = dependence.depends(program.jaxpr, marks, self.spec.axes.every)

        def grown() -> PyTree | None:
            twice = lambda x: jax.ShapeDtypeStruct((2 * x.shape[0], *x.shape[1:]), x.dtype)
            try:
                return self._trace_aux([twice(x) if a.cut else x for x, a in zip(local, kinds, strict=True)]).out
            except (TypeError, ValueError):  # the loss is written for one number of examples
                return None

        lengths = {x.shape[0] for x, a in zip(local, kinds, strict=True) if a.cut}
        return aux_spec(CALL, self.how.aux, program.out, depends, lengths, grown)

    def _trace_aux(self, local: Sequence[jax.ShapeDtypeStruct]) -> trace.Program:
        """The program of aux from parameters and one device's examples of one microbatch."""
        spec = self.spec
        aux_of = lambda params, arrays: jax.tree.map(jnp.asarray, self.call(params, arrays)[2])
        try:
            return trace.trace(aux_of, spec.abstract_params, local, axis_env=spec.axis_env, mesh=spec.trace_mesh)
        except (TypeError, ValueError):
            if not spec.manual:
                raise
        # What the loss closes over varies: so must its arguments.
        known, local = (abstract_varying(x, spec.axes.every) for x in (spec.abstract_params, local))
        return trace.trace(aux_of, known, local, axis_env=spec.axis_env, mesh=spec.trace_mesh)
