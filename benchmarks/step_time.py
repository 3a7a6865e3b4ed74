"""Step time, compile time, memory and traffic of a small GPT on virtual CPU devices, compared with native JAX.

    python benchmarks/step_time.py [--worlds 2 4 8] [--optimizers adamw lamb muon] [--rounds 20]

For one world and optimizer, all ways run in one process and take turns, step by step, with the same parameters and
batch. The time of a way is the minimum of all rounds, because other programs on the machine can only increase it.
Virtual devices share the cores of this machine, so the times include computation, copies and calls, but no network.

Writes `benchmarks/measured/step_time.json`. Worlds and optimizers that are not named keep their rows.
"""

import argparse
import datetime as dt
import os
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("NPROC", "32")
import jax

jax.config.update("jax_num_cpu_devices", 8)
import numpy as np
import optax
import optax.contrib
import results
import ways
from jax.sharding import Mesh
from ways import models

import jaxzero

SHAPE = dict(vocabulary=1003, width=128, layers=3, heads=4)
BATCH = (16, 32)
#: Parameters and native sums are float32.
WAYS = [way for way in ways.WAYS if "sums" not in way]
OPTIMIZERS = {"adamw": optax.adamw, "lamb": optax.lamb, "muon": optax.contrib.muon}


def model(how: models.How) -> models.Problem:
    """The GPT."""
    return models.gpt(**SHAPE, batch=BATCH, how=how)


def started(step: ways.Step, whole: optax.Params, tokens: jax.Array) -> list[jax.Array]:
    """The arguments of a step, with the same initial values for every way."""
    put = lambda x, like: jax.device_put(x, like.sharding)
    params = jax.tree.map(put, step.shard(whole), step.params)
    state = jax.tree.map(put, jax.jit(step.init)(params), step.state)
    return [params, state, put(tokens, step.tokens)]


def measured(world: int, name: str, rounds: int) -> list[dict[str, object]]:
    """One row per way."""
    mesh = Mesh(np.array(jax.devices()[:world]), ("data",))
    tokens = jax.random.randint(jax.random.key(1), (BATCH[0], BATCH[1] + 1), 0, SHAPE["vocabulary"])
    runs = {}
    for way in WAYS:
        step = ways.step(way, mesh, model, OPTIMIZERS[name](1e-3))
        clock = time.perf_counter()
        compiled = step.compile()
        seconds = time.perf_counter() - clock
        whole = ways.drawn(model(models.How(ways.WAYS[way].stacked))[0])
        runs[way] = [compiled, *started(step, whole, tokens), [], seconds]
    for _ in range(rounds):
        for run in runs.values():
            clock = time.perf_counter()
            run[1], run[2], _ = jax.block_until_ready(run[0](*run[1:4]))
            run[4].append(time.perf_counter() - clock)
    rows = []
    for way, (compiled, _, _, _, times, seconds) in runs.items():
        memory = jaxzero.Zero(mesh).memory(compiled)
        sent = jaxzero.collectives(compiled, mesh).sent()
        rows.append(
            dict(
                world=world,
                optimizer=name,
                way=way,
                milliseconds=1e3 * min(times[1:]),
                compile_seconds=seconds,
                total=memory.total,
                temporaries=memory.temporaries,
                sent=sent,
                date=dt.date.today().isoformat(),
            )
        )
        print(
            f"{world} {name:6s} {way:24s} {rows[-1]['milliseconds']:8.1f} ms  {memory.total / 1e6:7.2f} MB", flush=True
        )
    return rows


def main() -> None:
    """Measures and writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--optimizers", nargs="+", default=list(OPTIMIZERS), choices=list(OPTIMIZERS))
    parser.add_argument("--rounds", type=int, default=20)
    given = parser.parse_args()
    about = dict(parameters=ways.count(model), batch=BATCH[0], length=BATCH[1], rounds=given.rounds, **SHAPE)
    rows = (results.read("step_time") or {"rows": []})["rows"]
    for name in given.optimizers:
        for world in given.worlds:
            others = [row for row in rows if (row["world"], row["optimizer"]) != (world, name)]
            rows = others + measured(world, name, given.rounds)
            results.write("step_time", rows, about)


if __name__ == "__main__":
    main()
