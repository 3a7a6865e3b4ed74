"""Finds the jobs of a traced program: work on whole matrices that stands there once for each leaf.

By the rules, work that needs a matrix whole is done by every device. Where the same kind of work stands in the
program for several leaves, and the leaves do not need one another there, each device can do some of it instead. A
*job* is such a piece of one leaf's program, from the first equation that needs something whole to the last. Nothing
is known of optimizers here: what needs something whole shows when the program is evaluated by the rules without
running it.
"""

import collections
import dataclasses
import heapq
import math
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import numpy as np

from ..jaxpr import primitives as p
from ..jaxpr.calls import inner_programs
from ..jaxpr.compat import Literal, literal_value
from ..jaxpr.flat import inlined
from ..jaxpr.operations import on_matrices, operations, program_on_matrices
from ..jaxpr.trace import JaxprPart
from ..sharding.layout import SMALL, Layout
from ..sharding.leaves import is_key
from . import alike, assign, elementwise
from .leaves_apart import apart, between
from .values import Context, LazyBroadcast, NeedsReplicated, Partial, Split, Value

#: Operations in the time in which a device sends one byte: what an exchange may cost to save some work.
PER_BYTE = 64

#: Equations that begin or end no job. A broadcast is made where it is read; a sum needs nothing whole.
_FREE = {p.BROADCAST, *p.REDUCTIONS}
_MISSING = object()
_Apply = Callable[[Context, Any, list[Value]], list[Value]]


@dataclasses.dataclass(eq=False)
class Job:
    """A piece of a program that one device may run on whole arrays; it stands among equations like one of them.

    Attributes:
      jaxpr: Its equations, over what it reads and what others read of it.
      members: The numbers of the program's equations that it replaces.
      key: Equal for jobs that run the same program.
      operations: What it costs.
    """

    jaxpr: JaxprPart
    members: Sequence[int]
    key: Any
    operations: float
    effects: ClassVar[Any] = frozenset()
    primitive: ClassVar[Any] = types.SimpleNamespace(name="job")

    @property
    def invars(self) -> list[Any]:
        """What it reads."""
        return self.jaxpr.invars

    @property
    def outvars(self) -> list[Any]:
        """What it gives."""
        return self.jaxpr.outvars


@dataclasses.dataclass(frozen=True)
class Found:
    """A program in which pieces are replaced by jobs, and constants that it has besides."""

    jaxpr: JaxprPart
    consts: list[Any]


def found(apply: _Apply, ctx: Context, jaxpr: Any, consts: Sequence[Any], args: Sequence[Value]) -> Found | None:
    """The program with its jobs; `None` where there are none, or where they save nothing.

    Args:
      apply: Evaluates one equation.
      ctx: The evaluation; it keeps what was found for each program and forms of arguments.
      jaxpr: An open program.
      consts: Its constants.
      args: Its inputs; only shapes and layouts are read.

    Returns:
      A program that gives the same. Its constants are those of `jaxpr`, and then others.
    """
    if not ctx.deal or ctx.n == 1 or not program_on_matrices(jaxpr):
        return None
    key = (id(jaxpr), tuple(map(_form, args)))
    if key not in ctx.found:
        ctx.found[key] = jaxpr, _find(apply, ctx, jaxpr, consts, args)  # with the program, so that its id stays its own
    return ctx.found[key][1]


def _form(x: Value) -> Any:
    if isinstance(x, Split):
        return x.layout, x.whole is not None
    kind = type(x).__name__ if isinstance(x, (Partial, LazyBroadcast)) else "whole"
    return kind, np.shape(x), str(x.dtype)


def _find(apply: _Apply, ctx: Context, jaxpr: Any, consts: Sequence[Any], args: Sequence[Value]) -> Found | None:
    eqns, outs, known = inlined(jaxpr, consts, remat=True)
    constvars: list[Any] = list(known)
    program = JaxprPart(constvars, list(jaxpr.invars), outs, _needed(eqns, outs))
    pieces = _Pieces(program, [v for v, x in zip(jaxpr.invars, args, strict=True) if isinstance(x, (Split, Partial))])
    layers = any(isinstance(x, Split) and x.layout.lead for x in args)
    if len(pieces.leaves_with_matrices()) < (1 if layers else 2):
        return None
    meter = _dry_run(apply, ctx, program, list(known.values()), args)
    jobs: dict[int, Job] = {}
    gone: set[int] = set()
    for groups in pieces.by_level(lambda eqn: meter.whole(eqn, pieces.where.held, ctx.n)):
        level = [job for group in groups if (job := pieces.job(group)) and _may_travel(job, meter)]
        if _pays(level, program.eqns, meter, ctx.n):
            jobs.update((job.members[-1], job) for job in level)
            gone.update(i for job in level for i in job.members)
    if not jobs:
        return None
    new = [jobs.get(i, eqn) for i, eqn in enumerate(program.eqns) if i in jobs or i not in gone]
    return Found(dataclasses.replace(program, eqns=_needed(new, outs)), list(known.values())[len(consts) :])


def _needed(eqns: Sequence[Any], outs: Sequence[Any]) -> list[Any]:
    """Without equations whose results nothing reads."""
    read = set(_variables(outs))
    kept = []
    for eqn in reversed(eqns):
        if eqn.effects or not read.isdisjoint(eqn.outvars):
            kept.append(eqn)
            read.update(_variables(eqn.invars))
    return kept[::-1]


def _variables(atoms: Iterable[Any]) -> list[Any]:
    return [v for v in atoms if not isinstance(v, Literal)]


def _is_large(v: Any, n: int) -> bool:
    """Whether an array is split where it is not like a parameter."""
    return bool(v.aval.size >= SMALL * n)


# --- what the rules would do ---------------------------------------------------------------------


class _Meter:
    """What each equation does when a program is evaluated by the rules; stands in the place of a `Record`."""

    def __init__(self) -> None:
        self.current: Any = None
        self.values: dict[Any, Value] = {}
        self.sent: dict[int, float] = collections.defaultdict(float)  # bytes of a ring, per device
        self.ops: dict[int, float] = collections.defaultdict(float)
        self.summed: set[Any] = set()
        self._gathers: set[int] = set()
        self._seen: dict[int, Any] = {}

    def note(self, eqn: Any, how: str, times: int) -> None:
        """An equation, perhaps one of an inner program, is evaluated."""
        if how == "whole":
            self.ops[id(self.current)] += times * operations(eqn)

    def communicated(self, name: str, values: Sequence[Any], times: int) -> None:
        """Values are made whole for the current equation."""
        for x in values:
            if id(x) not in self._seen:
                self._seen[id(x)] = x
                gather = isinstance(x, Split)
                self.sent[id(self.current)] += times * math.prod(x.shape) * x.dtype.itemsize * (1 if gather else 2)
                if gather:
                    self._gathers.add(id(self.current))

    def exchanged(self, kinds: Any, loads: tuple[float, ...], nbytes: int, times: int) -> None:
        """Nothing is dealt out here."""
        raise AssertionError("jobs among the rules")

    def form(self, v: Any) -> Value | None:
        """The value of a variable."""
        return None if isinstance(v, Literal) else self.values.get(v)

    def whole(self, eqn: Any, held: Collection[Any], n: int) -> bool:
        """Whether a job may begin or end with an equation: it needs an array of a leaf whole, or has it so already."""
        if id(eqn) in self._gathers:
            return True
        if eqn.primitive.name in _FREE or elementwise.is_elementwise(eqn):
            return False
        arrays = [self.form(v) for v in _variables(eqn.invars) if v in held]
        if any(not isinstance(x, (Split, Partial)) or _was_summed(x, n) for x in arrays):
            return True
        if self.ops[id(eqn)] and inner_programs(eqn):
            return True
        return on_matrices(eqn) and any(v in self.summed and _is_large(v, n) for v in eqn.outvars)

    def find_summed(self, eqns: Sequence[Any]) -> None:
        """Notes the sums of terms that are made whole, they or what is made of them."""
        for eqn in reversed(eqns):
            for v in eqn.outvars:
                x = self.form(v)
                if isinstance(x, Partial) and (x.whole is not None or v in self.summed):
                    self.summed.add(v)
                    self.summed.update(u for u in _variables(eqn.invars) if isinstance(self.form(u), Partial))


def _was_summed(x: Value | None, n: int) -> bool:
    return isinstance(x, Partial) and x.whole is not None and math.prod(x.shape) >= SMALL * n


def _dry_run(apply: _Apply, ctx: Context, program: JaxprPart, consts: Sequence[Any], args: Sequence[Value]) -> _Meter:
    """Evaluates a program by the rules, without running it."""
    meter = _Meter()
    wholes = [getattr(x, "whole", None) for x in args]

    def body(args: list[Value], wholes: list[Any]) -> None:
        for x, whole in zip(args, wholes, strict=True):
            if isinstance(x, (Split, Partial)):
                x.whole = whole
        meter.values.update(zip([*program.constvars, *program.invars], [*consts, *args], strict=True))
        inner, work = ctx.dry(meter), program.eqns
        while work:
            work = _dry_round(apply, inner, work, meter)

    jax.eval_shape(body, list(args), wholes)
    meter.find_summed(program.eqns)
    return meter


def _dry_round(apply: _Apply, ctx: Context, work: Sequence[Any], meter: _Meter) -> list[Any]:
    postponed, needed = [], []
    for eqn in work:
        meter.current = eqn
        ins = [_read(meter.values, v) for v in eqn.invars]
        if any(x is _MISSING for x in ins):
            postponed.append(eqn)
            continue
        try:
            outs = apply(ctx, eqn, ins)
        except NeedsReplicated as missing:
            meter.communicated(eqn.primitive.name, missing.values, ctx.times)
            needed += missing.values
            postponed.append(eqn)
            continue
        meter.values.update(zip(eqn.outvars, outs, strict=True))
    assert not postponed or needed, "an equation is postponed and needs nothing"
    ctx.communicate(needed)
    return postponed


def _read(values: Mapping[Any, Value], v: Any) -> Any:
    if isinstance(v, Literal):
        return literal_value(v)
    x: Any = values.get(v, _MISSING)
    return x.whole if isinstance(x, Partial) and x.whole is not None else x


# --- jobs ----------------------------------------------------------------------------------------


class _Pieces:
    """A program, and which of its equations belong together."""

    def __init__(self, program: JaxprPart, leafy: Sequence[Any]) -> None:
        self.program = program
        self.where = apart(program.eqns, leafy)
        self.maker = {v: i for i, eqn in enumerate(program.eqns) for v in eqn.outvars}
        self.readers: dict[Any, set[int]] = {v: {len(program.eqns)} for v in _variables(program.outvars)}
        for i, eqn in enumerate(program.eqns):
            for v in _variables(eqn.invars):
                self.readers.setdefault(v, set()).add(i)

    def leaves_with_matrices(self) -> set[Any]:
        """The places where matrices are multiplied or factorised."""
        return {p for p, eqn in zip(self.where.places, self.program.eqns, strict=True) if p and on_matrices(eqn)}

    def by_level(self, ends: Callable[[Any], bool]) -> list[list[list[int]]]:
        """For each level the pieces between equations that may end one: numbers of equations."""
        where, eqns = self.where, self.program.eqns
        chosen = {i for i, eqn in enumerate(eqns) if where.arrays[i] and where.places[i] and ends(eqn)}
        levels: dict[int, list[list[int]]] = {}
        for (_, level), group in between(eqns, where.places, chosen).items():
            levels.setdefault(level, []).append(group)
        return [levels[level] for level in sorted(levels)]

    def job(self, group: Sequence[int]) -> Job | None:
        """The job around these equations; `None` where there is no matrix in it, or where it cannot be sent."""
        if not any(on_matrices(self.program.eqns[i]) for i in group):
            return None
        members = self._with_what_follows(group)
        inside = set(members)
        outvars = self._outputs(inside)
        eqns = [self.program.eqns[i] for i in self._with_constants(self._with_what_precedes(members))]
        made = {v for eqn in eqns for v in eqn.outvars}
        invars = list(dict.fromkeys(v for eqn in eqns for v in _variables(eqn.invars) if v not in made))
        stays = any(eqn.effects or _speaks_of_devices(eqn) for eqn in eqns)
        if stays or any(is_key(v.aval.dtype) for v in [*invars, *outvars]):
            return None
        jaxpr = JaxprPart([], invars, outvars, eqns)
        return Job(jaxpr, members, alike.key(eqns, invars, outvars), sum(map(operations, eqns)))

    def _outputs(self, inside: set[int]) -> list[Any]:
        """What other equations, or the results of the program, read of these."""
        made = [v for i in sorted(inside) for v in self.program.eqns[i].outvars]
        return [v for v in made if not self.readers.get(v, inside) <= inside]

    def _inputs(self, inside: set[int]) -> list[Any]:
        """The arrays of leaves that these equations read of others."""
        read = (v for i in sorted(inside) if self.where.arrays[i] for v in _variables(self.program.eqns[i].invars))
        return [v for v in dict.fromkeys(read) if v in self.where.held and self.maker.get(v) not in inside]

    def _with_what_follows(self, group: Sequence[int]) -> list[int]:
        """These equations, and later ones that read nothing more, if fewer bytes are given then: sums, say.

        Transposes and reshapes follow in any case, so that the result is cut like the leaf that it is for.
        """
        eqns, place = self.program.eqns, self.where.places[group[0]]
        inside, known, below = set(group), {v for i in group for v in eqns[i].outvars}, set(group)
        known.update(self._inputs(inside))
        before: dict[int, set[int]] = {}  # what each follower needs of other followers
        todo = sorted(self._readers(self._outputs(inside), place))
        while todo:
            i = heapq.heappop(todo)
            if i in below:
                continue
            ins = [v for v in _variables(eqns[i].invars) if v not in known]
            below.add(i)
            if not any(v in self.where.held or self.maker.get(v) in below for v in ins):
                known.update(eqns[i].outvars)
                makers = {self.maker[v] for v in _variables(eqns[i].invars) if v in self.maker} & before.keys()
                before[i] = makers.union(*(before[j] for j in makers))
            for j in self._readers(eqns[i].outvars, place):
                heapq.heappush(todo, j)
        for i, needed in sorted(before.items()):
            together = inside | needed | {i}
            then, now = (_bytes(self._outputs(x)) for x in (together, inside))
            moves = not elementwise.is_elementwise(eqns[i]) and eqns[i].primitive.name not in _FREE
            if then < now or (then == now and moves):
                inside = together
        return sorted(inside)

    def _readers(self, variables: Iterable[Any], place: Any) -> set[int]:
        """The equations of a place that read some of these variables."""
        found = {i for v in variables for i in self.readers.get(v, ()) if i < len(self.program.eqns)}
        return {i for i in found if self.where.places[i] == place}

    def _with_what_precedes(self, group: Sequence[int]) -> list[int]:
        """These equations, and earlier ones if fewer bytes are read then: an array instead of its multiples."""
        leaf = self._leaf(group[0])
        best = inside = set(group)
        least = now = _bytes(self._inputs(inside))
        while True:
            makers = {self.maker[v] for v in self._inputs(inside) if v in self.maker}
            ready = [i for i in makers if self._is_cheap(self.program.eqns[i]) and self._leaf(i) == leaf]
            steps = [(_bytes(self._inputs(inside | {i})), -i) for i in ready]
            if not steps or min(steps)[0] > now:
                return sorted(best)
            now, latest = min(steps)
            inside = inside | {-latest}
            if now < least:
                best, least = inside, now

    def _leaf(self, i: int) -> int | None:
        place = self.where.places[i]
        return None if place is None else place[0]

    def _is_cheap(self, eqn: Any) -> bool:
        return not (on_matrices(eqn) or inner_programs(eqn) or eqn.primitive.name in p.REDUCTIONS)

    def _with_constants(self, group: Sequence[int]) -> list[int]:
        """These equations, and those that make what they read of scalars alone: identities, draws, zeros."""
        inside, todo = set(group), list(group)
        while todo:
            for v in _variables(self.program.eqns[todo.pop()].invars):
                i = self.maker.get(v)
                large = v.aval.size > 1 or is_key(v.aval.dtype)
                if i is not None and i not in inside and large and not self.where.arrays[i]:
                    inside.add(i)
                    todo.append(i)
        return sorted(inside)


def _bytes(variables: Iterable[Any]) -> int:
    return sum(v.aval.size * v.aval.dtype.itemsize for v in variables)


def _speaks_of_devices(eqn: Any) -> bool:
    named = any(isinstance(axis, str) for axis in p.collective_axes(eqn))  # a reduction has numbers of dimensions
    if eqn.primitive.name == p.SHARD_MAP or named:
        return True
    return any(_speaks_of_devices(e) for inner in inner_programs(eqn) for e in inner.eqns)


def _may_travel(job: Job, meter: _Meter) -> bool:
    """Whether what a job reads can be sent: an array that other mesh axes shard cannot."""
    return not any(any(layout.other_axes) for layout in _layouts(job, meter))


def _layouts(job: Job, meter: _Meter) -> list[Layout]:
    return [x.layout for v in job.invars if isinstance(x := meter.form(v), Split)]


def _pays(jobs: Sequence[Job], eqns: Sequence[Any], meter: _Meter, n: int) -> bool:
    """Whether dealing jobs out takes less time than the rules, by operations and bytes alone."""
    kinds: dict[Any, tuple[int, Job]] = {}
    for job in jobs:
        kinds[job.key] = kinds.get(job.key, (0, job))[0] + _layers(job, meter), job
    if sum(count for count, _ in kinds.values()) < 2:
        return False
    each = [eqns[i] for job in jobs for i in job.members]
    today = sum(PER_BYTE * meter.sent[id(e)] + (meter.ops[id(e)] or operations(e) / n) for e in each)
    plan = assign.assign([(count, job.operations / _layers(job, meter)) for count, job in kinds.values()], n)
    moved = [_moved(job, meter) / _layers(job, meter) / n for _, job in kinds.values()]
    width = max(sum(count * moved[kind] for kind, _, count in row) for row in plan.rows)
    return PER_BYTE * n * width + max(plan.loads) < today


def _layers(job: Job, meter: _Meter) -> int:
    """In how many jobs one over stacked layers may be cut."""
    layouts = _layouts(job, meter)
    return layouts[0].shape[0] if layouts and all(x.lead and len(x.shape) > 2 for x in layouts) else 1


def _moved(job: Job, meter: _Meter) -> int:
    """Bytes that a job reads and gives, other than what is equal on all devices."""
    read = [v for v in job.invars if isinstance(meter.form(v), (Split, Partial))]
    return _bytes([*read, *job.outvars])
