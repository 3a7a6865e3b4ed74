"""Checks that all processes agree before a collective call."""

import dataclasses
import json
import zlib
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from .._text import path_text
from .._types import PyTree
from .options import Options
from .param_specs import ParamSpecs

#: Options that are functions or results of tracing: their effect on the layout is compared instead.
_NOT_COMPARED = ("mesh", "stacked", "overwrite", "observed")


def _settings(options: Options) -> dict[str, str]:
    """The options as text, equal on processes whose options are equal."""
    fields = {f.name: getattr(options, f.name) for f in dataclasses.fields(Options) if f.name not in _NOT_COMPARED}
    if not isinstance(options.param_specs, ParamSpecs | None):
        del fields["param_specs"]
    found = {name: str(value) for name, value in fields.items()}
    if options.mesh is not None:
        found["mesh"] = str(dict(options.mesh.shape))
        devices = getattr(options.mesh, "devices", None)
        found["order of devices"] = "" if devices is None else str(hash(tuple(d.id for d in devices.flat)))
    return found


def agree(call: str, options: Options | None, facts: Mapping[str, object], problem: str = "") -> None:
    """Raises on all processes where they differ. Every process must call it.

    Args:
      call: The name of the call, for the error.
      options: The options that must be equal.
      facts: Further values that must be equal, by name; they are compared as text.
      problem: The error of this process, if it has one; it is raised on every process.

    Raises:
      ValueError: Naming the first difference and the processes.
    """
    if jax.process_count() == 1:
        if problem:
            raise ValueError(problem)
        return
    facts = {**(_settings(options) if options is not None else {}), **facts}
    mine = {"call": call, **{k: str(v) for k, v in facts.items()}, "problem": problem}
    per_process = _exchange(json.dumps(mine).encode())
    first, count = per_process[0], len(per_process)
    for process, theirs in enumerate(per_process):
        for name in first:
            if name != "problem" and theirs.get(name) != first[name]:
                raise ValueError(
                    f"{call}: processes disagree on {name}. Found {first[name]} on process 0 and {theirs.get(name)} "
                    f"on process {process}; expected the same on all {count}. Fix: start every process with the "
                    "same program and options."
                )
    for process, theirs in enumerate(per_process):
        if theirs["problem"]:
            raise ValueError(f"{theirs['problem']} (process {process} of {count})")


def _exchange(mine: bytes) -> list[dict[str, str]]:
    """The JSON value of each process, in the order of processes; `mine` is the encoded one of this process."""
    lengths = np.asarray(multihost_utils.process_allgather(np.int32(len(mine))))
    room = np.zeros(lengths.max(), np.uint8)
    room[: len(mine)] = np.frombuffer(mine, np.uint8)
    rows = np.asarray(multihost_utils.process_allgather(room))
    return [json.loads(row[:length].tobytes()) for row, length in zip(rows, lengths, strict=True)]


def digests(tree: PyTree) -> dict[str, str]:
    """A digest of each leaf that is local to this process; all processes must have the same value there."""
    if jax.process_count() == 1:
        return {}
    found = {}
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        if isinstance(x, jax.core.Tracer) or isinstance(x, jax.Array) and not x.is_fully_addressable:
            continue
        if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        x = np.ascontiguousarray(x)
        found[f"the value of leaf {path_text(path)!r}"] = f"{x.dtype}{x.shape} {zlib.crc32(x.tobytes()):08x}"
    return found


def broadcast(value: int) -> int:
    """The value of process 0, on every process."""
    if jax.process_count() == 1:
        return value
    return int(multihost_utils.broadcast_one_to_all(np.int32(value)))
