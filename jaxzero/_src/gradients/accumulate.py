"""One microbatch, or several whose results are added: gradient accumulation as a `scan` over microbatches."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from .._positions import replace_at
from .._types import PyTree
from ..jaxpr.varying import Vary
from ..sharding.leaves import is_key
from .batch import Argument

Array = jax.Array


class Terms(NamedTuple):
    """The results of a loss that are added over microbatches.

    Attributes:
      value: The loss.
      weight: The weight of its examples, or `None`.
      aux: What the loss returns beside its value, as it is; its floating leaves are added.
      grads: One array per trainable leaf: local, or this device's share of a sum over the shard axis.
    """

    value: Array
    weight: Array | None
    aux: PyTree
    grads: list[Array]


def add_up(
    step: Callable[[list[Array]], Terms],
    arguments: Sequence[Argument],
    arrays: Sequence[Array],
    steps: int,
    dtype: DTypeLike,
    vary: Vary,
) -> tuple[Terms, Terms]:
    """The sum of `step` over `steps` equal parts of this device's examples.

    Args:
      step: Takes the arrays of one microbatch.
      arguments: What the arrays are: examples are cut on their leading dimension, keys are folded with
        the number of the microbatch, everything else is the same for all.
      arrays: This device's arrays.
      steps: The number of microbatches.
      dtype: The dtype in which gradients are added; narrower ones are widened to it.
      vary: Types a value as different on every device: every sum may be, until it is reduced.

    Returns:
      The sums, and the `Terms` of one microbatch, for their dtypes. Leaves of aux that are not floating are those of
      the last microbatch.
    """
    if steps == 1:
        terms = step(list(arrays))
        return terms, terms
    cut = [i for i, a in enumerate(arguments) if a.cut]
    keys = [i for i, a in enumerate(arguments) if a.key]
    examples = [arrays[i].reshape(steps, arrays[i].shape[0] // steps, *arrays[i].shape[1:]) for i in cut]

    def microbatch(number: Array, examples: Sequence[Array]) -> Terms:
        here = replace_at(arrays, cut, examples)
        return step(replace_at(here, keys, [jax.random.fold_in(here[i], number) for i in keys]))

    first = jax.eval_shape(lambda: microbatch(jnp.int32(0), [x[0] for x in examples]))
    wide = lambda x: jnp.promote_types(x.dtype, dtype) if _is_added(x) else x.dtype
    start = [vary(jnp.zeros(x.shape, wide(x))) for x in _sums(first)]

    def body(total: list[Array], x: tuple[Array, list[Array]]) -> tuple[list[Array], list[Array]]:
        terms = microbatch(*x)
        new = [a + vary(b).astype(a.dtype) for a, b in zip(total, _sums(terms), strict=True)]
        return new, [y for y in jax.tree.leaves(terms.aux) if not _is_added(y)]

    total, others = lax.scan(body, start, (jnp.arange(steps), examples))
    return _as_terms(first, total, [y[-1] for y in others]), first


def _is_added(x: Array) -> bool:
    return not is_key(x.dtype) and bool(jnp.issubdtype(x.dtype, jnp.inexact))


def _sums(terms: Terms) -> list[Array]:
    weight = [] if terms.weight is None else [terms.weight]
    return [terms.value, *weight, *filter(_is_added, jax.tree.leaves(terms.aux)), *terms.grads]


def _as_terms(like: Terms, sums: Iterable[Array], others: Iterable[Array]) -> Terms:
    """`Terms` of the results of `_sums`, and of the leaves of aux that are not added."""
    sums, others = iter(sums), iter(others)
    value = next(sums)
    weight = None if like.weight is None else next(sums)
    aux = jax.tree.map(lambda x: next(sums) if _is_added(x) else next(others), like.aux)
    return Terms(value, weight, aux, list(sums))
