"""One microbatch, or several whose results are added: gradient accumulation as a `scan` over microbatches."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from .._dtypes import promote
from .._positions import replace_at
from .._types import PyTree
from ..jaxpr.varying import Vary
from .aux import over_microbatches
from .batch import Argument

Array = jax.Array


class Terms(NamedTuple):
    """The results of a loss that are added over microbatches.

    Attributes:
      value: The loss.
      weight: The weight of its examples, or `None`.
      aux: What the loss returns beside its value: as it is for one microbatch, else the list of its leaves.
      grads: One array per trainable leaf: local, or this device's share of a sum over the shard axis.
    """

    value: Array
    weight: Array | None
    aux: PyTree
    grads: list[Array]


class Joins(NamedTuple):
    """What is joined in another way than by adding.

    Attributes:
      aux: For each leaf of aux how it is joined.
      overwritten: The numbers of the gradients of which the largest is taken.
    """

    aux: Sequence[str] = ()
    overwritten: Sequence[int] = ()


#: Everything is added.
ADDED = Joins()


def add_up(
    step: Callable[[list[Array]], Terms],
    arguments: Sequence[Argument],
    arrays: Sequence[Array],
    steps: int,
    dtype: DTypeLike,
    vary: Vary,
    joins: Joins = ADDED,
) -> tuple[Terms, Terms]:
    """The sum of `step` over `steps` equal parts of this device's examples.

    Args:
      step: Takes the arrays of one microbatch.
      arguments: What the arrays are: examples are cut on their leading dimension, an array of keys has one for each
        microbatch, everything else is the same for all.
      arrays: This device's arrays, as `fold` gives them.
      steps: The number of microbatches.
      dtype: The dtype in which gradients are added; narrower ones are widened to it.
      vary: Types a value as different on every device: every sum may be, until it is reduced.
      joins: What is not added.

    Returns:
      The sums, with aux as the list of its joined leaves, and the `Terms` of one microbatch, for their dtypes.
    """
    if steps == 1:
        terms = step(list(arrays))
        return terms._replace(aux=jax.tree.leaves(terms.aux)), terms
    cut = [i for i, a in enumerate(arguments) if a.cut]
    keys = [i for i, a in enumerate(arguments) if a.key]
    examples = [arrays[i].reshape(steps, arrays[i].shape[0] // steps, *arrays[i].shape[1:]) for i in cut]

    def microbatch(own: Sequence[Array]) -> Terms:
        return step(replace_at(arrays, [*cut, *keys], own))

    each = [*examples, *(arrays[i] for i in keys)]

    added = [i for i, join in enumerate(joins.aux) if join in ("mean", "sum")]
    rest = [i for i, join in enumerate(joins.aux) if join not in ("mean", "sum")]

    def sums(terms: Terms) -> list[Array]:
        weight, aux = [] if terms.weight is None else [terms.weight], jax.tree.leaves(terms.aux)
        return [terms.value, *weight, *(aux[i] for i in added), *terms.grads]

    first = jax.eval_shape(lambda: microbatch([x[0] for x in each]))
    wide = lambda x: promote(x.dtype, dtype) if jnp.issubdtype(x.dtype, jnp.inexact) else x.dtype
    own = len(sums(first)) - len(first.grads)
    largest = {own + i for i in joins.overwritten}
    start = [
        vary(jnp.full(x.shape, -jnp.inf, x.dtype) if i in largest else jnp.zeros(x.shape, wide(x)))
        for i, x in enumerate(sums(first))
    ]
    join = lambda i, a, b: jnp.maximum(a, b) if i in largest else a + b.astype(a.dtype)

    def body(total: list[Array], own: list[Array]) -> tuple[list[Array], list[Array]]:
        terms = microbatch(own)
        new = [join(i, a, vary(b)) for i, (a, b) in enumerate(zip(total, sums(terms), strict=True))]
        aux = jax.tree.leaves(terms.aux)
        return new, [aux[i] for i in rest]

    total, stacks = lax.scan(body, start, each, length=steps)
    one_by_one = iter(total)
    value = next(one_by_one)
    weight = None if first.weight is None else next(one_by_one)
    aux = replace_at([None] * len(joins.aux), added, [next(one_by_one) for _ in added])
    aux = replace_at(aux, rest, [over_microbatches(joins.aux[i], x) for i, x in zip(rest, stacks, strict=True)])
    return Terms(value, weight, aux, list(one_by_one)), first
