"""How each leaf of aux is joined over devices and microbatches: a mean, examples, a maximum, a sum.

What a loss returns beside its value belongs to one device's examples of one microbatch. A leaf whose leading dimension
grows with the number of examples holds examples, and is joined. Anything else that is floating counts as a mean. That
is seen by tracing the loss at twice the examples, not by comparing lengths: a statistic of 8 channels is no batch of 8.
"""

import dataclasses
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jax.tree_util import PyTreeDef

from .._text import path_text
from .._types import Path, PyTree
from ..sharding.axes import Axes
from ..sharding.leaves import is_key
from ..sharding.vma import cast, varying

Array = jax.Array
#: The ways in which a user may say that a leaf is joined.
JOINS = ("mean", "concat", "max", "sum")
#: The leaf is equal on all devices: that of the last microbatch.
SAME = "same"


@dataclasses.dataclass(frozen=True)
class JoinTree:
    """A tree of ways to join, or of its subtrees, that can be hashed."""

    tree: PyTreeDef
    joins: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class AuxSpec:
    """The leaves of aux in one call.

    Attributes:
      tree: The structure.
      joins: For each leaf how it is joined.
    """

    tree: PyTreeDef
    joins: tuple[str, ...]

    def specs(self, batch_axes: Sequence[str]) -> list[PartitionSpec]:
        """Where the joined leaves are, in the global view."""
        return [PartitionSpec(tuple(batch_axes)) if join == "concat" else PartitionSpec() for join in self.joins]


NO_AUX = AuxSpec(jax.tree.structure(None), ())


def hashable(call: str, how: Any) -> Hashable:
    """The option `aux` in a form that can be hashed; refuses words that are no way to join."""
    if how is None or (callable(how) and not isinstance(how, tuple)):
        return how
    leaves, tree = jax.tree.flatten(how, is_leaf=lambda x: x is None)
    wrong = [x for x in leaves if x is not None and x not in JOINS]
    if wrong:
        raise ValueError(
            f"{call}: aux={wrong[0]!r}. Expected one of {JOINS}, a tree of them like aux or a part of it (`None`: as "
            "without), or a function of (key path, abstract leaf). Fix: for example aux='mean'."
        )
    return JoinTree(tree, tuple(leaves))


def aux_spec(
    call: str,
    how: Hashable,
    one: PyTree,
    differs: Sequence[bool],
    lengths: Collection[int],
    grown: Callable[[], PyTree | None],
) -> AuxSpec:
    """How each leaf is joined; refuses by path what cannot be told.

    Args:
      call: The name of the call, for errors.
      how: The option, from `hashable`.
      one: Aux of one device's examples of one microbatch, abstract.
      differs: For each leaf, whether it may differ between devices.
      lengths: How many examples of one microbatch a device has, for each array of the batch.
      grown: Gives aux of twice the examples, or `None` if the loss accepts no other number; called if needed.
    """
    pairs, tree = jax.tree_util.tree_flatten_with_path(one)
    said = _said(call, how, one, pairs)
    shapes: list[Any] = [None] * len(pairs)
    if any(join is None and x.shape for join, (_, x) in zip(said, pairs, strict=True)):
        twice = jax.tree_util.tree_leaves_with_path(grown())
        if [path for path, _ in twice] == [path for path, _ in pairs]:
            shapes = [x.shape for _, x in twice]
    for join, (path, x), shape in zip(said, pairs, shapes, strict=True):
        if join is None and shape is None and x.shape and x.shape[0] in lengths:
            raise ValueError(
                f"{call}: aux leaf {path_text(path)!r} of shape {x.shape} may hold {x.shape[0]} examples or a "
                "statistic: the loss cannot be traced for another number of examples, which would show it. Expected "
                "a loss of any number of examples, or the word. Fix: aux='concat' for examples, 'mean' for a statistic."
            )
    rows = zip(said, pairs, differs, shapes, strict=True)
    return AuxSpec(tree, tuple(_join(call, join, path, x, mark, shape) for join, (path, x), mark, shape in rows))


def _said(call: str, how: Hashable, one: PyTree, pairs: Sequence[tuple[Path, Any]]) -> list[str | None]:
    """What the user says of each leaf; `None` for nothing."""
    if how is None:
        return [None] * len(pairs)
    if not isinstance(how, JoinTree):
        assert callable(how)
        said = [how(path, x) for path, x in pairs]
    else:
        prefix = jax.tree.unflatten(how.tree, how.joins)
        spread = lambda join, part: [join] * len(jax.tree.leaves(part))
        try:
            parts = jax.tree.map(spread, prefix, one, is_leaf=lambda x: x is None)
        except (ValueError, TypeError) as e:
            raise ValueError(
                f"{call}: aux={prefix!r} is no tree like what the loss returns as aux, {jax.tree.structure(one)}, and "
                "no part of one. Expected the same structure. Fix: one of "
                f"{JOINS} for all leaves, or a function of (key path, abstract leaf)."
            ) from e
        said = jax.tree.leaves(parts, is_leaf=lambda x: x is None)
    for (path, _), join in zip(pairs, said, strict=True):
        if join is not None and join not in JOINS:
            raise ValueError(
                f"{call}: aux gives {join!r} for leaf {path_text(path)!r}. Expected one of {JOINS}, or None. "
                "Fix: return one of these words."
            )
    return said


def is_mean(x: Any) -> bool:
    """Whether a leaf is averaged."""
    return not is_key(x.dtype) and bool(jnp.issubdtype(x.dtype, jnp.inexact))


def _join(call: str, said: str | None, path: Path, x: Any, differs: bool, grown: tuple[int, ...] | None) -> str:
    """How one leaf is joined.

    Args:
      call: The name of the call, for errors.
      said: What the user says of it.
      path: Its path.
      x: The leaf, abstract.
      differs: Whether it may differ between devices.
      grown: Its shape at twice the examples; `None` if that is not known.
    """
    if said is not None:
        fits = {"mean": is_mean(x), "concat": bool(x.shape)}.get(said, not is_key(x.dtype))
        if not fits:
            raise ValueError(
                f"{call}: aux leaf {path_text(path)!r} of shape {x.shape} and dtype {x.dtype} cannot be joined by "
                f"{said!r}. Expected a floating leaf for 'mean', a leading dimension for 'concat', a number for 'max' "
                "and 'sum'. Fix: .astype(float), x[None], or another way to join."
            )
        return said
    if grown is not None and x.shape and grown != x.shape:
        if grown == (2 * x.shape[0], *x.shape[1:]):
            return "concat"
        raise ValueError(
            f"{call}: aux leaf {path_text(path)!r} has shape {x.shape} for this device's examples of one micro-step, "
            f"and {grown} for twice as many: the dimension of the examples is not the first, or not the only one. "
            "Expected examples along the leading dimension, which are joined, or a mean over them. Fix: put the "
            "examples first, or say how it is joined: aux='concat' (along the leading dimension), 'mean', 'max' or "
            "'sum', for this leaf by a tree like aux or a function of (key path, leaf)."
        )
    if is_mean(x):
        return "mean"
    if differs:
        raise ValueError(
            f"{call}: aux leaf {path_text(path)!r} of dtype {x.dtype} depends on the device, and no mean of it "
            "is taken. Expected a floating leaf (averaged), examples along the leading dimension (joined), or a leaf "
            "that is equal on all devices. Fix: say how it is joined, aux='sum', 'max' or 'concat' (by a tree like "
            "aux or a function, for this leaf alone), or .astype(float) for a mean."
        )
    return SAME


def over_microbatches(join: str, stacked: Array) -> Array:
    """A leaf of all microbatches (stacked) joined to one of all of this device's examples."""
    if join == "concat":
        return stacked.reshape(-1, *stacked.shape[2:])
    if join == "max":
        return jnp.max(stacked, axis=0)
    return stacked[-1]


def over_devices(join: str, x: Array, dtype: Any, axes: Axes) -> Array:
    """The sum or the maximum over devices, in `dtype`; what is equal on all devices is typed so."""
    if join == SAME:
        over = tuple(a for a in axes.every if a in varying(x))
        return lax.all_gather(x, over, to="invarying")[0] if over else x
    if join == "sum":
        return lax.psum(cast(x, axes.every), axes.every).astype(dtype)
    number = x.astype(jnp.int32) if x.dtype == bool else x
    return lax.pmax(cast(number, axes.every), axes.every).astype(dtype)
