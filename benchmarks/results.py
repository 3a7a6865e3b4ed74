"""The measurements: one JSON file for each benchmark, with versions, machine and date."""

import datetime as dt
import json
import os
import pathlib
import platform
from typing import Any

FOLDER = pathlib.Path(__file__).parent / "measured"


def write(name: str, rows: list[dict[str, Any]], about: dict[str, Any]) -> None:
    """Writes the rows of one benchmark, the versions and the machine."""
    import jax
    import optax

    import jaxzero

    document = {
        "date": dt.date.today().isoformat(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "versions": {"jax": jax.__version__, "optax": optax.__version__, "jaxzero": jaxzero.__version__},
        "about": about,
        "rows": rows,
    }
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{name}.json"
    path.write_text(json.dumps(document, indent=1) + "\n")
    print(f"wrote {path.relative_to(FOLDER.parent.parent)}")


def read(name: str) -> dict[str, Any] | None:
    """The stored benchmark, or `None` if there is none."""
    path = FOLDER / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def write_lines(name: str, rows: list[dict[str, Any]]) -> None:
    """Writes a long benchmark, whose rows are measured at different times: one row in a line, all lines or none."""
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{name}.jsonl"
    new = path.with_suffix(".new")
    new.write_text("".join(json.dumps(row) + "\n" for row in rows))
    new.replace(path)


def read_lines(name: str) -> list[dict[str, Any]]:
    """The rows that `write_lines` has written; none where it has not."""
    path = FOLDER / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
