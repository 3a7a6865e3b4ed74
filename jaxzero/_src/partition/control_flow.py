"""`cond`, `scan` and `while`: branches and carries agree on whole or split, by a fixed point."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import jaxpr_as_fun

from ..jaxpr.compat import open_program, scan_parts
from ..sharding.layout import Layout
from ..sharding.vma import cast
from .values import Context, LazyBroadcast, Partial, Split, Value

Evaluate = Callable[[Context, Any, list[Any], list[Value]], list[Value]]

#: More rounds than any carry can change its form: split once, then pinned whole once.
_ROUNDS = 8


def _form(x: Value) -> Layout | None:
    return x.layout if isinstance(x, Split) else None


def _without_partials(ctx: Context, values: list[Value]) -> list[Value]:
    """Partial values cross devices before they enter an inner program; the rest goes in as it is."""
    partial = [x for x in values if isinstance(x, Partial)]
    if partial:
        ctx.whole(partial)
    return [ctx.whole([x])[0] if isinstance(x, (Partial, LazyBroadcast)) else x for x in values]


def _copied_splits(values: list[Value]) -> list[Value]:
    """Values that a loop closes over, each as an object of its own: what is gathered inside stays inside."""
    inner = [Split(x.local, x.layout) if isinstance(x, Split) else x for x in values]
    for x, y in zip(values, inner, strict=True):
        if isinstance(x, Split):
            y.whole = x.whole
    return inner


def cond(evaluate: Evaluate, ctx: Context, eqn: Any, ins: list[Value]) -> list[Value]:
    """Every branch gives each result in the same form; a result split in one branch is split in all."""
    (index,) = ctx.whole(ins[:1])
    operands = _without_partials(ctx, ins[1:])
    programs = [open_program(b) for b in eqn.params["branches"]]

    def branch(program: Any, quiet: bool, forms: list[Layout | None] | None) -> Callable[..., Any]:
        def body(values: list[Value]) -> list[Value]:
            inner = ctx.child(quiet=quiet)
            jaxpr, consts = program
            outs = evaluate(inner, jaxpr, consts, values)
            return outs if forms is None else _typed_varying(inner, inner.convert_all(outs, forms))

        return body

    outs = [jax.eval_shape(branch(p, True, None), operands) for p in programs]
    forms = [next((f for f in map(_form, column) if f is not None), None) for column in zip(*outs, strict=True)]
    return lax.switch(index, [branch(p, False, forms) for p in programs], operands)


def _typed_varying(ctx: Context, values: list[Value]) -> list[Value]:
    """Split values typed as varying over the shard axis even where a branch made them of constants."""
    return [Split(cast(x.local, ctx.axes.shard), x.layout) if isinstance(x, Split) else x for x in values]


def _carry_forms(
    ctx: Context, step: Callable[[Context, list[Value]], list[Value]], carry: list[Value]
) -> list[Layout | None]:
    """In which form each carry goes round.

    A carry that the body makes split becomes split; one that the body gathers, or gives out whole, stays
    whole from before the loop, so that it is gathered once and not in every iteration.
    """
    forms = [_form(x) for x in carry]
    pinned = [False] * len(carry)
    gathered: list[bool] = []

    def body(carry: list[Value]) -> list[Value]:
        values = _typed_varying(ctx, ctx.child(quiet=True).convert_all(carry, tuple(forms)))
        outs = step(ctx.child(quiet=True), values)
        gathered[:] = [isinstance(x, Split) and x.whole is not None for x in values]
        return outs

    for _ in range(_ROUNDS):
        changed = False
        for i, out in enumerate(jax.eval_shape(body, carry)):
            if forms[i] is None and isinstance(out, Split) and not pinned[i]:
                forms[i], changed = out.layout, True
            elif forms[i] is not None and (gathered[i] or not isinstance(out, Split)):
                forms[i], pinned[i], changed = None, True, True
        if not changed:
            return forms
    return [None] * len(carry)


def scan(evaluate: Evaluate, ctx: Context, eqn: Any, ins: list[Value]) -> list[Value]:
    """A stacked operand cut inside each layer is scanned share by share; others are gathered before."""
    jaxpr, consts = open_program(eqn.params["jaxpr"])
    closed, carry, xs = (list(part) for part in scan_parts(eqn, ins))
    closed, carry = _without_partials(ctx, closed), _without_partials(ctx, carry)
    xs = [x if isinstance(x, Split) and x.layout.lead else ctx.whole([x])[0] for x in xs]
    length = eqn.params["length"]
    if not length:  # nothing runs, and there is no first layer to look at
        return [*carry, *(lax.full(v.aval.shape, 0, v.aval.dtype) for v in eqn.outvars[len(carry) :])]

    def step(inner: Context, values: list[Value], slices: list[Any]) -> list[Value]:
        layers = [
            Split(s, x.layout.per_layer()) if isinstance(x, Split) else s for x, s in zip(xs, slices, strict=True)
        ]
        return evaluate(inner, jaxpr, consts, [*_copied_splits(closed), *values, *layers])

    scanned = [x.local if isinstance(x, Split) else x for x in xs]
    carries = len(carry)
    forms = _carry_forms(
        ctx, lambda inner, c: step(inner, c, [lax.index_in_dim(x, 0, keepdims=False) for x in scanned])[:carries], carry
    )
    carry = _typed_varying(ctx, ctx.convert_all(carry, forms))

    def body(c: list[Value], slices: list[Any]) -> tuple[list[Value], list[Value]]:
        inner = ctx.child(times=length)
        outs = step(inner, c, slices)
        wanted = [*forms, *map(_form, outs[carries:])]
        outs = _typed_varying(inner, inner.convert_all(outs, wanted))
        return outs[:carries], outs[carries:]

    keywords = {k: eqn.params[k] for k in ("reverse", "unroll")}
    carry, ys = lax.scan(body, carry, scanned, length=length, **keywords)
    return [*carry, *(_stacked(y, length) if isinstance(y, Split) else y for y in ys)]


def _stacked(y: Split, length: int) -> Split:
    layout = y.layout
    other_axes = ((), *layout.other_axes) if layout.other_axes else ()
    return Split(
        y.local, Layout((length, *layout.shape), layout.n, layout.kind, layout.lead + 1, other_axes=other_axes)
    )


def while_(evaluate: Evaluate, ctx: Context, eqn: Any, ins: list[Value]) -> list[Value]:
    """Like `scan`; the predicate is whole, so all devices take the same number of turns."""
    params = eqn.params
    for_cond, for_body = params["cond_nconsts"], params["body_nconsts"]
    values = _without_partials(ctx, list(ins))
    cond_consts, rest = values[:for_cond], values[for_cond:]
    body_consts, carry = rest[:for_body], rest[for_body:]
    test, body = params["cond_jaxpr"], params["body_jaxpr"]
    if test.out_avals[0].shape:
        test, body = _with_one_predicate(test, body, len(cond_consts), len(body_consts))
        body_consts = [*cond_consts, *body_consts]
    test, body = open_program(test), open_program(body)

    def step(inner: Context, c: list[Value]) -> list[Value]:
        return evaluate(inner, body[0], body[1], [*_copied_splits(body_consts), *c])

    forms = _carry_forms(ctx, step, carry)
    carry = _typed_varying(ctx, ctx.convert_all(carry, forms))

    def goes_on(c: list[Value]) -> Any:
        inner = ctx.child()
        return inner.convert_all(evaluate(inner, test[0], test[1], [*_copied_splits(cond_consts), *c]), [None])[0]

    def next_carry(c: list[Value]) -> list[Value]:
        inner = ctx.child()
        return _typed_varying(inner, inner.convert_all(step(inner, c), forms))

    return lax.while_loop(goes_on, next_carry, carry)


def _with_one_predicate(test: Any, body: Any, test_consts: int, body_consts: int) -> tuple[Any, Any]:
    """The programs of a loop that `vmap` made, with one predicate for each example.

    The loop goes on while any example does, and one that has ended keeps its carry. JAX leaves this to its
    compiler; here it is part of the programs. The body takes the constants of the test too.
    """
    test_of, body_of = jaxpr_as_fun(test), jaxpr_as_fun(body)

    def goes_on(*operands: Any) -> Any:
        return jnp.any(test_of(*operands)[0])

    def next_carry(*operands: Any) -> list[Any]:
        consts, rest = operands[:test_consts], operands[test_consts:]
        carry = rest[body_consts:]
        (running,) = test_of(*consts, *carry)
        apart = [lax.broadcast_in_dim(running, x.shape, range(running.ndim)) for x in carry]
        return [lax.select(p, new, old) for p, new, old in zip(apart, body_of(*rest), carry, strict=True)]

    avals = [*test.in_avals[:test_consts], *body.in_avals]
    return jax.make_jaxpr(goes_on)(*test.in_avals), jax.make_jaxpr(next_carry)(*avals)


RULES = {"cond": cond, "scan": scan, "while": while_}
