"""Results of compiles by the program and all that they depend on: in this process, and in a folder."""

import dataclasses
import hashlib
import json
import os
import pathlib

from .search import Measured

_FOUND: dict[str, Measured] = {}


def key(*parts: str) -> str:
    """The name of a result, from all texts that it depends on."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def read(name: str, folder: str | None) -> Measured | None:
    """A result, if there is one; a damaged file is none."""
    if name not in _FOUND and folder is not None:
        try:
            _FOUND[name] = Measured(**json.loads((pathlib.Path(folder) / f"{name}.json").read_text()))
        except (OSError, ValueError, TypeError):
            return None
    return _FOUND.get(name)


def write(name: str, found: Measured, folder: str | None) -> None:
    """Keeps a result."""
    _FOUND[name] = found
    if folder is None:
        return
    path = pathlib.Path(folder) / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(f".{os.getpid()}")
    new.write_text(json.dumps(dataclasses.asdict(found)))
    new.replace(path)
