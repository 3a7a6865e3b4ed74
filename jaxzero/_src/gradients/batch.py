"""The arguments of a loss after its parameters: examples are cut, scalars are whole, keys are folded."""

import collections
import dataclasses
from collections.abc import Hashable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jax.tree_util import PyTreeDef

from .._text import path_text
from .._types import PyTree
from ..sharding.arguments import Whole
from ..sharding.axes import Axes
from ..sharding.leaves import is_key
from ..sharding.vma import varying

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Argument:
    """One array among the arguments.

    Attributes:
      name: How errors name it.
      argument: The argument that it is, or is a leaf of: its position, with the parameters as 0, or its keyword.
      cut: Whether its leading dimension is cut over all devices.
      key: Whether it is a scalar key to be folded with the device's index.
    """

    name: str
    argument: int | str
    cut: bool
    key: bool

    def spec(self, axes: Sequence[str]) -> PartitionSpec:
        """Its `PartitionSpec`."""
        return PartitionSpec(tuple(axes)) if self.cut else PartitionSpec()


@dataclasses.dataclass(frozen=True)
class Arguments:
    """The arguments of a loss after its parameters, without their arrays.

    Attributes:
      tree: The structure of the positional arguments and of those given by keyword.
      static: Their leaves; an array is replaced by a mark.
      arrays: What the arrays are, in order.
    """

    tree: PyTreeDef
    static: tuple[Hashable, ...]
    arrays: tuple[Argument, ...]

    def rebuild(self, arrays: Sequence[Array]) -> tuple[tuple[PyTree, ...], dict[str, PyTree]]:
        """The positional arguments and those given by keyword, with `arrays` in their places."""
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
    named: Mapping[str, PyTree],
    whole: Whole,
    fold_keys: bool,
    traced: bool,
    call: str = "value_and_grad",
) -> tuple[Arguments, list[Array]]:
    """Separates the arrays of a batch from strings, callables and Python scalars.

    In an eager call Python numbers are arrays, as they are for `jit`: their values may change from step to step.
    Under a trace they stay Python numbers.

    Args:
      batch: The positional arguments after the parameters.
      named: The arguments given by keyword.
      whole: Which of them are given whole to every device.
      fold_keys: Whether scalar keys are folded with the device's index.
      traced: Whether the call stands under a trace.
      call: The name of the call, for errors.

    Returns:
      The arguments without their arrays, and the arrays.
    """
    known = {*range(1, len(batch) + 1), *(whole.position(name) for name in named)}
    wrong = [i for i in whole.positions if i not in known]
    if wrong:
        raise ValueError(
            f"{call}: whole_argnums={whole.positions} names position {wrong[0]}. Expected "
            f"positions of the loss's arguments after the parameters, 1 to {len(batch) + len(named)}. Fix: count the "
            "parameters as 0, as jax.jit's static_argnums does."
        )
    pairs, tree = jax.tree_util.tree_flatten_with_path((batch, dict(named)))
    static: list[Hashable] = []
    kinds: list[Argument] = []
    arrays: list[Array] = []
    for path, x in pairs:
        number = isinstance(x, (int, float, complex)) and not isinstance(x, (bool, np.generic))
        if not (hasattr(x, "dtype") and hasattr(x, "shape")) and (traced or not number):
            static.append(x)
            continue
        argument = path[1].key if path[0].idx else path[1].idx + 1
        name = f"argument {argument!r}"
        if len(path) > 2:
            name += f", leaf {path_text(path[2:])!r}"
        cut = not whole.holds(argument)
        scalar_key = np.ndim(x) == 0 and is_key(getattr(x, "dtype", np.float32))
        kinds.append(Argument(name, argument, cut and np.ndim(x) > 0, scalar_key and fold_keys and cut))
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
            fix = (
                _TYPED_KEY
                if _is_raw_key(x)
                else "drop or pad the partial last batch, or name the argument in whole_argnums if it is no batch"
            )
            raise ValueError(
                f"{call}: {argument.name} has leading dimension {x.shape[0]} (shape {tuple(x.shape)}), which does "
                f"not divide by {size} ({shares} shares x {replicas} replicas x {steps} micro-steps). Fix: {fix}."
            )


def check_agree(
    arguments: Sequence[Argument], arrays: Sequence[Array], whole: Whole, call: str = "value_and_grad"
) -> None:
    """Refuses arrays that would be cut but have another number of examples than the others: a small table."""
    pairs = [(a, x) for a, x in zip(arguments, arrays, strict=True) if a.cut]
    cut = sorted(pairs, key=lambda pair: whole.position(pair[0].argument) or len(pairs) + len(whole.names))
    counts = collections.Counter(x.shape[0] for _, x in cut)
    if len(counts) < 2:
        return
    most = max(counts, key=counts.__getitem__)  # of equally many the first, which holds the examples
    other, example = next((a, x) for a, x in cut if x.shape[0] == most)
    odd, x = next((a, x) for a, x in cut if x.shape[0] != most)
    if _is_raw_key(x):
        fix = _TYPED_KEY
    elif (position := whole.position(odd.argument)) is None or odd.argument in [
        a.argument for a, x in cut if x.shape[0] == most
    ]:
        fix = "make it a positional argument of its own, and name that in whole_argnums"
    else:
        fix = f"whole_argnums={position} gives argument {odd.argument!r} whole to every device"
    raise ValueError(
        f"{call}: {odd.name} has leading dimension {x.shape[0]} (shape {tuple(x.shape)}), but {other.name} has {most} "
        f"(shape {tuple(example.shape)}), and both would be cut over devices and micro-steps. Expected the same number "
        f"of examples in all of them. Fix: {fix}. If it holds examples, reshape or pad it to a leading dimension of "
        f"{most}."
    )


_TYPED_KEY = "for a PRNG key use jax.random.key (a typed, scalar key)"


def _is_raw_key(x: Array) -> bool:
    return bool(x.shape[-1:] == (2,) and x.dtype == np.uint32)


def fold(arguments: Sequence[Argument], arrays: Sequence[Array], axes: Axes, steps: int = 1) -> list[Array]:
    """Inside a manual region: the arrays, with scalar keys folded so that dropout differs.

    A key is folded once, with the number `device * steps + step`: keys of `unsafe_rbg` are equal after two folds with
    the same numbers in another order, so the device and the micro-step would meet again on other ones.

    Args:
      arguments: What the arrays are.
      arrays: The arrays.
      axes: The mesh axes.
      steps: The number of microbatches.

    Returns:
      The arrays. With several microbatches a key has become an array of their keys; otherwise one that varies already
      (inside a user's `shard_map`) is left alone.
    """
    return [_keys(x, axes, steps) if argument.key else x for argument, x in zip(arguments, arrays, strict=True)]


def _keys(key: Array, axes: Axes, steps: int) -> Array:
    """The key of this device, or one for each of its microbatches."""
    device = lax.axis_index(axes.every)
    if steps > 1:  # one after the other: a batch of `rbg` keys does not give the bits of each
        return lax.map(lambda step: jax.random.fold_in(key, device * steps + step), jnp.arange(steps))
    return key if set(axes.every) & varying(key) else jax.random.fold_in(key, device)
