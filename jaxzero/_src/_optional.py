"""Optional packages: imported where they are used, with an error that says how to get them."""

import importlib
from typing import Any


def install(extra: str) -> str:
    """The command that installs an extra: jaxzero is installed from its folder, not from a package index."""
    return f'pip install ".[{extra}]" in the folder of jaxzero'


def need(module: str, extra: str, what: str) -> Any:
    """The module, or an error that names the command which installs it.

    Args:
      module: Its name, possibly dotted.
      extra: The extra of jaxzero that brings it.
      what: What needs it.

    Returns:
      The module.

    Raises:
      ImportError: If it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if (error.name or "").partition(".")[0] != package:
            raise
        raise ImportError(f"{what} needs {package}. Fix: {install(extra)}") from None
