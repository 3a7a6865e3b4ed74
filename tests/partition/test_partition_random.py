"""Random programs on shares give what they give on whole arrays, over any mesh and any layouts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import random_programs
from on_shares import evaluate

# JAX itself warns when it takes the maximum of some short integers.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in cast")
SEEDS = [*range(4), *(pytest.param(i, marks=pytest.mark.slow) for i in range(4, 100))]


@pytest.mark.parametrize("seed", SEEDS)
def test_random(seed):
    """NaN in the padding of every argument; each intermediate value compared, on each device."""
    program = random_programs.make(seed)
    got, _ = evaluate(program, program.arrays, program.layouts, program.world)
    want = jax.jit(program)(*program.arrays)
    made = [f"argument {i}" for i in range(len(program.arrays))]
    for name, step in program.steps:
        made += [name] * len(jax.eval_shape(step, want[: len(made)]))
    for i, (name, a, b) in enumerate(zip(made, got, want, strict=True)):
        assert a.dtype == b.dtype
        scale = np.max(np.abs(b), initial=0.01, where=np.isfinite(b))
        for part in a.addressable_shards:
            message = f"value {i}, {name}, seed {seed}"
            if jnp.issubdtype(b.dtype, jnp.floating):
                np.testing.assert_allclose(part.data, b, rtol=0, atol=3e-5 * scale, err_msg=message)
            else:
                np.testing.assert_array_equal(part.data, b, err_msg=message)
