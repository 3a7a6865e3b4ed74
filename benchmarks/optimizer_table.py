"""Writes the table of `docs/optimizers.md` and the README's row from what `grid.py` measured.

python benchmarks/optimizer_table.py
"""

import pathlib
import re
import sys
from collections.abc import Iterable
from typing import Any

import results

ROOT = pathlib.Path(__file__).parent.parent
sys.path.append(str(ROOT / "tests/support"))
import optax_grid
from optax_cases import CASES, EXCLUDED, GROUPS, Case

PAGE, README = ROOT / "docs/optimizers.md", ROOT / "README.md"
BEGIN, END = "<!-- optimizers:begin -->", "<!-- optimizers:end -->"
#: The README's row: what was counted, the figure, and by what.
README_ROW = re.compile(r"^\| Optimizers of Optax that equal their unsharded run.*$", re.MULTILINE)

Rows = dict[str, dict[str, Any]]


def measured() -> Rows:
    """What was measured of the optimizers that there are."""
    return {row["optimizer"]: row for row in results.read_lines("optimizers") if row["optimizer"] in CASES}


def cell_name(cell: tuple[str, int, str]) -> str:
    """How a cell reads."""
    world, stage, way = cell
    return f"{world}, stage {stage}, {way}"


def passed(rows: Rows, key: str) -> int:
    """How many cells of an optimizer equal the unsharded run."""
    return sum(text.count(".") for text in rows[key]["cells"].values()) if key in rows else 0


def ran(row: dict[str, Any]) -> int:
    """How many cells of a row were run."""
    return sum(len(text) - text.count("-") for text in row["cells"].values())


def listed(words: Iterable[str]) -> str:
    """Distinct words, in order."""
    return ", ".join(sorted(set(words)))


def figure(rows: Rows) -> str:
    """How many optimizers equal their unsharded run in every cell that was run, of how many there are."""
    whole = sum(passed(rows, key) == ran(rows[key]) for key in CASES if key in rows)
    return f"{whole} of {len(CASES)}"


def readme_row(rows: Rows) -> str:
    """The row of the README's table of measurements."""
    cells = sum(map(ran, rows.values()))
    share = f" ({cells} of {len(CASES) * len(optax_grid.GRID)} cells run)"
    what = f"sharded over {len(optax_grid.MESHES)} meshes at {len(optax_grid.STAGES)} stages"
    return f"| Optimizers of Optax that equal their unsharded run, {what} | {figure(rows)}{share} | `make grid` |"


def origin(rows: Rows) -> list[str]:
    """The share that ran, the commit, the date and the versions."""
    cells, every = sum(map(ran, rows.values())), len(CASES) * len(optax_grid.GRID)
    good = sum(passed(rows, key) for key in rows)
    first = f"{cells} of {every} cells were run ({cells / every:.0%}); {good} equal the unsharded run, "
    lines = [first + f"{cells - good} do not."]
    if rows:
        by = {name: listed(row[name] for row in rows.values()) for name in ("commit", "date", "jax", "optax", "python")}
        lines += [
            f"Run at commit {by['commit']} on {by['date']} with jax {by['jax']}, optax {by['optax']}, Python"
            f" {by['python']}.",
        ]
    return lines


def table(rows: Rows) -> str:
    """What was run, each optimizer as it is called and how many of its cells pass, the failures, what is left out."""
    ways = "; ".join(f"`{way}`" for way in optax_grid.checks.WAYS)
    lines = [
        f"{len(CASES)} optimizers, each in {len(optax_grid.GRID)} cells: the meshes {', '.join(optax_grid.MESHES)};",
        f"stages {', '.join(map(str, optax_grid.STAGES))}; five ways to run a step: {ways}.",
        "",
        *origin(rows),
        "",
    ]
    for group, cases in GROUPS.items():
        lines += [f"| {group} | run as | `update` also takes | equal |", "|---|---|---|---:|"]
        lines += [_line(rows, case) for case in cases]
        lines += [""]
    failed = [(key, *item) for key in rows for item in rows[key]["failed"].items()]
    if failed:
        lines += ["Cells that failed:", ""]
        lines += [f"- `{key}`, {cell}: {_first_line(message)}" for key, cell, message in failed]
        lines += [""]
    lines += ["Not in the table:", ""]
    lines += [f"- `{name}`: {reason}." for name, reason in EXCLUDED.items()]
    return "\n".join(lines)


def _line(rows: Rows, case: Case) -> str:
    name, _, variant = case.key.partition(", ")
    first = f"`{name}`" + (f", {variant}" if variant else "")
    equal = f"{passed(rows, case.key)} of {ran(rows[case.key])}" if case.key in rows else "not run"
    equal += ", **failed**" if case.key in rows and rows[case.key]["failed"] else ""
    return f"| {first} | `{case.expression}` | {', '.join(f'`{n}`' for n in case.needs)} | {equal} |"


def _first_line(message: str) -> str:
    text = " ".join(message.split())
    return f"`{text[:200].replace('`', chr(39))}`"


def with_table(text: str, rows: Rows) -> str:
    """The page with this table in it."""
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n{table(rows)}\n{END}{after}"


def write() -> None:
    """Writes both."""
    rows = measured()
    PAGE.write_text(with_table(PAGE.read_text(), rows))
    README.write_text(README_ROW.sub(lambda _: readme_row(rows), README.read_text()))
    print(f"wrote docs/optimizers.md: {figure(rows)}")


if __name__ == "__main__":
    write()
