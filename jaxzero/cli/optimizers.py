"""Optimizers by name."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import optax
import optax.contrib

from .._src._text import nearest
from .user_code import guarded, load, running

RATE = 1e-3  # any: nothing that is planned or compiled depends on it


@functools.cache
def known() -> dict[str, Callable[..., optax.GradientTransformation]]:
    """Every function of optax and optax.contrib that makes an optimizer from a learning rate alone."""
    found: dict[str, Callable[..., optax.GradientTransformation]] = {}
    for module in (optax.contrib, optax):
        for name, f in inspect.getmembers(module, inspect.isfunction):
            parameters = inspect.signature(f).parameters.values()
            needed = {p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD}
            if not name.startswith("scale_by_") and needed <= {"learning_rate"} <= {p.name for p in parameters}:
                found[name] = f
    return found


def make(name: str) -> optax.GradientTransformation:
    """The optimizer of that name, or what the user's `module:function` returns."""
    if ":" in name:
        factory: Any = load(name)
        with running(name):
            inner = factory() if inspect.isfunction(factory) else factory
        if not isinstance(inner, optax.GradientTransformation):
            raise ValueError(
                f"--optimizer {name}: found a {type(inner).__name__}; expected an optax.GradientTransformation, or a "
                "function that returns one."
            )
        return _guarded(name, inner)
    if name not in known():
        fix = nearest(name, known()) or "Fix: module:function names one of your own."
        raise ValueError(f"--optimizer {name}: optax has no such optimizer. {fix}")
    return _guarded(f"optax's {name}", known()[name](learning_rate=RATE))


def _guarded(name: str, inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """The same optimizer, its errors in one line: some need more arguments than a plan has."""
    return inner._replace(init=guarded(name, inner.init), update=guarded(name, inner.update))
