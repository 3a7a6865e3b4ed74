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


def needs(name: str) -> str:
    """Why a name of optax or optax.contrib is not among `known`; empty where it is, or is in neither module."""
    modules = [module for module in (optax, optax.contrib) if inspect.isfunction(getattr(module, name, None))]
    if not modules or name in known() or name.startswith("_"):
        return ""
    signature = inspect.signature(getattr(modules[0], name))
    if "GradientTransformation" not in str(signature.return_annotation):
        return ""
    positional = (p for p in signature.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD)
    missing = [p.name for p in positional if p.default is p.empty and p.name != "learning_rate"]
    if missing:
        return f"it is in {modules[0].__name__} and needs more than a learning rate: {', '.join(missing)}."
    return f"it is in {modules[0].__name__}, but makes no optimizer from a learning rate alone."


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
    if problem := needs(name):
        raise ValueError(f"--optimizer {name}: {problem} Fix: module:function, one of your own that makes it.")
    if name not in known():
        fix = nearest(name, known()) or "Fix: module:function names one of your own."
        raise ValueError(f"--optimizer {name}: optax has no such optimizer. {fix}")
    return _guarded(f"optax's {name}", known()[name](learning_rate=RATE))


def _guarded(name: str, inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """The same optimizer, its errors in one line: some need more arguments than a plan has."""
    return inner._replace(init=guarded(name, inner.init), update=guarded(name, inner.update))
