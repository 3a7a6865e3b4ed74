"""How many gathers of stage 3 hide behind matrix products, in the program that XLA schedules for GPUs.

    python benchmarks/overlap.py TARGET_CONFIG [plain] [remat] [scan]

Compiles one training step of a 3.4 B-parameter GPT for 2 nodes of 8 GPUs. None is needed, only
`pip install "jax[cuda12]"` and the description of the GPU: a text proto as XLA dumps it
(`*.gpu_target_config.pbtxt` of `--xla_dump_to`), given as the first argument or as $GPU_TARGET_CONFIG.

A gather is hidden if a matrix product stands between its `-start` and its `-done`, and XLA has not marked the
pair as synchronous. Only large gathers are counted. What is scheduled before the first reduce-scatter of a
computation is its forward pass. A loop's body counts once: `while` rows are bodies of scans.
"""

import os
import pathlib
import re
import sys
import time
from collections.abc import Iterator

os.environ.setdefault("JAX_PLATFORMS", "cpu")
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding

import jaxzero

VOCAB, WIDTH, LAYERS, LENGTH, HEADS, PER_DEVICE = 32000, 4096, 16, 512, 8, 2
LARGE = 4 * 2**20
BYTES = {"f32": 4, "bf16": 2, "f16": 2}


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


def compiled_text(mesh, loss, params):
    """The scheduled program of one training step with the default options."""
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

    return jax.jit(step, donate_argnums=(0, 1)).lower(at_rest(split), at_rest(state), tokens).compile().as_text()


def computations(text: str) -> Iterator[tuple[str, list[str]]]:
    """The computations of a program: name and instructions, in the order in which they run."""
    name, lines = "", list[str]()
    for line in text.splitlines():
        if line.startswith(("%", "ENTRY")) and line.endswith("{"):
            name, lines = line.split()[0], []
        elif line.startswith("}") and name:
            yield name, lines
            name = ""
        elif name:
            lines.append(line)


def gathers(lines: list[str]) -> Iterator[tuple[str, bool, bool]]:
    """Of each large gather of one computation: its pass, whether it is hidden, whether it is synchronous."""
    products = [i for i, x in enumerate(lines) if re.search(r"%(gemm_fusion|cublas|dot)[\w.-]* = |\"__cublas", x)]
    first = next((i for i, x in enumerate(lines) if " reduce-scatter-start(" in x), len(lines))
    for start, line in enumerate(lines):
        found = re.match(r"\s*(%[\w.-]+) = (.*) all-gather-start\(", line)
        if not found or max(map(nbytes, re.findall(r"(?:f32|bf16|f16)\[[\d,]*\]", found[2])), default=0) < LARGE:
            continue
        done = next(i for i, x in enumerate(lines) if f" all-gather-done({found[1]})" in x)
        waits = '"is_sync":true' in line
        hidden = not waits and any(start < i < done for i in products)
        yield ("forward" if start < first else "backward"), hidden, waits


def nbytes(array: str) -> int:
    """Bytes of an array as XLA writes it, `f32[16,4096]`."""
    kind, _, dimensions = array[:-1].partition("[")
    return BYTES[kind] * int(np.prod([int(d) for d in dimensions.split(",") if d]))


def report(name: str, text: str) -> None:
    """Prints one row per computation and pass."""
    for computation, lines in computations(text):
        rows = list(gathers(lines))
        where = "step" if computation == "ENTRY" else "while"
        backward = where == "while" and any(" reduce-scatter-start(" in x for x in lines)
        rows = [("backward" if backward else kind, *rest) for kind, *rest in rows]
        for kind in ("forward", "backward"):
            mine = [x for x in rows if x[0] == kind]
            if mine:
                hidden, waits = sum(x[1] for x in mine), sum(x[2] for x in mine)
                share = 100 * hidden / len(mine)
                print(
                    f"{name:6s} {where:6s} {kind:9s} {len(mine):4d} {hidden:7d} {waits:12d} {share:6.0f} %", flush=True
                )


def main(config="", *rows):
    """Prints the table."""
    target = pathlib.Path(config or os.environ["GPU_TARGET_CONFIG"]).read_text()
    topology = topologies.get_topology_desc("any", platform="cuda", target_config=target, topology="2x8x1")
    mesh = Mesh(np.array(topology.devices), ("data",))
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
            report(name, compiled_text(mesh, loss_of(wrap), model(stacked)))
            print(f"{name:6s} compiled in {time.time() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
