"""Evaluate a traced program on shares: any function of full arrays, as it is, over split ones."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from ..jaxpr.compat import open_program
from .elementwise import EMPTY_MESH
from .evaluate import run as run
from .record import Record as Record
from .record import Report as Report
from .record import size_text as size_text
from .values import Context as Context
from .values import Partial as Partial
from .values import Split as Split
from .values import Spread as Spread


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
