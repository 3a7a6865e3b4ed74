"""The README's program runs as it stands, and its words fit the code."""

import pathlib
import re

import jax
import numpy as np

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_quick_start_runs():
    first, second = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    names: dict[str, object] = {}
    exec(first, names)
    _check_run(names)
    exec(second, names)  # stage 3 goes on from there
    _check_run(names)
    np.testing.assert_array_equal(names["whole"]["w"], names["params"]["w"])
    assert names["logits"].shape == (64, 8)
    assert names["split"]["w"].value.addressable_shards[0].data.size * 8 == names["split"]["w"].value.size


def _check_run(names):
    assert np.isfinite(names["loss"])
    state = [x for x in jax.tree.leaves(names["state"]) if x.ndim]
    assert state
    assert all(x.addressable_shards[0].data.size * 8 == x.size for x in state)


def test_table_of_optimizers_has_its_markers():
    assert README.count("<!-- optimizers:begin -->") == README.count("<!-- optimizers:end -->") == 1


def test_links_lead_somewhere():
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_make_targets_exist():
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = set(re.findall(r"(?:`|^ {4})make ([\w-]+)", README, re.MULTILINE))
    assert {"train", "test"} <= named <= set(targets)


def test_options_of_the_example_are_listed():
    options = set(
        re.findall(r"^    (\w+): ", (ROOT / "examples/train_gpt.py").read_text().split("def fail")[0], re.MULTILINE)
    )
    listed = (ROOT / "examples/README.md").read_text()
    assert {o for o in options if f"`--{o.replace('_', '-')}`" not in listed} == set()
