"""What is committed of the notebooks. nbmake executes them: the first by default, all in `make test-all`."""

import json
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
FIRST = 'jax.config.update("jax_num_cpu_devices", 8)'


def outputs(cell):
    return cell.get("outputs", [])


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_can_be_read_without_running(path):
    """Text first, devices in the first cell of code, all cells run in order and without errors."""
    cells = json.loads(path.read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert cells[0]["cell_type"] == "markdown"
    assert FIRST in "".join(code[0]["source"])
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    kinds = [output["output_type"] for cell in code for output in outputs(cell)]
    assert "error" not in kinds
    assert any("image/png" in output.get("data", {}) for cell in code for output in outputs(cell))
    assert not any(output.get("name") == "stderr" for cell in code for output in outputs(cell))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_names_no_machine(path):
    text = path.read_text()
    assert [
        word
        for word in ("/ho" + "me/", "/ro" + "ot/", "/tm" + "p/", "/wo" + "rk/", "site-pack" + "ages")
        if word in text
    ] == []


def test_first_notebook_is_run_by_default(pytestconfig):
    assert "--nbmake" in pytestconfig.getini("addopts")
    assert "notebooks" in pytestconfig.getini("testpaths")
    assert [path.stem[:2] for path in NOTEBOOKS] == [f"{i:02d}" for i in range(1, len(NOTEBOOKS) + 1)]
