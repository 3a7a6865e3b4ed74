"""What a loss does with its parameters: order of first use, stacked leaves, unused leaves."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._text import path_text
from ..jaxpr import trace
from ..jaxpr.compat import open_program, scan_parts
from ..jaxpr.flat import Flat, Var, flatten
from ..sharding import checks
from ..sharding.axes import for_losses
from ..sharding.flax_boxes import opened
from ..sharding.leaves import Leaves, leaves_of
from ..sharding.options import Options, other_axes, resolve_axes


@dataclasses.dataclass(frozen=True)
class Stacked:
    """A predicate on key paths: how many leading dimensions of a leaf count layers.

    Attributes:
      paths: Key paths of leaves, with that number. Optimizer state, whose paths end with them, counts too.
      also: A predicate given by hand, which comes first.
    """

    paths: tuple[tuple[Any, int], ...]
    also: Callable[[Any], int] | None = None

    def __call__(self, path: Any) -> int:
        """The number for one path."""
        if self.also is not None and (by_hand := int(self.also(path))):
            return by_hand
        known = dict(self.paths)
        return next((known[path[i:]] for i in range(len(path) + 1) if path[i:] in known), 0)


@dataclasses.dataclass(frozen=True)
class Loss:
    """The loss that was observed, for `Zero.plan`.

    Attributes:
      fn: The loss.
      batch: The rest of its arguments, global and abstract.
      whole_argnums: As for `value_and_grad`.
    """

    fn: Callable[..., Any]
    batch: tuple[Any, ...]
    whole_argnums: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Observed:
    """What `observe` found, by key path.

    Attributes:
      order: Leaves in the order of their first use.
      unused: Leaves that the loss does not use.
      loss: The loss; `None` where `observe` was called inside a user's `shard_map`.
    """

    order: tuple[Any, ...]
    unused: tuple[Any, ...]
    loss: Loss | None = dataclasses.field(default=None, compare=False, repr=False)


def observe(
    options: Options, loss_fn: Callable[..., Any], params: Any, batch: Sequence[Any], whole: Sequence[int]
) -> tuple[Observed, Stacked]:
    """Traces the loss, abstractly, and reads the trace."""
    axes, manual = resolve_axes(options, "observe")
    checks.check_params("observe", options, params)
    leaves = leaves_of(
        params, axes.n, None, functools.partial(other_axes, options), shares=manual and options.stage == 3
    )
    known = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves.leaves]
    count = 1 if manual else axes.n * axes.r
    counts = (1 if i in whole else count for i in range(1, len(batch) + 1))
    local = [jax.tree.map(lambda x, n=n: _local(x, n), b) for n, b in zip(counts, batch, strict=True)]
    env = list(zip(axes.every, axes.sizes, strict=True))
    loss = lambda p, b: loss_fn(opened(leaves.unflatten(p)), *b)
    program = trace.trace(loss, known, local, axis_env=env, mesh=for_losses(options.mesh, axes))
    flat = flatten(program.jaxpr, program.consts)
    inputs = dict(zip(flat.inputs[: len(known)], range(len(known)), strict=True))
    order: dict[int, None] = {}
    stacked: dict[int, int] = {}
    _walk(flat, inputs, order, stacked, 0)
    given = jax.tree.map(lambda x: _local(x, 1), tuple(batch))
    seen = None if manual else Loss(loss_fn, given, tuple(whole))
    return _found(leaves, order, stacked, options, seen)


def _found(leaves: Leaves, order: Any, stacked: Any, options: Options, loss: Loss | None) -> tuple[Observed, Stacked]:
    path = lambda i: leaves.leaves[i].path
    if not order:
        raise ValueError(
            "observe: the loss uses no leaf of the parameters. Found none of "
            f"{[path_text(leaf.path) for leaf in leaves.leaves[:4]]} in its trace; expected a function of its "
            "first argument. Fix: use the argument, not parameters that the function closes over."
        )
    unused = tuple(leaf.path for i, leaf in enumerate(leaves.leaves) if i not in order)
    idle = [path_text(leaf.path) for i, leaf in enumerate(leaves.leaves) if i not in order and leaf.trainable]
    if idle and options.unused == "error":
        raise ValueError(
            f"observe: unused='error', and the loss does not use {idle}. Expected every trainable "
            "leaf in its trace. Fix: drop these leaves, or unused='zero' (a zero gradient) or 'skip' (left untouched)."
        )
    deep = tuple((path(i), lead) for i, lead in sorted(stacked.items()) if lead)
    return Observed(tuple(path(i) for i in order), unused, loss), Stacked(deep, options.stacked)


def _local(x: Any, count: int) -> Any:
    """A batch leaf as one device sees it."""
    shape, dtype = np.shape(x), x.dtype if hasattr(x, "dtype") else jnp.result_type(x)
    if shape and shape[0] % count == 0:
        shape = (shape[0] // count, *shape[1:])
    return jax.ShapeDtypeStruct(shape, dtype)


_SAME = ("convert_element_type", "copy", "copy_p", "neg", "barrier")


def _walk(flat: Flat, inputs: dict[Var, int], order: dict[int, None], stacked: dict[int, int], depth: int) -> None:
    """Follows leaves through the program; `stacked` keeps the smallest depth at which all uses scan a leaf."""
    here = dict(inputs)
    for step in flat.steps:
        known = [here.get(x) if isinstance(x, Var) else None for x in step.ins]
        if step.name in _SAME:
            here.update((o, i) for i, o in zip(known, step.outs, strict=False) if i is not None)
            continue
        xs_from = len(step.ins)
        if step.name == "scan":
            body = flatten(*open_program(step.eqn.params["jaxpr"]))
            xs_from -= len(scan_parts(step.eqn, list(step.ins))[2])
            inner = {body.inputs[i]: leaf for i, leaf in enumerate(known) if leaf is not None and i >= xs_from}
            _walk(body, inner, order, stacked, depth + 1)
        for i, leaf in enumerate(known):
            if leaf is not None and i < xs_from:
                order.setdefault(leaf)
                stacked[leaf] = min(stacked.get(leaf, depth), depth)
    for x in flat.outs:
        if isinstance(x, Var) and x in here:
            order.setdefault(here[x])
            stacked[here[x]] = min(stacked.get(here[x], depth), depth)
