"""How a loss uses its parameters: order of first use, stacked leaves, unused leaves."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._text import path_text
from .._types import ArrayLike, Path, PyTree
from ..jaxpr import trace
from ..jaxpr.compat import open_program, scan_parts
from ..jaxpr.flat import Flat, Var, flatten
from ..jaxpr.primitives import CONVERT, COPY, NEG, SCAN
from ..sharding import checks
from ..sharding.arguments import whole_arguments
from ..sharding.axes import for_losses
from ..sharding.flax_boxes import opened
from ..sharding.leaves import Leaves, leaves_of
from ..sharding.options import Options, other_axes, resolve_axes


@dataclasses.dataclass(frozen=True)
class Stacked:
    """A predicate on key paths: how many leading dimensions of a leaf count layers.

    Attributes:
      paths: Key paths of leaves, each with that number. A path that ends with one of them, as paths of optimizer
        state do, has the same number.
      also: A predicate given by hand, which comes first.
    """

    paths: tuple[tuple[Path, int], ...]
    also: Callable[[Path], int] | None = None

    def __call__(self, path: Path) -> int:
        """The number for one path."""
        if self.also is not None and (by_hand := int(self.also(path))):
            return by_hand
        known = dict(self.paths)
        return next((known[path[i:]] for i in range(len(path) + 1) if path[i:] in known), 0)


@dataclasses.dataclass(frozen=True)
class ObservedLoss:
    """The loss that was observed, for `Zero.plan`.

    Attributes:
      fn: The loss.
      batch: Its positional arguments after the parameters, global and abstract.
      named: Those that are given by keyword.
      whole_argnums: As for `value_and_grad`.
    """

    fn: Callable[..., Any]
    batch: tuple[Any, ...]
    named: Mapping[str, Any]
    whole_argnums: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Observed:
    """What `observe` found, by key path.

    Attributes:
      order: Leaves in the order of their first use.
      unused: Leaves that the loss does not use.
      loss: The loss; `None` where `observe` was called inside a user's `shard_map`.
    """

    order: tuple[Path, ...]
    unused: tuple[Path, ...]
    loss: ObservedLoss | None = dataclasses.field(default=None, compare=False, repr=False)


def observe(
    options: Options,
    loss_fn: Callable[..., Any],
    params: PyTree,
    batch: Sequence[PyTree],
    named: Mapping[str, PyTree],
    whole_argnums: tuple[int, ...],
) -> tuple[Observed, Stacked]:
    """Traces the loss at abstract values, and reads the trace.

    Args:
      options: The options.
      loss_fn: The loss.
      params: Its parameters, whole or split, concrete or abstract.
      batch: Its other positional arguments, global, concrete or abstract.
      named: Its arguments by keyword, likewise.
      whole_argnums: Positions of arguments that are given whole to every device.

    Returns:
      What was found, and the predicate that says which leaves are stacked.
    """
    axes, manual = resolve_axes(options, "observe")
    checks.check_params("observe", options, params)
    leaves = leaves_of(
        params, axes.n, None, functools.partial(other_axes, options), shares=manual and options.stage == 3
    )
    known = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves.leaves]
    count = 1 if manual else axes.n * axes.r
    whole = whole_arguments(loss_fn, whole_argnums)
    cut = lambda argument, x: jax.tree.map(functools.partial(_local, count=1 if whole.holds(argument) else count), x)
    local = [cut(i, x) for i, x in enumerate(batch, 1)], {name: cut(name, x) for name, x in named.items()}
    env = list(zip(axes.every, axes.sizes, strict=True))
    loss = lambda p, b: loss_fn(opened(leaves.unflatten(p)), *b[0], **b[1])
    with trace.naming_values("observe"):
        program = trace.trace(loss, known, local, axis_env=env, mesh=for_losses(options.mesh, axes))
    flat = flatten(program.jaxpr, program.consts)
    inputs = dict(zip(flat.inputs[: len(known)], range(len(known)), strict=True))
    layers = scanned_layers(flat, inputs)
    given, by_name = jax.tree.map(lambda x: _local(x, 1), (tuple(batch), dict(named)))
    seen = None if manual else ObservedLoss(loss_fn, given, by_name, whole_argnums)
    return _found(leaves, layers, options, seen)


def _found(
    leaves: Leaves, layers: Mapping[int, int], options: Options, loss: ObservedLoss | None
) -> tuple[Observed, Stacked]:
    """The findings by key path; refuses a loss without parameters, and unused leaves with `unused="error"`.

    Args:
      leaves: The leaves of the parameters.
      layers: Number of a leaf -> how many of its leading dimensions count layers, in the order of first use.
      options: The options.
      loss: The loss.
    """
    if not layers:
        raise ValueError(
            "observe: the loss uses no leaf of the parameters. Found none of "
            f"{[path_text(leaf.path) for leaf in leaves.leaves[:4]]} in its trace; expected a function of its "
            "first argument. Fix: use the argument, not parameters that the function closes over."
        )
    unused = [leaf for i, leaf in enumerate(leaves.leaves) if i not in layers]
    idle = [path_text(leaf.path) for leaf in unused if leaf.trainable]
    if idle and options.unused == "error":
        raise ValueError(
            f"observe: unused='error', and the loss does not use {idle}. Expected every trainable "
            "leaf in its trace. Fix: drop these leaves, or unused='zero' (a zero gradient) or 'skip' (left untouched)."
        )
    path = lambda i: leaves.leaves[i].path
    stacked = tuple((path(i), count) for i, count in sorted(layers.items()) if count)
    observed = Observed(tuple(map(path, layers)), tuple(leaf.path for leaf in unused), loss)
    return observed, Stacked(stacked, options.stacked)


def _local(x: ArrayLike, count: int) -> jax.ShapeDtypeStruct:
    """An array of the batch as one of `count` devices sees it."""
    shape, dtype = np.shape(x), x.dtype if hasattr(x, "dtype") else jnp.result_type(x)
    if shape and shape[0] % count == 0:
        shape = (shape[0] // count, *shape[1:])
    return jax.ShapeDtypeStruct(shape, dtype)


#: What passes a parameter on without computing with it.
_PASSES = (CONVERT, COPY, NEG, "barrier")


def scanned_layers(flat: Flat, inputs: Mapping[Var, int]) -> dict[int, int]:
    """The leaves that a program uses, in the order of first use -> how many leading dimensions its scans iterate over.

    Args:
      flat: The program.
      inputs: Inputs that hold leaves -> the numbers of these.
    """
    layers: dict[int, int] = {}
    _follow(flat, inputs, layers, 0)
    return layers


def _follow(flat: Flat, inputs: Mapping[Var, int], layers: dict[int, int], depth: int) -> None:
    """Follows leaves through a program, in order, into the bodies of scans.

    Args:
      flat: The program.
      inputs: Inputs that hold leaves -> the numbers of these.
      layers: Takes up each leaf that is used, with the smallest number of scans around one of its uses.
      depth: The number of scans around the program.
    """
    leaf_of = dict(inputs)

    def use(leaf: int) -> None:
        layers[leaf] = min(layers.get(leaf, depth), depth)

    for step in flat.steps:
        used = [leaf_of.get(x) if isinstance(x, Var) else None for x in step.ins]
        if step.name in _PASSES:
            leaf_of.update((o, i) for i, o in zip(used, step.outs, strict=False) if i is not None)
            continue
        scanned = 0
        if step.name == SCAN and step.eqn is not None:
            body = flatten(*open_program(step.eqn.params["jaxpr"]))
            scanned = len(scan_parts(step.eqn, step.ins)[2])
            pairs = zip(body.inputs[len(used) - scanned :], used[len(used) - scanned :], strict=True)
            _follow(body, {v: leaf for v, leaf in pairs if leaf is not None}, layers, depth + 1)
        for leaf in used[: len(used) - scanned]:
            if leaf is not None:
                use(leaf)
    for x in flat.outs:
        if isinstance(x, Var) and x in leaf_of:
            use(leaf_of[x])
