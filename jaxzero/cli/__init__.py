"""The command line `jaxzero`: see a plan, compile for a machine that is not here, check an installation."""

import importlib.metadata
import sys
from collections.abc import Sequence

from .._src._optional import need
from .._src._version import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
      argv: Its arguments; `None`: those of the process.

    Returns:
      The exit status: 0; 1 if a check failed; 2, after one line on stderr, if what was asked cannot be done.
    """
    if (sys.argv[1:] if argv is None else list(argv)) == ["--version"]:
        print(f"jaxzero {__version__}, jax {importlib.metadata.version('jax')}")
        return 0
    try:
        for module in ("tyro", "rich"):
            need(module, "cli", "the command line")
    except ImportError as error:
        print(f"jaxzero: {error}", file=sys.stderr)
        return 2
    from .app import run

    return run(argv)
