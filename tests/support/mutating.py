"""One function of the library replaced by a wrong one, to show that a comparison sees it."""

import contextlib
import importlib
import pkgutil

import jax
import jax.numpy as jnp
from jax import lax

import jaxzero
from jaxzero._src.comm import collectives

MODULES = [
    importlib.import_module(info.name)
    for info in pkgutil.walk_packages(jaxzero.__path__, "jaxzero.")
    if not info.name.endswith("__main__")
]


@contextlib.contextmanager
def mutated(monkeypatch, name, change, module=collectives):
    """`module.name` replaced by `change(original)`, wherever the library has imported it."""
    original = getattr(module, name)
    wrong = change(original)
    with monkeypatch.context() as patch:
        found = [m for m in [module, *MODULES] if getattr(m, name, None) is original]
        assert found
        for m in found:
            patch.setattr(m, name, wrong)
        clear()
        yield
    clear()


def clear():
    """Nothing compiled under one set of functions may be used under another."""
    jax.clear_caches()
    for module in MODULES:
        for value in vars(module).values():
            if hasattr(value, "cache_clear") and not isinstance(value, type):
                value.cache_clear()


def scaled(factor):
    return lambda f: lambda *args, **kwargs: [x * jnp.asarray(factor, x.dtype) for x in f(*args, **kwargs)]


def rotated(f):
    """Device `i` keeps what belongs to device `i + 1`: right shapes, right norm."""

    def wrong(values, layouts, axes, **kwargs):
        n = lax.axis_size(axes)
        around = [(i, (i + 1) % n) for i in range(n)]
        return [lax.ppermute(x, axes, around) for x in f(values, layouts, axes, **kwargs)]

    return wrong


def no_reduction(f):
    """The second hop of MiCS is left out; every other reduction stays."""
    return lambda values, axes, **kwargs: list(values) if tuple(axes) == ("replica",) else f(values, axes, **kwargs)
