"""How far the predicted time of a step is off: `jaxzero.predict` next to measured steps on virtual CPU devices.

    python benchmarks/step_model.py [--rounds 15] [--optimizer adamw]

First measures the constants of this machine, with all devices at work at once, as in a step: products, memory, the
least time of an instruction, and bandwidth and latency of collectives. Then compiles every way of `ways.py`, times it
and predicts it. No constant is fitted to a step. Counts the pairs of ways that differ by more than 15 % in measured
time, and those whose order the model has right.

Writes `benchmarks/measured/step_model.json`.
"""

import argparse
import itertools
import time
from collections.abc import Callable
from typing import Any

import step_time  # first: it sets the number of devices

import jax  # isort: skip
import jax.numpy as jnp
import numpy as np
import optax
import results
import ways
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxzero

WORLD = 8
#: Pairs that differ by less are not compared.
APART = 1.15
OPTIMIZERS = {"adamw": optax.adamw, "lamb": optax.lamb}


def seconds(run: Callable[..., Any], *arguments: Any, rounds: int = 15) -> float:
    """The least time of a call, as other programs on the machine can only add to it."""
    jax.block_until_ready(run(*arguments))
    times = []
    for _ in range(rounds):
        clock = time.perf_counter()
        jax.block_until_ready(run(*arguments))
        times.append(time.perf_counter() - clock)
    return min(times)


def constants(mesh: Mesh) -> jaxzero.Machine:
    """The figures of this machine for one of its virtual devices, with all of them at work."""
    everywhere = lambda f: jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P("data"), out_specs=P("data")))
    array = lambda *shape: jnp.ones((mesh.size * shape[0], *shape[1:]))
    idle = seconds(everywhere(lambda x: x + 1), array(8))
    products, size = 8, 256
    chain = everywhere(lambda x: jax.lax.fori_loop(0, products, lambda _, y: y @ x, x))
    peak = products * 2 * size**3 / (seconds(chain, array(size, size)) - idle)
    length = 2**20
    copy = everywhere(lambda x: jax.lax.fori_loop(0, products, lambda _, y: -y, x))
    bandwidth = products * 2 * 4 * length / (seconds(copy, array(length)) - idle)
    small = everywhere(lambda x: jax.lax.fori_loop(0, 1000, lambda _, y: jnp.sort(y), x))
    launch = (seconds(small, array(8)) - idle) / 1000 / 3  # the counter and its comparison beside the sort
    gather = lambda x: jax.lax.all_gather(x, "data", tiled=True)
    scatter = lambda x: jax.lax.psum_scatter(gather(x), "data", tiled=True)
    many = lambda times: everywhere(lambda x: jax.lax.fori_loop(0, times, lambda _, y: scatter(y), x))
    each = (seconds(many(20), array(8)) - idle) / 40
    large = (seconds(many(5), array(2**17)) - idle) / 10 - each
    sent = 4 * 2**17 * (mesh.size - 1)
    return jaxzero.Machine(
        name="cpu",
        bf16=peak,
        f32=peak,
        f64=peak / 2,
        memory=1e12,
        bandwidth=bandwidth,
        per_node=mesh.size,
        local=sent / large,
        network=sent / large,
        local_latency=each / (mesh.size - 1),
        launch=launch,
        products_reach=1,
        memory_reach=1,
        links_reach=1,
    )


def compared(mesh: Mesh, machine: jaxzero.Machine, optimizer: str, rounds: int) -> list[dict[str, Any]]:
    """One row per way: measured and predicted seconds."""
    tokens = jax.random.randint(jax.random.key(1), (step_time.BATCH[0], step_time.BATCH[1] + 1), 0, 1003)
    runs = {}
    for way in step_time.WAYS:
        step = ways.step(way, mesh, step_time.model, OPTIMIZERS[optimizer](1e-3))
        compiled = step.compile()
        whole = ways.drawn(step_time.model(ways.models.How(ways.WAYS[way].stacked))[0])
        runs[way] = [compiled, *step_time.started(step, whole, tokens), []]
    for _ in range(rounds):
        for run in runs.values():
            clock = time.perf_counter()
            run[1], run[2], _ = jax.block_until_ready(run[0](*run[1:4]))
            run[4].append(time.perf_counter() - clock)
    rows = []
    for way, (compiled, _, _, _, times) in runs.items():
        found = jaxzero.predict(compiled, machine, mesh)
        rows.append(dict(way=way, measured=min(times[1:]), predicted=found.seconds, exposed=found.exposed))
        print(
            f"{way:26s} {1e3 * rows[-1]['measured']:8.1f} ms measured {1e3 * found.seconds:8.1f} ms predicted",
            flush=True,
        )
    return rows


def order(rows: list[dict[str, Any]]) -> tuple[int, int]:
    """How many pairs are ordered right, of those that differ enough."""
    pairs = [
        (a, b)
        for a, b in itertools.combinations(rows, 2)
        if max(a["measured"], b["measured"]) > APART * min(a["measured"], b["measured"])
    ]
    right = sum((a["measured"] < b["measured"]) == (a["predicted"] < b["predicted"]) for a, b in pairs)
    return right, len(pairs)


def main() -> None:
    """Measures, predicts and writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--optimizer", default="adamw", choices=list(OPTIMIZERS))
    given = parser.parse_args()
    mesh = Mesh(np.array(jax.devices()[:WORLD]), ("data",))
    machine = constants(mesh)
    names = ("f32", "bandwidth", "local", "local_latency", "launch")
    figures = {name: getattr(machine, name) for name in names}
    print(figures)
    rows = compared(mesh, machine, given.optimizer, given.rounds)
    right, pairs = order(rows)
    print(f"{right} of {pairs} pairs that differ by more than {APART - 1:.0%} are ordered right")
    results.write(
        "step_model",
        rows,
        dict(order=(right, pairs), figures=figures, optimizer=given.optimizer, rounds=given.rounds, world=WORLD),
    )


if __name__ == "__main__":
    main()
