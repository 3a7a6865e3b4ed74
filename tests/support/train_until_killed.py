"""One of several processes that train, save every step, and go on from what they find.

    python train_until_killed.py COORDINATOR PROCESSES PROCESS DEVICES DIRECTORY LAYOUT LAST

Beside the checkpoints, process 0 notes for each step a digest of what is saved, and which steps are complete.
"""

import hashlib
import json
import pathlib
import sys

import checkpoint_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxzero


@jax.jit
def bits(state):
    """Sums of the bits of each leaf: exact, and padding, which is zero, adds nothing."""
    return [jnp.sum(lax.bitcast_convert_type(x, jnp.uint32)) for x in jax.tree.leaves(state)]


def digest(zero, params, state) -> str:
    """Of every leaf of parameters and state, whatever the layout."""
    text = hashlib.sha256()
    for x in [*jax.tree.leaves(zero.gather(params)), *bits(state)]:
        text.update(np.asarray(x.addressable_data(0)).tobytes())
    return text.hexdigest()


def note(directory: pathlib.Path, **facts) -> None:
    if jax.process_index() == 0:
        with open(directory / "notes", "a") as file:
            file.write(json.dumps(facts) + "\n")


def main(directory: pathlib.Path, layout: str, last: int) -> None:
    zero = cases.make_zero(layout)
    step = jaxzero.latest(directory / "run")
    if step is None:
        step = 0
        params, state = cases.start(layout)
    else:
        params, state, step, _ = jaxzero.restore(
            directory / "run", zero, cases.abstract(cases.make_params()), cases.INNER
        )
        note(directory, restored=step, digest=digest(zero, params, state))
    saving = None
    cases.train(layout, params, state, step, 1)  # compiles
    note(directory, training=step)
    while step < last:
        params, state, losses = cases.train(layout, params, state, step, 1)
        step += 1
        note(directory, step=step, loss=losses[0], digest=digest(zero, params, state))
        if saving is not None:
            saving.wait()
            note(directory, complete=step - 1)
        saving = jaxzero.save(directory / "run", step, zero, params, state)
    if saving is not None:
        saving.wait()
        note(directory, complete=step)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", int(sys.argv[4]))
    jax.distributed.initialize(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), initialization_timeout=120)
    main(pathlib.Path(sys.argv[5]), sys.argv[6], int(sys.argv[7]))
