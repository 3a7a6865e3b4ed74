"""How many gathers of stage 3 overlap with matrix products in the program that XLA schedules for GPUs.

    python benchmarks/overlap.py [plain] [remat] [scan]

Compiles one training step of a 3.4 B-parameter GPT for 2 nodes of 8 H100. It needs `pip install ".[cuda]"` and
no GPU.

A gather is hidden if a matrix product is scheduled between its `-start` and its `-done`, and XLA has not marked the
pair as synchronous. Only large gathers are counted. The instructions before the first reduce-scatter of a computation
are its forward pass. The body of a loop counts once; `while` rows are bodies of scans.
"""

import itertools
import os
import sys
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")
import jax
import machines
import optax
import ways
from jax.sharding import Mesh

import jaxzero
from jaxzero import Collective, Collectives

LARGE = 4 * 2**20
ROWS = {"plain": "stage 3", "remat": "stage 3 + remat", "scan": "stage 3 + remat + scan"}


def report(name: str, found: Collectives) -> None:
    """Prints one row per computation and pass."""
    for _, rows in itertools.groupby(found, lambda x: x.computation):
        forward, backward = _passes(list(rows))
        for kind, mine in (("forward", forward), ("backward", backward)):
            mine = [x for x in mine if x.kind == "all-gather" and x.nbytes >= LARGE]
            if mine:
                where = "while" if mine[0].looped else "step"
                hidden, waits = sum(x.hidden for x in mine), sum(x.distance is None for x in mine)
                share = 100 * hidden / len(mine)
                print(
                    f"{name:6s} {where:6s} {kind:9s} {len(mine):4d} {hidden:7d} {waits:12d} {share:6.0f} %", flush=True
                )


def _passes(rows: list[Collective]) -> tuple[list[Collective], list[Collective]]:
    """The collectives of one computation that belong to the forward and to the backward pass."""
    first = next((i for i, x in enumerate(rows) if x.kind == "reduce-scatter"), len(rows))
    if rows[0].looped and first < len(rows):
        first = 0
    return rows[:first], rows[first:]


def main(*rows: str) -> None:
    """Prints the table."""
    mesh = Mesh(jaxzero.topology("h100:2x8"), ("data",))
    model = machines.model("gpt", mesh)
    print(f"jax {jax.__version__}, {mesh.size} GPUs, gathers of at least {LARGE // 2**20} MB")
    print("model  where  pass      gathers  hidden  synchronous  hidden")
    for name in rows or ROWS:
        start = time.time()
        step = ways.step(ROWS[name], mesh, model, optax.adamw(1e-4))
        report(name, jaxzero.collectives(step.compile(), mesh))
        print(f"{name:6s} in {time.time() - start:.0f} s", flush=True)


if __name__ == "__main__":
    if not set(sys.argv[1:]) <= ROWS.keys():
        sys.exit(f"overlap: expected some of {', '.join(ROWS)}")
    main(*sys.argv[1:])
