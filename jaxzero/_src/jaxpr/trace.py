"""Tracing a function at full shapes, as if there were no mesh."""

import dataclasses
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var
from jax.sharding import AbstractMesh

from .._types import PyTree
from .compat import open_program


def x64() -> bool:
    """Whether 64-bit types are on: a traced program depends on it."""
    return bool(jnp.arange(0).dtype == np.int64)


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
