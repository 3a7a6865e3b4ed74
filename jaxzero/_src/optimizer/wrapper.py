"""The wrapped optimizer: the calls of Optax, in the global view and inside a user's `shard_map`."""

import contextvars
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ..jaxpr import trace
from ..sharding import checks as sharding_checks
from ..sharding import place, vma
from ..sharding.axes import Axes
from ..sharding.layout import is_split
from ..sharding.leaves import Leaf, Leaves, is_key, skipping, state_leaves, unwrap, wrap_padded
from ..sharding.options import Options, param_leaves, require_observed, resolve_axes
from . import checks, split_regions
from . import trace as optimizer_trace
from .step import Init, Update

#: Set while an inner optimizer is traced: another wrapped one inside it is refused.
_tracing: contextvars.ContextVar[bool] = contextvars.ContextVar("tracing", default=False)

#: Traced calls that one optimizer keeps: structures, dtypes and callables rarely change.
_KEPT = 32


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


def wrap(options: Options, inner: Any, reduced: bool) -> ShardedOptimizer:
    """The wrapped optimizer; see `Zero.optimizer`."""
    checks.inner_optimizer(inner, ShardedOptimizer)
    if options.unused == "skip":
        require_observed(options, "optimizer")
    calls = Calls(options, inner, reduced)

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        return calls.update("update", grads, state, params, extra)

    return ShardedOptimizer(calls.init, update, calls)


class Calls:
    """`init`, `update`, `apply` and the record behind `explain` of one wrapped optimizer."""

    def __init__(self, options: Options, inner: Any, reduced: bool) -> None:
        self.options, self.inner, self.reduced = options, inner, reduced
        self._kept: dict[Any, Any] = {}

    def init(self, params: Any) -> Any:
        """Optimizer state, born split."""
        axes, manual = resolve_axes(self.options, "init")
        sharding_checks.parameters("init", self.options, params)
        leaves, arrays = optimizer_leaves(self.options, "init", params, axes, manual and self.options.stage == 3)
        split = self._split_params("init", leaves, arrays, manual)

        def make() -> Init:
            program = optimizer_trace.trace_init(self.inner, leaves, axes)
            state = state_leaves(program.out, leaves.leaves, axes.n)
            return Init(self.options, axes, program, leaves.leaves, split, state)

        body = self._keep(("init", axes, leaves, split), make)
        tree = jax.tree.structure(body.program.out)
        arrays = [unwrap(x) for x in arrays]
        if any(isinstance(x, jax.ShapeDtypeStruct) for x in arrays) and not manual:
            return jax.tree.unflatten(tree, self._abstract_state(body))
        paths = [leaf.path for leaf in leaves.leaves]
        run = body if manual else self._region("init", body, [paths, None])
        return jax.tree.unflatten(tree, run(arrays, body.program.consts))

    def update(self, call: str, grads: Any, state: Any, params: Any, extra: dict[str, Any]) -> Any:
        """Updates (or, for `apply`, new parameters) and new state."""
        axes, manual = resolve_axes(self.options, call)
        g, g_arrays = optimizer_leaves(self.options, call, grads, axes)
        at_rest = manual and self.options.stage == 3
        p, p_arrays = (None, []) if params is None else optimizer_leaves(self.options, call, params, axes, at_rest)
        if p is not None:
            checks.same_leaves(call, grads, params)
            g = checks.gradients(call, g, g_arrays, p, manual)
        if manual:
            checks.closures(call, extra, axes)
        more, trees, others = optimizer_trace.sort_extra(self.inner, extra, p or g, call, manual)
        leaves = (*g.leaves, *(leaf for t in more.trees.values() for leaf in t.leaves))
        split = tuple(_is_share(leaf, x, axes, manual) for leaf, x in zip(leaves, [*g_arrays, *trees], strict=True))
        split_p = () if p is None else self._split_params(call, p, p_arrays, manual)
        s_arrays, s_tree = jax.tree.flatten(state)

        def make() -> Update:
            add, local = call == "apply", manual and not self.reduced
            traced = optimizer_trace.trace_update(self.inner, g, state, p, more, axes, add)
            known = () if p is None else p.leaves
            return Update(self.options, axes, traced, leaves, split, local, known, split_p)

        dtypes = tuple(jnp.result_type(x) for x in s_arrays)
        key = (call, axes, manual, g, p, split, split_p, more.key(), s_tree, dtypes)
        body = self._keep(key, make)
        grads_ = [_reading(x, leaf) for x, leaf in zip([*g_arrays, *trees], leaves, strict=True)]
        consts = body.traced.program.consts
        arrays = [grads_, s_arrays, [unwrap(x) for x in p_arrays], others, consts]
        if manual:
            checks.local(call, body, arrays, self.reduced, params is None)
            new, new_state = body(*arrays)
        else:
            checks.state_arrays(call, s_arrays, body.traced.state, axes)
            paths = [[leaf.path for leaf in x] for x in (leaves, body.traced.state, body.params)]
            new, new_state = self._region(call, body, [*paths, None, None])(*arrays)
        return _assemble(call, body, new, new_state, s_arrays, p_arrays, manual)

    # --- behind the calls ---

    def _split_params(self, call: str, leaves: Leaves, arrays: Sequence[Any], manual: bool) -> tuple[bool, ...]:
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

    def _keep(self, key: Any, make: Callable[[], Any]) -> Any:
        """The traced call for `key`, traced once unless it closed over values being traced."""
        key = (*key, trace.x64())
        try:
            kept = self._kept.get(key)
        except TypeError:  # an extra argument that cannot be hashed
            return _traced(make)
        if kept is None:
            kept = _traced(make)
            program = kept.program if isinstance(kept, Init) else kept.traced.program
            if not place.is_traced(program.consts):
                if len(self._kept) >= _KEPT:
                    self._kept.pop(next(iter(self._kept)))
                self._kept[key] = kept
        return kept

    def _region(self, call: str, body: Any, paths: Sequence[Any]) -> Callable[..., Any]:
        """`body` in manual regions of the library's own; called eagerly it is compiled once."""
        options, axes = self.options, body.axes
        run = body.once("_regions", lambda: split_regions.around(body))

        def call_(*arrays: Any) -> Any:
            planned = place.is_elsewhere(options.mesh) and place.is_traced(arrays)
            placed = [
                place.place_all(call, options.mesh, path, xs, spec, axes, kinds, planned=planned)
                for path, xs, spec, kinds in zip(paths, arrays, body.in_specs, body.in_kinds, strict=True)
            ]
            if place.is_traced(placed):
                return run(*placed)
            return body.once("_compiled", lambda: jax.jit(run))(*placed)

        return call_

    def _abstract_state(self, body: Init) -> list[jax.ShapeDtypeStruct]:
        shapes = [(leaf.stored_shape, leaf.dtype) for leaf in body.state]
        return place.abstract(self.options.mesh, shapes, body.out_specs, body.out_kinds)


def optimizer_leaves(
    options: Options, call: str, tree: Any, axes: Axes, shares: bool = False
) -> tuple[Leaves, list[Any]]:
    """The leaves of a tree of parameters or gradients and their arrays; skipped ones are marked."""
    for path, x in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_split):
        checks.split_leaf(call, path, x)
    arrays = jax.tree.leaves(tree, is_leaf=is_split)
    leaves = param_leaves(options, tree, axes.n, shares=shares)
    if options.unused == "skip":
        leaves = skipping(leaves, options.observed.unused)
    return leaves, arrays


def _traced(make: Callable[[], Any]) -> Any:
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


def _is_share(leaf: Leaf, x: Any, axes: Axes, manual: bool) -> bool:
    """Whether a gradient comes as a share. In the global view every leaf does that is stored as it is.

    Over one device a share looks like the whole; only one that nobody has reduced varies over replicas.
    """
    if leaf.layout is None or not leaf.trainable:
        return False
    if is_split(x):
        return True
    if manual:
        shape, over = np.shape(x), vma.varying(x)
        alone = axes.n == 1 and over.issuperset(axes.shard) and not over & set(axes.replica)
        return shape == leaf.layout.local_shape and (shape != leaf.shape or alone)
    return leaf.layout.plain


def _reading(x: Any, leaf: Leaf) -> Any:
    """The array that stands for a gradient; nobody reads that of a leaf that passes through."""
    return unwrap(x) if leaf.trainable else jnp.zeros(())


def _assemble(
    call: str, body: Update, new: Any, new_state: Any, s_arrays: Sequence[Any], p_arrays: Sequence[Any], manual: bool
) -> Any:
    """The trees that go back: what passes through is put in its place."""
    moved, changed = iter(new), iter(new_state)
    traced, out = body.traced, []
    for i, leaf in enumerate(traced.new.leaves):
        if leaf.trainable:
            out.append(wrap_padded(next(moved), body.rest(leaf)))
        elif call == "apply":
            out.append(p_arrays[i])
        else:
            out.append(_no_update(leaf, body.rest(leaf), manual))
    state = [s_arrays[i] if leaf.frozen else next(changed) for i, leaf in enumerate(traced.new_state)]
    return traced.new.unflatten(out), jax.tree.unflatten(traced.new_state_tree, state)


def _no_update(leaf: Leaf, layout: Any, manual: bool) -> Any:
    """The update of a leaf that passes through, as it would be stored."""
    if is_key(leaf.dtype):
        return np.zeros(leaf.shape, jax.dtypes.float0)
    if layout is None:
        return jnp.zeros(leaf.shape, leaf.dtype)
    return wrap_padded(jnp.zeros(layout.local_shape if manual else layout.stored_shape, leaf.dtype), layout)
