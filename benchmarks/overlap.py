"""How many gathers of stage 3 hide behind matrix products, in the program that XLA schedules for GPUs.

    python benchmarks/overlap.py [plain] [remat] [scan]

Compiles one training step of a 3.4 B-parameter GPT for 2 nodes of 8 H100. None is needed, only
`pip install "jaxzero[cuda]"`.

A gather is hidden if a matrix product stands between its `-start` and its `-done`, and XLA has not marked the
pair as synchronous. Only large gathers are counted. What is scheduled before the first reduce-scatter of a
computation is its forward pass. A loop's body counts once: `while` rows are bodies of scans.
"""

import itertools
import os
import sys
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding

import jaxzero
from jaxzero import Collective, Collectives

VOCAB, WIDTH, LAYERS, LENGTH, HEADS, PER_DEVICE = 32000, 4096, 16, 512, 8, 2
LARGE = 4 * 2**20


def model(stacked):
    """Abstract parameters: blocks as a list, or stacked along a leading axis."""
    shapes = {
        "scale": (2, WIDTH),
        "qkv": (WIDTH, 3 * WIDTH),
        "out": (WIDTH, WIDTH),
        "up": (WIDTH, 4 * WIDTH),
        "bias": (4 * WIDTH,),
        "down": (4 * WIDTH, WIDTH),
    }
    array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    layer = lambda *lead: {k: array(*lead, *s) for k, s in shapes.items()}
    blocks = layer(LAYERS) if stacked else [layer() for _ in range(LAYERS)]
    return {"words": array(VOCAB, WIDTH), "places": array(LENGTH, WIDTH), "blocks": blocks}


def norm(x, scale):
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5) * scale


def block(x, p):
    batch, length, _ = x.shape
    q, k, v = jnp.split((norm(x, p["scale"][0]) @ p["qkv"]).reshape(batch, length, HEADS, -1), 3, -1)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
    scores = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9), -1)
    x = x + jnp.einsum("bhqk,bkhd->bqhd", scores, v).reshape(x.shape) @ p["out"]
    return x + jax.nn.gelu(norm(x, p["scale"][1]) @ p["up"] + p["bias"]) @ p["down"]


def loss_of(wrap):
    """The mean next-token loss, with `wrap` around each block."""

    def loss(params, tokens):
        x = params["words"][tokens[:, :-1]] + params["places"]
        run = wrap(block)
        if isinstance(params["blocks"], dict):
            x, _ = jax.lax.scan(lambda x, p: (run(x, p), None), x, params["blocks"])
        else:
            for p in params["blocks"]:
                x = run(x, p)
        logits = jax.nn.log_softmax(x @ params["words"].T)
        return -jnp.mean(jnp.take_along_axis(logits, tokens[:, 1:, None], -1))

    return loss


def compiled(mesh, loss, params):
    """The collectives of the scheduled program of one training step with the default options."""
    tokens = jax.ShapeDtypeStruct((mesh.size * PER_DEVICE, LENGTH + 1), jnp.int32)
    zero = jaxzero.Zero(mesh, stage=3).observe(loss, params, tokens)
    tx = zero.optimizer(optax.adamw(1e-4))
    split = jax.eval_shape(zero.shard, params)
    state = jax.eval_shape(tx.init, split)
    placed = lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
    at_rest = lambda tree: jax.tree.map(placed, tree, zero.specs(tree))

    def step(params, state, tokens):
        value, grads = zero.value_and_grad(loss)(params, tokens)
        return *zero.apply(tx, grads, state, params), value

    program = jax.jit(step, donate_argnums=(0, 1)).lower(at_rest(split), at_rest(state), tokens).compile()
    return jaxzero.collectives(program, mesh)


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


def main(*rows):
    """Prints the table."""
    mesh = Mesh(jaxzero.topology("h100:2x8"), ("data",))
    print(f"jax {jax.__version__}, {mesh.size} GPUs, gathers of at least {LARGE // 2**20} MB")
    print("model  where  pass      gathers  hidden  synchronous  hidden")
    same = lambda f: f
    for name, wrap, stacked in (
        ("plain", same, False),
        ("remat", jax.checkpoint, False),
        ("scan", jax.checkpoint, True),
    ):
        if not rows or name in rows:
            start = time.time()
            report(name, compiled(mesh, loss_of(wrap), model(stacked)))
            print(f"{name:6s} in {time.time() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
