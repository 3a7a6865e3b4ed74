"""Text tables fit the terminal, and no name in them is cut."""

import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AbstractMesh

import jaxzero
from jaxzero._src._table import fold, table
from jaxzero._src.analysis.explain import Report
from jaxzero._src.analysis.hlo import Collective, Collectives
from jaxzero._src.analysis.memory import Memory
from jaxzero._src.analysis.verify import Check, Verification
from jaxzero._src.partition.record import Communication

LONG = "transformer_decoder_stack/layers/self_attention_with_rotary_positions/query_projection_kernel"
WIDTHS = (80, 100, 120)


def a_plan():
    leaf = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    zero = jaxzero.Zero(AbstractMesh((4, 8), ("replica", "data")), replica_axis="replica", stage=3)
    return zero.plan({LONG: leaf(4096, 14336), "layers": [{"w": leaf(33, 8)}] * 3}, optax.adamw(1e-3))


def collectives():
    one = Collective("reduce-scatter", 4 * 10**9, ("node", "local"), ((0, 1),), 12, True, "main", 17, True, LONG)
    return Collectives((one,))


REPORTS = {
    "plan": a_plan,
    "report": lambda: Report(9, {"sort": 1}, 3, (Communication("sort", "gather", (4096, 14336), "float32", 7, 1),), 8),
    "memory": lambda: Memory(10**9, 10**8, 10**7, 0, None),
    "verification": lambda: Verification((Check(f"{LONG} at rest", 1e9, 8e9, "whole"),), collectives()),
    "collectives": collectives,
}


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("report", REPORTS)
def test_reports_fit_the_terminal(monkeypatch, report, width):
    monkeypatch.setenv("COLUMNS", str(width))
    lines = str(REPORTS[report]()).splitlines()
    assert max(map(len, lines)) <= width
    assert all(line == line.rstrip() for line in lines)
    if report in ("plan", "verification", "collectives"):
        for name in LONG.split("/"):
            assert any(name in line for line in lines), name


def test_short_names_take_one_line_each_at_80(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    zero = jaxzero.Zero(AbstractMesh((8,), ("data",)))
    plan = zero.plan({"head": jax.ShapeDtypeStruct((4096, 128), jnp.float32)}, optax.adamw(1e-3))
    row = next(line for line in str(plan).splitlines() if line.startswith("head"))
    assert row.split() == ["head", "f32[4096,128]", "rows", "2.097", "MB", "262.1", "kB", "524.3", "kB", "0"]


def test_a_table_keeps_its_natural_widths_where_they_fit():
    text = table(("name", "n"), [("a", "1"), ("bcd/e", "22")], width=10, title="two rows")
    assert text.splitlines() == ["two rows", "name    n", "---------", "a       1", "bcd/e  22"]


def test_text_columns_fold_and_figures_do_not():
    text = table(("name", "size"), [("layers/kernel", "4.096 kB")], width=17)
    assert text.splitlines() == ["name         size", "-----------------", "layers/  4.096 kB", "kernel"]


def test_whole_cells_go_to_the_next_line_where_folding_is_not_enough():
    lines = table(("name", "size", "n"), [("kernel", "4.096 kB", "12")], width=10).splitlines()
    assert lines == ["name", "      size", "   n", "----------", "kernel", "  4.096 kB", "  12"]


@pytest.mark.parametrize("width", [7, 30])
def test_any_width_is_kept_and_no_letter_is_lost(width):
    rows = [(LONG, "1", "a few words"), ("b", "123", "")]
    text = table(("leaf", "size", "note"), rows, "<><", width=width)
    assert max(map(len, text.splitlines())) <= width
    letters = re.sub(r"[\s-]", "", text)
    assert all(letters.count(char) >= LONG.count(char) for char in set(LONG))


def test_a_table_without_rows():
    assert table((), [], title="none") == "none"
    assert table(("a", "b"), [], width=80).splitlines() == ["a  b", "----"]


def test_a_name_is_broken_only_where_it_is_wider_than_all():
    assert fold("one two/three", 5) == ["one", "two/", "three"]
    assert fold("abcdefgh", 5) == ["abcde", "fgh"]
    assert fold("", 5) == [""]


def test_reports_need_no_rich():
    code = """
import sys
sys.modules["rich"] = None
import jax, jaxzero, optax
plan = jaxzero.Zero(jax.sharding.AbstractMesh((8,), ("data",))).plan({"w": jax.ShapeDtypeStruct((9, 3), "float32")})
assert "f32[9,3]" in str(plan) and "f32[9,3]" in plan._repr_html_()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | {"COLUMNS": ""}
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_notebook_shows_a_plan_once(capsys):
    shown = a_plan()._repr_html_()
    assert capsys.readouterr() == ("", "")
    assert shown.startswith("<pre")
    assert shown.count("bytes per device at rest") == 1
