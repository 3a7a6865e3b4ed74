"""Results to stdout, progress to stderr."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import rich.console
import rich.progress

from .._src._table import table as text_table
from .._src._types import JSON


@contextmanager
def working(on: str) -> Iterator[None]:
    """Shows the current task and its time on a terminal."""
    columns = (rich.progress.SpinnerColumn(), "{task.description}", rich.progress.TimeElapsedColumn())
    console = rich.console.Console(stderr=True)
    quiet = not console.is_terminal
    with rich.progress.Progress(*columns, console=console, transient=True, disable=quiet) as progress:
        progress.add_task(on, total=None)
        yield


def document(value: JSON) -> None:
    """One JSON document."""
    print(json.dumps(value, indent=2))


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> None:
    """A table; columns from number `left` on are figures."""
    print(text_table(columns, rows, "<" * left + ">" * (len(columns) - left), title=title))
