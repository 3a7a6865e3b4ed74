"""The loss of one device: differentiated on its own examples, added over microbatches, averaged over devices."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from .._positions import replace_at
from .._types import PyTree
from ..comm.reduce import GradReducer, Summand
from ..jaxpr import dependence, trace
from ..jaxpr.varying import Vary
from ..sharding.flax_boxes import opened
from ..sharding.layout import Layout
from ..sharding.leaves import Leaf
from ..sharding.options import reduce_options
from . import checks
from .accumulate import Terms, add_up
from .call import CallSpec
from .checks import GradOptions

P = PartitionSpec
Array = jax.Array
CALL = "value_and_grad"


def _no_check(value: Array, aux: PyTree) -> None:
    """No types to check."""


@dataclasses.dataclass(frozen=True)
class LocalLoss:
    """A user's loss in one call.

    Attributes:
      fn: `fn(params, *batch)`.
      how: How it is differentiated.
      spec: The call.
    """

    fn: Callable[..., Any]
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
    def out_specs(self) -> Terms:
        """Where the results are, in the global view."""
        pairs = zip(self.trainable, self.layouts, strict=True)
        grads: Any = [leaf.spec(self.spec.axes.shard if layout else None) for leaf, layout in pairs]
        replicated: Any = P()
        return Terms(replicated, None, replicated, grads)

    @property
    def reducer(self) -> GradReducer:
        """What sums over devices."""
        return GradReducer(self.spec.axes, reduce_options(self.spec.options), self.how.accumulate)

    def call(self, params: Sequence[Array], arrays: Sequence[Array]) -> tuple[Array, Array | None, PyTree]:
        """The loss, its weight and aux (`None` without), from whole parameters and one device's examples."""
        out = self.fn(opened(self.spec.leaves.unflatten(params)), *self.spec.arguments.rebuild(arrays))
        return checks.split_result(CALL, out, self.how)

    def differentiate(
        self, params: Sequence[Array], arrays: Sequence[Array], check: Callable[[Array, PyTree], None] = _no_check
    ) -> Terms:
        """Loss, weight, aux and gradients of one device's examples of one microbatch.

        Args:
          params: Whole parameters.
          arrays: The arrays of the batch.
          check: Refuses a loss or aux by their types.

        Returns:
          The results; gradients have the parameters' shapes, and are those of this device alone.
        """
        trainable = [i for i, leaf in enumerate(self.spec.leaves.leaves) if leaf.trainable]

        def of(values: list[Array]) -> tuple[Array, tuple[Array | None, PyTree]]:
            value, weight, aux = self.call(replace_at(params, trainable, values), arrays)
            return value, (weight, aux)

        (value, (weight, aux)), grads = jax.value_and_grad(of, has_aux=True)([params[i] for i in trainable])
        check(value, aux)
        return Terms(value, weight, aux, grads)

    def check_types(self, value: Array, aux: PyTree) -> None:
        """Inside a user's `shard_map`: refuses a loss that is reduced already, and aux of which no mean is taken."""
        checks.check_types(CALL, value, aux, self.spec.axes)

    def check_aux(self, arrays: Sequence[Array]) -> None:
        """Refuses leaves of aux that differ between devices and of which no mean is taken."""
        if not self.how.has_aux:
            return
        spec = self.spec
        known, local = spec.abstract_params, spec.abstract_batch(arrays)
        aux_of = lambda params, arrays: self.call(params, arrays)[2]
        traced = trace.trace(aux_of, known, local, axis_env=spec.axis_env, mesh=spec.trace_mesh)
        marks = [False] * len(spec.leaves.leaves) + spec.differs
        checks.check_aux(CALL, traced.out, dependence.depends(traced.jaxpr, marks, spec.axes.every))

    @property
    def reduces_each(self) -> bool:
        """Whether gradients leave each microbatch as shares of a sum over the shard axis."""
        return self.spec.options.stage == 3 or (self.spec.options.stage == 2 and self.how.sync == "each")

    def reduce_first(self, grads: Sequence[Array]) -> list[Array]:
        """Shares of sums over the shard axis, of the gradients that are cut."""
        reducer, layouts = self.reducer, self.layouts
        cut = [i for i, layout in enumerate(layouts) if layout is not None]
        reduce = reducer.all_reduce_then_slice if self.spec.options.stage == 1 else reducer.reduce_scatter
        shares = reduce([grads[i] for i in cut], [layout for layout in layouts if layout is not None])
        return replace_at(grads, cut, shares)

    def mean(self, step: Callable[[list[Array]], Terms], arrays: Sequence[Array], vary: Vary) -> Terms:
        """Everything that leaves a loss: the sum over microbatches, and the mean over devices, once.

        Args:
          step: The results of one microbatch.
          arrays: This device's arrays of the batch.
          vary: As for `evaluate`.

        Returns:
          The means; gradients as `layouts` says.
        """
        how, reducer = self.how, self.reducer
        kinds = self.spec.arguments.arrays
        sums, one = add_up(step, kinds, arrays, how.accumulate, how.accumulate_dtype, vary)
        weight = None if sums.weight is None else reducer.total(sums.weight)
        grads = sums.grads if self.reduces_each else self.reduce_first(sums.grads)
        aux, structure = jax.tree.flatten(sums.aux)
        dtypes = [x.dtype for x in jax.tree.leaves(one.aux)]
        means = [i for i, dtype in enumerate(dtypes) if checks.is_mean(dtype)]
        rows = zip(grads, self.trainable, self.layouts, strict=True)
        value, *done = reducer.finish(
            [
                Summand(sums.value, one.value.dtype, weight=weight),
                *(Summand(x, leaf.dtype, layout, weight, leaf.other_axes) for x, leaf, layout in rows),
                *(Summand(aux[i], dtypes[i]) for i in means),
            ],
            vary,
        )
        aux = replace_at(aux, means, done[len(grads) :])
        return Terms(value, None, jax.tree.unflatten(structure, aux), done[: len(grads)])
