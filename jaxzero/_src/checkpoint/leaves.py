"""The leaves of a checkpoint: names and logical shapes of parameters and optimizer state."""

import dataclasses
import math
import sys
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from .._text import path_text
from .._types import JSON, ArrayLike, DType, Path, PyTree
from ..optimizer import checks, trace
from ..optimizer.wrapper import ShardedOptimizer
from ..sharding.axes import Axes
from ..sharding.layout import Layout, OtherAxes, Shape, is_split
from ..sharding.leaves import (
    Leaf,
    Leaves,
    StateLeaf,
    is_key,
    leaves_of,
    owner,
    shape_dtype,
    spec_of,
    state_leaves,
    unwrap,
)
from ..sharding.options import Options, memory_kind, param_leaves

PARAMS, STATE = "params", "opt_state"


@dataclasses.dataclass(frozen=True)
class Entry:
    """One leaf of a checkpoint.

    Attributes:
      name: ``params/...`` or ``opt_state/...`` and its key path.
      shape: Its logical shape.
      dtype: Its dtype.
      layout: How the array in memory is cut; `None`: it is whole.
      memory_kind: The memory kind of the array; `None`: the device's memory.
      other_axes: The other mesh axes that shard each dimension of the array; empty where none does.
    """

    name: str
    shape: Shape
    dtype: DType
    layout: Layout | None
    memory_kind: str | None = None
    other_axes: OtherAxes = ()

    @property
    def padded(self) -> bool:
        """Whether the stored array is padded and of another shape."""
        return self.layout is not None and not self.layout.plain

    def spec(self, axes: Axes) -> PartitionSpec:
        """The `PartitionSpec` of the array in memory."""
        return spec_of(self.layout, self.other_axes, axes.shard)

    @property
    def has_data(self) -> bool:
        """Whether there is anything on disk: an empty leaf stands in the manifest alone."""
        return 0 not in self.shape

    @property
    def described(self) -> list[JSON]:
        """Dtype and shape as JSON."""
        return [str(self.dtype), list(self.shape)]

    def on_disk(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype on disk: typed keys are stored as their data."""
        leaf = jax.ShapeDtypeStruct(self.shape, self.dtype)
        return jax.eval_shape(jax.random.key_data, leaf) if is_key(self.dtype) else leaf


def of_tree(zero: Options | None, params: PyTree, axes: Axes) -> Leaves:
    """The leaves of a tree of parameters, with their layouts."""
    return leaves_of(params, 1, None) if zero is None else param_leaves(zero, params, axes.n)


def of_params(zero: Options | None, leaves: Leaves) -> list[Entry]:
    """The entries of parameters between steps: whole at stages 1 and 2."""
    split = zero is not None and zero.stage == 3
    kind = _kind(zero, "params")
    return [_entry(PARAMS, x, x.layout if split else None, kind(x)) for x in leaves.leaves]


def of_state(zero: Options | None, state: Sequence[StateLeaf]) -> list[Entry]:
    """The entries of optimizer state."""
    kind = _kind(zero, "state")
    return [_entry(STATE, x, x.layout, kind(x)) for x in state]


def _entry(tree: str, leaf: Leaf | StateLeaf, layout: Layout | None, kind: str | None) -> Entry:
    name = tree + ("/" + path_text(leaf.path) if leaf.path else "")
    return Entry(name, tuple(leaf.shape), leaf.dtype, layout, kind, leaf.other_axes)


def _kind(zero: Options | None, what: str) -> Callable[[Leaf | StateLeaf], str | None]:
    return lambda leaf: None if zero is None else memory_kind(zero, what, leaf.layout)


def check_names(call: str, entries: Sequence[Entry]) -> None:
    """Refuses two leaves whose key paths are written alike (``{"a/b": x, "a": {"b": y}}``)."""
    seen: set[str] = set()
    for e in entries:
        if e.name in seen:
            raise ValueError(
                f"{call}: two leaves are both written as {e.name!r}. Expected key paths that differ as text. Fix: "
                "rename one of the keys."
            )
        seen.add(e.name)


def saved(
    zero: Options | None, axes: Axes, params: PyTree, opt_state: PyTree, inner: optax.GradientTransformation | None
) -> tuple[list[Entry], list[ArrayLike]]:
    """The entries to save, and the stored array of each.

    Raises:
      ValueError: By leaf path, for arrays that are not stored as `zero` stores them.
    """
    opt_state = _unboxed(opt_state)
    for path, x in jax.tree_util.tree_leaves_with_path((params, opt_state), is_leaf=is_split):
        checks.split_leaf("save", path[1:], x)
        _check_array("save", path[1:], unwrap(x))
    leaves = of_tree(zero, params, axes)
    arrays = jax.tree.leaves(params, is_leaf=is_split)
    entries = of_params(zero, leaves)
    for leaf, e, x in zip(leaves.leaves, entries, arrays, strict=True):
        wanted = e.layout.stored_shape if e.layout else e.shape
        if not e.padded and is_split(x):
            raise ValueError(
                f"save: leaf {path_text(leaf.path)!r} is {x!r}; expected a plain array over {axes.n} devices at stage "
                f"{zero.stage if zero else None}. It was split by another Zero. Fix: use the Zero that split it."
            )
        checks.stored_shape("save", "parameter", leaf.path, np.shape(unwrap(x)), wanted, axes.n)
    state = _by_inner(opt_state, leaves, axes, inner) if inner is not None else _by_params(opt_state, leaves, axes)
    stored = jax.tree.leaves(opt_state)
    for s, x in zip(state, stored, strict=True):
        checks.stored_shape("save", "state", s.path, np.shape(x), s.stored_shape, axes.n)
    entries += of_state(zero, state)
    check_names("save", entries)
    return entries, [unwrap(x) for x in [*arrays, *stored]]


def _check_array(call: str, path: Path, x: object) -> None:
    """Refuses tracers, deleted arrays, and values that are no arrays."""
    if isinstance(x, jax.core.Tracer):
        found, fix = "is being traced: the call stands inside jit", "call it outside"
    elif isinstance(x, jax.Array) and x.is_deleted():
        found, fix = "was deleted, or donated to a step", "save what the last step returned"
    elif not isinstance(x, (jax.Array, np.ndarray, np.generic, bool, int, float, complex)):
        found, fix = f"is a {type(x).__name__}", "pass the arrays themselves"
    else:
        return
    raise ValueError(f"{call}: leaf {path_text(path)!r} {found}. Expected an array. Fix: {fix}.")


def _unboxed(opt_state: PyTree) -> PyTree:
    """The state without the boxes that `nnx.Optimizer` puts around leaves of no parameter (step counts)."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return opt_state
    boxed = lambda x: isinstance(x, nnx.OptArray)
    return jax.tree.map(lambda x: jax.tree.leaves(x)[0] if boxed(x) else x, opt_state, is_leaf=boxed)


def _by_inner(opt_state: PyTree, leaves: Leaves, axes: Axes, inner: optax.GradientTransformation) -> list[StateLeaf]:
    """The leaves of the state as the inner optimizer makes it."""
    checks.inner_optimizer(inner, ShardedOptimizer, "save")
    if "flax.nnx" in sys.modules:  # `nnx.Optimizer` boxes the same leaves in types of its own
        made = trace.trace_init(inner, leaves, axes).out
        names = lambda tree: [path_text(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
        if names(made) == names(opt_state):
            opt_state = jax.tree.unflatten(jax.tree.structure(made), jax.tree.leaves(opt_state))
    return state_leaves(trace.logical_state(inner, leaves, opt_state, axes), leaves.leaves, axes.n)


def _by_params(opt_state: PyTree, leaves: Leaves, axes: Axes) -> list[StateLeaf]:
    """The leaves of the state, their logical shapes inferred from parameters and stored shapes.

    Raises:
      ValueError: For a leaf that may be padded and is not stored like its parameter.
    """
    by_path = {leaf.path: leaf for leaf in leaves.leaves}
    out = []
    for path, x in jax.tree_util.tree_leaves_with_path(opt_state):
        shape, dtype = shape_dtype(x)
        ends = (by_path.get(path[start:]) for start in range(len(path) + 1))
        stored = lambda leaf: leaf.layout.stored_shape if leaf.layout else leaf.shape
        mine = next((leaf for leaf in ends if leaf is not None and stored(leaf) == shape), None)
        if mine is not None:
            out.append(StateLeaf(path, mine.shape, dtype, mine.layout, not mine.trainable, mine.other_axes))
            continue
        _check_cut(path, x, shape, owner(path, None, by_path), axes)
        out.append(StateLeaf(path, shape, dtype, None, False))
    return out


def _check_cut(path: Path, x: PyTree, shape: Shape, like: Leaf | None, axes: Axes) -> None:
    """Refuses a vector that is split over devices (so perhaps padded) and not stored like its parameter."""
    sharding = getattr(x, "sharding", None)
    if len(shape) != 1 or not isinstance(sharding, NamedSharding) or not any(sharding.spec):
        return
    devices = sharding.mesh.size
    if axes.n > 1:
        raise ValueError(
            f"save: state leaf {path_text(path)!r} is split, of stored shape {shape}, and not stored like its "
            "parameter, so its logical shape is not known. Expected the optimizer, which knows it. Fix: "
            "jaxzero.save(directory, step, zero, params, opt_state, inner)."
        )
    if devices > 1 and like and 0 <= shape[0] - math.prod(like.shape) < devices:
        raise ValueError(
            f"save: state leaf {path_text(path)!r} of shape {shape} is split and padded, for a parameter of shape "
            f"{like.shape}. Found a save without the Zero that split it. Expected that Zero. Fix: "
            "jaxzero.save(directory, step, zero, params, opt_state)."
        )


def wanted_state(
    inner: optax.GradientTransformation, params: Leaves, axes: Axes, found: Mapping[str, list[JSON]]
) -> PyTree:
    """Abstract state at logical shapes that fits the saved leaves `found`; `update` may have added leaves."""
    checks.inner_optimizer(inner, ShardedOptimizer, "restore")
    entries = lambda state: of_state(None, state_leaves(state, params.leaves, axes.n))
    fitting = lambda state: sum(found.get(e.name) == e.described for e in entries(state))
    return trace.state_that(inner, params, axes, fitting, len(found))
