"""Results to stdout, progress to stderr."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import rich.console
import rich.progress

from .._src._table import table as text_table


@contextmanager
def working(on: str) -> Iterator[None]:
    """Shows what is being done and for how long, on a terminal."""
    columns = (rich.progress.SpinnerColumn(), "{task.description}", rich.progress.TimeElapsedColumn())
    console = rich.console.Console(stderr=True)
    quiet = not console.is_terminal
    with rich.progress.Progress(*columns, console=console, transient=True, disable=quiet) as progress:
        progress.add_task(on, total=None)
        yield


def document(value: Any) -> None:
    """One JSON document."""
    print(json.dumps(value, indent=2))


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> None:
    """A table; columns from number `left` on are figures."""
    print(text_table(columns, rows, "<" * left + ">" * (len(columns) - left), title=title))
