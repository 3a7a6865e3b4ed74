"""Tracing a function at full shapes, as if no mesh were there."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh

from .compat import open_program


def x64() -> bool:
    """Whether 64-bit types are on: a traced program depends on it."""
    return bool(jnp.arange(0).dtype == np.int64)


EMPTY_MESH = AbstractMesh((), ())


@dataclasses.dataclass(frozen=True)
class Jaxpr:
    """What the evaluator reads of a program."""

    constvars: list[Any]
    invars: list[Any]
    outvars: list[Any]
    eqns: list[Any]


@dataclasses.dataclass(frozen=True)
class Program:
    """A function traced at full shapes.

    Attributes:
      jaxpr: The open program.
      consts: Arrays that the function closed over.
      out: The results, abstract, in the function's own structure.
    """

    jaxpr: Any
    consts: list[Any]
    out: Any


def trace(f: Callable[..., Any], *args: Any, axis_env: Any = (), mesh: Any = EMPTY_MESH) -> Program:
    """Traces `f` at the shapes of `args`, as if no mesh were there but `mesh`; names in `axis_env` are bound.

    Inside a manual region its mesh stays: what `f` closes over has types that speak of it.
    """
    here = jax.sharding.get_abstract_mesh()
    with jax.sharding.use_abstract_mesh(here if here.manual_axes else mesh):
        make = jax.make_jaxpr(f, axis_env=list(axis_env), return_shape=True)
        closed, out = make(*args)
    return Program(*open_program(closed), out)
