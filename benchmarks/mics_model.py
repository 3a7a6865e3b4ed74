"""A model, not a measurement: the step time of MiCS and of ZeRO-3 in the setting of the MiCS paper.

    python benchmarks/mics_model.py [--micro-steps 4] [--links 0.8] ...

Step time = compute + bytes over links + latency of collectives. The bytes are those of `formulas.py`, which
`traffic.py` compares with compiled programs. Everything else is an assumption and is printed above the table. No
assumption was chosen to meet the published figures. Both systems are ideal: other costs of an implementation are left
out.

How bytes become seconds, with k devices in a node that share one network card:

* A flat ring over several nodes enters each node once, so the card sends the bytes of one device.
* Hops between nodes, and the all-reduce across groups, run in k rings at once, so the card sends k times as many bytes.
* Inside a node each device has its own link.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import NamedTuple

import formulas
from formulas import Sent

PUBLISHED_SPEED_UP, PUBLISHED_EFFICIENCY = 2.89, 0.994
K = 8


class Cluster(NamedTuple):
    """Nodes of 8 GPUs: the network of a node and the link of a GPU in bytes/s one way, peak FLOP/s, memory."""

    name: str
    network: float
    local: float
    peak: float
    memory: float


class Model(NamedTuple):
    """A transformer: `12 width^2` parameters in each layer."""

    name: str
    layers: int
    width: int

    @property
    def parameters(self) -> float:
        """The number of parameters of the layers, without embeddings."""
        return 12.0 * self.width**2 * self.layers


class Time(NamedTuple):
    """Seconds of one step: computing, communication in the microbatches, communication after them."""

    compute: float
    micro: float
    boundary: float

    @property
    def exposed(self) -> float:
        """The step time without overlap."""
        return self.compute + self.micro + self.boundary

    @property
    def hidden(self) -> float:
        """The step time if the microbatches overlap perfectly; the communication after them cannot overlap."""
        return max(self.compute, self.micro) + self.boundary


CLUSTERS = (
    Cluster("100 Gb/s", 100e9 / 8, 150e9, 125e12, 32e9),  # V100: NVLink 300 GB/s both ways, 125 TFLOP/s
    Cluster("400 Gb/s", 400e9 / 8, 300e9, 312e12, 40e9),  # A100: NVSwitch 600 GB/s both ways, 312 TFLOP/s
)
MODELS = (
    Model("10B", 127, 2560),
    Model("15B", 190, 2560),
    Model("20B", 64, 5120),
    Model("50B", 62, 8192),
    Model("100B", 80, 10240),  # the size at which the published weak scaling was measured
)


def assumptions(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """All assumptions, from the command line."""
    parser = argparse.ArgumentParser(description="A cost model of MiCS and ZeRO-3; see the module's docstring.")
    add = parser.add_argument
    add("--micro-steps", type=int, default=4, help="s: microbatches per optimizer step, for any number of GPUs")
    add("--tokens", type=int, default=8 * 512, help="tokens per GPU and microbatch")
    add("--flops", type=float, default=8.0, help="FLOP per parameter and token: forward, backward, recomputation")
    add("--bytes", type=float, default=2.0, help="bytes per parameter and per gradient on the wire")
    add("--compute", type=float, default=0.5, help="fraction of peak FLOP/s achieved by the computation alone")
    add("--links", type=float, default=0.8, help="fraction of each link's nominal speed achieved by large messages")
    add("--latency-network", type=float, default=15e-6, help="seconds per ring step that crosses nodes")
    add("--latency-local", type=float, default=3e-6, help="seconds per ring step inside a node")
    add("--memory", type=float, default=0.7, help="fraction of GPU memory that 16 bytes per parameter may fill")
    add("--devices", type=int, nargs="+", default=[64, 128, 256, 512], help="numbers of GPUs in the table")
    return parser.parse_args(arguments)


def group(model: Model, cluster: Cluster, given: argparse.Namespace) -> int:
    """The smallest group of 8, 16, 32, ... GPUs whose memory holds 16 bytes per parameter."""
    p = K
    while 16 * model.parameters / p > given.memory * cluster.memory:
        p *= 2
    return p


def zero3_time(model: Model, cluster: Cluster, n: int, given: argparse.Namespace) -> Time:
    """One step of ZeRO-3 over all GPUs."""
    sent = formulas.zero3(given.bytes * model.parameters, n, given.micro_steps)
    return _time(sent, {"all": n}, model, cluster, given)


def mics_time(model: Model, cluster: Cluster, n: int, given: argparse.Namespace) -> Time:
    """One step of MiCS; hierarchical if a group spans several nodes."""
    p = group(model, cluster, given)
    M, r, s = given.bytes * model.parameters, n // p, given.micro_steps
    sent = formulas.mics_hierarchical(M, p, r, K, s) if p > K else formulas.mics(M, p, r, s)
    return _time(sent, {"group": p, "node": p // K, "local": K, "replica": r}, model, cluster, given)


def _time(
    sent: Sequence[Sent], sizes: dict[str, int], model: Model, cluster: Cluster, given: argparse.Namespace
) -> Time:
    flops = given.flops * model.parameters * given.tokens * given.micro_steps
    seconds = [(row.axis, _seconds(row, sizes[row.axis], model, cluster, given)) for row in sent]
    return Time(
        flops / (given.compute * cluster.peak),
        sum(t for axis, t in seconds if axis != "replica"),
        sum(t for axis, t in seconds if axis == "replica"),
    )


def _seconds(row: Sent, size: int, model: Model, cluster: Cluster, given: argparse.Namespace) -> float:
    """Bytes over the link, and per layer and collective the latency of its ring steps."""
    if size == 1:
        return 0.0
    inside = row.axis == "local" or (row.axis in ("group", "all") and size <= K)
    sharing = K if row.axis in ("node", "replica") else 1
    speed = given.links * (cluster.local if inside else cluster.network / sharing)
    steps = (size - 1) * (2 if row.kind == formulas.REDUCE else 1)
    return row.nbytes / speed + _calls(row, model, given) * steps * _latency(inside, given)


def _calls(row: Sent, model: Model, given: argparse.Namespace) -> int:
    """Collectives per step: one per layer, forward and backward for gathers; the last hop runs once."""
    if row.axis == "replica":
        return model.layers
    return model.layers * given.micro_steps * (2 if row.kind == formulas.GATHER else 1)


def _latency(inside: bool, given: argparse.Namespace) -> float:
    return given.latency_local if inside else given.latency_network


# --- the table -----------------------------------------------------------------------------------


class Row(NamedTuple):
    """One line of the table: speed-up over ZeRO-3 and weak scaling, each without and with overlap."""

    network: str
    model: str
    devices: int
    group: int
    zero3: Time
    mics: Time
    speed_up: tuple[float, float]
    scaling: tuple[float, float]
    zero3_scaling: tuple[float, float]


def rows(given: argparse.Namespace) -> list[Row]:
    """The table, without numbers of GPUs that do not divide by the group."""
    out = []
    for cluster in CLUSTERS:
        for model in MODELS:
            p = group(model, cluster, given)
            counts = [n for n in given.devices if n % p == 0]
            times = [(n, zero3_time(model, cluster, n, given), mics_time(model, cluster, n, given)) for n in counts]
            for n, zero3, mics in times:
                speed_up, scaling = _ratio(zero3, mics), _ratio(times[0][2], mics)
                out.append(
                    Row(cluster.name, model.name, n, p, zero3, mics, speed_up, scaling, _ratio(times[0][1], zero3))
                )
    return out


def _ratio(a: Time, b: Time) -> tuple[float, float]:
    return a.exposed / b.exposed, a.hidden / b.hidden


COLUMNS = (
    f"{'network':9s} {'model':>5s} {'GPUs':>5s} {'p':>3s}  {'ZeRO-3 s/step':>15s}  {'MiCS s/step':>15s}  "
    f"{'speed-up':>11s}  {'weak scaling %':>14s}  {'of ZeRO-3 %':>13s}"
)


def line(row: Row) -> str:
    """One printed row; pairs are without and with overlap."""
    pair = lambda time: f"{time.exposed:7.1f} {time.hidden:7.1f}"
    percent = lambda x: f"{100 * x[0]:6.1f} {100 * x[1]:6.1f}"
    return (
        f"{row.network:9s} {row.model:>5s} {row.devices:5d} {row.group:3d}  {pair(row.zero3):>15s}  "
        f"{pair(row.mics):>15s}  {row.speed_up[0]:5.2f} {row.speed_up[1]:5.2f}  {percent(row.scaling):>14s}  "
        f"{percent(row.zero3_scaling):>13s}"
    )


def _span(values: Sequence[tuple[float, float]], form: str) -> str:
    ends = [(min(column), max(column)) for column in zip(*values, strict=True)]
    (a, b), (c, d) = ends
    return f"{a:{form}} to {b:{form}} without overlap, {c:{form}} to {d:{form}} with perfect overlap"


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the assumptions, the table, and the published figures next to those of the model."""
    given = assumptions(arguments)
    print("THIS IS A MODEL: predicted step times, nothing here was measured.")
    print("Assumptions (all but the clusters are options):")
    for name, value in vars(given).items():
        print(f"  {name.replace('_', '-'):16s} {value}")
    for c in CLUSTERS:
        print(
            f"  cluster          {c.name} per node of {K} GPUs, {c.local / 1e9:.0f} GB/s per GPU inside a node, "
            f"{c.peak / 1e12:.0f} TFLOP/s, {c.memory / 1e9:.0f} GB"
        )
    for m in MODELS:
        print(
            f"  model            {m.name}: {m.layers} layers of width {m.width}, {m.parameters / 1e9:.1f} B parameters"
        )
    print("  both systems     ideal: nothing but computing, bytes and latency; rings; one collective per layer and use")
    print("  MiCS             the two hops of a gather follow each other; the all-reduce across groups, once per step,")
    print("                   overlaps nothing; k rings share a network card; a group fills whole nodes")
    print("Pairs: without overlap of computing and communication, and with perfect overlap. p: GPUs of a MiCS group.")
    print("Weak scaling: against the first row of the same model and network, same work per GPU.")
    print(COLUMNS)
    table = rows(given)
    for row in table:
        print(line(row))
    last = [row for row in table if row.devices == max(given.devices)]
    print(f"model: speed-up over ZeRO-3         {_span([r.speed_up for r in table], '.2f')}")
    print(f"published: speed-up over ZeRO-3     up to {PUBLISHED_SPEED_UP}")
    print(f"model: weak scaling, {last[0].devices} GPUs       {_span([r.scaling for r in last], '.1%')}")
    print(f"published: weak scaling, 512 GPUs   {PUBLISHED_EFFICIENCY:.1%} (a model of 100 B parameters)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
