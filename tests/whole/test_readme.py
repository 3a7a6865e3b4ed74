"""The README's program runs as it stands, and so do those of the user guide; their words fit the code."""

import pathlib
import re

import jax
import numpy as np
import optax
import pytest

import jaxzero

ROOT = pathlib.Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(text):
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def sections(text):
    """The Python block below each heading that has one."""
    parts = re.split(r"^## ", text, flags=re.MULTILINE)
    return {part.splitlines()[0]: "\n".join(blocks(part)) for part in parts if blocks(part)}


def test_programs_run(tmp_path):
    """The quick start, then the guide from top to bottom in the same names."""
    (quick_start,) = blocks(README)
    names: dict[str, object] = {}
    exec(quick_start, names)
    _check_run(names)
    whole = names["params"]
    guide = sections((ROOT / "docs/guide.md").read_text())
    exec(guide.pop("Stage 3: parameters split too"), names)
    _check_run(names)
    np.testing.assert_array_equal(names["whole"]["w"], whole["w"])
    assert names["logits"].shape == (64, 8)
    assert names["split"]["w"].value.addressable_shards[0].data.size * 8 == names["split"]["w"].value.size
    exec(guide.pop("Inside your own `shard_map`"), names)
    _check_run(names)
    assert float(np.max(np.abs(names["params"]["w"] - whole["w"]))) > 1e-5
    saved = names["params"]
    names |= {
        "zero": jaxzero.Zero(names["mesh"]),
        "inner": optax.lamb(1e-3),
        "abstract_params": jax.eval_shape(lambda: saved),
    }
    exec(guide.pop("Checkpoints").replace("/checkpoints/run", str(tmp_path / "run")), names)
    _check_run(names)
    np.testing.assert_array_equal(names["params"]["w"], saved["w"])
    assert names["position"] == {"next batch": 100}
    for heading, block in guide.items():  # what needs more than the quick start has
        compile(block, heading, "exec")


def test_silent_mistakes_are_wrong_and_mended():
    """Each block of the page asserts that its wrong line gives another number, and its right one the unsharded one."""
    page = (ROOT / "docs/silent_mistakes.md").read_text()
    names: dict[str, object] = {}
    parts = sections(page)
    assert len(parts) == page.count("\n## ") + 1
    for heading, block in parts.items():
        assert re.search(r"^ *assert ", block, re.MULTILINE), heading
        exec(compile(block, heading, "exec"), names)


def test_quick_start_has_fifteen_lines():
    (quick_start,) = blocks(README)
    assert len([line for line in quick_start.splitlines() if line.strip()]) <= 15


def test_readme_is_one_screen():
    assert README.count("\n") <= 90


def _check_run(names):
    assert 0 < names["loss"] < np.inf
    state = [x for x in jax.tree.leaves(names["state"]) if x.ndim]
    assert state
    assert all(x.addressable_shards[0].data.size * 8 == x.size for x in state)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#:]+)\)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_make_targets_exist():
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = set(re.findall(r"(?:`|^ {4})make ([\w-]+)", README, re.MULTILINE))
    assert {"train", "test", "docs"} <= named <= set(targets)


def test_options_of_the_example_are_listed():
    options = set(
        re.findall(r"^    (\w+): ", (ROOT / "examples/train_gpt.py").read_text().split("def fail")[0], re.MULTILINE)
    )
    listed = (ROOT / "examples/README.md").read_text()
    options -= {"process", "coordinator"}  # with which the program starts itself
    assert {o for o in options if f"`--{o.replace('_', '-')}`" not in listed} == set()
