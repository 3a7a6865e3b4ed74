"""Pure views of parameters: casts, transposes, reshapes, slices, broadcasts and scalar multiples.

A view is never computed where it stands. It is a parameter and a list of operations, which are applied to the
gathered array at each use. So a transposed or narrowed weight that autodiff keeps for the backward pass takes no
memory: only the share is kept.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn
from jax.typing import ArrayLike

from ..jaxpr.bind import bind
from ..jaxpr.flat import Known, Step, Var
from ..jaxpr.primitives import (
    BROADCAST,
    CONVERT,
    COPY,
    DIV,
    MUL,
    NEG,
    RESHAPE,
    REV,
    SLICE,
    SPLIT,
    SQUEEZE,
    TRANSPOSE,
)

#: Primitives that move elements and change none, so that a cast may be done before them.
_MOVES = {TRANSPOSE, RESHAPE, SQUEEZE, BROADCAST, SLICE, COPY, REV, SPLIT}
_SCALES = {MUL, DIV, NEG}
Array = jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class Op:
    """One operation of a view.

    Attributes:
      eqn: Its equation.
      others: Its operands; `None` in the place of the viewed one.
      out: The number of the result.
      depth: How many leading dimensions count layers; it is mapped over them.
    """

    eqn: JaxprEqn
    others: tuple[ArrayLike | None, ...]
    out: int
    depth: int = 0

    def __call__(self, x: Array) -> Array:
        """The operation on a whole array."""
        f: Callable[[Array], Array] = lambda x: bind(self.eqn, [x if o is None else o for o in self.others])[self.out]
        for _ in range(self.depth):
            f = jax.vmap(f)
        return f(x)

    def per_layer(self) -> "Op | None":
        """The same operation on one layer of a stacked array; `None` if it mixes layers."""
        if self.depth:
            return dataclasses.replace(self, depth=self.depth - 1)
        same = self.eqn.primitive.name in (CONVERT, COPY, *_SCALES)
        return self if same else None


@dataclasses.dataclass(frozen=True, eq=False)
class View:
    """A parameter, or a pure view of one.

    Attributes:
      source: The input of the program that holds the share.
      ops: Operations on the gathered array, first to last.
    """

    source: Var
    ops: tuple[Op, ...] = ()

    def gather_dtype(self, stored: jnp.dtype) -> jnp.dtype:
        """The dtype in which the parameter travels: if the view narrows it, the share is narrowed before the gather."""
        for op in self.ops:
            name = op.eqn.primitive.name
            if name == CONVERT:
                new = jnp.dtype(op.eqn.params["new_dtype"])
                return new if new.itemsize < jnp.dtype(stored).itemsize else stored
            if name not in _MOVES:
                break
        return stored

    def apply(self, x: Array) -> Array:
        """The view of a gathered array."""
        for op in self.ops:
            x = op(x)
        return x

    def per_layer(self, source: Var) -> "View | None":
        """The view of one layer, whose share is `source`; `None` if the view mixes layers."""
        ops = [op.per_layer() for op in self.ops]
        return None if None in ops else View(source, tuple(ops))  # type: ignore[arg-type]

    def stacked(self, source: Var) -> "View":
        """The view of all layers, whose shares are `source`, where `self` is that of one."""
        return View(source, tuple(dataclasses.replace(op, depth=op.depth + 1) for op in self.ops))


def view_through(step: Step, views: dict[Var, View]) -> list[View] | None:
    """The views that are the results of a step; `None` if it computes something."""
    lazy = [i for i, x in enumerate(step.ins) if isinstance(x, Var) and x in views]
    if len(lazy) != 1 or step.eqn is None:
        return None
    known = [x.value if isinstance(x, Known) else None for x in step.ins]
    alone = all(x is not None and np.ndim(x) == 0 for i, x in enumerate(known) if i != lazy[0])
    if not alone or not _is_view(step, lazy[0]):
        return None
    view = views[step.ins[lazy[0]]]  # type: ignore[index]
    others = tuple(None if i == lazy[0] else x for i, x in enumerate(known))
    return [View(view.source, (*view.ops, Op(step.eqn, others, i))) for i in range(len(step.outs))]


def _is_view(step: Step, at: int) -> bool:
    name = step.name
    if name in _MOVES:
        return len(step.ins) == 1
    if name == CONVERT:
        return all(jnp.issubdtype(x.aval.dtype, jnp.inexact) for x in (step.ins[0], step.outs[0]))  # type: ignore[union-attr]
    return name in _SCALES and (at == 0 or name == MUL)
