"""Device memory of a training step with state and parameters stored on the host, compiled for GPUs.

    python benchmarks/offload.py [none] [state] [params] [--scan]

Compiles one AdamW step of the 3.4 B-parameter GPT of `overlap.py`, its blocks under `jax.checkpoint`, at stage 3 for
8 H100. It needs `pip install ".[cuda]"` and no GPU.

JAX has no memory kinds for devices that are not present. So the script marks the arguments that are stored on the host
in the lowered program; on a real GPU their sharding (`memory_kind="pinned_host"`) does that.
"""

import os
import sys
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")
import jax
import machines
import optax
from jax.sharding import Mesh, NamedSharding
from ways import models

import jaxzero

OFFLOAD = {"none": (), "state": ("state",), "params": ("state", "params")}


def mark(lowered, on_host):
    """Marks arguments of the entry function as stored on the host; `on_host` has one bool for each."""
    module = lowered.compiler_ir("stablehlo")
    with module.context:
        entry = next(op for op in module.body.operations if "main" in str(op.attributes["sym_name"]))
        text, every = type(entry.attributes["sym_name"]), entry.attributes["arg_attrs"]
        host_kind = {"mhlo.memory_kind": text.get("pinned_host")}
        marked = [
            type(one).get({x.name: x.attr for x in one} | (host_kind if host else {}))
            for one, host in zip(every, on_host, strict=True)
        ]
        entry.attributes["arg_attrs"] = type(every).get(marked)
    return lowered


def compiled(mesh, offload, stacked):
    """The step, compiled."""
    params, loss, tokens = machines.model("gpt", mesh)(models.How(stacked))
    zero = jaxzero.Zero(mesh, stage=3, offload=offload).observe(loss, params, tokens)
    tx = zero.optimizer(optax.adamw(1e-4))
    split = jax.eval_shape(zero.shard, params)
    placed = lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
    stored = lambda tree: jax.tree.map(placed, tree, zero.specs(tree))
    params, state = stored(split), stored(jax.eval_shape(tx.init, split))
    hosted = [
        [x.ndim > 0 and what in offload for x in jax.tree.leaves(tree)]
        for what, tree in (("params", params), ("state", state))
    ]

    def host(tree, marks):
        leaves, structure = jax.tree.flatten(tree)
        moved = [jax.device_put(x, jax.memory.Space.Host) if m else x for x, m in zip(leaves, marks, strict=True)]
        return jax.tree.unflatten(structure, moved)

    def step(params, state, tokens):
        params, state = host(params, hosted[0]), host(state, hosted[1])
        value, grads = zero.value_and_grad(loss)(params, tokens)
        return *zero.apply(tx, grads, state, params), value

    lowered = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, tokens)
    return mark(lowered, [*hosted[0], *hosted[1], False]).compile()


def main(*arguments):
    """Prints the table."""
    mesh = Mesh(jaxzero.topology("h100:1x8"), ("data",))
    print(f"jax {jax.__version__}, {mesh.size} GPUs; GB per device")
    print("offload           device  arguments  temporaries  host")
    rows = [x for x in arguments if x in OFFLOAD] or list(OFFLOAD)
    for name in rows:
        start = time.time()
        found = compiled(mesh, OFFLOAD[name], "--scan" in arguments).memory_analysis()
        arguments_, temporaries = found.argument_size_in_bytes, found.temp_size_in_bytes
        total = arguments_ + temporaries + found.output_size_in_bytes - found.alias_size_in_bytes
        figures = [x / 1e9 for x in (total, arguments_, temporaries, found.host_argument_size_in_bytes)]
        row = "{:16s} {:7.2f}  {:9.2f}  {:11.2f}  {:4.2f}".format(name, *figures)
        print(row, f" in {time.time() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
