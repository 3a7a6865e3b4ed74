"""One step, or several whose results are added: gradient accumulation as a `scan` over micro-batches."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..sharding.axes import Axes
from ..sharding.leaves import is_key
from ..sharding.vma import cast
from .batch import Argument


class Terms(NamedTuple):
    """What the steps of one call add up.

    Attributes:
      value: The loss.
      weight: The weight of its examples, or `None`.
      aux: The leaves of aux; those that are floating are added.
      grads: One array per trainable leaf: local, or this device's share of a sum over the shard axis.
    """

    value: Any
    weight: Any
    aux: list[Any]
    grads: list[Any]


def run(
    step: Callable[[list[Any]], Terms],
    arguments: Sequence[Argument],
    arrays: Sequence[Any],
    axes: Axes,
    steps: int,
    dtype: Any,
    typed: bool,
) -> tuple[Terms, Any]:
    """The sum of `step` over `steps` equal parts of this device's examples.

    Args:
      step: Takes the arrays of one micro-step.
      arguments: What the arrays are: examples are cut on their leading dimension, keys are folded with
        the number of the micro-step, everything else is the same for all.
      arrays: This device's arrays.
      axes: The mesh axes.
      steps: The number of micro-steps.
      dtype: The dtype in which gradients are added; narrower ones are widened to it.
      typed: Whether the region checks types.

    Returns:
      The sums, and the `Terms` of one step, for their dtypes. Leaves of aux that are not floating are those of
      the last micro-step.
    """
    if steps == 1:
        terms = step(list(arrays))
        return terms, terms
    cut = [i for i, a in enumerate(arguments) if a.cut]
    deep = [arrays[i].reshape(steps, arrays[i].shape[0] // steps, *arrays[i].shape[1:]) for i in cut]

    def part(number: Any, slices: Sequence[Any]) -> Terms:
        here = list(arrays)
        for i, x in zip(cut, slices, strict=True):
            here[i] = x
        for i, a in enumerate(arguments):
            if a.key:
                here[i] = jax.random.fold_in(here[i], number)
        return step(here)

    first = jax.eval_shape(lambda: part(jnp.int32(0), [x[0] for x in deep]))
    wide = lambda x: jnp.promote_types(x.dtype, dtype) if _added(x) else x.dtype
    start = [_zeros(x, wide(x), axes, typed) for x in _sums(first)]

    def body(total: list[Any], x: Any) -> Any:
        terms = part(*x)
        new = [a + _typed(b, axes, typed).astype(a.dtype) for a, b in zip(total, _sums(terms), strict=True)]
        return new, [y for y in terms.aux if not _added(y)]

    total, last = lax.scan(body, start, (jnp.arange(steps), deep))
    return _rebuilt(first, total, [y[-1] for y in last]), first


def _added(x: Any) -> bool:
    return not is_key(x.dtype) and bool(jnp.issubdtype(x.dtype, jnp.inexact))


def _sums(terms: Terms) -> list[Any]:
    weight = [] if terms.weight is None else [terms.weight]
    return [terms.value, *weight, *(x for x in terms.aux if _added(x)), *terms.grads]


def _rebuilt(like: Terms, total: Sequence[Any], last: Sequence[Any]) -> Terms:
    rest, others = iter(total), iter(last)
    value = next(rest)
    weight = None if like.weight is None else next(rest)
    aux = [next(rest) if _added(x) else next(others) for x in like.aux]
    return Terms(value, weight, aux, list(rest))


def _zeros(x: Any, dtype: Any, axes: Axes, typed: bool) -> Any:
    return _typed(jnp.zeros(x.shape, dtype), axes, typed)


def _typed(x: Any, axes: Axes, typed: bool) -> Any:
    """Every sum may differ between devices until it is reduced."""
    return cast(x, axes.every) if typed else x
