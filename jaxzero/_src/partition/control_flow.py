"""`cond`, `scan` and `while`: branches and carries agree on whole or split, by a fixed point."""

import copy
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn, jaxpr_as_fun

from ..jaxpr import primitives as p
from ..jaxpr.calls import scan_options, while_parts
from ..jaxpr.compat import aval, open_program, scan_parts
from ..jaxpr.trace import AnyJaxpr
from ..sharding.layout import Layout
from ..sharding.vma import cast
from .values import Array, Context, LazyBroadcast, Partial, Split, Value

#: An inner program and its constants.
Open = tuple[AnyJaxpr, list[Array]]
Evaluate = Callable[[Context, AnyJaxpr, Sequence[Array], Sequence[Value]], list[Value]]

#: More rounds than any carry can change its form: split once, then pinned whole once.
_ROUNDS = 8


def _form(x: Value) -> Layout | None:
    return x.layout if isinstance(x, Split) else None


def _without_partials(ctx: Context, values: list[Value]) -> list[Value]:
    """Values for an inner program: partial ones are reduced and lazy ones broadcast before, the others stay."""
    partial = [x for x in values if isinstance(x, Partial)]
    if partial:
        ctx.whole(partial)
    return [ctx.whole([x])[0] if isinstance(x, (Partial, LazyBroadcast)) else x for x in values]


def _copied_splits(values: list[Value]) -> list[Value]:
    """Values that a loop closes over, splits as new objects: what is gathered inside the loop stays inside."""
    return [copy.copy(x) if isinstance(x, Split) else x for x in values]


def cond(evaluate: Evaluate, ctx: Context, eqn: JaxprEqn, ins: list[Value]) -> list[Value]:
    """Every branch gives each result in the same form; a result split in one branch is split in all."""
    (index,) = ctx.whole(ins[:1])
    operands = _without_partials(ctx, ins[1:])
    programs = [open_program(b) for b in eqn.params["branches"]]

    def branch(program: Open, quiet: bool, forms: list[Layout | None] | None) -> Callable[..., list[Value]]:
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
    over = ctx.axes.shard
    if ctx.all_varying:
        values = [x if isinstance(x, Split) else cast(jnp.asarray(x), over) for x in values]
    return [Split(cast(x.local, over), x.layout) if isinstance(x, Split) else x for x in values]


def _carry_forms(
    ctx: Context, step: Callable[[Context, list[Value]], list[Value]], carry: list[Value]
) -> list[Layout | None]:
    """The form that each carry has between iterations: a layout, or `None` for whole.

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


def scan(evaluate: Evaluate, ctx: Context, eqn: JaxprEqn, ins: list[Value]) -> list[Value]:
    """A stacked operand cut inside each layer is scanned share by share; others are gathered before."""
    jaxpr, consts = open_program(eqn.params["jaxpr"])
    closed, carry, scanned = scan_parts(eqn, ins)
    closed, carry = _without_partials(ctx, closed), _without_partials(ctx, carry)
    xs = [x if isinstance(x, Split) and x.layout.lead else ctx.whole([x])[0] for x in scanned]
    options = scan_options(eqn)
    length = options["length"]
    if not length:  # nothing runs, and there is no first layer to look at
        return [*carry, *(lax.full(aval(v).shape, 0, aval(v).dtype) for v in eqn.outvars[len(carry) :])]

    def step(inner: Context, values: list[Value], slices: list[Array]) -> list[Value]:
        layers = [
            Split(s, x.layout.per_layer()) if isinstance(x, Split) else s for x, s in zip(xs, slices, strict=True)
        ]
        return evaluate(inner, jaxpr, consts, [*_copied_splits(closed), *values, *layers])

    shares = [x.local if isinstance(x, Split) else x for x in xs]
    carries = len(carry)
    forms = _carry_forms(
        ctx, lambda inner, c: step(inner, c, [lax.index_in_dim(x, 0, keepdims=False) for x in shares])[:carries], carry
    )
    carry = _typed_varying(ctx, ctx.convert_all(carry, forms))

    def body(c: list[Value], slices: list[Array]) -> tuple[list[Value], list[Value]]:
        inner = ctx.child(times=length)
        outs = step(inner, c, slices)
        wanted = [*forms, *map(_form, outs[carries:])]
        outs = _typed_varying(inner, inner.convert_all(outs, wanted))
        return outs[:carries], outs[carries:]

    carry, ys = lax.scan(body, carry, shares, **options)
    return [*carry, *(_stacked(y, length) if isinstance(y, Split) else y for y in ys)]


def _stacked(y: Split, length: int) -> Split:
    layout = y.layout
    other_axes = ((), *layout.other_axes) if layout.other_axes else ()
    return Split(
        y.local, Layout((length, *layout.shape), layout.n, layout.kind, layout.lead + 1, other_axes=other_axes)
    )


def while_(evaluate: Evaluate, ctx: Context, eqn: JaxprEqn, ins: list[Value]) -> list[Value]:
    """Like `scan`; the predicate is whole, so all devices take the same number of iterations."""
    cond_consts, body_consts, carry = while_parts(eqn, _without_partials(ctx, ins))
    test, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
    if test.out_avals[0].shape:
        test, body = _with_one_predicate(test, body, len(cond_consts), len(body_consts))
        body_consts = [*cond_consts, *body_consts]
    open_test, open_body = open_program(test), open_program(body)

    def step(inner: Context, c: list[Value]) -> list[Value]:
        return evaluate(inner, *open_body, [*_copied_splits(body_consts), *c])

    forms = _carry_forms(ctx, step, carry)
    carry = _typed_varying(ctx, ctx.convert_all(carry, forms))

    def goes_on(c: list[Value]) -> Value:
        inner = ctx.child()
        return inner.convert_all(evaluate(inner, *open_test, [*_copied_splits(cond_consts), *c]), [None])[0]

    def next_carry(c: list[Value]) -> list[Value]:
        inner = ctx.child()
        return _typed_varying(inner, inner.convert_all(step(inner, c), forms))

    return lax.while_loop(goes_on, next_carry, carry)


def _with_one_predicate(
    test: ClosedJaxpr, body: ClosedJaxpr, test_consts: int, body_consts: int
) -> tuple[ClosedJaxpr, ClosedJaxpr]:
    """The programs of a loop that `vmap` made, with one predicate for each example.

    The loop goes on while any example does, and one that has ended keeps its carry. JAX leaves this to its
    compiler; here it is part of the programs. The body takes the constants of the test too.
    """
    test_of, body_of = jaxpr_as_fun(test), jaxpr_as_fun(body)

    def goes_on(*operands: Array) -> Array:
        return jnp.any(test_of(*operands)[0])

    def next_carry(*operands: Array) -> list[Array]:
        consts, rest = operands[:test_consts], operands[test_consts:]
        carry = rest[body_consts:]
        (running,) = test_of(*consts, *carry)
        apart = [lax.broadcast_in_dim(running, x.shape, range(running.ndim)) for x in carry]
        return [lax.select(p, new, old) for p, new, old in zip(apart, body_of(*rest), carry, strict=True)]

    avals = [*test.in_avals[:test_consts], *body.in_avals]
    return jax.make_jaxpr(goes_on)(*test.in_avals), jax.make_jaxpr(next_carry)(*avals)


RULES = {p.COND: cond, p.SCAN: scan, p.WHILE: while_}
