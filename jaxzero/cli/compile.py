"""Compile a training step, for a machine that is not here, and show memory, collectives and the predicted time.

Nothing runs. GPUs and TPUs need their JAX plug-in (pip install ".[cuda]" or ".[tpu]"), no accelerator.
Without --topology the step is compiled for virtual CPU devices.

Examples:
  jaxzero compile models:gpt --topology h100:2x8 --stage 3
  jaxzero compile models:gpt --topology v5e:4x4 --mesh replica=2,data=8 --json
  jaxzero compile models:gpt --mesh data=8
"""

import dataclasses
import math
import time
from typing import Annotated

import jax
import numpy as np
import tyro
from jax.sharding import Mesh

from .._src._text import size_text
from .._src.analysis.hlo import Collective, Collectives, collectives
from .._src.analysis.machine import Machine, figures_of, machine
from .._src.analysis.memory import memory
from .._src.analysis.predict import predict
from .._src.analysis.topology import is_gpu, topology
from .._src.fit.step import lower_step, tokens_of
from . import output
from .problem import Problem, problem_of
from .settings import Settings, mesh_sizes

#: With more virtual CPU devices JAX takes some of them for devices of other processes.
MOST = 2048


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compile(Settings):
    """The arguments of `jaxzero compile`."""

    topology: Annotated[str | None, tyro.conf.arg(metavar="NAME:SIZES")] = None
    """The machine: h100:2x8 (2 nodes of 8), a100, h200, v5e:4x4, v5p:4x4x4, v6e:4x4. Default: virtual CPU devices."""
    mesh: Annotated[str | None, tyro.conf.arg(metavar="AXIS=N,...")] = None
    """Axes of the mesh with their sizes, outer first. Default: node and local for several nodes, else data."""
    figures: Annotated[str, tyro.conf.arg(metavar="NAME=NUMBER,...")] = ""
    """Your figures of the machine, for the predicted time: network=12.5e9, links_reach=0.9, ... Needs --topology."""

    def run(self) -> int:
        """Compiles and prints."""
        hardware = self._machine()
        mesh = self._mesh()  # before the user's code, which may use a device as soon as it is imported
        inner = self.inner()
        zero = self.zero(mesh)
        with output.working(f"tracing {self.target}"):
            problem = problem_of(self.target)
            if problem.loss is None:
                raise ValueError(
                    f"{self.target} returns parameters alone, and a step needs a loss. Fix: return (parameters, "
                    "loss_fn, *batch), or a Flax model and its inputs."
                )
            problem = problem.sized(self.batch, self.parts(zero), self.accumulate)
            assert problem.loss is not None
            seen = self.observed(zero, problem)
            lowered = lower_step(
                seen, problem.loss, problem.params, problem.batch, inner, self.accumulate, problem.whole
            )
        started = time.perf_counter()
        with output.working(f"compiling for {self.topology or f'{mesh.size} virtual CPU devices'}"):
            compiled = lowered.compile(compiler_options=zero.compiler_options() or None)
        seconds = time.perf_counter() - started
        self._report(mesh, compiled, hardware, seconds, problem)
        return 0

    def _machine(self) -> Machine | None:
        figures = figures_of(self.figures)
        if self.topology is None and figures:
            raise ValueError("--figures without --topology. Fix: name a machine, for example --topology h100:4x8.")
        return machine(self.topology, **figures) if self.topology is not None else None

    def _mesh(self) -> Mesh:
        sizes = mesh_sizes(self.mesh) if self.mesh is not None else None
        if self.topology is None:
            if sizes is None:
                raise ValueError(
                    "neither --topology nor --mesh is given. Fix: for example --topology h100:2x8, or --mesh data=8 "
                    "for virtual CPU devices."
                )
            count = math.prod(sizes.values())
            if count > MOST:
                raise ValueError(
                    f"--mesh {self.mesh}: {count} devices; a process has at most {MOST} virtual CPU devices. Fix: a "
                    "smaller mesh, or --topology."
                )
            jax.config.update("jax_platforms", "cpu")
            jax.config.update("jax_num_cpu_devices", count)
            devices = np.array(jax.devices("cpu"))
        else:
            devices = topology(self.topology)
            sizes = sizes or _default(self.topology, devices.size)
        if math.prod(sizes.values()) != devices.size:
            raise ValueError(
                f"--mesh {self.mesh}: {math.prod(sizes.values())} devices, but {self.topology or 'this process'} has "
                f"{devices.size}. Fix: axes whose sizes multiply to {devices.size}, or no --mesh."
            )
        return Mesh(devices.reshape(tuple(sizes.values())), tuple(sizes))

    # --- the report ---

    def _report(
        self, mesh: Mesh, compiled: jax.stages.Compiled, hardware: Machine | None, seconds: float, problem: Problem
    ) -> None:
        needed = memory(compiled)
        amount, unit = tokens_of(problem.batch, problem.whole) or (None, "examples")
        time_of = predict(compiled, hardware, mesh, tokens=amount) if hardware else None
        found = time_of.collectives if time_of else collectives(compiled, mesh)
        if self.json:
            output.document(
                {
                    "target": self.target,
                    "topology": self.topology,
                    "mesh": dict(mesh.shape),
                    "stage": self.stage,
                    "optimizer": self.optimizer,
                    "jax": jax.__version__,
                    "seconds": seconds,
                    "memory": dataclasses.asdict(needed) | {"total": needed.total},
                    "sent": found.sent(),
                    "collectives": [dataclasses.asdict(x) | {"sent": x.sent} for x in found],
                    "predicted": time_of.to_dict() | {"unit": unit} if time_of else None,
                    "note": problem.note,
                }
            )
            return
        axes = " x ".join(f"{name}={size}" for name, size in mesh.shape.items())
        print(f"{self.target}, stage {self.stage}, {self.optimizer}, {self.topology or 'virtual CPU devices'}, {axes}")
        print(f"compiled in {seconds:.1f} s by jax {jax.__version__}")
        print(needed)
        print("  total = arguments + temporaries + outputs - aliased")
        columns = ("collective", "mesh axes", "in a loop", "calls", "sent by each device", "overlapped")
        output.table("collectives of one step", columns, _summary(found), left=3)
        print(f"{size_text(round(found.sent()))} sent by each device: all rows; calls in a loop count per iteration")
        if time_of:
            print(time_of.text(unit))
        if problem.note:
            print(problem.note)


def _default(name: str, devices: int) -> dict[str, int]:
    """A mesh for a machine: nodes and their devices where there are several nodes of several."""
    nodes = int(name.partition(":")[2].partition("x")[0] or 1) if is_gpu(name) else 1
    if 1 < nodes < devices:
        return {"node": nodes, "local": devices // nodes}
    return {"data": devices}


def _summary(found: Collectives) -> list[tuple[str, ...]]:
    """One row for collectives of one kind, over the same axes, in a loop or not."""
    groups: dict[tuple[str, tuple[str, ...] | None, bool], list[Collective]] = {}
    for x in found:
        groups.setdefault((x.kind, x.axes, x.looped), []).append(x)
    rows: list[tuple[str, ...]] = []
    for (kind, axes, looped), members in sorted(groups.items(), key=lambda item: -sum(x.sent for x in item[1])):
        sent = sum(x.sent for x in members)
        hidden = sum(x.sent for x in members if x.hidden) / sent if sent else 0.0
        calls = str(sum(x.times for x in members))
        over = ", ".join(axes or ("?",))
        rows.append((kind, over, "yes" if looped else "no", calls, size_text(round(sent)), f"{hidden:.0%}"))
    return rows


COMMAND = Compile
