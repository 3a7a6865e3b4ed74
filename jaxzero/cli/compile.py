"""Compile a training step, for a machine that is not here, and show memory and collectives.

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
import optax
import tyro
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .._src._text import size_text
from .._src._types import PyTree
from .._src.analysis import planned_traffic
from .._src.analysis.hlo import Collective, Collectives, collectives
from .._src.analysis.memory import Memory
from .._src.analysis.topology import is_gpu, topology
from .._src.sharding.options import param_leaves, resolve_axes
from .._src.zero import Zero
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

    def run(self) -> int:
        """Compiles and prints."""
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
            lowered = self._step(self.observed(zero, problem), problem, inner)
        started = time.perf_counter()
        with output.working(f"compiling for {self.topology or f'{mesh.size} virtual CPU devices'}"):
            compiled = lowered.compile(compiler_options=zero.compiler_options() or None)
        seconds = time.perf_counter() - started
        self._report(mesh, zero.memory(compiled), collectives(compiled, mesh), seconds, problem.note)
        return 0

    # --- the step ---

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

    def _step(self, zero: Zero, problem: Problem, inner: optax.GradientTransformation) -> jax.stages.Lowered:
        """One training step, lowered: gradient, update, donation."""
        assert problem.loss is not None
        tx = zero.optimizer(inner)
        grad_fn = zero.value_and_grad(problem.loss, accumulate=self.accumulate, whole_argnums=problem.whole)

        def step(params: PyTree, state: PyTree, *batch: PyTree) -> PyTree:
            value, grads = grad_fn(params, *batch)
            return *zero.apply(tx, grads, state, params), value

        params = _stored_params(zero, problem.params)
        over = P((*zero.replica_axes, *zero.shard_axes))
        dealt = lambda i, x: P() if i in problem.whole or not x.shape else over
        batch = [jax.tree.map(lambda x, i=i: _placed(zero, x, dealt(i, x)), b) for i, b in enumerate(problem.batch, 1)]
        return jax.jit(step, donate_argnums=(0, 1)).lower(params, tx.init(params), *batch)

    # --- the report ---

    def _report(self, mesh: Mesh, memory: Memory, found: Collectives, seconds: float, note: str) -> None:
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
                    "memory": dataclasses.asdict(memory) | {"total": memory.total},
                    "sent": found.sent(),
                    "collectives": [dataclasses.asdict(x) | {"sent": x.sent} for x in found],
                    "note": note,
                }
            )
            return
        axes = " x ".join(f"{name}={size}" for name, size in mesh.shape.items())
        print(f"{self.target}, stage {self.stage}, {self.optimizer}, {self.topology or 'virtual CPU devices'}, {axes}")
        print(f"compiled in {seconds:.1f} s by jax {jax.__version__}")
        print(memory)
        columns = ("collective", "mesh axes", "in a loop", "calls", "sent by each device", "overlapped")
        output.table("collectives of one step", columns, _summary(found), left=3)
        print(f"{size_text(round(found.sent()))} sent by each device")
        if note:
            print(note)


def _default(name: str, devices: int) -> dict[str, int]:
    """A mesh for a machine: nodes and their devices where there are several nodes of several."""
    nodes = int(name.partition(":")[2].partition("x")[0] or 1) if is_gpu(name) else 1
    if 1 < nodes < devices:
        return {"node": nodes, "local": devices // nodes}
    return {"data": devices}


def _placed(zero: Zero, x: jax.ShapeDtypeStruct, spec: P) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(zero.mesh, spec))


def _stored_params(zero: Zero, params: PyTree) -> PyTree:
    """Abstract parameters as they are stored between steps, with their shardings."""
    axes, _ = resolve_axes(zero, "compile")
    stored = planned_traffic.stored_params(zero, param_leaves(zero, params, axes.n))
    specs = zero.specs(stored) if zero.stage == 3 else jax.tree.map(lambda x: P(), stored)
    return jax.tree.map(lambda x, spec: _placed(zero, x, spec), stored, specs)


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
