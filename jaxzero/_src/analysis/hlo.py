"""The collectives of a compiled program: their bytes, mesh axes, counts, and whether they overlap with products."""

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.stages import Compiled

from .._table import fold, table, terminal_width
from ..jaxpr.collectives import REDUCE, SCATTER
from .hlo_parser import (
    Groups,
    HloProgram,
    Instruction,
    axes,
    called,
    groups,
    operand_names,
    parse,
    sizes,
    text_of,
)

_OPS = re.compile(r"(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|ragged-all-to-all)(-start)?")
#: The computations of TPU programs in which an all-reduce keeps one share of its result.
_FUSED_SCATTER = re.compile(r"all-reduce-scatter")
_BEGINS, _ENDS = 'custom_call_target="AsyncCollectiveStart"', 'custom_call_target="AsyncCollectiveDone"'
#: A path may hold parentheses of its own: `(root)`.
_LEAF = re.compile(r'leaf\(((?:\([^()"]*\)|[^"])*?)\)(?=[/")]|$)')


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a compiled program.

    Attributes:
      kind: ``"all-gather"``, ``"reduce-scatter"``, ``"all-reduce"``, ``"all-to-all"``, ``"collective-permute"``.
      nbytes: Bytes of its full operand: the result of an all-gather, all shares of a reduce-scatter.
      axes: The mesh axes it runs over; `None` where no mesh is known.
      groups: The devices that take part together, by their place in the mesh.
      times: How often it runs in one call of the program.
      looped: Whether it stands in the body of a loop.
      computation: The computation of the program in which it stands: the entry, the body of a loop, ...
      distance: Instructions between its start and its end; `None` where it waits: it is one instruction, or a pair
        that XLA marks as synchronous.
      hidden: Whether a matrix product stands between them.
      leaf: The parameter it carries, by path, where the program says so: one that travels alone.
      exposed: Seconds in one call of the program in which the computation waits for it, in `predict(...).collectives`;
        `None` where no machine is known.
    """

    kind: str
    nbytes: int
    axes: tuple[str, ...] | None
    groups: Groups
    times: int
    looped: bool
    computation: str
    distance: int | None
    hidden: bool
    leaf: str | None
    exposed: float | None = None

    @property
    def sent(self) -> float:
        """Bytes that each device sends in all its runs, as a ring does it."""
        size = len(self.groups[0])
        if self.kind == "collective-permute":
            return float(self.times * self.nbytes)
        return self.times * self.nbytes * (size - 1) / size * (2 if self.kind == REDUCE else 1)


class Collectives(tuple[Collective, ...]):
    """All collectives of a program, in the order of its text; `print` shows a table."""

    __slots__ = ()

    def sent(self, kind: str | None = None, axes: Iterable[str] | None = None, looped: bool | None = None) -> float:
        """Bytes that each device sends in those of a kind, over exactly these axes, in loops or not."""
        over = None if axes is None else set(axes)
        return sum(
            x.sent
            for x in self
            if kind in (None, x.kind)
            and (over is None or set(x.axes or ()) == over)
            and (looped is None or x.looped == looped)
        )

    def __str__(self) -> str:
        head = ("collective", "axes", "MB", "times", "loop", "between", "hidden", "leaf")
        rows = [_row(x) for x in sorted(self, key=lambda x: -x.sent)]
        total = sum(x.times for x in self)
        sent = f"{total} collectives, {self.sent() / 1e6:.3f} MB sent by each device"
        return "\n".join([table(head, rows, "<<>><><<"), *fold(sent, terminal_width())])


def _row(x: Collective) -> tuple[str, ...]:
    over = "?" if x.axes is None else "+".join(x.axes)
    between = "-" if x.distance is None else str(x.distance)
    yes = lambda flag: "yes" if flag else "no"
    size = f"{x.nbytes / 1e6:.3f}"
    return x.kind, over, size, str(x.times), yes(x.looped), between, yes(x.hidden), x.leaf or ""


def collectives(compiled: Compiled | str, mesh: Mesh | AbstractMesh | None = None) -> Collectives:
    """Every collective of a compiled program, read from its text; sends nothing.

    Reads what XLA prints for CPUs, GPUs and TPUs. A collective in a loop counts once per iteration, also
    in nested loops; a branch of a conditional counts as taken. TPU programs show some reduce-scatters as
    all-reduces: those that XLA fuses with the slicing are recognised, those whose result is sliced later are not.

    Args:
      compiled: What `jax.jit(f).lower(*args).compile()` returned, or its `as_text()`.
      mesh: The mesh that the program was compiled for, for `axes`; default: that of the program's arguments.

    Returns:
      A tuple of `Collective`, with `sent(kind, axes)`, that prints as a table.

    Raises:
      ValueError: If `compiled` has no text of a compiled program, or `mesh` is not of its devices.

    Examples:
      >>> import jax, jax.numpy as jnp, jaxzero
      >>> zero = jaxzero.Zero(jax.make_mesh((8,), ("data",)))
      >>> loss = lambda w, x: jnp.mean((x @ w) ** 2)
      >>> step = jax.jit(zero.value_and_grad(loss)).lower(jnp.ones((64, 64)), jnp.ones((8, 64))).compile()
      >>> found = jaxzero.collectives(step)
      >>> [(x.kind, x.nbytes, x.axes) for x in found if x.nbytes > 4]
      [('reduce-scatter', 16384, ('data',))]
    """
    program = parse(text_of("collectives", compiled))
    shape = known_mesh("collectives", compiled, mesh, program)
    return Collectives(x.collective for x in placed(program, shape))


def known_mesh(call: str, compiled: object, mesh: object, program: HloProgram) -> dict[str, int] | None:
    """The axes and sizes of the mesh of a program: the one given, checked, or that of its arguments."""
    if mesh is not None:
        _check_mesh(call, mesh, program)
    known: Any = mesh if mesh is not None else _mesh_of(compiled)
    return None if known is None else dict(known.shape)


def _check_mesh(call: str, mesh: object, program: HloProgram) -> None:
    if not isinstance(mesh, (Mesh, AbstractMesh)) or mesh.size != program.devices:
        found = f"one of {mesh.size} devices" if hasattr(mesh, "size") else f"a {type(mesh).__name__}"
        raise ValueError(
            f"{call}: mesh is {found}. Expected the mesh of the program's {program.devices} devices. Fix: leave "
            "it out, or pass the mesh that the program was compiled for."
        )


def _mesh_of(compiled: object) -> Mesh | AbstractMesh | None:
    """The mesh of the first argument or result that has one."""
    for name in ("input_shardings", "output_shardings"):
        for sharding in _leaves(getattr(compiled, name, None)):
            if isinstance(sharding, NamedSharding):
                return sharding.mesh
    return None


def _leaves(tree: object) -> Iterator[object]:
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, (list, tuple)):
        for x in tree:
            yield from _leaves(x)
    elif tree is not None:
        yield tree


class Placed(NamedTuple):
    """A collective, and where its program schedules it.

    Attributes:
      collective: The collective.
      computation: The computation of the instruction that starts it, which may be a fusion around it.
      start: The place of this instruction in the computation.
      end: The place of the instruction that waits for it; `None` where it is the same.
    """

    collective: Collective
    computation: str
    start: int
    end: int | None


def placed(program: HloProgram, mesh: dict[str, int] | None) -> Iterator[Placed]:
    """The collectives of a program with their places, in the order of its text."""
    for name, body in program.computations.items():
        begins = any(_BEGINS in x.line for x in body)
        for i, x in enumerate(body):
            op = _OPS.fullmatch(x.op)
            if op and not ("chain_id=" in x.line and not begins):  # the later part of one that has begun already
                where = _place(program, name, i, bool(op[2]))
                yield Placed(_one(program, mesh, name, i, where), *where)


def _one(
    program: HloProgram, mesh: dict[str, int] | None, computation: str, index: int, where: tuple[str, int, int | None]
) -> Collective:
    x = program.computations[computation][index]
    kind, started = x.op.removesuffix("-start"), x.op.endswith("-start")
    members = groups(x.line, program.devices)
    parts = sizes(x.type)
    if started and (kind != REDUCE or x.type.startswith("((")):  # operands stand before results
        parts = parts[len(parts) // 2 :] if kind != "collective-permute" else parts[:1]
    full = sum(parts) * (len(members[0]) if kind == SCATTER else 1)
    if kind == REDUCE and _FUSED_SCATTER.search(computation):
        kind = SCATTER
    over = None if mesh is None else axes(members[0], mesh)
    outer, start, end = where
    between = None if end is None else program.computations[outer][start + 1 : end]
    return Collective(
        kind,
        full,
        over,
        members,
        program.times(computation),
        program.looped(computation),
        computation,
        None if between is None else len(between),
        any(map(program.is_product, between or ())),
        _leaf(x, len(parts)),
    )


def _place(program: HloProgram, computation: str, index: int, started: bool) -> tuple[str, int, int | None]:
    """The computation that schedules a collective, the places of its start and of its end, if that is another one."""
    body = program.computations[computation]
    if started:
        waits = '"is_sync":true' in body[index].line
        return computation, index, None if waits else _until(body, index, lambda y: y.op.endswith("-done"))
    for caller, *_ in program.callers.get(computation, ()):
        outer = program.computations[caller]
        start = next((i for i, y in enumerate(outer) if f"calls=%{computation}," in f"{y.line},"), None)
        if start is None or outer[start].op != "fusion":
            continue
        if not any(_BEGINS in y.line for y in body):
            return caller, start, None
        ends = lambda y: any(_ENDS in z.line for c in called(y.line) for z in program.computations.get(c, ()))
        return caller, start, _until(outer, start, ends)
    return computation, index, None


def _until(body: list[Instruction], start: int, ends: Callable[[Instruction], bool]) -> int | None:
    """The place of the instruction that `ends` what `start` began: it uses the start, or what was made from it."""
    made = {body[start].name}
    for i in range(start + 1, len(body)):
        y = body[i]
        if made.isdisjoint(operand_names(y)):
            continue
        if ends(y):
            return i
        made.add(y.name)
    return None


def _leaf(x: Instruction, arrays: int) -> str | None:
    """The leaf that stands in the name of a collective that carries one array."""
    name = re.search(r'op_name="((?:[^"\\]|\\.)*)"', x.line)
    found = _LEAF.findall(name[1]) if name and arrays == 1 else []
    return found[-1] if found else None
