"""Runs a program over stacked layers for one of the layers, by the rules for shares: a share is one layer."""

from collections.abc import Callable, Sequence
from typing import Any

from jax import lax

from .values import Array, Context, LazyBroadcast, Partial, Split, Value

Evaluate = Callable[[Context, Any, Sequence[Value], Sequence[Value]], list[Value]]


class Coupled(Exception):
    """A program needs several layers at once."""


class OneEntry(Context):
    """An evaluation that holds one of `count` entries of everything that is cut at its first dimension.

    Args:
      ctx: The surrounding evaluation.
      count: The number of entries.
      index: Which of them.
    """

    def __init__(self, ctx: Context, count: int, index: Array) -> None:
        super().__init__(ctx.axes, None, None)
        self.all_varying = True
        self._count, self._entry = count, index

    @property
    def n(self) -> int:
        """The number of entries."""
        return self._count

    @property
    def index(self) -> Array:
        """Which entry this is."""
        return self._entry

    def communicate(self, values: Sequence[Split | Partial]) -> None:
        """Refuses: nothing of other entries is here."""
        if any(x.whole is None for x in values):
            raise Coupled


def run_entry(
    evaluate: Evaluate, ctx: Context, jaxpr: Any, operands: Sequence[Value], count: int, index: Array
) -> list[tuple[Array, bool]]:
    """The results of a program for one entry, and whether each entry has another; raises `Coupled`.

    Args:
      evaluate: Evaluates a program on shares.
      ctx: The surrounding evaluation.
      jaxpr: The program, over all entries.
      operands: Its operands; what has entries is `Split` into `count` of them.
      count: How many entries there are.
      index: Which one to make.

    Returns:
      For each result the entry, without the first dimension, or the whole value where it has no entries.
    """
    outs = evaluate(OneEntry(ctx, count, index), jaxpr, [], operands)
    return [(_entry(x, count), isinstance(x, Split)) for x in outs]


def _entry(x: Value, count: int) -> Array:
    if isinstance(x, Partial):
        raise Coupled
    if isinstance(x, LazyBroadcast):
        return lax.broadcast_in_dim(x.value, x.shape, x.dims)
    if not isinstance(x, Split):
        return x
    layout = x.layout
    if (layout.kind, layout.lead, layout.shape[0], layout.n) != ("rows", 0, count, count):
        raise Coupled
    return x.local.reshape(layout.shape[1:])
