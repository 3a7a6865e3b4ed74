"""The arguments of a loss after its parameters: examples are cut, scalars are whole, keys are folded."""

import dataclasses
from collections.abc import Hashable, Sequence

import jax
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jax.tree_util import PyTreeDef

from .._text import path_text
from .._types import PyTree
from ..sharding.axes import Axes
from ..sharding.leaves import is_key
from ..sharding.vma import varying

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Argument:
    """One array among the arguments.

    Attributes:
      name: How errors name it.
      cut: Whether its leading dimension is cut over all devices.
      key: Whether it is a scalar key to be folded with the device's index.
    """

    name: str
    cut: bool
    key: bool

    def spec(self, axes: Sequence[str]) -> PartitionSpec:
        """Its `PartitionSpec`."""
        return PartitionSpec(tuple(axes)) if self.cut else PartitionSpec()


@dataclasses.dataclass(frozen=True)
class Arguments:
    """The arguments of a loss after its parameters, without their arrays.

    Attributes:
      tree: The structure of the positional arguments.
      static: Their leaves; an array is replaced by a mark.
      arrays: What the arrays are, in order.
    """

    tree: PyTreeDef
    static: tuple[Hashable, ...]
    arrays: tuple[Argument, ...]

    def rebuild(self, arrays: Sequence[Array]) -> tuple[PyTree, ...]:
        """The positional arguments, with `arrays` in their places."""
        rest = iter(arrays)
        leaves = [next(rest) if isinstance(x, _Array) else x for x in self.static]
        return jax.tree.unflatten(self.tree, leaves)


class _Array:
    """Stands for an array among the static leaves."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Array)

    def __hash__(self) -> int:
        return hash(_Array)


def sort_arguments(
    batch: tuple[PyTree, ...],
    whole_argnums: Sequence[int],
    fold_keys: bool,
    traced: bool,
    call: str = "value_and_grad",
) -> tuple[Arguments, list[Array]]:
    """Separates the arrays of a batch from strings, callables and Python scalars.

    In an eager call Python numbers are arrays, as they are for `jit`: their values may change from step to step.
    Under a trace they stay Python numbers.

    Args:
      batch: The positional arguments after the parameters.
      whole_argnums: Positions of those that are given whole to every device.
      fold_keys: Whether scalar keys are folded with the device's index.
      traced: Whether the call stands under a trace.
      call: The name of the call, for errors.

    Returns:
      The arguments without their arrays, and the arrays.
    """
    wrong = [i for i in whole_argnums if not 1 <= i <= len(batch)]
    if wrong:
        raise ValueError(
            f"{call}: whole_argnums={tuple(whole_argnums)} names position {wrong[0]}. Expected "
            f"positions of the loss's arguments after the parameters, 1 to {len(batch)}. Fix: count the "
            "parameters as 0, as jax.jit's static_argnums does."
        )
    pairs, tree = jax.tree_util.tree_flatten_with_path(batch)
    static: list[Hashable] = []
    kinds: list[Argument] = []
    arrays: list[Array] = []
    for path, x in pairs:
        number = isinstance(x, (int, float, complex)) and not isinstance(x, (bool, np.generic))
        if not (hasattr(x, "dtype") and hasattr(x, "shape")) and (traced or not number):
            static.append(x)
            continue
        position = path[0].idx + 1
        name = f"argument {position}"
        if len(path) > 1:
            name += f", leaf {path_text(path[1:])!r}"
        whole = position in whole_argnums
        scalar_key = np.ndim(x) == 0 and is_key(getattr(x, "dtype", np.float32))
        kinds.append(Argument(name, not whole and np.ndim(x) > 0, scalar_key and fold_keys and not whole))
        static.append(_Array())
        arrays.append(x)
    return Arguments(tree, tuple(static), tuple(kinds)), arrays


def check_divides(
    arguments: Sequence[Argument],
    arrays: Sequence[Array],
    sizes: tuple[int, int],
    steps: int = 1,
    call: str = "value_and_grad",
) -> None:
    """Refuses examples that cannot be cut evenly over shares, replicas and microbatches."""
    shares, replicas = sizes
    for argument, x in zip(arguments, arrays, strict=True):
        size = shares * replicas * steps
        if argument.cut and x.shape[0] % size:
            raw_key = x.shape[-1:] == (2,) and x.dtype == np.uint32
            fix = (
                "for a PRNG key use jax.random.key (a typed, scalar key)"
                if raw_key
                else "drop or pad the partial last batch, or name the argument in whole_argnums if it is no batch"
            )
            raise ValueError(
                f"{call}: {argument.name} has leading dimension {x.shape[0]} (shape {tuple(x.shape)}), which does "
                f"not divide by {size} ({shares} shares x {replicas} replicas x {steps} micro-steps). Fix: {fix}."
            )


def fold(arguments: Sequence[Argument], arrays: Sequence[Array], axes: Axes) -> list[Array]:
    """Inside a manual region: the arrays, with scalar keys folded with the device's index, so that dropout differs.

    A key that varies already (inside a user's `shard_map`) is left alone.
    """
    return [
        jax.random.fold_in(x, lax.axis_index(axes.every)) if argument.key and not set(axes.every) & varying(x) else x
        for argument, x in zip(arguments, arrays, strict=True)
    ]
