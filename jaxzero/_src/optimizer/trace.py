"""The inner optimizer, traced at full, unsharded shapes: its program has no mesh."""

import contextlib
import dataclasses
import inspect
import re
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import PyTreeDef

from .._dtypes import promotes
from .._text import path_text
from .._types import PyTree
from ..jaxpr.compat import aval, is_weak, trace_of
from ..jaxpr.trace import Program, trace
from ..sharding.axes import Axes
from ..sharding.layout import EvenSplit, is_split
from ..sharding.leaves import Leaf, Leaves, StateLeaf, leaves_of, owner, shape_dtype, state_leaves
from . import checks
from .ownership import frozen_paths
from .zero_updates import without_zero_updates

T = TypeVar("T")
#: A leaf of parameters, gradients or trees like them, as it is stored.
StoredLeaf = jax.Array | EvenSplit
#: The inputs of a trace, flat.
Avals = Sequence[jax.Array]

#: How often the structure of optimizer state may grow before it has its final one.
_GROWTHS = 3


@dataclasses.dataclass(frozen=True)
class Extra:
    """The extra arguments of one `update`, sorted by how they are passed on.

    Attributes:
      static: Callables, strings, Python scalars: closed over as they are.
      trees: Trees like the parameters: read like gradients.
      arrays: Everything else: (structure, abstract leaves), whole.
    """

    static: Mapping[str, Any]
    trees: Mapping[str, Leaves]
    arrays: Mapping[str, tuple[PyTreeDef, tuple[jax.ShapeDtypeStruct, ...]]]

    def avals(self) -> list[jax.ShapeDtypeStruct]:
        """Abstract leaves of `trees`, then of `arrays`."""
        out = [a for leaves in self.trees.values() for a in leaves.trace_avals()]
        return out + [a for _, avals in self.arrays.values() for a in avals]

    def rebuild(self, flat: Sequence[jax.Array]) -> dict[str, Any]:
        """The keyword arguments from their flat leaves."""
        out, rest = dict(self.static), iter(flat)
        for name, leaves in self.trees.items():
            out[name] = leaves.unflatten([next(rest) for _ in leaves.leaves])
        for name, (tree, avals) in self.arrays.items():
            out[name] = jax.tree.unflatten(tree, [next(rest) for _ in avals])
        return out


def accepted(inner: optax.GradientTransformation, extra: Mapping[str, Any]) -> dict[str, Any]:
    """The extra arguments that `inner.update` takes, by its own signature.

    Optax drops extra arguments for transformations that do not take them; some wrappers take them
    without being of the class that says so.
    """
    if isinstance(inner, optax.GradientTransformationExtraArgs):
        return dict(extra)
    parameters = inspect.signature(inner.update).parameters
    if any(p.kind == p.VAR_KEYWORD for p in parameters.values()):
        return dict(extra)
    return {name: value for name, value in extra.items() if name in parameters}


def sort_extra(
    inner: optax.GradientTransformation, extra: Mapping[str, Any], like: Leaves, call: str, manual: bool
) -> tuple[Extra, list[StoredLeaf], list[jax.Array]]:
    """Sorts the extra arguments of `update`.

    Returns:
      The `Extra`, the leaves of its trees, and the leaves of its arrays.
    """
    sorted_ = Extra({}, {}, {})
    trees: list[StoredLeaf] = []
    arrays: list[jax.Array] = []
    for name, value in accepted(inner, extra).items():
        flat, tree = jax.tree.flatten(value, is_leaf=is_split)
        if not flat or not all(hasattr(x, "dtype") and hasattr(x, "shape") for x in flat):
            sorted_.static[name] = value  # type: ignore[index]
        elif tree == like.tree and all(_fits(x, leaf, manual) for x, leaf in zip(flat, like.leaves, strict=True)):
            given = leaves_of(value, 1, None)
            sorted_.trees[name] = checks.gradients(call, given, flat, like, manual)  # type: ignore[index]
            trees += flat
        else:
            avals = tuple(jax.ShapeDtypeStruct(*shape_dtype(x)) for x in flat)
            sorted_.arrays[name] = (tree, avals)  # type: ignore[index]
            arrays += flat
    return sorted_, trees, arrays


#: How Optax says that an extra argument is missing.
_MISSING = re.compile(r"missing \d+ required (keyword-only|positional) argument|must be provided")


class MissingExtra(ValueError):
    """An optimizer whose `update` needs more than gradients, state and parameters."""


@contextlib.contextmanager
def naming_missing_extra(call: str, fix: str) -> Iterator[None]:
    """Names the call and the fix where the inner `update` lacks an extra argument; other errors stay as they are."""
    try:
        yield
    except (TypeError, ValueError) as error:
        if not _MISSING.search(str(error)):
            raise
        raise MissingExtra(
            f"{call}: the update of this optimizer needs more than gradients: {error}. Expected what tx.update gets, "
            f"by name. Fix: {fix}"
        ) from error


def _fits(x: StoredLeaf, leaf: Leaf, manual: bool) -> bool:
    """Whether an array can be this parameter's gradient, whole or (inside `shard_map`) its share."""
    shape = shape_dtype(x)[0]
    return shape == leaf.shape or (manual and leaf.layout is not None and shape == leaf.layout.local_shape)


def trace_init(inner: optax.GradientTransformation, params: Leaves, axes: Axes) -> Program:
    """`inner.init` at full shapes; its result is the state at logical shapes."""
    return _trace(axes, lambda p: inner.init(params.unflatten(p)), params.trace_avals())


#: The traces of optimizers that have ended: an array of one of them is of no use in a later one.
_ended: weakref.WeakSet[Any] = weakref.WeakSet()


def _trace(axes: Axes, f: Callable[..., PyTree], *args: PyTree) -> Program:
    """`f` at full shapes; refuses arrays that the optimizer computed in an earlier trace and kept."""
    here: list[Any] = []

    def watched(*args: PyTree) -> PyTree:
        here.extend(map(trace_of, jax.tree.leaves(args)[:1]))
        return f(*args)

    program = trace(watched, *args, axis_env=list(zip(axes.every, axes.sizes, strict=True)))
    for x in program.consts:
        if trace_of(x) in _ended:
            raise ValueError(
                f"optimizer: the optimizer uses an array {x.dtype.name}{list(x.shape)} that it computed in an earlier "
                "call and kept outside its state. Expected arrays of its arguments or its state: each call is traced, "
                "as under jax.jit, and what it computes ends with it. Fix: return the array from init as part of the "
                "state, or compute it before init and update are called, or with NumPy."
            )
    _ended.update(here)
    return program


def weak_results(program: Program) -> list[bool]:
    """Which results of a program are of weak type, as Python's numbers are."""
    return [bool(aval(v).weak_type) for v in program.jaxpr.outvars]


@dataclasses.dataclass(frozen=True)
class UpdateProgram:
    """`inner.update`, or the whole step with `apply_updates`, at full shapes.

    Attributes:
      program: Takes gradients, state, parameters and extra arguments, flat, in this order.
      grads: How many leaves the gradients have.
      state: The leaves of the state that goes in.
      new: The leaves of the updates or new parameters that come out, and their structure.
      new_state: The leaves of the state that comes out, and its structure.
      adds: Whether `new` holds parameters rather than updates.
      unread_grads: The numbers of the gradients on which no result depends.
    """

    program: Program
    grads: int
    state: list[StateLeaf]
    new: Leaves
    new_state: list[StateLeaf]
    new_state_tree: PyTreeDef
    adds: bool
    unread_grads: frozenset[int] = frozenset()

    @property
    def moving(self) -> list[Leaf]:
        """The updates or new parameters that are evaluated; the others pass through."""
        return [leaf for leaf in self.new.leaves if leaf.trainable]

    @property
    def changing(self) -> list[StateLeaf]:
        """The leaves of new state that are evaluated; the others stay as they were."""
        return [leaf for leaf in self.new_state if not leaf.frozen]

    @property
    def weak(self) -> list[bool]:
        """Which results are stored as weak types: the state that comes out as the state that goes in.

        So the first step's program serves all; where the state grew, results keep the types of the trace.
        """
        found = weak_results(self.program)
        if len(self.new_state) != len(self.state):
            return found
        given = self.program.jaxpr.invars[self.grads : self.grads + len(self.state)]
        return [*found[: len(self.new.leaves)], *(bool(aval(v).weak_type) for v in given)]

    def inputs(self, grads: Sequence[T], state: Sequence[T], params: Sequence[T], extra: Sequence[T]) -> list[T]:
        """The program's arguments; `grads` holds the gradients, then trees like them."""
        return [*grads[: self.grads], *state, *params, *grads[self.grads :], *extra]

    def results(self, out: Sequence[T]) -> tuple[list[T], list[T]]:
        """The program's results that are kept: `moving` and `changing`."""
        count = len(self.new.leaves)
        new = [x for x, leaf in zip(out[:count], self.new.leaves, strict=True) if leaf.trainable]
        state = [x for x, leaf in zip(out[count:], self.new_state, strict=True) if not leaf.frozen]
        return new, state


def trace_update(
    inner: optax.GradientTransformation,
    grads: Leaves,
    state: PyTree,
    params: Leaves | None,
    extra: Extra,
    axes: Axes,
    add: bool,
) -> UpdateProgram:
    """Traces one step.

    Args:
      inner: The optimizer.
      grads: The gradients.
      state: The state as given; only its structure and dtypes are read.
      params: The parameters; `None` where the caller has none.
      extra: The extra arguments.
      axes: The mesh axes, whose names are bound in the trace.
      add: Whether the result is the new parameters rather than the updates.

    Returns:
      The traced step.
    """
    like = params or grads

    def step(g: Avals, s: PyTree, p: Avals, e: Avals) -> tuple[PyTree, PyTree]:
        plain = None if params is None else params.unflatten(p)
        updates, new_state = inner.update(grads.unflatten(g), s, plain, **extra.rebuild(e))
        return (_added(plain, updates) if add else updates), new_state

    def program_of(s: PyTree) -> Program:
        given = [] if params is None else params.trace_avals()
        return _trace(axes, step, grads.trace_avals(), s, given, extra.avals())

    initial = trace_init(inner, like, axes).out
    abstract = _logical(state, initial, lambda s: program_of(s).out[1])
    with _naming_state(state, initial):
        program = program_of(abstract)
    first = len(grads.leaves) + len(jax.tree.leaves(abstract))
    adding = range(len(like.leaves) if add else 0)
    frozen = frozen_paths(inner, like, initial, abstract, axes)
    leaves = lambda s: state_leaves(s, like.leaves, axes.n, frozen)
    old_state, new, new_state = leaves(abstract), _belonging(program.out[0], like), leaves(program.out[1])
    at = {leaf.path: len(grads.leaves) + i for i, leaf in enumerate(old_state)}
    passing = {i: i for i, leaf in enumerate(new.leaves) if not leaf.trainable}
    rows = enumerate(new_state, len(new.leaves))
    passing |= {i: at[leaf.path] for i, leaf in rows if leaf.frozen and leaf.path in at}
    program, inputs = without_zero_updates(program, adding, [first + i for i in adding], passing)
    return UpdateProgram(
        program,
        len(grads.leaves),
        old_state,
        new,
        new_state,
        jax.tree.structure(program.out[1]),
        add,
        frozenset(i for i in range(len(grads.leaves)) if i not in inputs),
    )


def _added(params: PyTree, updates: PyTree) -> PyTree:
    """`optax.apply_updates`, also for floats of 8 bits with wider updates, which JAX does not add by itself."""
    widens = lambda p, u: not promotes(p.dtype) and p.dtype != jnp.result_type(u)
    wide = lambda p, u: p if p is None or u is None or not widens(p, u) else p.astype(jnp.result_type(u))
    none = lambda x: x is None
    new = optax.apply_updates(jax.tree.map(wide, params, updates, is_leaf=none), updates)
    return jax.tree.map(lambda p, x: x if p is None else x.astype(p.dtype), params, new, is_leaf=none)


def _logical(state: PyTree, initial: PyTree, grow: Callable[[PyTree], PyTree]) -> PyTree:
    """The given state at logical shapes: those of `inner.init`, or of a later step where it grew."""
    tree: Any = jax.tree.structure(state)
    candidate = initial
    if not (jax.tree.leaves(state) or jax.tree.leaves(initial)):
        return state  # Optax's stateless transformations take and return anything
    for _ in range(_GROWTHS):
        if jax.tree.structure(candidate) == tree:
            pairs = zip(jax.tree.leaves(candidate), jax.tree.leaves(state), strict=True)
            typed = lambda x, y: jax.ShapeDtypeStruct(x.shape, shape_dtype(y)[1], weak_type=is_weak(y))
            return jax.tree.unflatten(tree, [typed(x, y) for x, y in pairs])
        candidate = grow(candidate)
    raise _other_structure(state, initial)


def _other_structure(state: PyTree, initial: PyTree) -> ValueError:
    """The error for a state that is not the optimizer's: the leaves that differ, or the trees where none do."""
    paths = lambda t: {path_text(p) for p, _ in jax.tree_util.tree_leaves_with_path(t)}
    here, there = paths(state), paths(initial)
    found = f"leaves {sorted(here - there)[:4]} that it does not have; expected {sorted(there - here)[:4]}"
    if here == there:
        found = "; expected ".join(str(jax.tree.structure(t)) for t in (state, initial))
    return ValueError(
        f"update: the optimizer state has another structure than this optimizer's. Found {found}. Fix: "
        "pass the state of tx.init(params) of the same optimizer."
    )


@contextlib.contextmanager
def _naming_state(state: PyTree, initial: PyTree) -> Iterator[None]:
    """Names the state where an update fails on one without leaves that `init` did not make."""
    try:
        yield
    except (AttributeError, TypeError, ValueError) as error:
        tree: Any = jax.tree.structure(initial)
        if jax.tree.structure(state) == tree or jax.tree.leaves(state):
            raise
        raise _other_structure(state, initial) from error


def logical_state(inner: optax.GradientTransformation, params: Leaves, state: PyTree, axes: Axes) -> PyTree:
    """The given state at logical shapes; only its structure and dtypes are read."""
    return _logical(state, trace_init(inner, params, axes).out, lambda s: _after(inner, params, s, axes))


def state_that(
    inner: optax.GradientTransformation, params: Leaves, axes: Axes, fitting: Callable[[PyTree], int], enough: int
) -> PyTree:
    """The abstract state, of `init` or of a later step where it grew or changed dtypes, of which most leaves fit."""
    best = candidate = trace_init(inner, params, axes).out
    for _ in range(_GROWTHS):
        best = max(best, candidate, key=fitting)
        if fitting(best) >= enough:
            break
        try:
            candidate = _after(inner, params, candidate, axes)
        except (TypeError, ValueError):  # it needs more than gradients, so its later state is not known
            break
    return best


def _after(inner: optax.GradientTransformation, params: Leaves, state: PyTree, axes: Axes) -> PyTree:
    """The state after one update by gradients like the parameters."""
    return trace_update(inner, params, state, params, Extra({}, {}, {}), axes, False).program.out[1]


def _belonging(tree: PyTree, like: Leaves) -> Leaves:
    """The leaves of the updates, each cut like the parameter that it belongs to."""
    by_path = {leaf.path: leaf for leaf in like.leaves}
    out = []
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        leaf = owner(path, x.shape, by_path)
        out.append(leaf or Leaf(path, x.shape, x.dtype, None))
    return Leaves(tuple(out), jax.tree.structure(tree))
