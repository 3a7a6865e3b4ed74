"""The memory that saving and restoring take beside the state at rest, in a process of its own."""

import sys

import helpers
import pytest

CODE = """
import jax.numpy as jnp, optax, sys, tempfile, jaxzero

def memory(kind):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(kind)) * 1024

def peak_of(f):
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak so far is forgotten
    before = memory("VmRSS")
    f()
    return (memory("VmHWM") - before) / total

def make():
    rows = {f"w{i}": jnp.full((1024, 512), float(i)) for i in range(10)}
    return {"odd": jnp.full((50257, 256), 1.5), "kernel": jnp.full((3, 3, 257, 515), 2.0), **rows}

def run(make, directory):
    zero, inner = jaxzero.Zero(jax.make_mesh((8,), ("data",)), stage=3), optax.adamw(1e-3)
    abstract = jax.eval_shape(make)
    params = zero.init(make)
    state = jax.block_until_ready(jax.jit(zero.optimizer(inner).init)(params))
    save = peak_of(lambda: jaxzero.save(directory, 0, zero, params, state).wait())
    del params, state
    return save, peak_of(lambda: jax.block_until_ready(jaxzero.restore(directory, zero, abstract, inner)[:2]))

total = 3 * sum(x.size * 4 for x in jax.tree.leaves(jax.eval_shape(make)))
run(lambda: {"odd": jnp.ones((17, 30)), "w": jnp.ones((16, 8))}, tempfile.mkdtemp())  # what is loaded once
print(*run(make, tempfile.mkdtemp()))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_of_save_and_restore():
    """Of 232 MB of state, half in one leaf that divides by nothing; all eight shares are this process's."""
    save, restore = map(float, helpers.run_python(CODE).split())
    print(f"save: {save:.2f} of the share beside it, restore: {restore:.2f} of it in all")
    assert save < 1.5
    assert restore < 1.5
