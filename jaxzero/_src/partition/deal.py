"""Deals jobs out: one all-to-all to their owners, each owner works on whole arrays, one all-to-all back.

A job reads shares (each device has 1/n of the array) and values that are equal everywhere. Every job has an owner. One
all-to-all brings the shares of all jobs to their owners, row `d` of the buffer to device `d`:

    send  [n, w]: row d holds this device's shares of all that device d's jobs read
    got   [n, w]: row s holds the shares of device s of all that this device's jobs read
    out   [n, v]: row d holds device d's shares of all that this device's jobs give
    back  [n, v]: row s holds this device's shares of all that device s's jobs give

Jobs that are alike (one *kind*: the same program and shapes) fill *slots*. All work is one loop over the jobs of a
device, with a branch for each kind, which reads kind, slot and columns from a table; no collective stands inside. As
long as there is a job of a kind for each device, all devices are in the same branch. A device that has nothing left
does nothing. So the code grows with the number of kinds, not of jobs, and one job at a time is in memory.

All that depends on the device is typed so, and comes back as shares, or (small results) through a sum in which one
device has the value and all others have -0.0.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..comm import collectives
from ..jaxpr.operations import on_matrices
from ..jaxpr.varying import evaluate_program
from ..sharding.layout import SMALL, Layout, Shape, even_split
from ..sharding.vma import cast
from .assign import Assignment, assign
from .jobs import Job
from .one_entry import Coupled, Evaluate, run_entry
from .values import Array, Context, LazyBroadcast, Recorder, Split, Value


@dataclasses.dataclass(frozen=True)
class Result:
    """What a job gives, for one slot.

    Attributes:
      shape: Its shape.
      dtype: Its dtype.
      layout: How it is cut; `None` for a small one, which is whole on all devices.
      layers: Whether there is one for each layer.
    """

    shape: Shape
    dtype: Any
    layout: Layout | None
    layers: bool


@dataclasses.dataclass(eq=False)
class Kind:
    """Jobs that are alike.

    Attributes:
      job: One of them.
      members: The operands of each.
      layers: How many slots each member has: one for each layer of what it reads; 0 for one slot that is no layer.
      shares: The layouts, in a slot, of operands that are split, by position.
      results: What a slot gives.
    """

    job: Job
    members: list[Sequence[Value]]
    layers: int
    shares: dict[int, Layout]
    results: list[Result]

    @property
    def each(self) -> int:
        """Slots of one member."""
        return self.layers or 1

    @property
    def slots(self) -> int:
        """Slots of all members."""
        return self.each * len(self.members)

    @property
    def cost(self) -> float:
        """Operations of one slot."""
        return self.job.operations / self.each

    def read(self, dtype: str) -> list[tuple[int, int]]:
        """Operands of a dtype that are split, and the sizes of their shares."""
        ins = self.members[0]
        return [(i, math.prod(x.local_shape)) for i, x in self.shares.items() if str(ins[i].dtype) == dtype]

    def given(self, dtype: str) -> list[tuple[int, int]]:
        """Results of a dtype that are split, and the sizes of their shares."""
        return [
            (i, math.prod(r.layout.local_shape))
            for i, r in enumerate(self.results)
            if r.layout and str(r.dtype) == dtype
        ]


def deal(
    evaluate: Evaluate, ctx: Context, jobs: Sequence[Job], operands: Sequence[Sequence[Value]]
) -> list[list[Value]]:
    """The results of jobs that do not need one another.

    Args:
      evaluate: Evaluates a program on shares.
      ctx: The evaluation.
      jobs: The jobs.
      operands: For each of them what it reads; `Partial` values are whole already.

    Returns:
      For each job its results: large ones split, small ones whole.
    """
    members: dict[Any, list[int]] = {}
    for i, (job, ins) in enumerate(zip(jobs, operands, strict=True)):
        members.setdefault((job.key, tuple(map(_form, ins))), []).append(i)
    kinds = [_kind(evaluate, ctx, jobs[group[0]], [operands[i] for i in group]) for group in members.values()]
    plan = assign([(kind.slots, kind.cost) for kind in kinds], ctx.n)
    if ctx.abstract:
        results = _abstract(ctx, kinds)
    else:
        exchange = _Exchange(evaluate, ctx, kinds, plan)
        if ctx.record is not None:
            exchange.note(ctx.record)
        results = exchange.run()
    out: list[Any] = [None] * len(jobs)
    for group, values in zip(members.values(), results, strict=True):
        for i, x in zip(group, values, strict=True):
            out[i] = x
    return out


def _form(x: Value) -> Any:
    """What must agree in jobs that are alike."""
    if isinstance(x, Split):
        return x.layout, str(x.dtype)
    if isinstance(x, LazyBroadcast):
        return np.shape(x.value), str(x.dtype), x.shape, x.dims
    return np.shape(x), str(x.dtype)


# --- kinds ---------------------------------------------------------------------------------------


def _kind(evaluate: Evaluate, ctx: Context, job: Job, members: list[Sequence[Value]]) -> Kind:
    """The kind of these jobs, layer by layer where all that is split has layers and none needs another."""
    layouts = {i: x.layout for i, x in enumerate(members[0]) if isinstance(x, Split)}
    counts = {layout.shape[0] if layout.lead and len(layout.shape) > 2 else 0 for layout in layouts.values()}
    if len(counts) == 1 and (count := counts.pop()):
        kind = Kind(job, members, count, {i: x.per_layer() for i, x in layouts.items()}, [])
        outs = _of_one_layer(evaluate, ctx, kind)
        if outs is not None:
            kind.results = [_result(ctx, kind, x.shape, x.dtype, is_entry) for x, is_entry in outs]
            return kind
    kind = Kind(job, members, 0, layouts, [])
    kind.results = [_result(ctx, kind, v.aval.shape, v.aval.dtype, False) for v in job.outvars]
    return kind


def _result(ctx: Context, kind: Kind, shape: Shape, dtype: Any, layers: bool) -> Result:
    """A result is cut like an operand of its shape; another one stays whole if it is small."""
    like = next((layout for layout in kind.shares.values() if layout.shape == shape), None)
    if kind.layers and not layers:
        like = None
    elif like is None and math.prod(shape) >= SMALL * ctx.n:
        like = even_split(shape, ctx.n)
    return Result(tuple(shape), dtype, like, layers)


def _of_one_layer(evaluate: Evaluate, ctx: Context, kind: Kind) -> list[tuple[Any, bool]] | None:
    """What one layer of a job gives, abstract, and whether each layer gives another; `None` if layers are coupled."""
    marks: list[bool] = []
    index = ctx.index

    def body(wholes: dict[int, Array], others: dict[int, Any]) -> list[Array]:
        outs = run_entry(evaluate, ctx, kind.job.jaxpr, _operands(kind, wholes, others), kind.layers, index)
        marks[:] = [is_entry for _, is_entry in outs]
        return [x for x, _ in outs]

    member = kind.members[0]
    wholes = {i: cast(jnp.zeros(layout.shape, member[i].dtype), ctx.axes.shard) for i, layout in kind.shares.items()}
    others = {i: jnp.asarray(_payload(x)) for i, x in enumerate(member) if i not in kind.shares}
    try:
        outs = jax.eval_shape(body, wholes, others)
    except Coupled:
        return None
    return list(zip(outs, marks, strict=True))


def _payload(x: Value) -> Any:
    return x.value if isinstance(x, LazyBroadcast) else x


def _operands(kind: Kind, wholes: dict[int, Array], others: dict[int, Array]) -> list[Value]:
    """The operands of one slot: whole arrays, with a first dimension of one layer where there are layers."""
    out: list[Value] = []
    for i, x in enumerate(kind.members[0]):
        if i in wholes and kind.layers:
            layout = Layout((kind.layers, *kind.shares[i].shape), kind.layers, "rows", 0)
            out.append(Split(wholes[i][None], layout))
        elif i in wholes:
            out.append(wholes[i])
        elif isinstance(x, LazyBroadcast):
            lazy = LazyBroadcast(others[i], x.shape, x.dims)
            out.append(lazy if kind.layers else lax.broadcast_in_dim(lazy.value, lazy.shape, lazy.dims))
        else:
            out.append(others[i])
    return out


def _abstract(ctx: Context, kinds: Sequence[Kind]) -> list[list[list[Value]]]:
    """Results of the right forms, with nothing in them."""
    zeros = lambda shape, dtype: cast(jnp.zeros(shape, dtype), ctx.axes.shard)

    def value(kind: Kind, r: Result) -> Value:
        shape = (kind.layers, *r.shape) if r.layers else r.shape
        if r.layout is None:
            return jnp.zeros(shape, r.dtype)
        layout = _stacked(kind, r.layout)
        return Split(zeros(layout.local_shape, r.dtype), layout)

    return [[[value(kind, r) for r in kind.results] for _ in kind.members] for kind in kinds]


def _stacked(kind: Kind, layout: Layout) -> Layout:
    """The layout of all layers together."""
    if not kind.layers:
        return layout
    return dataclasses.replace(layout, shape=(kind.layers, *layout.shape), lead=layout.lead + 1)


# --- the exchange --------------------------------------------------------------------------------


class _Columns:
    """Where each slot stands in the rows of a buffer: device by device, in the order of its jobs.

    Attributes:
      sizes: For each kind its arrays, as position and size of a share; those of a slot stand side by side.
      total: For each kind the columns of a slot.
      start: For each kind and slot its first column.
      ends: For each device how much of its row is used.
      width: Columns of the buffer.
      widest: The most columns of a slot.
    """

    def __init__(self, plan: Assignment, sizes: Sequence[list[tuple[int, int]]]) -> None:
        self.sizes = sizes
        self.total = total = [sum(size for _, size in arrays) for arrays in sizes]
        self.start: dict[tuple[int, int], int] = {}
        self.ends = [0] * len(plan.rows)
        for device in range(len(plan.rows)):
            for kind, slot in plan.slots(device):
                self.start[kind, slot] = self.ends[device]
                self.ends[device] += total[kind]
        self.width, self.widest = max(self.ends), max(total)

    def arrays(self, kind: int) -> Iterator[tuple[int, int, int]]:
        """Position, first column inside a slot and size of each array."""
        at = 0
        for i, size in self.sizes[kind]:
            yield i, at, size
            at += size


class _Window:
    """The columns of a buffer in which a slot of any kind stands, so that a branch takes these and not the buffer.

    Attributes:
      columns: The columns.
      inside: Where among them the slot begins.
    """

    def __init__(self, buffer: Array, start: Array, columns: _Columns) -> None:
        self._first = lax.min(start, np.int32(columns.width - columns.widest))
        shape = (buffer.shape[0], columns.widest)
        self.columns = lax.dynamic_slice(buffer, (np.int32(0), self._first), shape)
        self.inside = start - self._first

    def put(self, buffer: Array, columns: Array) -> Array:
        """The buffer with other values in these columns."""
        return lax.dynamic_update_slice(buffer, columns, (np.int32(0), self._first))


class _Exchange:
    """One exchange: the buffers, the work, the results."""

    def __init__(self, evaluate: Evaluate, ctx: Context, kinds: Sequence[Kind], plan: Assignment) -> None:
        self.evaluate, self.ctx, self.kinds, self.plan, self.n = evaluate, ctx, kinds, plan, ctx.n
        ins = {str(x.dtype) for kind in kinds for x in kind.members[0] if isinstance(x, Split)}
        outs = {str(r.dtype) for kind in kinds for r in kind.results if r.layout}
        self.reads = {t: _Columns(plan, [kind.read(t) for kind in kinds]) for t in sorted(ins)}
        self.gives = {t: _Columns(plan, [kind.given(t) for kind in kinds]) for t in sorted(outs)}
        #: What a job gives takes the place of what it read, where all jobs give as much.
        self.in_place = all(t in self.reads and self.reads[t].total == c.total for t, c in self.gives.items())
        self.others = [self._others(kind) for kind in kinds]
        self.owner = {slot: device for device in range(self.n) for slot in plan.slots(device)}

    def run(self) -> list[list[list[Value]]]:
        """For each kind and member the results."""
        got = {t: self._to_owners(t) for t in self.reads}
        out, small = self._work(got)
        back = {t: lax.all_to_all(x, self.ctx.axes.shard, 0, 0, tiled=True) for t, x in out.items()}
        small = self._shown(small)
        return [
            [[self._result(k, m, i, back, small) for i in range(len(kind.results))] for m in range(len(kind.members))]
            for k, kind in enumerate(self.kinds)
        ]

    def note(self, record: Recorder) -> None:
        """Writes it into the record."""
        sent = sum(c.width * jnp.dtype(t).itemsize for side in (self.reads, self.gives) for t, c in side.items())
        kinds = tuple((kind.slots, *_described(kind)) for kind in self.kinds)
        record.exchanged(kinds, self.plan.loads, (self.n - 1) * sent, self.ctx.times)

    # --- there ---

    def _to_owners(self, dtype: str) -> Array:
        """`got` of the module's picture."""
        columns, parts = self.reads[dtype], []
        for device, row in enumerate(self.plan.rows):
            for k, first, count in row:
                arrays = columns.sizes[k]
                step = count if len(arrays) == 1 else 1  # one array of many slots is one piece
                for slot in range(first, first + count, step):
                    parts += [part for i, _ in arrays for part in _cut(self.kinds[k], i, slot, slot + step)]
            parts.append(jnp.zeros(columns.width - columns.ends[device], dtype))
        parts = [cast(x, self.ctx.axes.shard) for x in parts if x.size]
        send = lax.concatenate(parts, 0).reshape(self.n, columns.width)
        return lax.all_to_all(send, self.ctx.axes.shard, 0, 0, tiled=True)

    def _others(self, kind: Kind) -> dict[int, tuple[Array, bool]]:
        """Operands that are equal on all devices: one for all members, or stacked."""
        out = {}
        for i in range(len(kind.members[0])):
            if i in kind.shares:
                continue
            each: list[Any] = [_payload(member[i]) for member in kind.members]
            same = all(y is each[0] for y in each)
            out[i] = (jnp.asarray(each[0]), False) if same else (jnp.stack(each), True)
        return out

    # --- the work ---

    def _work(self, got: dict[str, Array]) -> tuple[dict[str, Array], dict[Any, Array]]:
        """`out` of the module's picture, and the small results: those of other devices hold nothing."""
        vary = lambda x: cast(x, self.ctx.axes.shard)
        zeros = lambda t: vary(jnp.zeros((self.n, self.gives[t].width), t))
        out = {t: got[t] if self.in_place else zeros(t) for t in self.gives}
        small = {
            (k, i): vary(jnp.full((kind.slots, *r.shape), _nothing(r.dtype), _sent_as(r.dtype)))
            for k, kind in enumerate(self.kinds)
            for i, r in enumerate(kind.results)
            if r.layout is None
        }
        mine = {name: lax.dynamic_index_in_dim(x, self.ctx.index, keepdims=False) for name, x in self._tables().items()}
        branches: list[Callable[..., Any]] = [
            lambda *same: same[2:],
            *(functools.partial(self._slot, k) for k in range(len(self.kinds))),
        ]
        busy = len(self.kinds) == 1 and all(len(self.plan.slots(d)) == self.plan.turns for d in range(self.n))

        def turn(carry: Any, row: Any) -> Any:
            out, small = carry
            shares = {
                t: _Window(out[t] if t in out and self.in_place else got[t], row[f"read {t}"], c)
                for t, c in self.reads.items()
            }
            given = {t: _Window(out[t], row[f"give {t}"], c) for t, c in self.gives.items()}
            starts = {f"read {t}": x.inside for t, x in shares.items()} | {
                f"give {t}": x.inside for t, x in given.items()
            }
            operands = (
                {**row, **starts},
                {t: x.columns for t, x in shares.items()},
                {t: x.columns for t, x in given.items()},
                small,
            )
            new, small = branches[1](*operands) if busy else lax.switch(row["branch"], branches, *operands)
            return ({t: given[t].put(out[t], x) for t, x in new.items()}, small), None

        if self.plan.turns == 1:
            return turn((out, small), {name: x[0] for name, x in mine.items()})[0]
        return lax.scan(turn, (out, small), mine)[0]

    def _tables(self) -> dict[str, np.ndarray]:
        """For each device and turn: the branch, the slot, and where it stands in the buffers."""
        turns = self.plan.turns
        rows = [[*(slots := self.plan.slots(d)), *[None] * (turns - len(slots))] for d in range(self.n)]
        table = lambda f: np.array([[0 if x is None else f(x) for x in row] for row in rows], np.int32)
        tables = {"branch": table(lambda x: 1 + x[0]), "slot": table(lambda x: x[1])}
        tables |= {f"read {t}": table(c.start.__getitem__) for t, c in self.reads.items()}
        return tables | {f"give {t}": table(c.start.__getitem__) for t, c in self.gives.items()}

    def _slot(self, k: int, row: Any, shares: Any, windows: Any, small: Any) -> Any:
        """Runs one job: reads its shares, writes what it gives into the windows and among the small results."""
        kind, slot, zero = self.kinds[k], row["slot"], np.int32(0)
        wholes = {}
        for t, c in self.reads.items():
            for i, at, size in c.arrays(k):
                part = lax.dynamic_slice(shares[t], (zero, row[f"read {t}"] + np.int32(at)), (self.n, size))
                wholes[i] = collectives.unblocks(part, kind.shares[i])
        results = self._results(k, wholes, slot)
        windows, small = dict(windows), dict(small)
        for t, c in self.gives.items():
            for i, at, _ in c.arrays(k):
                part = collectives.blocks(results[i], _known(kind.results[i].layout))
                windows[t] = lax.dynamic_update_slice(windows[t], part, (zero, row[f"give {t}"] + np.int32(at)))
        for i, r in enumerate(kind.results):
            if r.layout is None:
                x = results[i].astype(_sent_as(r.dtype))
                small[k, i] = lax.dynamic_update_index_in_dim(small[k, i], x, slot, 0)
        return windows, small

    def _results(self, k: int, wholes: dict[int, Array], slot: Array) -> list[Array]:
        """What the program of a job gives, typed as different on every device."""
        kind, vary = self.kinds[k], lambda x: cast(jnp.asarray(x), self.ctx.axes.shard)
        member, layer = lax.div(slot, np.int32(kind.each)), lax.rem(slot, np.int32(kind.each))
        others = {
            i: vary(lax.dynamic_index_in_dim(x, member, keepdims=False) if stacked else x)
            for i, (x, stacked) in self.others[k].items()
        }
        operands: list[Any] = _operands(kind, wholes, others)
        if not kind.layers:
            return evaluate_program(kind.job.jaxpr, [], operands, vary)
        outs = run_entry(self.evaluate, self.ctx, kind.job.jaxpr, operands, kind.layers, layer)
        return [vary(x) for x, _ in outs]

    # --- back ---

    def _shown(self, small: dict[Any, Array]) -> dict[Any, Array]:
        """Small results, whole on all devices."""
        summed = collectives.all_reduce(list(small.values()), self.ctx.axes.shard, bucket_bytes=self.ctx.bucket_bytes)
        return dict(zip(small, summed, strict=True))

    def _result(self, k: int, m: int, i: int, back: dict[str, Array], small: dict[Any, Array]) -> Value:
        """One result of one member."""
        kind = self.kinds[k]
        r, first = kind.results[i], m * kind.each
        if r.layout is None:
            x = small[k, i].astype(r.dtype)
            return x[first : first + kind.each] if r.layers else x[first]
        layout, t = _stacked(kind, r.layout), str(r.dtype)
        parts = [
            lax.slice(back[t], (device, start), (device + 1, end)).reshape(-1)
            for device, start, end in self._ranges(k, i, t, first, first + kind.each)
        ]
        local = parts[0] if len(parts) == 1 else lax.concatenate(parts, 0)
        return Split(local.reshape(layout.local_shape), layout)

    def _ranges(self, k: int, i: int, dtype: str, first: int, end: int) -> list[tuple[int, int, int]]:
        """Device and columns of a result in some slots, in order; what stands side by side is one range."""
        columns = self.gives[dtype]
        at, size = next((at, size) for j, at, size in columns.arrays(k) if j == i)
        out: list[tuple[int, int, int]] = []
        for slot in range(first, end):
            device, start = self.owner[k, slot], columns.start[k, slot] + at
            if out and (out[-1][0], out[-1][2]) == (device, start):
                out[-1] = (device, out[-1][1], start + size)
            else:
                out.append((device, start, start + size))
        return out


def _known(layout: Layout | None) -> Layout:
    assert layout is not None
    return layout


def _cut(kind: Kind, i: int, first: int, end: int) -> list[Array]:
    """The shares of an operand in some slots, one after the other, in as few arrays as they are."""
    out = []
    for m in range(first // kind.each, -(-end // kind.each)):
        operand: Any = kind.members[m][i]
        local = operand.local
        if kind.layers:
            start = m * kind.layers
            local = local[max(first - start, 0) : min(end - start, kind.layers)]
        out.append(local.reshape(-1))
    return out


def _described(kind: Kind) -> tuple[str, str]:
    """What a job reads, and what it does."""
    read = ", ".join(f"{kind.members[0][i].dtype}{list(x.shape)}" for i, x in kind.shares.items())
    return read, ", ".join(dict.fromkeys(e.primitive.name for e in kind.job.jaxpr.eqns if on_matrices(e)))


def _nothing(dtype: Any) -> Any:
    """What changes no number that it is added to, not the sign of a zero either."""
    return -0.0 if jnp.issubdtype(dtype, jnp.inexact) else 0


def _sent_as(dtype: Any) -> Any:
    return np.dtype(np.int8) if dtype == np.bool_ else dtype
