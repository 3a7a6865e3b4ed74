"""Memory, traffic and compile time of large models for other machines, compared with native JAX.

    python benchmarks/machines.py h100:2x8 [gpt] [llama]      # needs pip install ".[cuda]", no GPU
    python benchmarks/machines.py v5e:4x4 [gpt] [llama]       # needs pip install ".[tpu]", no TPU

One AdamW step of a 3.4 B-parameter GPT in float32 (2 x 512 tokens per device) and of an 8 B Llama in bfloat16
(1 x 2048 tokens per device), compiled for all devices of the machine: native FSDP (`jit`, NamedSharding on the first
dimension that divides, activations constrained to the batch axis) and stage 3. If XLA refuses a program because it
does not fit the device, the row records that.

Writes `benchmarks/measured/<machine>.json`. Models that are not named keep their rows.
"""

import os
import sys
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")
import jax
import optax
import results
import ways
from jax.sharding import Mesh
from ways import models

import jaxzero

#: The model, and texts per device.
MODELS = {"gpt": (models.gpt_3b, 2), "llama": (models.llama_8b, 1)}


def large(name: str) -> list[str]:
    """The ways to train a model that may fit on a device, scans first because they compile in seconds.

    The Llama is compiled with scans only, because unrolled it compiles for long. It is in bfloat16, and so are the sums
    of native JAX.
    """
    llama = name == "llama"
    kept = [way for way, (split, *_) in ways.WAYS.items() if split in ("fsdp", 3)]
    return [way for way in kept[::-1] if ("scan" in way if llama else "sums" not in way)]


def model(name: str, mesh: Mesh) -> ways.MakeModel:
    """The model, with a batch for all devices of the mesh."""
    make, texts = MODELS[name]
    return lambda how: make(texts * mesh.size, how)


def compiled(name: str, way: str, mesh: Mesh) -> dict[str, object]:
    """One row."""
    clock = time.perf_counter()
    row = dict(model=name, way=way)
    try:
        program = ways.step(way, mesh, model(name, mesh), optax.adamw(1e-4)).compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return row | dict(refused=str(error).splitlines()[0][:200])
    seconds = time.perf_counter() - clock
    memory = jaxzero.Zero(mesh).memory(program)
    found = jaxzero.collectives(program, mesh)
    gathers = [x for x in found if x.kind == "all-gather" and x.nbytes >= 2**22]
    hidden = sum(x.times for x in gathers if x.hidden) / max(1, sum(x.times for x in gathers))
    sizes = dict(arguments=memory.arguments, total=memory.total, peak=memory.peak, sent=found.sent())
    return row | sizes | dict(hidden=hidden, seconds=seconds)


def main(machine: str, *names: str) -> None:
    """Compiles and writes."""
    mesh = Mesh(jaxzero.topology(machine), ("data",))
    file = machine.replace(":", "_")
    names = names or tuple(MODELS)
    kept = [row for row in (results.read(file) or {"rows": []})["rows"] if row["model"] not in names]
    about = {name: ways.count(model(name, mesh)) for name in MODELS}
    rows = []
    for name in names:
        for way in large(name):
            rows.append(compiled(name, way, mesh))
            print(rows[-1], flush=True)
            results.write(file, kept + rows, about)


if __name__ == "__main__":
    if len(sys.argv) < 2 or not set(sys.argv[2:]) <= MODELS.keys():
        sys.exit("machines: expected a machine, h100:2x8 or v5e:4x4, and perhaps models, gpt or llama")
    main(*sys.argv[1:])
