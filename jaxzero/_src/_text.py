"""Texts that messages and reports share: key paths, byte counts, the nearest known name."""

import difflib
from collections.abc import Iterable
from typing import Any

import jax


def path_text(path: Any) -> str:
    """A key path as users write it: ``layers/0/w``; the root is ``(root)``."""
    return jax.tree_util.keystr(path, simple=True, separator="/") or "(root)"


def nearest(name: str, known: Iterable[str], form: str = "{!r}") -> str:
    """The end of an error about an unknown name: the nearest known one, or nothing where none is near."""
    near = difflib.get_close_matches(name, list(known), 1)
    return f"Fix: did you mean {form.format(near[0])}?" if near else ""


def size_text(nbytes: float) -> str:
    """Bytes as people read them: at most four digits and a decimal unit."""
    for unit in ("B", "kB", "MB"):
        if nbytes < 1000:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.4g} GB"
