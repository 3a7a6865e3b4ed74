"""The bytes that each schedule sends per device, step and axis: the formula, and a count from the compiled program.

    python benchmarks/traffic.py

Compiles one training step of a scan over layers on 8 CPU devices for each schedule (data parallel, ZeRO-1, 2 and 3,
MiCS with groups of 4, and with groups of 2 x 2 that gather in hops or with hpZ, with one and two microbatches) and
reads its collectives. If a count is off by more than 1 %, its row is marked and the exit status is 1. Nothing is
executed.
"""

import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")
import jax

jax.config.update("jax_num_cpu_devices", 8)
import formulas
import jax.numpy as jnp
import numpy as np
import optax
from formulas import Sent
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxzero

LAYERS, WIDTH, HIDDEN = 4, 128, 512
#: Bytes of the parameters: all in stacked layers, large enough that stage 3 does not persist them.
M = LAYERS * 2 * WIDTH * HIDDEN * 4
N, K = 8, 2
#: Micro-steps of the schedules that accumulate.
S = 2
#: Collectives of fewer bytes carry the loss.
SCALARS = 64

Mesh_ = tuple[tuple[int, ...], tuple[str, ...]]
FLAT: Mesh_ = ((8,), ("data",))
GROUPS: Mesh_ = ((2, 4), ("replica", "shard"))
NODES: Mesh_ = ((2, 2, 2), ("replica", "node", "local"))


class Schedule(NamedTuple):
    """One way to train.

    Attributes:
      name: The name.
      mesh: Sizes and names of the mesh axes.
      options: The options of `Zero`; `None`: plain data parallelism without jaxzero.
      links: Axis of a formula -> its mesh axes.
      formula: The expected bytes.
      steps: The number of microbatches.
    """

    name: str
    mesh: Mesh_
    options: dict[str, Any] | None
    links: dict[str, tuple[str, ...]]
    formula: list[Sent]
    steps: int = 1


def schedules() -> list[Schedule]:
    """All schedules."""
    everywhere = {"all": ("data",)}
    group = dict(shard_axis="shard", replica_axis="replica")
    nodes = dict(shard_axis=("node", "local"), replica_axis="replica")
    in_group = {"group": ("shard",), "replica": ("replica",)}
    in_hops = {a: (a,) for a in ("node", "local", "replica")}
    out = [
        Schedule("replicated", FLAT, None, everywhere, formulas.replicated(M, N)),
        Schedule("ZeRO-1", FLAT, dict(stage=1), everywhere, formulas.zero1(M, N)),
        Schedule("ZeRO-2", FLAT, dict(stage=2), everywhere, formulas.zero2(M, N)),
    ]
    for s in (1, S):
        twice = "" if s == 1 else f", s = {s}"
        if s > 1:
            out.append(Schedule(f"ZeRO-2{twice}", FLAT, dict(stage=2), everywhere, formulas.zero2(M, N, s), s))
        out.append(Schedule(f"ZeRO-3{twice}", FLAT, dict(stage=3), everywhere, formulas.zero3(M, N, s), s))
    for stage in (2, 3):
        sent = formulas.mics(M, N // 2, 2, stage=stage)
        out.append(Schedule(f"MiCS, stage {stage}", GROUPS, dict(stage=stage, **group), in_group, sent))
        sent = formulas.mics_hierarchical(M, N // 2, 2, K, stage=stage)
        out.append(Schedule(f"MiCS in hops, stage {stage}", NODES, dict(stage=stage, **nodes), in_hops, sent))
    sent = formulas.mics(M, N // 2, 2, S)
    out.append(Schedule(f"MiCS, stage 3, s = {S}", GROUPS, dict(stage=3, **group), in_group, sent, S))
    sent = formulas.mics_hierarchical(M, N // 2, 2, K, S)
    out.append(Schedule(f"MiCS in hops, 3, s = {S}", NODES, dict(stage=3, **nodes), in_hops, sent, S))
    again = dict(stage=3, regather="local", **nodes)
    for s in (1, S):
        name = "MiCS, hpZ" + ("" if s == 1 else f", s = {s}")
        out.append(Schedule(name, NODES, again, in_hops, formulas.hpz(M, N // 2, 2, K, s), s))
    return out


# --- the program ---------------------------------------------------------------------------------


def init() -> Any:
    """Stacked layers."""
    return {"up": jnp.ones((LAYERS, WIDTH, HIDDEN)), "down": jnp.ones((LAYERS, HIDDEN, WIDTH))}


def loss_fn(params: Any, x: Any) -> Any:
    """A mean over examples of a scan over layers."""

    def layer(x: Any, w: Any) -> Any:
        return x + jnp.tanh(x @ w["up"]) @ w["down"], None

    return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)


def counted(schedule: Schedule) -> list[jaxzero.Collective]:
    """The collectives of one compiled training step."""
    sizes, names = schedule.mesh
    mesh = Mesh(np.array(jax.devices()[:N]).reshape(sizes), names, axis_types=(AxisType.Auto,) * len(names))
    x = jax.ShapeDtypeStruct((16, WIDTH), jnp.float32, sharding=NamedSharding(mesh, P(names)))
    whole = jax.device_put(init(), NamedSharding(mesh, P()))
    if schedule.options is None:
        step, args = _replicated(mesh), (whole, jax.jit(optax.adamw(1e-3).init)(whole), x)
    else:
        step, args = _split(jaxzero.Zero(mesh, **schedule.options), whole, x, schedule.steps)
    program = jax.jit(step, donate_argnums=(0, 1)).lower(*args).compile()
    return [row for row in jaxzero.collectives(program, mesh) if row.nbytes > SCALARS]


def _split(zero: jaxzero.Zero, params: Any, x: Any, steps: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    if zero.stage == 3:
        zero = zero.observe(loss_fn, params, x)
    tx = zero.optimizer(optax.adamw(1e-3))
    params = zero.shard(params)

    def step(params: Any, state: Any, x: Any) -> Any:
        value, grads = zero.value_and_grad(loss_fn, accumulate=steps)(params, x)
        return *zero.apply(tx, grads, state, params), value

    return step, (params, jax.jit(tx.init)(params), x)


def _replicated(mesh: Mesh) -> Callable[..., Any]:
    tx, axes = optax.adamw(1e-3), mesh.axis_names

    def step(params: Any, state: Any, x: Any) -> Any:
        value, grads = jax.value_and_grad(loss_fn)(jax.lax.pcast(params, axes, to="varying"), x)
        value, grads = jax.lax.pmean((value, grads), axes)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return jax.shard_map(step, mesh=mesh, in_specs=(P(), P(), P(axes)), out_specs=P())


# --- the table -----------------------------------------------------------------------------------


class Row(NamedTuple):
    """One line: the bytes that a schedule sends over one axis in one kind of collective."""

    schedule: str
    axis: str
    kind: str
    formula: str
    promised: float
    count: float

    @property
    def ok(self) -> bool:
        """Within 1 %."""
        return abs(self.count - self.promised) <= 0.01 * self.promised


def rows(schedule: Schedule) -> list[Row]:
    """The formulas of the schedule with the counts; a collective without a formula is a separate row."""
    found: dict[tuple[tuple[str, ...], str], float] = {}
    for x in counted(schedule):
        key = (x.axes or (), x.kind)
        found[key] = found.get(key, 0.0) + x.sent
    out = []
    for sent in schedule.formula:
        axes = schedule.links[sent.axis]
        count = found.pop((axes, sent.kind), 0.0)
        out.append(Row(schedule.name, "+".join(axes), sent.kind, sent.formula, sent.nbytes, count))
    out += [Row(schedule.name, "+".join(axes), kind, "none", 0.0, count) for (axes, kind), count in found.items()]
    return out


def main() -> int:
    """Prints the table."""
    print(f"jax {jax.__version__}; M = {M / 1e6:.3f} MB; n = {N} devices; MiCS: p = 4, r = 2, k = {K}, e = 2")
    print(f"{'schedule':23s} {'axis':8s} {'collective':15s} {'formula':16s} {'promised':>10s} {'counted':>10s}")
    table = [row for schedule in schedules() for row in rows(schedule)]
    for row in table:
        mark = "" if row.ok else "  off by more than 1 %"
        sizes = f"{row.promised / 1e6:7.3f} MB {row.count / 1e6:7.3f} MB"
        print(f"{row.schedule:23s} {row.axis:8s} {row.kind:15s} {row.formula:16s} {sizes}{mark}")
    print(f"{sum(row.ok for row in table)} of {len(table)} within 1 %")
    return 0 if all(row.ok for row in table) else 1


if __name__ == "__main__":
    sys.exit(main())
