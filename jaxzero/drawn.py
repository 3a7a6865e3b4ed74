"""Random draws of arrays that are stored flat: drawn at the stored shape, so that each device draws its part alone.

XLA cannot follow a split through the reshape of `(50257, 64)` to a padded vector: it draws the whole array
on every device. But a threefry draw is a function of the position in row-major order, and what initializers
do to it is elementwise. So the same program, written for the stored shape, gives the same elements.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import collectives
from .flat_program import Atom, Flat, Known, Var
from .layout import Layout
from .partition.bind import bind
from .partition.elementwise import is_elementwise


class Drawn:
    """A program whose results can be asked for at their stored shapes.

    Args:
      flat: The program.
      args: Its arguments.
    """

    def __init__(self, flat: Flat, args: Any) -> None:
        self.values: dict[Var, Any] = dict(zip(flat.inputs, args, strict=True))
        self.makers = {v: step for step in flat.steps for v in step.outs}

    def stored(self, atom: Atom, layout: Layout) -> Any:
        """A result as it is stored, padding zero; `None` if it is not an elementwise function of draws."""
        if layout.kind != "flat" or layout.lead or not jax.config.jax_threefry_partitionable:  # type: ignore[attr-defined]
            return None
        x = self._at(atom, layout, {})
        if x is None or not layout.padding:
            return x
        # By device and place in its share: the position in the array may not fit into 32 bits.
        device, place = (lax.broadcasted_iota(jnp.int32, (layout.n, layout.length), i) for i in (0, 1))
        full, rest = divmod(layout.size, layout.length)
        real = (device < full) | ((device == full) & (place < rest))
        return jnp.where(real, x.reshape(real.shape), jnp.zeros((), x.dtype)).reshape(x.shape)

    def _at(self, atom: Atom, layout: Layout, known: dict[Var, Any]) -> Any:
        """A value of as many elements, at the stored shape; its padding holds anything."""
        size = np.size(atom.value) if isinstance(atom, Known) else math.prod(atom.aval.shape)
        if size != layout.size:
            return None
        if isinstance(atom, Known) or atom not in self.makers:
            return collectives.stored(jnp.asarray(self._value(atom)).reshape(layout.shape), layout)
        if atom not in known:
            known[atom] = self._made(self.makers[atom], layout, known)
        return known[atom]

    def _made(self, step: Any, layout: Layout, known: dict[Var, Any]) -> Any:
        shape, shapes = (
            layout.stored_shape,
            [jnp.shape(x.value) if isinstance(x, Known) else x.aval.shape for x in step.ins],
        )
        if step.name == "random_bits" and shapes == [()] and str(step.ins[0].aval.dtype) == "key<fry>":
            return bind(step.eqn, [self._value(step.ins[0])], shape=shape)[0]
        if step.name == "reshape" and len(shapes) == 1:
            return self._at(step.ins[0], layout, known)
        if step.name == "broadcast_in_dim" and shapes == [()]:
            return jnp.broadcast_to(self._value(step.ins[0]), shape)
        if len(step.outs) != 1 or not is_elementwise(step.eqn):
            return None
        ins = [self._operand(x, s, layout, known) for x, s in zip(step.ins, shapes, strict=True)]
        return None if any(x is None for x in ins) else bind(step.eqn, ins)[0]

    def _operand(self, atom: Atom, shape: Any, layout: Layout, known: dict[Var, Any]) -> Any:
        """An operand beside arrays at the stored shape: bounds and factors may be scalars, or of size one."""
        if not shape:
            return self._value(atom)
        return self._value(atom).reshape(1) if math.prod(shape) == 1 else self._at(atom, layout, known)

    def _value(self, atom: Atom) -> Any:
        """A value as it is: keys, scalars, and what comes before them."""
        if isinstance(atom, Known):
            return atom.value
        if atom not in self.values:
            step = self.makers[atom]
            outs = bind(step.eqn, [self._value(x) for x in step.ins])
            self.values.update(zip(step.outs, outs, strict=True))
        return self.values[atom]
