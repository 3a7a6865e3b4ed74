"""Runs a command and turns its errors into one line and an exit status."""

import functools
import operator
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Annotated, Any

import tyro

from . import compile, doctor, export, fit, plan

#: One module for each command: `COMMAND` is the class of its arguments, whose `run()` executes it.
COMMANDS = (plan, compile, fit, export, doctor)
ABOUT = """ZeRO for JAX: see a plan, compile for a machine that is not here, choose settings for it, export a
checkpoint, check an installation.

jaxzero --version prints the versions of jaxzero and jax.

Exit status: 0; 1 if a check failed or nothing fits; 2 if what was asked cannot be done. Results go to
stdout, with --json as one JSON document; progress and errors go to stderr."""


def run(argv: Sequence[str] | None) -> int:
    """Parses the arguments and runs the command; `tyro` handles wrong flags and --help itself."""
    choices = [Annotated[c.COMMAND, tyro.conf.subcommand(_name(c), description=c.__doc__)] for c in COMMANDS]
    config = (tyro.conf.FlagCreatePairsOff, tyro.conf.OmitSubcommandPrefixes)
    parse: Any = functools.partial(tyro.cli, prog="jaxzero", description=ABOUT, config=config)
    command = parse(functools.reduce(operator.or_, choices), args=None if argv is None else list(argv))
    try:
        status = int(command.run())
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # `| head` has closed the pipe: write nothing more, also not at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, ImportError) as error:
        print(f"jaxzero: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _name(module: ModuleType) -> str:
    return str(module.__name__).rpartition(".")[2]
