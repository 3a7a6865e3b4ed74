"""One way to train on a machine: how the devices are grouped, the stage, and the options of `Zero`."""

import dataclasses
import math
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from ..analysis.machine import Machine
from ..sharding.options import BUCKET_BYTES, CHUNK_BYTES, PERSIST_BYTES, PREFETCH
from ..zero import Zero

REPLICA, NODE, LOCAL, DATA = "replica", "node", "local", "data"
_MEGABYTE = 2**20


@dataclasses.dataclass(frozen=True)
class Way:
    """Settings of one try.

    Attributes:
      devices: All devices.
      per_node: Devices in a node.
      group: Devices among which the state is split; groups of them repeat it.
      stage: The stage.
      remat: Whether the loss that computes activations again is used.
      hops: Whether gathers of a group of several nodes go hop by hop.
      prefetch: As in `Zero`.
      persist_bytes: As in `Zero`.
      chunk_bytes: As in `Zero`.
      bucket_bytes: As in `Zero`.
      regather: As in `Zero`.
      offload: As in `Zero`.
    """

    devices: int
    per_node: int
    group: int
    stage: int
    remat: bool = False
    hops: bool = True
    prefetch: int = PREFETCH
    persist_bytes: int = PERSIST_BYTES
    chunk_bytes: int = CHUNK_BYTES
    bucket_bytes: int = BUCKET_BYTES
    regather: str | None = None
    offload: tuple[str, ...] = ()

    @property
    def several_nodes(self) -> bool:
        """Whether a group spans nodes of several devices, so that gathers can take hops."""
        return self.group > self.per_node > 1

    @property
    def axes(self) -> dict[str, int]:
        """The axes of the mesh with their sizes."""
        copies = {REPLICA: self.devices // self.group} if self.group < self.devices else {}
        if not self.several_nodes:
            return {**copies, DATA: self.group}
        return {**copies, NODE: self.group // self.per_node, LOCAL: self.per_node}

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of `Zero` after the mesh; none that has its default."""
        axes = self.axes
        given: dict[str, Any] = {"stage": self.stage, "shard_axis": (NODE, LOCAL) if NODE in axes else DATA}
        if REPLICA in axes:
            given["replica_axis"] = REPLICA
        if self.several_nodes and not self.hops:
            given["hierarchical"] = False
        if self.stage == 3:
            names = ["prefetch", "persist_bytes", "chunk_bytes", "regather", "offload"]
        else:
            names = ["bucket_bytes", "offload"]
        defaults = {f.name: f.default for f in dataclasses.fields(self)}
        return given | {name: value for name in names if (value := getattr(self, name)) != defaults[name]}

    def zero(self, devices: np.ndarray | None = None) -> Zero:
        """The `Zero`, over devices; without them over an abstract mesh."""
        names, sizes = tuple(self.axes), tuple(self.axes.values())
        mesh = AbstractMesh(sizes, names) if devices is None else Mesh(devices.reshape(sizes), names)
        return Zero(mesh, **self.options)

    @property
    def constructor(self) -> str:
        """The call to paste."""
        names, sizes = tuple(self.axes), tuple(self.axes.values())
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        return f"jaxzero.Zero(jax.make_mesh({sizes}, {names}), {options})".replace("'", '"')

    def __str__(self) -> str:
        kept = {k: v for k, v in self.options.items() if k not in ("stage", "shard_axis", "replica_axis")}
        remat = ["remat"] if self.remat else []
        return ", ".join(
            [f"stage {self.stage}", f"groups of {self.group}", *remat, *(f"{k}={v}" for k, v in kept.items())]
        )


def start_ways(machine: Machine, devices: int, remat: tuple[bool, ...]) -> list[Way]:
    """Stages and groups with default options: small groups first, in each the plain loss first."""
    per_node = min(machine.per_node, devices)
    return [
        Way(devices, per_node, group, stage, again)
        for group in group_sizes(machine, devices)
        for again in remat
        for stage in (2, 3, 1)
    ]


def group_sizes(machine: Machine, devices: int) -> list[int]:
    """A node, two nodes, four, ..., all; on a torus whole rows, whole planes, all."""
    if machine.torus:
        sizes = {math.prod(machine.torus[i:]) for i in range(len(machine.torus))}
    else:
        sizes = {machine.per_node * 2**i for i in range(devices.bit_length())}
    return sorted({size for size in sizes if size < devices and devices % size == 0 and size > 1} | {devices})


def faster(way: Way) -> list[Way]:
    """Neighbours that may be faster; each changes one option."""
    change = lambda **new: dataclasses.replace(way, **new)
    out = []
    if way.stage == 3:
        local = [change(regather=LOCAL)] if way.several_nodes and way.hops else []
        out += [] if way.regather else [change(regather="never"), *local]
        out += [change(prefetch=2 * way.prefetch if way.prefetch else PREFETCH)]
        out += [change(chunk_bytes=4 * way.chunk_bytes), change(persist_bytes=16 * way.persist_bytes or PERSIST_BYTES)]
        out += [change(prefetch=way.prefetch // 2)] if way.prefetch else []
    else:
        out += [change(bucket_bytes=16 * way.bucket_bytes)]
    return [*out, change(hops=not way.hops, regather=None)] if way.several_nodes else out


def smaller(way: Way, remat: bool, offload: bool) -> list[Way]:
    """Ways that need less memory, each with the savings of the ones before."""
    out = [way]
    if way.stage == 3:
        out.append(dataclasses.replace(way, prefetch=0, persist_bytes=0))
    if remat and not way.remat:
        out.append(dataclasses.replace(out[-1], remat=True))
    for kept in (("state",), ("state", "params")) if offload else ():
        if way.stage == 3 or "params" not in kept:
            out.append(dataclasses.replace(out[-1], offload=kept))
    return out[1:]
