"""Writes and reads checkpoints with Orbax: in the background, atomically, each process its part."""

import contextlib
import functools
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from .._optional import need
from .._types import JSON, ArrayLike, DType
from ..jaxpr.compat import before_exit
from ..sharding.axes import Axes
from ..sharding.leaves import is_key
from ..sharding.options import Options
from ..sharding.place import named_sharding, put
from . import checksums
from .leaves import Entry

#: A folder as `etils.epath` gives it, also of a bucket. Orbax brings that package.
EPath = Any

#: Leaves are read in groups of about this many bytes, or an eighth of all where that is more.
GROUP_BYTES = 64 * 2**20
#: Every replica writes a part of replicated arrays that are larger.
SLICE_BYTES = 1 * 2**20

#: The folder of the step that was given to Orbax last, and how many steps to keep then.
_under_way: EPath | None = None
_keep: int | None = None

_ARRAYS, _MANIFEST, _FILE = "arrays", "jaxzero", "manifest.json"


def orbax() -> Any:
    """The module `orbax.checkpoint`, which is an optional dependency."""
    return need("orbax.checkpoint", "checkpoint", "jaxzero.save and jaxzero.restore")


def folder(directory: str | os.PathLike[str]) -> EPath:
    """The directory as an absolute path, or as it is where it names a bucket."""
    orbax()
    from etils import epath  # Orbax brings it

    if not isinstance(directory, (str, os.PathLike)) or not str(directory):
        raise ValueError(
            f"checkpoints: the directory is {directory!r}. Expected a path, or a bucket such as 'gs://...'. Fix: "
            "'/checkpoints/run'."
        )
    try:
        return epath.Path(directory) if "://" in str(directory) else epath.Path(directory).absolute()
    except KeyError as error:
        raise ValueError(
            f"checkpoints: {directory!r} cannot be reached. Found scheme {error}; expected a path, or a "
            "bucket ('gs://...', 's3://...'). Fix: a path without a scheme."
        ) from error


# --- writing ------------------------------------------------------------------------------------


def write(
    path: EPath,
    manifest: Mapping[str, JSON],
    entries: Sequence[Entry],
    arrays: Sequence[ArrayLike],
    zero: Options | None,
    axes: Axes,
    keep: int | None = None,
) -> None:
    """Starts writing one step; returns when this process's part is on the host."""
    ocp = orbax()
    from .padded_handler import CHUNK_BYTES

    _check_dtypes(entries)
    items = {e.name: _item(e, x, zero, axes) for e, x in zip(entries, arrays, strict=True) if e.has_data}
    what = {_MANIFEST: ocp.args.JsonSave(manifest)}
    if items:
        chunks = {name: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES) for name in items}
        what[_ARRAYS] = ocp.args.PyTreeSave(items, save_args=chunks)
    global _under_way, _keep
    _under_way, _keep = path, keep
    with _writing(path):
        _remove_unfinished(path.parent)
        _saver().save(path, args=ocp.args.Composite(**what))


def _check_dtypes(entries: Sequence[Entry]) -> None:
    """Refuses leaves that the file format has no data type for."""
    from .orbax_compat import can_store

    for e in entries:
        if e.has_data and not is_key(e.dtype) and not can_store(e.dtype):
            raise ValueError(
                f"save: leaf {e.name!r} has dtype {e.dtype}. Expected a dtype that TensorStore, which writes files, "
                "can store. Fix: cast the leaf before you save it, to uint8 for example, and back after restore."
            )


def wait() -> None:
    """Waits for the step that is being written, and raises if it failed."""
    global _under_way
    if not _saver.cache_info().currsize:
        return
    path = _under_way
    with _writing(path):
        _saver().wait_until_finished()
        _under_way = None
        if path is not None and is_complete(path):
            checksums.write(path)
            if _keep is not None and jax.process_index() == 0:
                _remove_old(path, _keep)


def _remove_old(path: EPath, keep: int) -> None:
    """Removes all complete steps but the newest `keep`, to which `path` always belongs."""
    others = [step for step in complete_steps(path.parent) if str(step) != path.name]
    for step in others[: max(len(others) - (keep - 1), 0)]:
        (path.parent / str(step) / _MANIFEST).rmtree()  # from here on it is not complete
        (path.parent / str(step)).rmtree()


def _last_wait() -> None:
    """Completes an unfinished save if Python can still run threads; otherwise prints that it was lost."""
    try:
        wait()
    except ValueError as error:
        print(f"{error} If the program ended before it was written: call .wait() on the last save.", file=sys.stderr)


def is_complete(path: EPath) -> bool:
    """Whether a step is complete."""
    return bool((path / _MANIFEST / _FILE).exists())


def obstacle(path: EPath) -> str:
    """The error that writing a step would raise, found before anything is written; empty if there is none."""
    if path.exists():
        return (
            f"save: step {path.name} is in {path.parent} already. Expected a new step. Fix: another directory for "
            "another run, or remove that step."
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        probe = path.parent / f".jaxzero-{jax.process_index()}"
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        return (
            f"save: {path.parent} cannot be written: {error.strerror or error}. Expected a directory that every "
            "process can write. Fix: its permissions, or another directory."
        )
    return ""


def _item(e: Entry, x: ArrayLike, zero: Options | None, axes: Axes) -> object:
    """The value of one leaf for Orbax: an array of all processes."""
    from .padded_handler import PaddedLeaf

    if is_key(e.dtype):
        x = jax.random.key_data(x)
    x = x if isinstance(x, jax.Array) else jnp.asarray(x)
    if zero is not None and e.padded and e.layout is not None:
        return PaddedLeaf(e.name, x, e.layout, zero.mesh, axes)
    if jax.process_count() > 1 and x.is_fully_addressable and zero is not None:
        return put(x, NamedSharding(zero.mesh, PartitionSpec()))
    return x


def _remove_unfinished(directory: EPath) -> None:
    """Removes the steps that a killed program left unfinished; this program is not writing any."""
    from .orbax_compat import unfinished

    if jax.process_index() == 0:
        for left in unfinished(directory):
            left.rmtree()


@functools.cache
def _saver() -> Any:
    saver = orbax().AsyncCheckpointer(_handler())
    before_exit(_last_wait)
    return saver


@functools.cache
def _handler() -> Any:
    ocp = orbax()
    from .padded_handler import PaddedHandler, PaddedLeaf

    whole = ocp.type_handlers.ArrayHandler(
        min_slice_bytes_for_replica_parallel=SLICE_BYTES,
        enable_write_sharding_file=False,  # a checkpoint belongs to no mesh
    )
    types = ocp.type_handlers.create_type_handler_registry((PaddedLeaf, PaddedHandler()), (jax.Array, whole))
    arrays = ocp.PyTreeCheckpointHandler(type_handler_registry=types, use_compression=False)
    return ocp.CompositeCheckpointHandler(**{_ARRAYS: arrays, _MANIFEST: ocp.JsonCheckpointHandler(filename=_FILE)})


@contextlib.contextmanager
def _writing(path: EPath) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # whatever a storage driver raises
        raise ValueError(
            f"save: {path} could not be written: {_line(error)}. Expected room and permission to write. Earlier "
            "checkpoints are as they were. Fix: free some space or choose another directory, then save again."
        ) from error


def _line(error: Exception) -> str:
    """The cause of an error, in one line."""
    while error.__cause__ is not None and isinstance(error.__cause__, Exception):
        error = error.__cause__
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


# --- reading ------------------------------------------------------------------------------------


def complete_steps(directory: str | os.PathLike[str]) -> list[int]:
    """The complete steps in a directory, in order."""
    path = folder(directory)
    return [step for step in steps_in(directory) if is_complete(path / str(step))]


def steps_in(directory: str | os.PathLike[str]) -> list[int]:
    """The steps in a directory, in order, complete or damaged."""
    path = folder(directory)
    try:
        os.scandir(path).close()
    except PermissionError as error:  # otherwise a run would start anew, as if there were no checkpoint
        raise ValueError(
            f"latest: {path} cannot be read: {error.strerror}. Expected a directory that may be listed, or none. Fix: "
            "its permissions."
        ) from error
    except NotADirectoryError as error:
        raise ValueError(
            f"latest: {path} is a file. Expected the directory that jaxzero.save wrote to. Fix: the directory, not a "
            "file in it."
        ) from error
    except OSError:
        pass  # there is none, or it is not a local path
    if not path.exists():
        return []
    from .orbax_compat import steps

    return sorted(steps(path))


def read_manifest(path: EPath) -> tuple[dict[str, JSON], str]:
    """The manifest of a step, and what is wrong with it: empty if nothing is."""
    try:
        found = json.loads((path / _MANIFEST / _FILE).read_text())
    except OSError as error:
        return {}, error.strerror or str(error)
    except ValueError as error:
        return {}, f"its manifest is damaged ({error})"
    wanted = {"format": int, "jaxzero": str, "step": int, "leaves": dict, "extra": object}
    mine = isinstance(found, dict) and all(isinstance(found.get(k, ...), kind) for k, kind in wanted.items())
    mine = mine and all(isinstance(x, list) and len(x) == 2 for x in found["leaves"].values())
    return (found, "") if mine else ({}, "it is not one of jaxzero's")


def read(path: EPath, zero: Options | None, entries: Sequence[Entry], axes: Axes) -> dict[str, jax.Array]:
    """The arrays by name, read in groups so that little is in memory twice; typed keys are typed again."""
    found: dict[str, jax.Array] = {}
    for group in _groups([e for e in entries if e.has_data]):
        found |= _read_group(path, zero, group, axes)
    for e in entries:
        if not e.has_data:
            found[e.name] = put(np.zeros(e.shape, e.dtype), _sharding(zero, e, axes))
        elif is_key(e.dtype):
            found[e.name] = jax.random.wrap_key_data(found[e.name], impl=_implementation(e.dtype))
    return found


def _groups(entries: Sequence[Entry]) -> Iterator[list[Entry]]:
    sizes = [np.prod(e.shape, dtype=float) * e.on_disk().dtype.itemsize for e in entries]
    most = max(GROUP_BYTES, sum(sizes) / 8)
    group: list[Entry] = []
    held = 0.0
    for e, size in zip(entries, sizes, strict=True):
        if group and held + size > most:
            yield group
            group, held = [], 0.0
        group.append(e)
        held += size
    if group:
        yield group


def _read_group(path: EPath, zero: Options | None, entries: Sequence[Entry], axes: Axes) -> dict[str, jax.Array]:
    ocp = orbax()
    from .padded_handler import PaddedLeaf, PaddedTarget

    how: dict[str, Any] = {}
    for e in entries:
        sharding, x = _sharding(zero, e, axes), e.on_disk()
        if e.padded and e.layout is not None:
            how[e.name] = PaddedTarget(restore_type=PaddedLeaf, layout=e.layout, sharding=sharding)
        else:
            how[e.name] = ocp.ArrayRestoreArgs(sharding=sharding, global_shape=x.shape, dtype=x.dtype)
    item = {e.name: e.on_disk() for e in entries}
    what = ocp.args.PyTreeRestore(item=item, restore_args=how, partial_restore=True)
    with _reading("restore", path):
        return dict(ocp.Checkpointer(_handler()).restore(path, args=ocp.args.Composite(**{_ARRAYS: what}))[_ARRAYS])


def read_plain(path: EPath, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Whole arrays on the host, by name; keys as their data."""
    if not names:
        return {}
    ocp = orbax()
    how = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names}
    what = ocp.args.PyTreeRestore(item=dict.fromkeys(names, 0), restore_args=how, partial_restore=True)
    with _reading("export", path):
        return dict(ocp.Checkpointer(ocp.PyTreeCheckpointHandler()).restore(path / _ARRAYS, args=what))


@contextlib.contextmanager
def _reading(call: str, path: EPath) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # noqa: BLE001 - whatever a storage driver raises
        raise ValueError(
            f"{call}: {path} could not be read: {_line(error)}. Expected all of its files as they were written. Fix: "
            "another step."
        ) from None  # the causes are a hundred lines of what Orbax does, and the line says the first of them


def _sharding(zero: Options | None, e: Entry, axes: Axes) -> NamedSharding | SingleDeviceSharding:
    if zero is None:
        return SingleDeviceSharding(jax.local_devices()[0])
    stored = e.layout.stored_shape if e.layout else e.on_disk().shape
    return named_sharding(zero.mesh, e.spec(axes), len(stored), e.memory_kind)


def _implementation(dtype: DType) -> Any:
    """The implementation of keys of this dtype; `jax.random.key_impl` takes arrays only, traced ones too."""
    found: list[Any] = []
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), jax.ShapeDtypeStruct((), dtype))
    return found[0]
