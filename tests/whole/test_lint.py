"""Lint, format and types are tests like any other."""

import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.parametrize("tool", ["ruff check .", "ruff format --check .", "mypy"])
def test_tool_finds_nothing(tool):
    result = subprocess.run([sys.executable, "-m", *tool.split()], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
