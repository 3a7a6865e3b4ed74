"""The command line `jaxzero`: see a plan, compile for a machine that is not here, check an installation."""

import sys
from collections.abc import Sequence

from .._src._optional import need


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
      argv: Its arguments; `None`: those of the process.

    Returns:
      The exit status: 0; 1 if a check failed; 2, after one line on stderr, if what was asked cannot be done.
    """
    try:
        for module in ("tyro", "rich"):
            need(module, "cli", "the command line")
    except ImportError as error:
        print(f"jaxzero: {error}", file=sys.stderr)
        return 2
    from .app import run

    return run(argv)
