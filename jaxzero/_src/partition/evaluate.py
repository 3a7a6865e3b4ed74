"""Evaluates a traced program on shares, equation by equation, in rounds.

A rule that needs a value whole raises `NeedsReplicated`; its equation is postponed and the round goes on. At the
end of a round all needed values are communicated together, and the next round evaluates the postponed equations in
their old order. So the norms of all leaves are reduced in one small collective and not one by one. For example, with
leaves `a`: f32[6, 4] and `b`: f32[8], clipped by their global norm over 4 devices:

    round 1   squares run on the shares (f32[6] of `a`, which is flat, and f32[2] of `b`)
              `reduce_sum` of each gives a `Partial` f32[], this device's term; their `add` is one `Partial` f32[]
              `sqrt` is not linear: it needs the sum whole, so it is postponed, and all that reads it
    between   one all-reduce of f32[1]
    round 2   `sqrt`, `min`, and the products of the whole factor with the shares

A postponed equation leaves its results out of the scope; what reads them is postponed too. An inner program that is
only called is opened in place (its variables are aliases of the caller's), so that its equations take part in the
caller's rounds.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn, Var

from ..jaxpr import primitives as p
from ..jaxpr.bind import bind
from ..jaxpr.calls import called_program
from ..jaxpr.compat import Literal, aval, literal_value
from ..jaxpr.trace import AnyJaxpr
from ..sharding.vma import varying
from . import batched, contractions, control_flow, deal, draws, elementwise, indexing, jobs, reductions, structural
from .values import Context, LazyBroadcast, NeedsReplicated, Partial, Results, Split, Value

_MISSING = object()
Atom = Var | Literal

_RULES = {**reductions.RULES, **structural.RULES, **indexing.RULES, **contractions.RULES}
_IDENTITY = {p.BARRIER, p.RESHARD, p.SHARDING_CONSTRAINT}


class _Scope(dict):
    """Variables of one program; a variable may stand for an atom of another scope."""

    def read(self, atom: Atom) -> Any:
        """The value of an atom; `_MISSING` where it is not computed yet."""
        scope = self
        while True:
            if isinstance(atom, Literal):
                return literal_value(atom)
            value = scope.get(atom, _MISSING)
            if isinstance(value, _Alias):
                scope, atom = value.scope, value.atom
                continue
            if isinstance(value, Partial) and value.whole is not None:
                return value.whole
            return value


class _Alias:
    """The value is, or will be, that of `atom` in `scope`."""

    def __init__(self, scope: _Scope, atom: Atom) -> None:
        self.scope, self.atom = scope, atom


Work = list[tuple[JaxprEqn, _Scope]]


def evaluate(ctx: Context, jaxpr: AnyJaxpr, consts: Sequence[Value], args: Sequence[Value]) -> list[Value]:
    """Evaluates a program on shares.

    Args:
      ctx: Axes, record and caches of this evaluation.
      jaxpr: The program, traced at full shapes.
      consts: Its constants, whole.
      args: Whole arrays, `Split`, `Partial` or `LazyBroadcast` values of the program's input shapes.

    Returns:
      One value per result, in whatever form it came out.
    """
    found = jobs.found(_apply, ctx, jaxpr, consts, args)
    if found is not None:
        jaxpr, consts = found.jaxpr, [*consts, *found.consts]
    scope = _Scope(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
    work = [(eqn, scope) for eqn in jaxpr.eqns]
    while work:
        postponed, needed = _round(ctx, work)
        ready = [(eqn, s) for eqn, s in postponed if isinstance(eqn, jobs.Job) and _ready(eqn, s)]
        assert not postponed or needed or ready, "an equation is postponed and needs nothing"
        if needed:
            ctx.communicate(needed)
        elif ready:
            _deal(ctx, ready)
            postponed = [(eqn, s) for eqn, s in postponed if eqn.outvars[0] not in s]
        work = postponed
    return [scope.read(v) for v in jaxpr.outvars]


def _ready(job: jobs.Job, scope: _Scope) -> bool:
    return all(scope.read(v) is not _MISSING for v in job.invars)


def _deal(ctx: Context, ready: Sequence[tuple[jobs.Job, _Scope]]) -> None:
    """Runs the jobs, all in one exchange."""
    operands = [[scope.read(v) for v in job.invars] for job, scope in ready]
    results = deal.deal(evaluate, ctx, [job for job, _ in ready], operands)
    for (job, scope), outs in zip(ready, results, strict=True):
        scope.update(zip(job.outvars, outs, strict=True))


def _round(ctx: Context, work: Work) -> tuple[Work, list[Split | Partial]]:
    """Evaluates what can be evaluated; returns the postponed equations and the values that they need whole."""
    postponed: Work = []
    needed: list[Split | Partial] = []
    stack = list(reversed(work))
    while stack:
        eqn, scope = stack.pop()
        ins = [scope.read(v) for v in eqn.invars]
        missing = any(x is _MISSING for x in ins)
        called = called_program(eqn)
        if called is not None and (missing or ctx.sharded_draws or not _bound_as_it_is(ins)):
            jaxpr, consts = called
            inner = _Scope(zip(jaxpr.constvars, consts, strict=True))
            for v, atom, x in zip(jaxpr.invars, eqn.invars, ins, strict=True):
                inner[v] = _Alias(scope, atom) if x is _MISSING else x
            for v, atom in zip(eqn.outvars, jaxpr.outvars, strict=True):
                scope[v] = _Alias(inner, atom)
            stack.extend((e, inner) for e in reversed(jaxpr.eqns))
            continue
        if missing:
            if eqn.primitive.name not in elementwise.LINEAR:  # it will need these whole in any case
                needed += _recorded(ctx, eqn, [x for x in ins if isinstance(x, Partial)])
            postponed.append((eqn, scope))
            continue
        if isinstance(eqn, jobs.Job):  # deferred until nothing else can run, so that all jobs share one exchange
            needed += _recorded(ctx, eqn, [x for x in ins if isinstance(x, Partial)])
            postponed.append((eqn, scope))
            continue
        try:
            outs = _apply(ctx, eqn, ins)
        except NeedsReplicated as missing_values:
            needed += _recorded(ctx, eqn, missing_values.values)
            postponed.append((eqn, scope))
            continue
        for v, x in zip(eqn.outvars, outs, strict=True):
            scope[v] = x
    return postponed, needed


def _recorded(ctx: Context, eqn: JaxprEqn, values: list[Split | Partial]) -> list[Split | Partial]:
    """The values, once it is recorded that the equation needs them."""
    if ctx.record is not None:
        ctx.record.communicated(eqn.primitive.name, values, ctx.times)
    return values


def _bound_as_it_is(ins: Sequence[Value]) -> bool:
    """Whether an inner program may be bound: of varying operands its results would be typed as whole all the same.

    Seen with jax 0.10.2 and 0.12.0.1. It can go when a `scan`, traced outside a manual region and bound inside on a
    varying operand, gives a result that `vma.varying` says varies.
    """
    return all(not isinstance(x, (Split, Partial, LazyBroadcast)) and not varying(x) for x in ins)


def _apply(ctx: Context, eqn: JaxprEqn, ins: list[Value]) -> list[Value]:
    name = eqn.primitive.name
    divided = any(isinstance(x, (Split, Partial)) for x in ins)
    if name in control_flow.RULES and (ctx.sharded_draws or not _bound_as_it_is(ins)):
        ctx.note(eqn, "loop")
        return control_flow.RULES[name](evaluate, ctx, eqn, ins)
    if name in _IDENTITY:
        return list(ins)
    if name == p.RANDOM_BITS and ctx.sharded_draws and (outs := draws.bits(ctx, eqn, ins)) is not None:
        return outs
    if not divided:
        return _whole(ctx, eqn, ins)
    for rule, how in _candidates(ctx, eqn, name):
        outs = rule(ins)
        if outs is not None:
            ctx.note(eqn, how)
            return outs
    _refuse(eqn)
    whole = ctx.whole(ins)
    ctx.note(eqn, "whole")
    return [*bind(eqn, whole)]


def _candidates(ctx: Context, eqn: JaxprEqn, name: str) -> Iterator[tuple[Callable[[list[Value]], Results], str]]:
    """The rules that may apply, in order, each with the word that the record counts it under."""
    yield lambda ins: elementwise.on_partials(ctx, eqn, ins), "local"
    if name in _RULES:
        yield lambda ins: _RULES[name](ctx, eqn, ins) if _for_rules(name, ins) else None, "local"
    elif elementwise.is_elementwise(eqn):
        yield lambda ins: elementwise.on_shares(ctx, eqn, ins), "local"
    else:
        yield lambda ins: batched.on_entries(ctx, eqn, ins), "local"


def _for_rules(name: str, ins: list[Value]) -> bool:
    """Family rules take split operands; only reductions (sums of sums) take a partial one."""
    return any(isinstance(x, Split) for x in ins) or name in reductions.RULES


def _whole(ctx: Context, eqn: JaxprEqn, ins: list[Value]) -> list[Value]:
    """No operand is divided: the equation runs as it is, equal on all devices."""
    if eqn.primitive.name == p.BROADCAST and len(ins) == 1:
        x, full = ins[0], aval(eqn.outvars[0])
        if not isinstance(x, (Split, Partial, LazyBroadcast)) and np.size(x) < full.size:
            return [LazyBroadcast(x, full.shape, tuple(eqn.params["broadcast_dimensions"]))]
    if any(isinstance(x, LazyBroadcast) for x in ins) and elementwise.is_elementwise(eqn):
        outs = elementwise.on_lazy_broadcasts(eqn, ins)
        if outs is not None:
            return outs
    _refuse(eqn)
    ctx.note(eqn, "whole")
    return [*bind(eqn, ctx.whole(ins))]


def _refuse(eqn: JaxprEqn) -> None:
    name = eqn.primitive.name
    if name == p.SHARD_MAP:
        raise ValueError(
            "optimizer: the inner optimizer opens a shard_map itself (a jaxzero optimizer inside a "
            "jaxzero optimizer?). Expected a plain Optax optimizer. Fix: wrap once, outermost: "
            "zero.optimizer(optax.chain(...))."
        )
    if name == p.AXIS_INDEX:
        raise ValueError(
            "optimizer: the inner optimizer asks for its device's index (jax.lax.axis_index), which "
            "has no meaning in the unsharded program that it is. Fix: draw with a key instead."
        )
