"""The tutorial runs from top to bottom, its runs agree, and each diff is between the programs beside it."""

import pathlib
import re

import jax
import numpy as np
import pytest

PAGE = (pathlib.Path(__file__).parents[2] / "docs/tutorial.md").read_text()
FENCE = re.compile(r"```(python|diff)\n(.*?)```", re.DOTALL)


@pytest.fixture(scope="module")
def names():
    found: dict[str, object] = {}
    code = "\n".join(code for kind, code in FENCE.findall(PAGE) if kind == "python")
    exec(code.replace("32, 64, 2, 2", "32, 64, 2, 1"), found)  # one layer: half of the time
    return found


def test_every_run_is_the_unsharded_run(names):
    for run in ("stage2", "stage3"):
        np.testing.assert_allclose(names[run], names["plain"], rtol=2e-5)
    np.testing.assert_allclose(names["linen_stage3"], names["linen_plain"], rtol=2e-5)
    assert names["plain"][-1] < names["plain"][0] - 0.3


def test_memory_evaluation_and_resume(names):
    memory = names["memory"]
    assert memory["stage 3"] < memory["one device"] / 8 * 1.02 + 500
    assert memory["stage 2"] < memory["one device"] * (1 + 2 / 8) / 3 * 1.02 + 500
    assert names["held_out"] < names["plain"][0] - 0.3
    assert max(names["resumed"]) < names["plain"][0] - 0.3
    assert names["window"].shape == (names["LENGTH"],)
    assert names["scores"].shape == (16, names["LENGTH"], names["LETTERS"])
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(names["whole"]))


def test_diffs_lead_from_one_program_to_the_next():
    parts = FENCE.findall(PAGE)
    before = ""
    for i, (kind, code) in enumerate(parts):
        if kind == "python":
            before += code
            continue
        after = parts[i + 1][1]
        lines = [(line[0], line[1:]) for line in code.splitlines()]
        assert [line for mark, line in lines if mark in "+ " and line not in after] == []
        assert [line for mark, line in lines if mark == "-" and line not in before and "evaluate" not in line] == []
