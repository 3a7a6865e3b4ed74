"""Elementwise equations run on the shares; whole operands are sliced, which XLA fuses."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn, Primitive

from ..jaxpr import primitives as p
from ..jaxpr.bind import bind
from ..jaxpr.compat import aval
from ..jaxpr.trace import EMPTY_MESH
from ..sharding.layout import Layout
from .values import Context, LazyBroadcast, Partial, Results, Split, Value


def is_elementwise(eqn: JaxprEqn) -> bool:
    """Whether an equation maps elements to elements, as `vmap` of its primitive shows.

    `vmap` of the primitive on scalars is by definition the elementwise map. Where that is one equation
    of the same primitive with the same parameters, the primitive *is* the elementwise map. No list of
    names, so primitives of later JAX versions are known too. Where other operands are arrays, a scalar is
    not mapped: `clamp` uses the same bound for each element, but `random_gamma` not the same key.
    """
    if eqn.effects or not eqn.invars or eqn.primitive.name == p.BARRIER:
        return False
    if any(key in eqn.params for key in ("axes", "axis_name", "jaxpr", "call_jaxpr", "branches")):
        return False
    dtypes = tuple(aval(v).dtype for v in eqn.invars)
    arrays = tuple(bool(aval(v).shape) for v in eqn.invars)
    mapped = arrays if any(arrays) else (True,) * len(arrays)
    try:
        return _vmaps_to_itself(eqn.primitive, tuple(sorted(eqn.params.items())), dtypes, mapped)
    except TypeError:  # a parameter that cannot be hashed: no elementwise primitive has one
        return False


@functools.lru_cache(maxsize=4096)
def _vmaps_to_itself(
    primitive: Primitive, params: tuple[tuple[str, Any], ...], dtypes: tuple[np.dtype, ...], mapped: tuple[bool, ...]
) -> bool:
    keywords = dict(params)
    avals = [jax.ShapeDtypeStruct((2, 3) if m else (), d) for d, m in zip(dtypes, mapped, strict=True)]
    axes = [0 if m else None for m in mapped]
    one = lambda *xs: primitive.bind(*xs, **keywords)
    try:
        with jax.sharding.use_abstract_mesh(EMPTY_MESH):
            jaxpr = jax.make_jaxpr(jax.vmap(jax.vmap(one, axes), axes))(*avals).jaxpr
    except Exception:  # noqa: BLE001 - any complaint about scalars says that it is not elementwise
        return False
    if not jaxpr.eqns:  # a conversion that changes nothing is left out of a trace
        return list(jaxpr.outvars) == list(jaxpr.invars)
    return (
        len(jaxpr.eqns) == 1
        and jaxpr.eqns[0].primitive is primitive
        and jaxpr.eqns[0].params == keywords
        and list(jaxpr.eqns[0].invars) == list(jaxpr.invars)
        and list(jaxpr.eqns[0].outvars) == list(jaxpr.outvars)
        and all(aval(v).shape == (2, 3) for v in jaxpr.outvars)
    )


def on_shares(ctx: Context, eqn: JaxprEqn, ins: list[Value]) -> Results:
    """The rule for elementwise equations with a split operand."""
    shape = aval(eqn.outvars[0]).shape
    layout = _pick(ins, shape)
    if layout is None:
        return None
    waiting = [x for x in ins if isinstance(x, Partial)]
    if waiting:
        ctx.whole(waiting)
    locals_ = []
    for x, v in zip(ins, eqn.invars, strict=True):
        local = ctx.share(x, layout)
        if local.ndim == 0 and aval(v).shape:  # the primitive was given an array here, not a scalar
            local = lax.broadcast(local, layout.local_shape)
        locals_.append(local)
    outs = bind(eqn, locals_)
    return [Split(y, layout) for y in outs]


def _pick(ins: list[Value], shape: tuple[int, ...]) -> Layout | None:
    """The layout of the result: that of a split operand, the fullest one first."""
    layouts = sorted((x.layout for x in ins if isinstance(x, Split)), key=lambda layout: not layout.other_axes)
    for layout in layouts:
        if layout.shape == shape:
            return layout
    for layout in layouts:  # an operand with dimensions of size 1, still cut at a real one
        lead = layout.lead
        if layout.kind == "rows" and len(layout.shape) == len(shape) and layout.shape[lead] == shape[lead]:
            return layout.rows(shape, lead, range(len(shape)))
    return None


def on_lazy_broadcasts(eqn: JaxprEqn, ins: list[Value]) -> Results:
    """Scalars and broadcast scalars give a broadcast scalar: constants are never made in full."""
    if not any(isinstance(x, LazyBroadcast) for x in ins):
        return None
    scalars = []
    for x in ins:
        value = x.value if isinstance(x, LazyBroadcast) else x
        if isinstance(value, (Split, Partial)) or np.ndim(value):
            return None
        scalars.append(value)
    return [LazyBroadcast(y, aval(v).shape, ()) for y, v in zip(bind(eqn, scalars), eqn.outvars, strict=True)]


# --- partial sums --------------------------------------------------------------------------------

_ADDITIVE = {p.ADD, p.ADD_ANY, p.SUB}
#: Equations that may keep a partial sum partial, depending on their other operands.
LINEAR = _ADDITIVE | {p.MUL, p.DIV}
_UNARY = {p.NEG, p.REAL, p.IMAG, p.COPY, p.RESHAPE, p.SQUEEZE, p.TRANSPOSE}


def on_partials(ctx: Context, eqn: JaxprEqn, ins: list[Value]) -> Results:
    """Linear equations keep a sum partial, so that it is reduced once, as late as possible."""
    if not eqn.outvars:  # a print
        return None
    name = eqn.primitive.name
    size = max((x.local.size for x in ins if isinstance(x, Partial)), default=0)
    if name in _ADDITIVE and size:
        ins = [_on_one_device(ctx, x) if _ready(x) and np.size(_value(x)) <= size else x for x in ins]
    terms = [x.local if isinstance(x, Partial) and x.how == "sum" and x.whole is None else None for x in ins]
    sums = [x is not None for x in terms]
    linear = (
        (name in _ADDITIVE and all(sums))
        or (name == p.MUL and sum(sums) == 1 and _known(ins[sums.index(False)]))
        or (name == p.DIV and sums == [True, False] and _is_divisor(ins[1]))
        or (name in _UNARY and sums == [True])
    )
    out = aval(eqn.outvars[0])
    if not linear or out.size > max(x.size for x in terms if x is not None):
        return None
    locals_ = [_value(x) if term is None else term for x, term in zip(ins, terms, strict=True)]
    return [Partial(y, "sum") for y in bind(eqn, locals_)]


def _value(x: Value) -> Any:
    """The array of a whole value, or the one that a lazy broadcast repeats."""
    return x.value if isinstance(x, LazyBroadcast) else x


def _ready(x: Value) -> bool:
    return not isinstance(x, (Split, Partial)) and not (isinstance(x, LazyBroadcast) and x.dims)


def _on_one_device(ctx: Context, x: Value) -> Partial:
    """A whole value as a sum over devices: the first has all of it. So a chain of sums stays partial."""
    x = jnp.asarray(_value(x))
    return Partial(jnp.where(ctx.index == 0, x, jnp.zeros_like(x)), "sum")


def _known(x: Value) -> bool:
    """Whether a factor is a finite constant. By any other a device's term of zero might become NaN."""
    return _ready(x) and isinstance(_value(x), (np.ndarray, np.generic)) and bool(np.isfinite(_value(x)).all())


def _is_divisor(x: Value) -> bool:
    """Whether dividing the terms divides their sum: not for integers, which are rounded."""
    return _known(x) and jnp.issubdtype(x.dtype, jnp.inexact) and bool(np.all(_value(x)))
