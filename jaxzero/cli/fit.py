"""Choose stage, groups and options for a machine that is not here: the fastest that fit its memory.

Compiles up to --compiles steps; nothing runs. Times are predicted. If the function has an argument remat, it is called
with False and with True, and both losses are tried.

Examples:
  jaxzero fit models:llama_8b --topology h100:4x8
  jaxzero fit models:llama_8b --topology a100:2x8 --memory 40GB --json
"""

import dataclasses
import math
import os
import pathlib
import re
from typing import Annotated

import tyro

from .._src.analysis.machine import figures_of, machine
from .._src.analysis.topology import topology
from .._src.fit.api import Fit, FitOptions, fit
from . import optimizers, output
from .problem import Problem, problem_of, takes_remat

_UNITS = {"": 1, "b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choose:
    """The arguments of `jaxzero fit`."""

    target: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODULE:FUNCTION")]
    """Returns (parameters, loss_fn, *batch), or a Flax model and its inputs."""
    topology: Annotated[str, tyro.conf.arg(metavar="NAME:SIZES")]
    """The machine: h100:4x8 (4 nodes of 8), a100, h200, v5e:4x4, v5p:4x4x4, v6e:4x4."""
    memory: Annotated[str, tyro.conf.arg(metavar="BYTES")] = ""
    """What a step may need of a device's memory, for example 70GB. Default: all of it."""
    optimizer: Annotated[str, tyro.conf.arg(metavar="NAME")] = "adamw"
    """Any of optax or optax.contrib, or module:function for one of your own."""
    batch: int | None = None
    """Examples per step, over all devices. Default: as many as the function returns."""
    accumulate: int = 1
    """Micro-steps, whose gradients are added."""
    compiles: int = 12
    """How many programs may be compiled."""
    figures: Annotated[str, tyro.conf.arg(metavar="NAME=NUMBER,...")] = ""
    """Your figures of the machine: network=12.5e9, links_reach=0.9, ..."""
    json: bool = False
    """Print one JSON document."""

    def run(self) -> int:
        """Searches and prints."""
        hardware = machine(self.topology, **figures_of(self.figures))
        budget = bytes_of(self.memory) if self.memory else hardware.memory
        devices = topology(self.topology)  # before the user's code, which may use a device as soon as it is imported
        inner = optimizers.make(self.optimizer)
        problems = self._problems(devices.size)
        plain = problems[min(problems)]
        options = FitOptions(
            accumulate=self.accumulate,
            whole_argnums=plain.whole,
            remat=problems[True].loss if len(problems) > 1 else None,
            compiles=self.compiles,
            devices=devices,
            cache=str(cache_folder()),
        )
        assert plain.loss is not None
        found = fit(plain.loss, plain.params, plain.batch, inner, hardware, memory=budget, options=options)
        if self.json:
            output.document({"target": self.target, "topology": self.topology, **to_dict(found)})
        else:
            print(found)
        return 0 if found.best else 1

    def _problems(self, devices: int) -> dict[bool, Problem]:
        """The problem; without and with recomputed activations where the function has both."""
        out = {}
        for remat in (False, True) if takes_remat(self.target) else (False,):
            given = {"remat": remat} if takes_remat(self.target) else {}
            problem = problem_of(self.target, **given)
            if problem.loss is None:
                raise ValueError(
                    f"{self.target} returns parameters alone, and a step needs a loss. Fix: return (parameters, "
                    "loss_fn, *batch), or a Flax model and its inputs."
                )
            out[remat] = problem.sized(self.batch, devices, self.accumulate)
        return out


def to_dict(found: Fit) -> dict[str, object]:
    """A result without objects."""
    rows = [dataclasses.asdict(x) | {"settings": str(x.way), "constructor": x.way.constructor} for x in found.trials]
    finite = lambda x: None if isinstance(x, float) and math.isinf(x) else x
    for row in rows:
        if row["found"]:
            row["found"] = {name: finite(value) for name, value in row["found"].items()}
    return {"memory": found.memory, "constructor": found.constructor, "advice": found.advice, "trials": rows}


def bytes_of(text: str) -> float:
    """Bytes from a number with a unit.

    Examples:
      >>> bytes_of("70GB"), bytes_of("1.5 GiB")
      (70000000000.0, 1610612736.0)
    """
    found = re.fullmatch(r"([\d.]+(?:e\d+)?)\s*([kmg]?i?b?)", text.strip().lower())
    if not found or found[2] not in _UNITS or found[1].count(".") > 1:
        raise ValueError(f"--memory {text}: expected bytes, with a unit or without. Fix: for example --memory 70GB.")
    return float(found[1]) * _UNITS[found[2]]


def cache_folder() -> pathlib.Path:
    """Where results of compiles are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(base) / "jaxzero" / "fit"


COMMAND = Choose
