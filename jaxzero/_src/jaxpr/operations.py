"""How many operations an equation takes: a pure function of its shapes, by which work is compared and balanced."""

import math
from typing import Any

from . import primitives as p
from .calls import called_program, inner_programs
from .compat import open_program

#: Turns of a `while` loop; its shapes do not say how many there are.
TURNS = 10


def operations(eqn: Any) -> float:
    """Operations of one equation, those of its inner programs included.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> program = jax.make_jaxpr(lambda x: jnp.tanh(x @ x.T))(jnp.ones((3, 5))).jaxpr
      >>> [operations(eqn) for eqn in program.eqns]
      [15.0, 90.0, 9.0]
    """
    name = eqn.primitive.name
    if name == p.SCAN:
        return eqn.params["length"] * _program(eqn.params["jaxpr"])
    if name == p.WHILE:
        return TURNS * (_program(eqn.params["cond_jaxpr"]) + _program(eqn.params["body_jaxpr"]))
    if name == p.COND:
        return max(map(_program, eqn.params["branches"]))
    if (called := called_program(eqn)) is not None:
        return _program(called[0])
    if is_product(eqn):
        (contract, _), _ = eqn.params["dimension_numbers"]
        shape = eqn.invars[0].aval.shape
        return 2.0 * math.prod(eqn.outvars[0].aval.shape) * math.prod(shape[d] for d in contract)
    if name in p.FACTORISATIONS:
        *batch, m, n = max((v.aval.shape for v in eqn.invars), key=math.prod)
        return p.FACTORISATIONS[name] * math.prod(batch) * m * n * min(m, n)
    return float(sum(math.prod(v.aval.shape) for v in eqn.outvars))


def _program(program: Any) -> float:
    return sum(map(operations, open_program(program)[0].eqns))


def is_product(eqn: Any) -> bool:
    """Whether an equation is a product of matrices, not an inner product."""
    return eqn.primitive.name == p.DOT_GENERAL and bool(eqn.outvars[0].aval.shape)


def on_matrices(eqn: Any) -> bool:
    """Whether an equation multiplies or factorises matrices, or holds a program that does."""
    return (
        is_product(eqn) or eqn.primitive.name in p.FACTORISATIONS or any(map(program_on_matrices, inner_programs(eqn)))
    )


def program_on_matrices(jaxpr: Any) -> bool:
    """Whether any equation of an open program does."""
    return any(map(on_matrices, jaxpr.eqns))
