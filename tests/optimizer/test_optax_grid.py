"""Every Optax optimizer, sharded, equals the unsharded run.

The names are discovered from Optax's namespaces, so a new one fails here until it is classified in
`optax_cases.py`. The tests give every optimizer one cell of the grid (some a second) and visit every mesh, stage and
way to run; `make grid` runs the whole product, and `docs/optimizers.md` and the README say what it found.
"""

import itertools
import pathlib
import threading

import checks
import grid
import jax
import jax.numpy as jnp
import optax
import optax_grid
import optimizer_table
import pytest
from optax_cases import CASES, EXCLUDED, GROUPS, public_names
from optax_grid import CELLS, GRID, MESHES, PASS, STAGES

import jaxzero

ROOT = pathlib.Path(__file__).parents[2]
PAGE, README = ROOT / "docs/optimizers.md", ROOT / "README.md"


def sampled():
    """A cell per row, in turn in the global view and inside.

    One row in nine runs on one device too.
    """
    outside, inside = ([c for c in CELLS if c[0] != "1" and c[2].startswith("inside") == b] for b in (False, True))
    alone = [c for c in CELLS if c[0] == "1"]
    for i, key in enumerate(CASES):
        cells = outside if i % 2 else inside
        yield key, *cells[7 * (i // 2) % len(cells)]
        if i % 9 == 0:
            yield key, *alone[(i // 9) % len(alone)]


SAMPLED = list(sampled())


def test_every_public_name_is_classified():
    """A new Optax optimizer fails here until it has a row or a reason."""
    names = public_names()
    classified = {case.name for case in CASES.values()} | set(EXCLUDED)
    assert names - classified == set(), "new in Optax: add a row or a reason to tests/support/optax_cases.py"
    assert classified - names == set(), "no longer in Optax: remove from tests/support/optax_cases.py"
    assert not {case.name for case in CASES.values()} & set(EXCLUDED)
    assert len(CASES) == sum(map(len, GROUPS.values())), "two rows have one key"
    assert all(EXCLUDED.values())


def test_discovery_sees_more_than_annotations():
    """`dog` is not annotated, `nadam` is a partial, `MultiSteps` a class: the discovery must find them all."""
    assert {"optax.nadam", "contrib.dog", "optax.MultiSteps", "optax.scale_by_factored_rms"} <= public_names()


def test_sample_covers_every_case_mesh_stage_and_way():
    for position, values in enumerate((CASES, MESHES, STAGES, checks.WAYS)):
        assert {cell[position] for cell in SAMPLED} == set(values)
    assert {(c[1], c[2]) for c in SAMPLED} == set(itertools.product(MESHES, STAGES))
    assert {(c[2], c[3]) for c in SAMPLED} == set(itertools.product(STAGES, checks.WAYS))
    assert {(c[1], c[3]) for c in SAMPLED} == set(itertools.product(MESHES, checks.WAYS))


@pytest.mark.parametrize(("key", "world", "stage", "way"), SAMPLED)
def test_equals_unsharded(key, world, stage, way):
    optax_grid.check(key, world, stage, way)


@pytest.mark.parametrize("expression", ["dpsgd", "differentially_private_aggregate"])
def test_per_example_gradients_are_refused(mesh8, expression):
    """The excluded optimizers are refused by name, not averaged into something else."""
    if expression == "dpsgd":
        with pytest.warns(DeprecationWarning, match="seed"):  # of Optax's own call
            made = optax.contrib.dpsgd(0.1, 1.0, 0.1, 0)
    else:
        made = optax.contrib.differentially_private_aggregate(1.0, 0.1, key=jax.random.key(0))
    params = {"w": jnp.ones((16, 2))}
    tx = jaxzero.Zero(mesh8).optimizer(made)
    with pytest.raises(ValueError, match=r"(?s)w\b.*\(4, 16, 2\).*\(16, 2\)"):
        tx.update({"w": jnp.ones((4, 16, 2))}, tx.init(params), params)


# --- the whole product: `make grid` ---------------------------------------------------------------


def row(key, failed=(), cells=CELLS, **about):
    """A row as `grid.py` makes it, with failures at these positions of the cells."""
    messages = ["AssertionError: w\ndiffers" if i in failed else "" for i in range(len(cells))]
    names = {optimizer_table.cell_name(cell): text for cell, text in zip(cells, messages, strict=True) if text}
    about = {"commit": "abc", "tree": "t", "date": "2030-01-02", "jax": "1.2", "optax": "3", "python": "4"} | about
    return {"optimizer": key, "seconds": 1.0, "cells": grid.marks(cells, messages), "failed": names} | about


def test_table_is_written_from_results():
    optimizers = list(CASES)
    rows = {key: row(key) for key in optimizers}
    assert optimizer_table.figure(rows) == f"{len(CASES)} of {len(CASES)}"
    assert optimizer_table.origin(rows)[0].startswith(f"{len(CASES) * 150} of {len(CASES) * 150} cells were run (100%)")
    del rows[optimizers[0]]
    rows[optimizers[1]] = row(optimizers[1], failed=(0, 149), commit="def")
    text = optimizer_table.table(rows)
    assert optimizer_table.figure(rows) == f"{len(CASES) - 2} of {len(CASES)}"
    assert "commit abc, def on 2030-01-02 with jax 1.2, optax 3, Python 4." in text
    assert text.count("| not run |") == 1
    assert text.count("| 148 of 150, **failed** |") == 1
    assert f"- `{optimizers[1]}`, 1, stage 1, value_and_grad, update: `AssertionError: w differs`" in text
    assert f"- `{optimizers[1]}`, 2x2x2, stage 3, inside, apply: `AssertionError: w differs`" in text


def test_marks_stand_for_cells():
    found = row("optax.adam", failed=(0, 29))["cells"]
    assert list(found) == list(MESHES)
    assert (found["1"], found["2"], found["3"]) == ("F" + "." * 14, "." * 14 + "F", "." * 15)


def test_resumes_behind_what_this_tree_has_run():
    about = {"commit": "new", "date": "2031-01-02", "tree": "t", "jax": "1.2", "optax": "3", "python": "4"}
    rows = [row("a"), row("b", tree="other"), row("c", jax="1.1"), row("e", cells=GRID[:PASS])]
    every = ["a", "b", "c", "d", "e"]
    done = grid.same_tree(rows, about, [])
    assert list(done) == ["a", "e"]
    assert grid.to_run(every, done, len(GRID)) == ["b", "c", "d", "e"]
    assert grid.to_run(every, done, PASS) == ["b", "c", "d"]
    assert grid.to_run(["a"], grid.same_tree(rows, about, ["a"]), PASS) == ["a"]


def test_a_row_goes_on_behind_its_cells(monkeypatch):
    """Cells that have run are kept as they were, failures too; the next process begins behind them."""
    starts = []

    def lines_of(key, first, end):
        starts.append(first)
        yield from [""] * (end - first)

    monkeypatch.setattr(grid, "lines_of", lines_of)
    old = row("optax.adam", failed=(2,), cells=GRID[:PASS])
    found = grid.run_optimizer("optax.adam", GRID, old, threading.Event())
    assert starts == [PASS]
    assert found["failed"] == old["failed"] != {}
    assert (optimizer_table.ran(found), optimizer_table.passed({"k": found}, "k")) == (len(GRID), len(GRID) - 1)


def test_a_pass_takes_every_mesh_and_stage_once():
    """So a part of the product says something of all of them; all passes are the product."""
    assert sorted(GRID) == sorted(CELLS)
    for first in range(0, len(GRID), PASS):
        assert [cell[:2] for cell in GRID[first : first + PASS]] == list(itertools.product(MESHES, STAGES))
        assert {cell[2] for cell in GRID[first : first + PASS]} == set(checks.WAYS)
    rows = {key: row(key, cells=GRID[:PASS]) for key in CASES}
    assert optimizer_table.origin(rows)[0].startswith(f"{len(CASES) * 30} of {len(CASES) * 150} cells were run (20%)")
    assert optimizer_table.table(rows).count("| 30 of 30 |") == len(CASES)
    assert f"({len(CASES) * 30} of {len(CASES) * 150} cells run)" in optimizer_table.readme_row(rows)


def test_a_process_that_ends_is_a_failed_cell(monkeypatch):
    """The next process goes on behind the cell; a process that says nothing is no endless loop."""
    starts = []

    def lines_of(key, first, end):
        starts.append(first)
        yield from [""] * 3 if first == 0 else [""] * (end - first)
        if first == 0:
            yield "the process ended with status -6: "

    monkeypatch.setattr(grid, "lines_of", lines_of)
    found = grid.run_optimizer("optax.adam", GRID, {}, threading.Event())
    assert starts == [0, 4]
    assert found["failed"] == {optimizer_table.cell_name(GRID[3]): "the process ended with status -6: "}
    monkeypatch.setattr(grid, "lines_of", lambda key, first, end: iter(()))
    assert len(grid.run_optimizer("optax.adam", GRID, {}, threading.Event())["failed"]) == len(GRID)


def test_a_worker_says_what_fails(monkeypatch, capsys):
    """The last two cells of the grid, of which one is made to fail."""
    real = optax_grid.check

    def check(key, world, stage, way):
        if (world, stage, way) == GRID[-1]:
            raise ValueError("broken")
        real(key, world, stage, way)

    monkeypatch.setattr(optax_grid, "check", check)
    grid.run_cells("optax.scale", len(GRID) - 2, len(GRID))
    assert capsys.readouterr().out.splitlines() == ['""', '"ValueError: broken\\n"']


def test_pages_say_what_was_measured():
    rows, page, readme = optimizer_table.measured(), PAGE.read_text(), README.read_text()
    assert page.count(optimizer_table.BEGIN) == page.count(optimizer_table.END) == 1
    assert page == optimizer_table.with_table(page, rows), "run: python benchmarks/optimizer_table.py"
    assert optimizer_table.README_ROW.findall(readme) == [optimizer_table.readme_row(rows)]
