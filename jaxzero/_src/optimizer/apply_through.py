"""`zero.apply` of an optimizer that is not the wrapped one, but a transformation around it.

The step on shares belongs to the wrapped optimizer. So the outer `update` runs with a note that makes every wrapped
optimizer inside it apply its updates, and the note keeps what each got and gave. Where the outer one handed on the
arrays themselves, and what it returns are the arrays of the inner ones, nothing happened outside: the result is exact.
`optax.inject_hyperparams` and `optax.multi_transform` with fixed labels do no more than that.
"""

import contextvars
import dataclasses
from typing import Any

import jax
import optax

from .._text import path_text
from .._types import PyTree
from ..sharding.layout import is_split
from ..sharding.leaves import unwrap
from . import checks


@dataclasses.dataclass
class Note:
    """What passes between an outer transformation and the wrapped optimizers inside it, by identity.

    Attributes:
      given: The arrays of the gradients and parameters that `apply` was called with, by `id`.
      applied: The arrays of new parameters that wrapped optimizers returned; empty if none was called.
    """

    given: dict[int, Any]
    applied: dict[int, Any]

    def check_given(self, what: str, tree: PyTree) -> None:
        """Refuses gradients or parameters that the outer transformation has changed."""
        for path, x in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_split):
            if id(unwrap(x)) not in self.given:
                raise _changed(f"it changed {what} leaf {path_text(path)!r} before the wrapped optimizer")


#: The note of the `zero.apply` that is running.
_note: contextvars.ContextVar[Note | None] = contextvars.ContextVar("note", default=None)


def update(calls: Any, grads: PyTree, state: PyTree, params: PyTree, extra: dict[str, Any]) -> tuple[PyTree, PyTree]:
    """The update of a wrapped optimizer: its updates, or inside `apply` the new parameters."""
    note = _note.get()
    if note is None:
        return calls.update(grads, state, params, extra)
    note.check_given("gradient", grads)
    note.check_given("parameter", params)
    new, new_state = calls.apply(grads, state, params, extra)
    note.applied |= _by_id(new)
    return new, new_state


def apply(tx: Any, grads: PyTree, state: PyTree, params: PyTree, extra: dict[str, Any]) -> tuple[PyTree, PyTree]:
    """The step of transformations around wrapped optimizers.

    Args:
      tx: The outermost transformation.
      grads: The gradients.
      state: Its state.
      params: The parameters.
      extra: Extra arguments of its update.

    Returns:
      New parameters and new state.

    Raises:
      ValueError: If no wrapped optimizer is inside, or if what is around it does more than hand on.
    """
    if not isinstance(tx, optax.GradientTransformation):
        raise checks.not_wrapped(tx)
    note = Note(_by_id((grads, params)), {})
    token = _note.set(note)
    try:
        new, new_state = optax.with_extra_args_support(tx).update(grads, state, params, **extra)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if not note.applied:
            raise error if str(error).startswith("apply: ") else checks.not_wrapped(tx) from error
        raise _changed(f"its update raises {type(error).__name__}") from error
    finally:
        _note.reset(token)
    if not note.applied:
        raise checks.not_wrapped(tx)
    for path, x in jax.tree_util.tree_leaves_with_path(new, is_leaf=is_split):
        if id(unwrap(x)) not in note.applied:
            raise _changed(f"its update of leaf {path_text(path)!r} is not that of a wrapped optimizer")
    return new, new_state


def _by_id(tree: PyTree) -> dict[int, Any]:
    return {id(x): x for x in map(unwrap, jax.tree.leaves(tree, is_leaf=is_split))}


def _changed(found: str) -> ValueError:
    return ValueError(
        "apply: tx is a transformation around what zero.optimizer returns that does more than hand gradients and "
        f"updates on: {found}. Expected the wrapped optimizer, or optax.inject_hyperparams or optax.multi_transform "
        "with fixed labels around wrapped ones. Fix: wrap the whole chain: tx = zero.optimizer(optax.chain(...))."
    )
