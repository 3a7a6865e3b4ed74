"""Objects that users name as `module:function`, and errors of their code in one line."""

import functools
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

from .._src._text import nearest


@contextmanager
def running(what: str) -> Iterator[None]:
    """Turns whatever the user's code raises into one line that says where; what it prints is no result."""
    try:
        with redirect_stdout(sys.stderr):
            yield
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        theirs = [f for f in frames if not f.filename.startswith(("<", *_NOT_THEIRS)) and _SITE not in f.filename]
        where = f" at {os.path.relpath(theirs[-1].filename)}:{theirs[-1].lineno}" if theirs else ""
        raise ValueError(f"{what} raised {type(error).__name__}: {error}{where}") from error


#: jaxzero and the standard library, and what stands in the path of installed packages.
_NOT_THEIRS, _SITE = (os.path.dirname(os.path.dirname(__file__)), os.path.dirname(os.__file__)), "site-packages"


def guarded(what: str, f: Callable[..., Any]) -> Callable[..., Any]:
    """The user's function, its errors in one line."""

    @functools.wraps(f)
    def call(*args: Any, **more: Any) -> Any:
        with running(what):
            return f(*args, **more)

    return call


def load(name: str) -> Any:
    """The object called `module:name`; modules of the current folder are found, too."""
    module_name, colon, path = name.partition(":")
    if not colon or not module_name or not path:
        raise ValueError(f"{name!r} names no function. Expected module:function. Fix: for example models:gpt.")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        with running(f"importing {module_name}"):
            found: Any = importlib.import_module(module_name)
    except ValueError as error:
        cause = error.__cause__
        if not isinstance(cause, ModuleNotFoundError) or not f"{module_name}.".startswith(f"{cause.name}."):
            raise
        raise ValueError(
            f"no module {module_name!r} here or among the installed packages. Expected module:function. Fix: run in "
            "its folder, or install its package."
        ) from None
    for part in path.split("."):
        if not hasattr(found, part):
            names = [n for n in vars(found) if not n.startswith("_")] if hasattr(found, "__dict__") else []
            raise ValueError(f"{module_name} has no {path!r}. {nearest(part, names)}".rstrip())
        found = getattr(found, part)
    return found
