"""Many processes: what they must agree on before they do something together."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from .options import Options

#: Bytes that each process tells the others.
_ROOM = 8192
#: Options that are functions or what tracing found: their effect on the layout is compared instead.
_NOT_COMPARED = ("mesh", "stacked", "observed")


def _settings(options: Options) -> dict[str, str]:
    """The options as text, the same on every process that was given the same ones."""
    fields = {f.name: getattr(options, f.name) for f in dataclasses.fields(Options) if f.name not in _NOT_COMPARED}
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
    mine = {"call": call, **{k: str(v)[:200] for k, v in facts.items()}, "problem": problem[:2000]}
    text = json.dumps(mine).encode()[:_ROOM]
    room = np.zeros(_ROOM, np.uint8)
    room[: len(text)] = np.frombuffer(text, np.uint8)
    rows = np.asarray(multihost_utils.process_allgather(room))
    told = [json.loads(row.tobytes().rstrip(b"\0")) for row in rows]
    for process, facts_ in enumerate(told):
        if facts_.get("problem"):
            raise ValueError(f"{facts_['problem']} (process {process} of {len(told)})")
        for name in told[0].keys() | facts_.keys():
            if told[0].get(name) != facts_.get(name):
                raise ValueError(
                    f"{call}: processes disagree on {name}. Found {told[0].get(name)} on process 0 and "
                    f"{facts_.get(name)} on process {process}; expected the same on all {len(told)}. Fix: start every "
                    "process with the same program and options."
                )


def broadcast(value: int) -> int:
    """Process 0's value, on every process."""
    if jax.process_count() == 1:
        return value
    return int(multihost_utils.broadcast_one_to_all(np.int32(value)))
