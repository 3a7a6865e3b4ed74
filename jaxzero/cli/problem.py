"""A training problem from the value of a user's function: parameters, and a loss and a batch if there are any."""

import dataclasses
import inspect
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._src._types import PyTree
from .user_code import guarded, load, running

EXPECTED = (
    "Expected parameters (a tree of arrays or jax.ShapeDtypeStructs), (parameters, loss_fn, *batch), a Flax Linen "
    "(module, inputs), or a Flax NNX module, alone or with its inputs."
)


@dataclasses.dataclass(frozen=True)
class Problem:
    """A training problem, abstract.

    Attributes:
      params: Parameters.
      loss: The loss; `None`: only the parameters are known.
      batch: The rest of its arguments.
      whole: The positions of arguments that are no examples, as `whole_argnums`.
      note: What was assumed.
    """

    params: PyTree
    loss: Callable[..., PyTree] | None = None
    batch: tuple[PyTree, ...] = ()
    whole: tuple[int, ...] = ()
    note: str = ""

    def sized(self, examples: int | None, devices: int, steps: int) -> "Problem":
        """The same with so many examples, if they can be dealt over devices and micro-steps."""
        dealt = [x for i, x in enumerate(self.batch, 1) if i not in self.whole]
        leading = [x.shape[0] for x in jax.tree.leaves(dealt) if x.shape]
        if not leading and examples is None:
            return self
        if not leading:
            raise ValueError(
                f"--batch: {examples} examples, but the function returns no examples. Fix: drop --batch, or return "
                "(parameters, loss_fn, *batch)."
            )
        count = leading[0] if examples is None else examples
        if count < 1 or count % (devices * steps):
            raise ValueError(
                f"--batch: {count} examples do not divide over {devices} devices x {steps} micro-steps. Fix: "
                f"--batch {devices * steps * max(1, math.ceil(count / (devices * steps)))}."
            )

        def resize(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            same = x.shape and x.shape[0] == leading[0]
            return jax.ShapeDtypeStruct((count, *x.shape[1:]), x.dtype) if same else x

        resized = [x if i in self.whole else jax.tree.map(resize, x) for i, x in enumerate(self.batch, 1)]
        return dataclasses.replace(self, batch=tuple(resized))


def takes_remat(name: str) -> bool:
    """Whether the user's function has an argument `remat`."""
    f = load(name)
    return callable(f) and "remat" in inspect.signature(f).parameters


def problem_of(name: str, **arguments: bool) -> Problem:
    """Calls the user's `module:function` and reads what it returns."""
    f = load(name)
    if not callable(f):
        raise ValueError(f"{name} is a {type(f).__name__}, not a function. Fix: name a function without arguments.")
    with running(name):
        value = f(**arguments)
    with running(f"reading what {name} returned"):
        problem = read(value)
    if problem is None:
        raise ValueError(f"{name} returned {_describe(value)}. {EXPECTED}")
    if problem.loss is None:
        return problem
    return dataclasses.replace(problem, loss=guarded(f"the loss of {name}", problem.loss))


def read(value: object) -> Problem | None:
    """A returned value as a problem; `None` if it is none."""
    first, *rest = value if isinstance(value, tuple) and value and not hasattr(value, "_fields") else (value,)
    linen, nnx = sys.modules.get("flax.linen"), sys.modules.get("flax.nnx")
    if linen is not None and isinstance(first, linen.Module):
        return _linen(linen, first, _inputs(rest)) if rest else None
    if nnx is not None and isinstance(first, nnx.Module):
        return _nnx(nnx, first, _inputs(rest))
    if rest and callable(rest[0]):
        params, batch = _abstract(first), _abstract(tuple(rest[1:]))
        return None if params is None or batch is None else Problem(params, rest[0], batch)
    params = _abstract(value)
    return None if params is None else Problem(params)


def _describe(value: object) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {', '.join(type(x).__name__ for x in value)}"
    odd = [type(x).__name__ for x in jax.tree.leaves(value) if not _is_array(x)]
    inside = f" with a {odd[0]} in it" if odd and type(value).__name__ != odd[0] else ""
    return f"a {type(value).__name__}{inside}" if jax.tree.leaves(value) else f"{value!r}, which has no arrays"


def _is_array(x: object) -> bool:
    return (hasattr(x, "shape") and hasattr(x, "dtype")) or isinstance(x, (bool, int, float, complex))


def _abstract(tree: PyTree) -> PyTree:
    """Shapes and dtypes of a tree of arrays, or `None` if it is none."""
    leaves = jax.tree.leaves(tree)
    if not all(map(_is_array, leaves)) or (not leaves and tree != ()):
        return None
    make = lambda x: jax.ShapeDtypeStruct(jnp.shape(x), x.dtype if hasattr(x, "dtype") else jnp.result_type(x))
    return jax.tree.map(make, tree)


def _inputs(rest: Sequence[PyTree]) -> tuple[PyTree, ...]:
    """`(module, x, y)` and `(module, (x, y))` mean the same."""
    inputs = rest[0] if len(rest) == 1 and isinstance(rest[0], (tuple, list)) else rest
    abstract: tuple[PyTree, ...] = _abstract(tuple(inputs))
    if abstract is None:
        raise TypeError("the inputs of a model are arrays or jax.ShapeDtypeStructs")
    return abstract


# --- Flax ----------------------------------------------------------------------------------------

_NOTE = "loss: the mean square of the model's results"


def _linen(linen: Any, module: Any, inputs: tuple[PyTree, ...]) -> Problem:
    """Parameters as `module.init` makes them; other collections are given whole."""
    rngs = lambda: {name: jax.random.key(0) for name in ("params", "dropout")}
    variables = dict(jax.eval_shape(lambda *x: linen.meta.unbox(module.init(rngs(), *x)), *inputs))
    params = variables.pop("params", {})

    def loss(params: PyTree, others: PyTree, *x: PyTree) -> jax.Array:
        out = module.apply({"params": params, **others}, *x, rngs=rngs(), mutable=list(others))
        return _mean_square(out[0])

    return Problem(params, loss, (variables, *inputs), (1,), _NOTE)


def _nnx(nnx: Any, module: Any, inputs: tuple[PyTree, ...]) -> Problem:
    """Parameters are the `nnx.Param`s; other variables are given whole."""
    graph, params, others = nnx.split(module, nnx.Param, ...)
    pure = lambda state: jax.tree.map(lambda x: x, nnx.to_pure_dict(state))
    given, rest = _abstract(pure(params)), _abstract(pure(others) or ())

    def loss(values: PyTree, others_: PyTree, *x: PyTree) -> jax.Array:
        state, more = jax.tree.map(lambda y: y, params), jax.tree.map(lambda y: y, others)
        nnx.replace_by_pure_dict(state, values)
        if others_ != ():
            nnx.replace_by_pure_dict(more, others_)
        return _mean_square(nnx.merge(graph, state, more)(*x))

    return Problem(given, loss, (rest, *inputs), (1,), _NOTE) if inputs else Problem(given)


def _mean_square(out: PyTree) -> jax.Array:
    parts = [x for x in jax.tree.leaves(out) if jnp.issubdtype(x.dtype, jnp.inexact)]
    squares = (jnp.mean(jnp.square(jnp.abs(x).astype(jnp.float32))) for x in parts)
    return sum(squares, jnp.float32(0))
