"""Tracing a function at full shapes, as if there were no mesh."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator

import jax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var
from jax.sharding import AbstractMesh

from .._types import PyTree
from .compat import open_program

EMPTY_MESH = AbstractMesh((), ())


@dataclasses.dataclass(frozen=True)
class JaxprPart:
    """Some equations of a jaxpr, with their own inputs and results: what an evaluator reads of a `Jaxpr`."""

    constvars: list[Var]
    invars: list[Var]
    outvars: list[Var | Literal]
    eqns: list[JaxprEqn]


AnyJaxpr = Jaxpr | JaxprPart


@dataclasses.dataclass(frozen=True)
class Program:
    """A function traced at full shapes.

    Attributes:
      jaxpr: The open program.
      consts: Arrays that the function closed over.
      out: The results, abstract, in the function's own structure.
    """

    jaxpr: AnyJaxpr
    consts: list[jax.Array]
    out: PyTree


def trace(
    f: Callable[..., PyTree],
    *args: PyTree,
    axis_env: Iterable[tuple[str, int]] = (),
    mesh: AbstractMesh = EMPTY_MESH,
) -> Program:
    """Traces `f` at the shapes of `args`, as if there were no mesh but `mesh`; names in `axis_env` are bound.

    Inside a manual region its mesh stays: the types of arrays that `f` closes over name its axes.
    """
    here = jax.sharding.get_abstract_mesh()
    with jax.sharding.use_abstract_mesh(here if here.manual_axes else mesh):
        make = jax.make_jaxpr(f, axis_env=list(axis_env), return_shape=True)
        closed, out = make(*args)
    return Program(*open_program(closed), out)


_NEEDS_VALUE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


@contextlib.contextmanager
def naming_values(call: str) -> Iterator[None]:
    """An error of JAX that a function needs the value of a traced array becomes one that names the call and the fix."""
    try:
        yield
    except _NEEDS_VALUE as error:
        found = str(error).splitlines()[0].rstrip(".")
        raise ValueError(
            f"{call}: the function needs the value of an array while it is traced. Found: {found}. Expected a function "
            "that jax.jit can trace, where arrays have shapes and dtypes but no values. Fix: return arrays, not "
            "float(x), int(x) or np.asarray(x); jnp.where or jax.lax.cond instead of a Python if."
        ) from error
