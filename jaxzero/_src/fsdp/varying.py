"""Equations evaluated where JAX checks types, with every value typed as different on every device.

An inner program was traced where no types were. Bound as it is, its results would be typed as if they
were equal on all devices, or refused; so `scan`, `while` and `cond` are opened and evaluated.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from ..jaxpr.bind import bind
from ..jaxpr.calls import CALLS
from ..jaxpr.compat import Literal, open_program, scan_parts

#: Casts that a trace left: here every value has the type already; axes that are not manual are the compiler's.
_CASTS = {"pvary", "pcast", "reshard"}
#: Types one value as varying over all axes.
Cast = Callable[[Any], Any]


def equation(eqn: Any, ins: Sequence[Any], cast: Cast) -> list[Any]:
    """The results of one equation on values that `cast` has typed, typed by it again."""
    name = eqn.primitive.name
    if name in CALLS:
        return program(eqn.params[CALLS[name]], ins, cast)
    if name in _CASTS:
        return [cast(x) for x in ins]
    rule = {"scan": _scan, "while": _while, "cond": _cond}.get(name)
    outs = bind(eqn, ins) if rule is None else rule(eqn, [cast(jnp.asarray(x)) for x in ins], cast)
    return [cast(x) for x in outs]


def program(closed: Any, args: Sequence[Any], cast: Cast) -> list[Any]:
    """The results of an inner program."""
    jaxpr, consts = open_program(closed)
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, map(cast, map(jnp.asarray, consts)), strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))

    def read(v: Any) -> Any:
        if isinstance(v, Literal):
            aval: Any = v.aval
            return cast(jnp.asarray(v.val, aval.dtype))
        return env[v]

    for eqn in jaxpr.eqns:
        env.update(zip(eqn.outvars, equation(eqn, [read(v) for v in eqn.invars], cast), strict=True))
    return [read(v) for v in jaxpr.outvars]


def _scan(eqn: Any, ins: Sequence[Any], cast: Cast) -> list[Any]:
    consts, carry, xs = scan_parts(eqn, list(ins))
    count = len(carry)

    def body(c: list[Any], x: list[Any]) -> Any:
        outs = program(eqn.params["jaxpr"], [*consts, *c, *map(cast, x)], cast)
        return outs[:count], outs[count:]

    keywords = {k: eqn.params[k] for k in ("reverse", "unroll", "length")}
    carry, ys = lax.scan(body, carry, xs, **keywords)
    return [*carry, *ys]


def _while(eqn: Any, ins: Sequence[Any], cast: Cast) -> list[Any]:
    first, second = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    for_test, for_body, carry = ins[:first], ins[first : first + second], list(ins[first + second :])
    test = lambda c: program(eqn.params["cond_jaxpr"], [*for_test, *c], cast)[0]
    body = lambda c: program(eqn.params["body_jaxpr"], [*for_body, *c], cast)
    return list(lax.while_loop(test, body, carry))


def _cond(eqn: Any, ins: Sequence[Any], cast: Cast) -> list[Any]:
    branches = [lambda *xs, b=b: program(b, xs, cast) for b in eqn.params["branches"]]
    return list(lax.switch(ins[0], branches, *ins[1:]))
