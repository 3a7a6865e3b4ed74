"""Equations that work on each entry of their first dimension for itself: factorisations of many matrices, say."""

import functools
from typing import Any

import jax

from ..jaxpr.bind import bind
from ..jaxpr.trace import EMPTY_MESH
from ..sharding.layout import Layout
from .values import Context, Split, Value


def on_entries(ctx: Context, eqn: Any, ins: list[Value]) -> list[Value] | None:
    """The rule for operands that are all cut at their first dimension, or can be: every device has some entries."""
    layouts = [x.layout for x in ins if isinstance(x, Split)]
    if not layouts or any((layout.kind, layout.lead) != ("rows", 0) for layout in layouts):
        return None
    count = layouts[0].shape[0]
    avals = tuple((v.aval.shape, v.aval.dtype) for v in (*eqn.invars, *eqn.outvars))
    if any(len(shape) < 2 or shape[0] != count for shape, _ in avals):
        return None
    try:
        if not _maps(eqn.primitive, tuple(sorted(eqn.params.items())), avals[: len(eqn.invars)]):
            return None
    except TypeError:  # a parameter that cannot be hashed
        return None
    rows = lambda v: Layout(v.aval.shape, ctx.n, "rows", 0)
    outs = bind(eqn, [ctx.split(x, rows(v)).local for x, v in zip(ins, eqn.invars, strict=True)])
    return [Split(y, rows(v)) for y, v in zip(outs, eqn.outvars, strict=True)]


@functools.lru_cache(maxsize=1024)
def _maps(primitive: Any, params: tuple[Any, ...], avals: tuple[Any, ...]) -> bool:
    """Whether `vmap` of a primitive over a new first dimension is the primitive itself, by JAX's own word."""
    keywords = dict(params)
    one = lambda *xs: primitive.bind(*xs, **keywords)
    try:
        with jax.sharding.use_abstract_mesh(EMPTY_MESH):
            jax.eval_shape(one, *(jax.ShapeDtypeStruct(shape[1:], dtype) for shape, dtype in avals))
            jaxpr = jax.make_jaxpr(jax.vmap(one))(*(jax.ShapeDtypeStruct(*x) for x in avals)).jaxpr
    except Exception:  # noqa: BLE001 - any complaint says that it does not map
        return False
    return (
        len(jaxpr.eqns) == 1
        and jaxpr.eqns[0].primitive is primitive
        and jaxpr.eqns[0].params == keywords
        and list(jaxpr.eqns[0].invars) == list(jaxpr.invars)
        and list(jaxpr.eqns[0].outvars) == list(jaxpr.outvars)
    )
