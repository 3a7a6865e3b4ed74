"""`cond`, `scan` and `while`: branches and carries agree on whole or split, by a fixed point."""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from .._compat import open_program, scan_parts
from ..layout import Layout
from ..mesh import cast
from .values import Context, Partial, Split, Spread, Value

Run = Callable[[Context, Any, list[Any], list[Value]], list[Value]]

#: More rounds than any carry can change its form: split once, then pinned whole once.
_ROUNDS = 8


def _form(x: Value) -> Layout | None:
    return x.layout if isinstance(x, Split) else None


def _plain(ctx: Context, values: list[Value]) -> list[Value]:
    """Partial values cross devices before they enter an inner program; the rest goes in as it is."""
    partial = [x for x in values if isinstance(x, Partial)]
    if partial:
        ctx.whole(partial)
    return [ctx.whole([x])[0] if isinstance(x, (Partial, Spread)) else x for x in values]


def cond(run: Run, ctx: Context, eqn: Any, ins: list[Value]) -> list[Value]:
    """Every branch gives each result in the same form; a result split in one branch is split in all."""
    (index,) = ctx.whole(ins[:1])
    operands = _plain(ctx, ins[1:])
    programs = [open_program(b) for b in eqn.params["branches"]]

    def branch(program: Any, quiet: bool, forms: list[Layout | None] | None) -> Callable[..., Any]:
        def body(values: list[Value]) -> list[Value]:
            inner = ctx.child(quiet=quiet)
            jaxpr, consts = program
            outs = run(inner, jaxpr, consts, values)
            return outs if forms is None else _typed(inner, inner.settle(outs, forms))

        return body

    outs = [jax.eval_shape(branch(p, True, None), operands) for p in programs]
    forms = [next((f for f in map(_form, column) if f is not None), None) for column in zip(*outs, strict=True)]
    return lax.switch(index, [branch(p, False, forms) for p in programs], operands)


def _typed(ctx: Context, values: list[Value]) -> list[Value]:
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

    def body(values: list[Value]) -> list[Value]:
        outs = step(ctx.child(quiet=True), values)
        gathered[:] = [isinstance(x, Split) and x.whole is not None for x in values]
        return outs

    for _ in range(_ROUNDS):
        values = jax.eval_shape(lambda c, f=tuple(forms): _typed(ctx, ctx.child(quiet=True).settle(c, f)), carry)
        changed = False
        for i, out in enumerate(jax.eval_shape(body, values)):
            if forms[i] is None and isinstance(out, Split) and not pinned[i]:
                forms[i], changed = out.layout, True
            elif forms[i] is not None and (gathered[i] or not isinstance(out, Split)):
                forms[i], pinned[i], changed = None, True, True
        if not changed:
            return forms
    return [None] * len(carry)


def scan(run: Run, ctx: Context, eqn: Any, ins: list[Value]) -> list[Value]:
    """A stacked operand cut inside each layer is scanned share by share; others are gathered before."""
    jaxpr, consts = open_program(eqn.params["jaxpr"])
    closed, carry, xs = (list(part) for part in scan_parts(eqn, ins))
    closed, carry = _plain(ctx, closed), _plain(ctx, carry)
    xs = [x if isinstance(x, Split) and x.layout.lead else ctx.whole([x])[0] for x in xs]
    length = eqn.params["length"]

    def step(inner: Context, values: list[Value], slices: list[Any]) -> list[Value]:
        layers = [
            Split(s, x.layout.per_layer()) if isinstance(x, Split) else s for x, s in zip(xs, slices, strict=True)
        ]
        return run(inner, jaxpr, consts, [*closed, *values, *layers])

    scanned = [x.local if isinstance(x, Split) else x for x in xs]
    first = jax.eval_shape(lambda xs: [lax.index_in_dim(x, 0, keepdims=False) for x in xs], scanned)
    carries = len(carry)
    forms = _carry_forms(ctx, lambda inner, c: step(inner, c, first)[:carries], carry)
    carry = _typed(ctx, ctx.settle(carry, forms))

    def body(c: list[Value], slices: list[Any]) -> tuple[list[Value], list[Value]]:
        inner = ctx.child(times=length)
        outs = step(inner, c, slices)
        wanted = [*forms, *map(_form, outs[carries:])]
        outs = _typed(inner, inner.settle(outs, wanted))
        return outs[:carries], outs[carries:]

    keywords = {k: eqn.params[k] for k in ("reverse", "unroll")}
    carry, ys = lax.scan(body, carry, scanned, length=length, **keywords)
    return [*carry, *(_stacked(y, length) if isinstance(y, Split) else y for y in ys)]


def _stacked(y: Split, length: int) -> Split:
    layout = y.layout
    return Split(y.local, Layout((length, *layout.shape), layout.n, layout.kind, layout.lead + 1))


def while_(run: Run, ctx: Context, eqn: Any, ins: list[Value]) -> list[Value]:
    """Like `scan`; the predicate is whole, so all devices take the same number of turns."""
    params = eqn.params
    for_cond, for_body = params["cond_nconsts"], params["body_nconsts"]
    values = _plain(ctx, list(ins))
    cond_consts, rest = values[:for_cond], values[for_cond:]
    body_consts, carry = rest[:for_body], rest[for_body:]
    test, body = open_program(params["cond_jaxpr"]), open_program(params["body_jaxpr"])

    def step(inner: Context, c: list[Value]) -> list[Value]:
        return run(inner, body[0], body[1], [*body_consts, *c])

    forms = _carry_forms(ctx, step, carry)
    carry = _typed(ctx, ctx.settle(carry, forms))

    def again(c: list[Value]) -> Any:
        inner = ctx.child()
        return inner.settle(run(inner, test[0], test[1], [*cond_consts, *c]), [None])[0]

    def turn(c: list[Value]) -> list[Value]:
        inner = ctx.child()
        return _typed(inner, inner.settle(step(inner, c), forms))

    return lax.while_loop(again, turn, carry)


RULES = {"cond": cond, "scan": scan, "while": while_}
