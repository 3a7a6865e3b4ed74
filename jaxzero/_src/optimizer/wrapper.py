"""The wrapped optimizer: the calls of Optax, in the global view and inside a user's `shard_map`."""

import contextvars
import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._text import path_text
from .._types import ArrayLike, Path, PyTree
from ..comm.reduce import overwrite_all
from ..jaxpr.compat import is_weak
from ..partition import alike
from ..sharding import place, vma
from ..sharding.axes import Axes
from ..sharding.checks import check_params
from ..sharding.layout import EvenSplit, Layout, is_split
from ..sharding.leaves import Leaf, Leaves, is_key, skipping, state_leaves, unwrap, wrap_padded
from ..sharding.options import Options, param_leaves, require_observed, resolve_axes
from . import apply_through, checks, split_regions
from .step import Arrays, Init, Update
from .trace import Extra, StoredLeaf, sort_extra, trace_init, trace_update, weak_results

T = TypeVar("T")

#: Set while an inner optimizer is traced: another wrapped one inside it is refused.
_tracing: contextvars.ContextVar[bool] = contextvars.ContextVar("tracing", default=False)

#: Compiled calls that one optimizer keeps for eager callers: its programs rarely change.
_CACHE_SIZE = 32


class ShardedOptimizer(optax.GradientTransformationExtraArgs):
    """A wrapped optimizer: an Optax transformation that also carries the step on shares.

    Attributes:
      calls: The calls behind it; `Zero.apply` and `Zero.explain` use them.
    """

    calls: "Calls | None" = None  # what `_replace` makes of it has none

    def __new__(cls, init: Any, update: Any, calls: "Calls | None" = None) -> "ShardedOptimizer":
        """The pair that Optax expects, with one more attribute."""
        self = super().__new__(cls, init, update)
        self.calls = calls
        return self


def wrap(options: Options, inner: optax.GradientTransformation, reduced: bool) -> ShardedOptimizer:
    """The wrapped optimizer; see `Zero.optimizer`."""
    checks.inner_optimizer(inner, ShardedOptimizer)
    if options.unused == "skip":
        require_observed(options, "optimizer")
    calls = Calls(options, inner, reduced)

    def update(grads: PyTree, state: PyTree, params: PyTree = None, **extra: Any) -> tuple[PyTree, PyTree]:
        return apply_through.update(calls, grads, state, params, extra)

    return ShardedOptimizer(calls.init, update, calls)


def apply(tx: Any, grads: PyTree, state: PyTree, params: PyTree, extra: dict[str, Any]) -> tuple[PyTree, PyTree]:
    """See `Zero.apply`."""
    calls = tx.calls if isinstance(tx, ShardedOptimizer) else None
    if calls is None:
        return apply_through.apply(tx, grads, state, params, extra)
    return calls.apply(grads, state, params, extra)


@dataclasses.dataclass(frozen=True)
class _Given:
    """The arguments of one `update` or `apply`, taken apart.

    Attributes:
      call: Its name, for messages.
      adds: Whether it returns new parameters rather than updates.
      axes: The mesh axes.
      manual: Whether it stands inside a user's `shard_map`.
      grads: The gradients, at logical shapes.
      params: The parameters, where there are any.
      extra: The extra arguments.
      leaves: The leaves of the gradients and of extra trees like them.
      split: Which of these come as shares.
      split_params: Which parameters do.
      grad_arrays: The arrays of `leaves`, as they came.
      param_arrays: Those of the parameters.
      extra_arrays: The other extra arrays.
      state: The state.
    """

    call: str
    adds: bool
    axes: Axes
    manual: bool
    grads: Leaves
    params: Leaves | None
    extra: Extra
    leaves: tuple[Leaf, ...]
    split: tuple[bool, ...]
    split_params: tuple[bool, ...]
    grad_arrays: list[StoredLeaf]
    param_arrays: list[StoredLeaf]
    extra_arrays: list[jax.Array]
    state: PyTree

    def key(self) -> tuple[Hashable, ...]:
        """What an update depends on beside its program."""
        arrays, tree = jax.tree.flatten(self.state)
        dtypes = tuple((jnp.result_type(x), is_weak(x)) for x in arrays)
        return (self.call, self.axes, self.leaves, self.params, self.split, self.split_params, tree, dtypes)


class Calls:
    """`init`, `update` and `apply` of one wrapped optimizer.

    The optimizer is traced at each call, so that it reads Python state when plain Optax would: under `jit` when that
    is traced, eagerly each time. Eager calls with equal programs share a compiled one.
    """

    def __init__(self, options: Options, inner: optax.GradientTransformation, reduced: bool) -> None:
        self.options, self.inner, self.reduced = options, inner, reduced
        self._compiled: dict[Hashable, Callable[..., Any]] = {}

    def init(self, params: PyTree) -> PyTree:
        """Optimizer state, made in its shares."""
        axes, manual = resolve_axes(self.options, "init")
        check_params("init", self.options, params)
        leaves, arrays = optimizer_leaves(self.options, "init", params, axes, manual and self.options.stage == 3)
        split = self._split_params("init", leaves, arrays, manual)

        program = _traced(lambda: trace_init(self.inner, leaves, axes))
        state = state_leaves(program.out, leaves.leaves, axes.n)
        step = Init(self.options, axes, program, leaves.leaves, split, state)
        tree = jax.tree.structure(program.out)
        stored = [unwrap(x) for x in arrays]
        if any(isinstance(x, jax.ShapeDtypeStruct) for x in stored) and not manual:
            return jax.tree.unflatten(tree, self._abstract_state(step))
        if manual:
            return jax.tree.unflatten(tree, step(stored, program.consts))
        paths = [leaf.path for leaf in leaves.leaves]
        key = ("init", axes, leaves, split)
        made = self._in_regions("init", step, key, [paths, None], [stored, program.consts])
        return jax.tree.unflatten(tree, made)

    def update(self, grads: PyTree, state: PyTree, params: PyTree, extra: dict[str, Any]) -> tuple[PyTree, PyTree]:
        """Updates and new state."""
        return self._run(self._read(False, grads, state, params, extra))

    def apply(self, grads: PyTree, state: PyTree, params: PyTree, extra: dict[str, Any]) -> tuple[PyTree, PyTree]:
        """New parameters and new state."""
        return self._run(self._read(True, grads, state, params, extra))

    # --- behind the calls ---

    def _read(self, adds: bool, grads: PyTree, state: PyTree, params: PyTree, extra: dict[str, Any]) -> _Given:
        """The arguments as leaves and arrays; refuses those that do not fit."""
        call = "apply" if adds else "update"
        axes, manual = resolve_axes(self.options, call)
        g, g_arrays = optimizer_leaves(self.options, call, grads, axes)
        p: Leaves | None = None
        p_arrays: list[StoredLeaf] = []
        if params is not None:
            p, p_arrays = optimizer_leaves(self.options, call, params, axes, manual and self.options.stage == 3)
            checks.same_leaves(call, grads, params)
            g = checks.gradients(call, g, g_arrays, p, manual)
        if manual:
            checks.closures(call, extra, axes)
        more, trees, others = sort_extra(self.inner, extra, p or g, call, manual)
        leaves = (*g.leaves, *(leaf for tree in more.trees.values() for leaf in tree.leaves))
        arrays = [*g_arrays, *trees]
        split = tuple(_is_share(leaf, x, axes, manual) for leaf, x in zip(leaves, arrays, strict=True))
        split_p = () if p is None else self._split_params(call, p, p_arrays, manual)
        return _Given(call, adds, axes, manual, g, p, more, leaves, split, split_p, arrays, p_arrays, others, state)

    def _run(self, given: _Given) -> tuple[PyTree, PyTree]:
        """Traces the update, runs it and rebuilds the trees."""
        step, state = _traced(lambda: self._trace_update(given)), jax.tree.leaves(given.state)
        grads = [_reading(x, leaf) for x, leaf in zip(given.grad_arrays, given.leaves, strict=True)]
        params = [unwrap(x) for x in given.param_arrays]
        arrays = [grads, state, params, given.extra_arrays, step.traced.program.consts]
        if given.manual:
            checks.local(given.call, step, arrays, self.reduced, given.params is None)
            new, new_state = step(grads, state, params, given.extra_arrays, step.traced.program.consts)
        else:
            checks.state_arrays(given.call, state, step.traced.state, given.axes, given.params is None)
            paths = [[leaf.path for leaf in leaves] for leaves in (given.leaves, step.traced.state, step.params)]
            new, new_state = self._in_regions(given.call, step, given.key(), [*paths, None, None], arrays)
        return _assemble(given, step, new, new_state)

    def _trace_update(self, given: _Given) -> Update:
        params, local = given.params, given.manual and not self.reduced
        traced = trace_update(self.inner, given.grads, given.state, params, given.extra, given.axes, given.adds)
        known = () if params is None else params.leaves
        unread = traced.unread_grads
        grads = tuple(dataclasses.replace(x, skipped=x.skipped or i in unread) for i, x in enumerate(given.leaves))
        return Update(self.options, given.axes, traced, grads, given.split, local, known, given.split_params)

    def _split_params(self, call: str, leaves: Leaves, arrays: Sequence[StoredLeaf], manual: bool) -> tuple[bool, ...]:
        """Which parameters come as shares: an `EvenSplit` is one, and at stage 3 every leaf that is cut."""
        out = []
        for leaf, x in zip(leaves.leaves, arrays, strict=True):
            layout = leaf.layout
            share = is_split(x) or (self.options.stage == 3 and layout is not None)
            if share and layout is not None:
                wanted = layout.local_shape if manual else layout.stored_shape
                checks.stored_shape(call, "parameter", leaf.path, np.shape(unwrap(x)), wanted, layout.n)
            out.append(share and layout is not None)
        return tuple(out)

    def _in_regions(
        self,
        call: str,
        step: Init | Update,
        key: tuple[Hashable, ...],
        paths: Sequence[list[Path] | None],
        arrays: Sequence[list[Any]],
    ) -> PyTree:
        """The results of a step in manual regions of the library's own; called eagerly it is compiled once."""
        options = self.options
        planned = place.is_elsewhere(options.mesh) and place.is_traced(arrays)
        place_all = place.place_traced if planned else place.place_all
        placed = [
            place_all(call, options.mesh, path, xs, spec, step.axes, kinds)
            for path, xs, spec, kinds in zip(paths, arrays, step.in_specs, step.in_kinds, strict=True)
        ]
        return (split_regions.around(step) if place.is_traced(placed) else self._compile(step, key))(*placed)

    def _compile(self, step: Init | Update, key: tuple[Hashable, ...]) -> Callable[..., Any]:
        """The step compiled, for eager calls: one that was compiled before, if it has the same program."""
        program = step.program if isinstance(step, Init) else step.traced.program
        jaxpr = program.jaxpr
        # Constants are arguments, so only their shapes count. A cached step keeps the objects alive that a key names.
        same = alike.key(jaxpr.eqns, [*jaxpr.constvars, *jaxpr.invars], jaxpr.outvars)
        key = (*key, same, tuple(weak_results(program)))
        if key not in self._compiled:
            if len(self._compiled) >= _CACHE_SIZE:
                self._compiled.pop(next(iter(self._compiled)))
            self._compiled[key] = jax.jit(split_regions.around(step))
        return self._compiled[key]

    def _abstract_state(self, step: Init) -> list[jax.ShapeDtypeStruct]:
        shapes = [(leaf.stored_shape, leaf.dtype) for leaf in step.state]
        made = place.abstract(self.options.mesh, shapes, step.out_specs, step.out_kinds)
        typed = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding, weak_type=True)
        return [typed(x) if weak else x for x, weak in zip(made, weak_results(step.program), strict=True)]


def optimizer_leaves(
    options: Options, call: str, tree: PyTree, axes: Axes, shares: bool = False
) -> tuple[Leaves, list[StoredLeaf]]:
    """The leaves of a tree of parameters or gradients and their arrays; skipped ones are marked."""
    for path, x in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_split):
        checks.split_leaf(call, path, x)
    arrays = jax.tree.leaves(tree, is_leaf=is_split)
    leaves = param_leaves(options, tree, axes.n, shares=shares)
    return skipping(leaves, options.observed.unused if options.unused == "skip" else ()), arrays


def _traced(make: Callable[[], T]) -> T:
    if _tracing.get():
        raise ValueError(
            "optimizer: a wrapped optimizer stands inside a wrapped optimizer. Expected a plain Optax optimizer "
            "inside. Fix: wrap once, outermost: zero.optimizer(optax.chain(...))."
        )
    token = _tracing.set(True)
    try:
        return make()
    finally:
        _tracing.reset(token)


def _is_share(leaf: Leaf, x: StoredLeaf, axes: Axes, manual: bool) -> bool:
    """Whether a gradient comes as a share. In the global view every leaf does that is stored as it is.

    Over one device a share looks like the whole; only one that is not reduced varies over replicas.
    """
    if leaf.layout is None or not leaf.trainable:
        return False
    if isinstance(x, EvenSplit):
        return True
    if manual:
        shape, over = np.shape(x), vma.varying(x)
        alone = axes.n == 1 and over.issuperset(axes.shard) and not over & set(axes.replica)
        return shape == leaf.layout.local_shape and (shape != leaf.shape or alone)
    return leaf.layout.plain


def _reading(x: StoredLeaf, leaf: Leaf) -> jax.Array:
    """The array of a gradient; zero for a leaf that passes through, whose array is not read."""
    return unwrap(x) if leaf.trainable else jnp.zeros(())


def _assemble(given: _Given, step: Update, new: Arrays, new_state: Arrays) -> tuple[PyTree, PyTree]:
    """The trees that are returned; leaves that pass through are put in their places."""
    moved, changed = iter(new), iter(new_state)
    traced, out = step.traced, []
    old = {leaf.path: x for leaf, x in zip(traced.state, jax.tree.leaves(given.state), strict=True)}
    for i, leaf in enumerate(traced.new.leaves):
        layout = step.stored_layout(leaf)
        if leaf.trainable:
            out.append(wrap_padded(next(moved), layout))
        elif leaf.overwritten:
            out.append(_next_value(given, step, i))
        elif traced.adds:
            out.append(given.param_arrays[i])
        else:
            out.append(_no_update(leaf, layout, given.manual))
    state = [old[leaf.path] if leaf.frozen else next(changed) for leaf in traced.new_state]
    return traced.new.unflatten(out), jax.tree.unflatten(traced.new_state_tree, state)


def _next_value(given: _Given, step: Update, i: int) -> jax.Array:
    """The new value of a leaf that its gradient overwrites, or the update that leads to it."""
    leaf, x = given.leaves[i], jnp.asarray(unwrap(given.grad_arrays[i]))
    if step.local:
        x = overwrite_all([x], given.axes)[0]
    if step.traced.adds:
        return x.astype(given.param_arrays[i].dtype)
    if not given.param_arrays:
        raise ValueError(
            f"update: leaf {path_text(leaf.path)!r} is overwritten by its gradient (overwrite=), and update got no "
            "params, from which the update to it is taken. Fix: tx.update(grads, state, params), or zero.apply."
        )
    return x - given.param_arrays[i]


def _no_update(leaf: Leaf, layout: Layout | None, manual: bool) -> ArrayLike | EvenSplit:
    """The update of a leaf that passes through, as it would be stored."""
    if is_key(leaf.dtype):
        return np.zeros(leaf.shape, jax.dtypes.float0)
    if layout is None:
        return jnp.zeros(leaf.shape, leaf.dtype)
    return wrap_padded(jnp.zeros(layout.local_shape if manual else layout.stored_shape, leaf.dtype), layout)
