"""Many processes: what they must agree on before they do something together."""

import dataclasses
import json
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from .._text import path_text
from .options import Options
from .param_specs import ParamSpecs

#: Options that are functions or what tracing found: their effect on the layout is compared instead.
_NOT_COMPARED = ("mesh", "stacked", "observed")


def _settings(options: Options) -> dict[str, str]:
    """The options as text, the same on every process that was given the same ones."""
    fields = {f.name: getattr(options, f.name) for f in dataclasses.fields(Options) if f.name not in _NOT_COMPARED}
    if not isinstance(options.param_specs, ParamSpecs | None):
        del fields["param_specs"]
    found = {name: str(value) for name, value in fields.items()}
    if options.mesh is not None:
        found["mesh"] = str(dict(options.mesh.shape))
        devices = getattr(options.mesh, "devices", None)
        found["order of devices"] = "" if devices is None else str(hash(tuple(d.id for d in devices.flat)))
    return found


def agree(call: str, options: Options | None, facts: Mapping[str, Any], problem: str = "") -> None:
    """Refuses to go on where processes differ, on all of them, by name. All processes must call it.

    Args:
      call: The call that is about to do something together.
      options: The options that must be equal.
      facts: What must be equal; values are compared as text.
      problem: What stands in this process's way; raised on every process.

    Raises:
      ValueError: Naming the first difference and the processes.
    """
    if jax.process_count() == 1:
        if problem:
            raise ValueError(problem)
        return
    facts = {**(_settings(options) if options is not None else {}), **facts}
    mine = {"call": call, **{k: str(v) for k, v in facts.items()}, "problem": problem}
    told = _exchange(json.dumps(mine).encode())
    for process, theirs in enumerate(told):
        for name in told[0]:
            if name != "problem" and theirs.get(name) != told[0][name]:
                raise ValueError(
                    f"{call}: processes disagree on {name}. Found {told[0][name]} on process 0 and {theirs.get(name)} "
                    f"on process {process}; expected the same on all {len(told)}. Fix: start every process with the "
                    "same program and options."
                )
    for process, theirs in enumerate(told):
        if theirs["problem"]:
            raise ValueError(f"{theirs['problem']} (process {process} of {len(told)})")


def _exchange(mine: bytes) -> list[Any]:
    """What each process tells, in the order of processes."""
    lengths = np.asarray(multihost_utils.process_allgather(np.int32(len(mine))))
    room = np.zeros(lengths.max(), np.uint8)
    room[: len(mine)] = np.frombuffer(mine, np.uint8)
    rows = np.asarray(multihost_utils.process_allgather(room))
    return [json.loads(row[:length].tobytes()) for row, length in zip(rows, lengths, strict=True)]


def digests(tree: Any) -> dict[str, str]:
    """Of each leaf that a process has for itself, a digest: other processes must have the same value."""
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
    """Process 0's value, on every process."""
    if jax.process_count() == 1:
        return value
    return int(multihost_utils.broadcast_one_to_all(np.int32(value)))
