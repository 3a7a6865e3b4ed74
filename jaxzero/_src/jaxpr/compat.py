"""What differs between the supported JAX versions (0.10.2 and 0.12), and all that is private, in one place."""

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.extend import core
from jax.extend.core import Jaxpr, JaxprEqn, Var
from jax.extend.core import Literal as Literal

from .._types import ArrayLike

T = TypeVar("T")


def bind_params(eqn: JaxprEqn) -> tuple[list[Any], dict[str, Any]]:
    """An equation's parameters as `bind` takes them.

    Before 0.10 a pair (functions, parameters), since then the parameters alone.
    """
    params: Any = eqn.primitive.get_bind_params(eqn.params)
    return params if isinstance(params, tuple) else ([], params)


def open_program(program: Any) -> tuple[Jaxpr, list[jax.Array]]:
    """An inner program as (jaxpr, constants).

    In 0.10 a closed and an open program are two classes, in 0.12 one; only the closed kind has
    constants.
    """
    consts = list(getattr(program, "consts", ()))
    return (program.jaxpr if hasattr(program, "jaxpr") else program), consts


def scan_parts(eqn: JaxprEqn, operands: Sequence[T]) -> tuple[list[T], list[T], list[T]]:
    """The operands of a `scan` equation as (constants, carry, scanned).

    0.10 keeps two counts; 0.12 keeps the structure of the three groups instead.
    """
    params = eqn.params
    if "num_consts" in params:
        consts, carry = params["num_consts"], params["num_carry"]
    else:
        groups = params["ft_in"].unpack()
        consts, carry = len(groups[0]), len(groups[1])
    return list(operands[:consts]), list(operands[consts : consts + carry]), list(operands[consts + carry :])


def aval(atom: Var | Literal) -> jax.core.ShapedArray:
    """The abstract array of a variable or literal; JAX types it as any abstract value."""
    return atom.aval  # type: ignore[return-value]


def literal_value(atom: Literal) -> Any:
    """The constant that a literal of a program stands for, in the program's dtype."""
    return np.asarray(atom.val, aval(atom).dtype)


def backends_started() -> bool:
    """Whether this process has used a device; asking in any public way would start them (0.10 and 0.12)."""
    from jax._src import xla_bridge  # private, so imported by the one call that needs it

    return bool(xla_bridge.backends_are_initialized())


def before_exit(f: Callable[[], None]) -> None:
    """Calls `f` when the program ends, before Python shuts down what threads need.

    `atexit` comes too late: thread pools are shut by then. Private, the same in Python 3.11 to 3.14. In 3.11 threads
    can still be started here, from 3.12 on not.
    """
    threading._register_atexit(f)  # type: ignore[attr-defined]


def as_weak(x: jax.Array) -> jax.Array:
    """`x`, of the weak type that Python's numbers have; JAX has no public function that makes one (0.10 and 0.12)."""
    return core.primitives.convert_element_type_p.bind(x, new_dtype=x.dtype, weak_type=True, sharding=None)


def is_weak(x: ArrayLike | jax.ShapeDtypeStruct) -> bool:
    """Whether an array, abstract or not, has the weak type that Python's numbers have."""
    return isinstance(x, (bool, int, float, complex)) or bool(getattr(x, "weak_type", False))


def trace_of(x: object) -> Any:
    """The trace to which an array belongs, `None` if it is not traced; private (0.10 and 0.12)."""
    return getattr(x, "_trace", None) if isinstance(x, jax.core.Tracer) else None
