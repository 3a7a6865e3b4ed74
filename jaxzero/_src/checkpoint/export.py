"""Exports the parameters of a checkpoint for other tools, one file at a time: the whole model is never in memory."""

import json
import math
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._optional import need
from ..sharding.scalars import is_int, python_scalar
from . import orbax_io
from .api import Directory, check_data, find, latest
from .leaves import PARAMS
from .orbax_io import EPath

FORMATS = ("safetensors",)
#: The size of a file, which is also how much is in memory at a time (or the largest parameter).
MAX_BYTES = 2**30


def export(
    directory: Directory,
    to: str = "safetensors",
    *,
    step: int | None = None,
    out: Directory | None = None,
    max_bytes: int = MAX_BYTES,
) -> EPath:
    """Writes the full parameters of a checkpoint to files that other tools read.

    Needs neither the model nor the mesh that the checkpoint came from. Names are key paths joined by dots. A model
    that does not fit into one file takes several with an index, in the form that Hugging Face's libraries read.

    Args:
      directory: That of `jaxzero.save`.
      to: The format, ``"safetensors"``.
      step: The step; `None`: the latest complete one.
      out: The folder to write; `None`: ``safetensors/<step>`` in `directory`.
      max_bytes: The size of a file, in bytes. A larger parameter has one of its own.

    Returns:
      The folder.

    Raises:
      ValueError: If there is no such checkpoint, the format is unknown, or the folder has files of an export.

    Examples:
      >>> import tempfile, jax.numpy as jnp, jaxzero
      >>> from jaxzero.export import export
      >>> directory = tempfile.mkdtemp()
      >>> jaxzero.save(directory, 5, None, {"dense": {"kernel": jnp.ones((2, 3))}}, None).wait()
      >>> import safetensors.numpy
      >>> tensors = safetensors.numpy.load_file(export(directory) / "model.safetensors")
      >>> {name: x.shape for name, x in tensors.items()}
      {'dense.kernel': (2, 3)}
    """
    if to not in FORMATS:
        raise ValueError(f"export: to={to!r}. Expected one of {FORMATS}. Fix: to='safetensors'.")
    max_bytes = python_scalar(max_bytes)
    if not is_int(max_bytes, 1):
        raise ValueError(
            f"export: max_bytes={max_bytes!r}. Expected a positive int. Fix: leave it out for {MAX_BYTES}."
        )
    library = need("safetensors.numpy", "export", "jaxzero export")
    path, leaves = _found(directory, step)
    _check(library, path, leaves)
    check_data("export", path, None, params_only=True)
    folder = orbax_io.folder(out) if out is not None else path.parent / to / path.name
    groups = list(_groups(leaves, max_bytes))
    files = {f"model-{i:05}-of-{len(groups):05}.safetensors": group for i, group in enumerate(groups, 1)}
    if len(groups) < 2:
        files = {"model.safetensors": [*leaves]}
    _make(folder)
    for file, names in files.items():
        found = orbax_io.read_plain(path, [name for name in names if 0 not in leaves[name].shape])
        empty = {name: np.zeros(x.shape, x.dtype) for name, x in leaves.items() if name in names and 0 in x.shape}
        tensors = {_dotted(name): np.asarray(x, order="C") for name, x in {**found, **empty}.items()}
        _save(library, tensors, folder / file, {"format": "np", "step": path.name})
    if len(groups) > 1:
        index = {_dotted(name): file for file, names in files.items() for name in names}
        total = sum(_bytes(x) for x in leaves.values())
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=1)
        (folder / "model.safetensors.index.json").write_text(text)
    return folder


def _save(library: Any, tensors: Mapping[str, np.ndarray], file: EPath, metadata: Mapping[str, str]) -> None:
    """Writes one file, with the mode that the umask gives to new files: the library's own is 0600."""
    file.touch()
    mode = os.stat(file).st_mode
    library.save_file(tensors, file, metadata=metadata)
    os.chmod(file, stat.S_IMODE(mode))


def _found(directory: Directory, step: int | None) -> tuple[EPath, dict[str, jax.ShapeDtypeStruct]]:
    """The folder of a step, and its parameters as they are on disk."""
    step = latest(directory) if step is None else step
    path, manifest = find("export", directory, None, step)
    params = {name: x for name, x in manifest["leaves"].items() if name.split("/")[0] == PARAMS}
    clash = {_dotted(name) for name in params}
    if len(clash) < len(params):
        raise ValueError(
            f"export: two parameters of {path} have the same name when joined by dots. Expected names that differ. "
            "Fix: rename one of the keys."
        )
    return path, {name: _on_disk(*x) for name, x in params.items()}


def _check(library: Any, path: EPath, leaves: Mapping[str, jax.ShapeDtypeStruct]) -> None:
    """Refuses leaves that the format cannot hold, before anything is written."""
    refusal = need("safetensors", "export", "jaxzero export").SafetensorError
    for name, x in leaves.items():
        problem = "it keeps its own notes under this name" if _dotted(name) == "__metadata__" else ""
        try:
            library.save({"x": np.zeros(0, x.dtype)})
        except refusal as error:
            problem = str(error).partition(".")[0]
        if problem:
            raise ValueError(
                f"export: {path}: safetensors cannot hold leaf {name.removeprefix(PARAMS + '/')!r} of dtype {x.dtype}: "
                f"{problem}. Expected names and dtypes that it knows. Fix: rename or cast the parameter before "
                "jaxzero.save, or read the folder 'arrays' of the step with Orbax."
            )


def _on_disk(dtype: str, shape: Sequence[int]) -> jax.ShapeDtypeStruct:
    """A leaf on disk. The size of keys is a guess; only the division into files depends on it."""
    keys = dtype.startswith("key<")
    return jax.ShapeDtypeStruct((*shape, 4) if keys else tuple(shape), jnp.dtype("uint32" if keys else dtype))


def _groups(leaves: Mapping[str, jax.ShapeDtypeStruct], most: int) -> Iterator[list[str]]:
    """Groups of names whose arrays take at most `most` bytes together; a larger array is a group of its own."""
    group: list[str] = []
    for name, x in leaves.items():
        if group and sum(_bytes(leaves[n]) for n in group) + _bytes(x) > most:
            yield group
            group = []
        group.append(name)
    if group:
        yield group


def _bytes(x: jax.ShapeDtypeStruct) -> int:
    return math.prod(x.shape) * x.dtype.itemsize


def _dotted(name: str) -> str:
    return name.removeprefix(PARAMS).removeprefix("/").replace("/", ".") or PARAMS


def _make(folder: EPath) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        there = [file.name for file in folder.glob("*.safetensors*")]
    except OSError as error:
        raise ValueError(
            f"export: {folder} cannot be written: {error.strerror or error}. Expected a folder. Fix: another out."
        ) from error
    if there:
        raise ValueError(
            f"export: {folder} has {sorted(there)[0]} already. Expected a folder without an export. Fix: another out, "
            "or remove it."
        )
