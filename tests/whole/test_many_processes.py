"""Two processes with four devices each, joined by `jax.distributed`, beside one process with eight."""

import json
import pathlib
import subprocess
import sys

import checkpoint_cases as cases
import helpers
import jax
import numpy as np
import pytest

import jaxzero

EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "multi_process.py"


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    """The folder that `many_processes.py` left behind, and its losses; what it asserts by itself has passed."""
    directory = tmp_path_factory.mktemp("two")
    helpers.run_processes("many_processes.py", str(directory))
    losses = [json.loads((directory / f"losses-{i}.json").read_text()) for i in range(2)]
    assert losses[0] == losses[1]
    return directory, losses[0]


@pytest.mark.parametrize("layout", ["8/3", "2x4/2"])
def test_two_processes_equal_one(two_processes, layout):
    directory, losses = two_processes
    zero = cases.make_zero(layout)
    params, state, mine = cases.train(layout, *cases.start(layout), 0, 3)
    np.testing.assert_allclose(losses[layout], mine, rtol=5e-6)
    with np.load(directory / f"{layout.replace('/', '-')}.npz") as found:
        helpers.close(dict(found), jax.tree.map(np.asarray, zero.gather(params)), 5e-6)
    restored = jaxzero.restore(
        directory / layout.replace("/", "-"), zero, cases.abstract(cases.make_params()), cases.INNER
    )
    got = cases.whole(zero, restored.params, restored.opt_state)
    helpers.close(got, cases.whole(zero, params, state), 5e-6)
    other = cases.make_zero("3/3")
    again = jaxzero.restore(
        directory / layout.replace("/", "-"), other, cases.abstract(cases.make_params()), cases.INNER
    )
    cases.same_bits(cases.whole(other, again.params, again.opt_state), got)


def run_example(*options):
    return subprocess.run([sys.executable, EXAMPLE, *options], capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.slow
def test_example_trains_and_resumes(tmp_path):
    first = run_example("--steps", "12", "--checkpoint-dir", str(tmp_path))
    assert first.returncode == 0, first.stderr
    losses = [float(line.split()[3]) for line in first.stdout.splitlines() if line.startswith("step")]
    assert len(losses) == 12
    assert sum(losses[-3:]) < 0.8 * sum(losses[:3])
    assert "process 1 of 2: 4 of 8 devices" in first.stdout
    second = run_example("--steps", "12", "--checkpoint-dir", str(tmp_path), "--processes", "1", "--devices", "8")
    assert second.returncode == 0, second.stderr
    again = [float(line.split()[3]) for line in second.stdout.splitlines() if line.startswith("step")]
    assert len(again) == 2
    assert "process 0 of 1: 8 of 8 devices" in second.stdout


def test_example_tells_that_nobody_came():
    run = run_example("--process", "1", "--coordinator", "localhost:1", "--timeout", "2")
    assert run.returncode == 1
    assert "multi_process: process 1 waited 2 s for 2 processes to meet at localhost:1." in run.stderr
    assert run.stderr.count("\n") == 1
