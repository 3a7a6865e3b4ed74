"""What differs between the supported JAX versions (0.10.2 and 0.12), in one place."""

import threading
from collections.abc import Callable
from typing import Any

from jax._src import xla_bridge
from jax.extend.core import Literal as Literal


def bind_params(eqn: Any) -> tuple[list[Any], dict[str, Any]]:
    """An equation's parameters as `bind` takes them.

    Older versions return a pair (functions, parameters), newer ones the parameters alone.
    """
    params = eqn.primitive.get_bind_params(eqn.params)
    return params if isinstance(params, tuple) else ([], params)


def open_program(program: Any) -> tuple[Any, list[Any]]:
    """An inner program as (jaxpr, constants).

    In 0.10 a closed and an open program are two classes, in 0.12 one; only the closed kind has
    constants.
    """
    consts = list(getattr(program, "consts", ()))
    return (program.jaxpr if hasattr(program, "jaxpr") else program), consts


def scan_parts(eqn: Any, operands: list[Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """The operands of a `scan` equation as (constants, carry, scanned).

    0.10 keeps two counts; 0.12 keeps the structure of the three groups instead.
    """
    params = eqn.params
    if "num_consts" in params:
        consts, carry = params["num_consts"], params["num_carry"]
    else:
        groups = params["ft_in"].unpack()
        consts, carry = len(groups[0]), len(groups[1])
    return operands[:consts], operands[consts : consts + carry], operands[consts + carry :]


def backends_started() -> bool:
    """Whether this process has used a device; asking in any public way would start them (0.10 and 0.12)."""
    return bool(xla_bridge.backends_are_initialized())


def before_exit(f: Callable[[], None]) -> None:
    """Calls `f` when the program ends, before Python shuts down what threads need.

    `atexit` comes too late: thread pools are shut by then. Private, the same in Python 3.11 to 3.14. In 3.11 threads
    can still be started here, from 3.12 on not.
    """
    threading._register_atexit(f)  # type: ignore[attr-defined]
