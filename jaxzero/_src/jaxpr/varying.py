"""Equations evaluated in a manual region, with its types of values or without.

A region that checks types distinguishes values that are equal on all devices from values that vary. A traced
program holds no such types. Bound as it is, an inner program would have results typed as equal on all devices, or be
refused; so `scan`, `while` and `cond` are opened and evaluated, with every value typed as varying.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn
from jax.typing import ArrayLike

from ..sharding.axes import Axes
from ..sharding.vma import cast
from .bind import bind
from .calls import called_program, scan_options, while_parts
from .compat import Literal, literal_value, open_program, scan_parts
from .primitives import COND, RESHARD, SCAN, VARYING_CAST, WHILE
from .trace import AnyJaxpr

Array = jax.Array
#: Types a value as varying over all axes of the region; `unchecked` in a region that does not check types.
Vary = Callable[[Any], Any]

#: Casts that a trace left: here every value has the type already; axes that are not manual are the compiler's.
_CASTS = {VARYING_CAST, "pcast", RESHARD}


def unchecked(x: Any) -> Any:
    """`x` itself: no types are checked."""
    return x


def varying_over(axes: Axes) -> Vary:
    """The function that types a value as varying over all of `axes`."""
    return lambda x: cast(x, axes.every)


def evaluate_equation(eqn: JaxprEqn, ins: Sequence[ArrayLike], vary: Vary) -> list[Array]:
    """The results of one equation on values that `vary` has typed, typed by it again."""
    if vary is unchecked:
        return bind(eqn, ins)
    name = eqn.primitive.name
    if (called := called_program(eqn)) is not None:
        return evaluate_program(*called, ins, vary)
    if name in _CASTS:
        return [vary(x) for x in ins]
    rule = {SCAN: _scan, WHILE: _while, COND: _cond}.get(name)
    outs = bind(eqn, ins) if rule is None else rule(eqn, [vary(jnp.asarray(x)) for x in ins], vary)
    return [vary(x) for x in outs]


def evaluate_program(
    jaxpr: AnyJaxpr, consts: Sequence[ArrayLike], args: Sequence[ArrayLike], vary: Vary
) -> list[Array]:
    """The results of a program on values that `vary` has typed, typed by it again."""
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, map(vary, map(jnp.asarray, consts)), strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))
    read = lambda v: vary(jnp.asarray(literal_value(v))) if isinstance(v, Literal) else env[v]
    for eqn in jaxpr.eqns:
        env.update(zip(eqn.outvars, evaluate_equation(eqn, [read(v) for v in eqn.invars], vary), strict=True))
    return [read(v) for v in jaxpr.outvars]


def _scan(eqn: JaxprEqn, ins: Sequence[Array], vary: Vary) -> list[Array]:
    consts, carry, xs = scan_parts(eqn, list(ins))
    count, inner = len(carry), open_program(eqn.params["jaxpr"])

    def body(c: list[Array], x: list[Array]) -> tuple[list[Array], list[Array]]:
        outs = evaluate_program(*inner, [*consts, *c, *map(vary, x)], vary)
        return outs[:count], outs[count:]

    carry, ys = lax.scan(body, carry, xs, **scan_options(eqn))
    return [*carry, *ys]


def _while(eqn: JaxprEqn, ins: Sequence[Array], vary: Vary) -> list[Array]:
    for_test, for_body, carry = while_parts(eqn, ins)
    test_program, body_program = open_program(eqn.params["cond_jaxpr"]), open_program(eqn.params["body_jaxpr"])
    test = lambda c: evaluate_program(*test_program, [*for_test, *c], vary)[0]
    body = lambda c: evaluate_program(*body_program, [*for_body, *c], vary)
    return list(lax.while_loop(test, body, carry))


def _cond(eqn: JaxprEqn, ins: Sequence[Array], vary: Vary) -> list[Array]:
    branches = [lambda *xs, b=b: evaluate_program(*open_program(b), xs, vary) for b in eqn.params["branches"]]
    return list(lax.switch(ins[0], branches, *ins[1:]))
