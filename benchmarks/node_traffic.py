"""Bytes that enter one node in one gather of stage 3, flat and hierarchical, compiled for nodes of 8 GPUs.

    python benchmarks/node_traffic.py

It needs `pip install ".[cuda]"` and no GPU.

The count is from the compiled program. Each group of a gather counts as a ring that passes through the nodes of its
devices in order, so a group of `g` devices in several nodes brings `(g-1)/g` of its result into each of these nodes.
The bytes of several groups in one node (one channel per device) are added.

For `M` bytes over `p` devices, `k` in a node, the formulas are `(p-1)M/p` for a flat gather and `(p-k)M/p` in hops.
If a count is off by more than 1 %, the exit status is 1.
"""

import os
import sys
from collections.abc import Iterable

os.environ.setdefault("JAX_PLATFORMS", "cpu")
import formulas
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxzero
from jaxzero import Collective

K = 8
ROWS, COLUMNS = 4096, 4096


def entering(rows: Iterable[Collective], node: set[int]) -> float:
    """Bytes that all gathers bring into the devices of one node from other nodes."""
    met = [(x, set(group)) for x in rows if x.kind == "all-gather" for group in x.groups]
    across = [(x, group) for x, group in met if node & group and group - node]
    return sum(x.times * x.nbytes * (len(group) - 1) / len(group) for x, group in across)


def gathers(mesh: Mesh, hierarchical: bool) -> jaxzero.Collectives:
    """The collectives of a program that gathers one large parameter once."""
    zero = jaxzero.Zero(mesh, stage=3, shard_axis=("node", "local"), hierarchical=hierarchical)
    split = NamedSharding(mesh, P(("node", "local")))
    w = jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.float32, sharding=split)
    x = jax.ShapeDtypeStruct((mesh.size, ROWS), jnp.float32, sharding=split)
    run = jax.jit(zero.forward(lambda w, x: x @ w))
    return jaxzero.collectives(run.lower(w, x).compile())


def main() -> int:
    """Prints the table."""
    M = ROWS * COLUMNS * 4
    wrong = 0
    print(f"jax {jax.__version__}; M = {M / 1e6:.1f} MB; k = {K} devices in a node; bytes into one node per gather")
    print(f"{'nodes':>5s} {'way':8s} {'formula':>12s} {'counted':>12s} {'less than flat':>15s}")
    for nodes in (2, 4):
        p = nodes * K
        devices = jaxzero.topology("h100", nodes=nodes, per_node=K)
        mesh = Mesh(devices.reshape(nodes, K), ("node", "local"))
        flat = None
        for hierarchical in (False, True):
            count = entering(gathers(mesh, hierarchical), set(range(K)))
            flat = count if flat is None else flat
            promised = formulas.into_a_node(M, p, K, hierarchical)
            wrong += abs(count - promised) > 0.01 * promised
            way = "in hops" if hierarchical else "flat"
            print(f"{nodes:5d} {way:8s} {promised / 1e6:9.2f} MB {count / 1e6:9.2f} MB {1 - count / flat:15.1%}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
