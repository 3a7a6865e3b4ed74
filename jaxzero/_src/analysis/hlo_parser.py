"""The text of a compiled program (optimized HLO), parsed into computations and instructions, with how often each runs.

Covers what XLA prints for CPUs, GPUs and TPUs in both supported JAX versions: groups of devices as lists or as
named mesh axes, collectives as one instruction, as `-start` and `-done`, or as TPU fusions that begin and end one.
"""

import dataclasses
import functools
import math
import re
from typing import NamedTuple

_WIDTH = {"pred": 1, "bf16": 2, "f16": 2, "c64": 8, "c128": 16}
_ARRAY = re.compile(r"\b(pred|bf16|[fsuc]\d+)(?:e\w+)?\[([\d,]*)\]")
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_LINE = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([a-z][\w\-]*)\(")
_CALLEES = re.compile(r"(?:body|condition|to_apply|calls|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIP_COUNT = re.compile(r'known_trip_count":\{"n":"(\d+)"')
_PRODUCT = re.compile(r'" ?__cublas|custom_call_target="__(?:cublas|onednn\$matmul|cudnn\$conv|cudnn\$fmha)')

Groups = tuple[tuple[int, ...], ...]


class Instruction(NamedTuple):
    """One line of a computation: `%name = type op(...)`, and all of the text."""

    name: str
    type: str
    op: str
    line: str


class HloArgument(NamedTuple):
    """One argument of the program, as one device holds it.

    Attributes:
      number: Its position among those that the compiled program kept.
      name: As the traced function named it, for example ``state[0].mu['w']``; empty where the text does not say.
      shape: Its shape.
      nbytes: Its bytes.
    """

    number: int
    name: str
    shape: tuple[int, ...]
    nbytes: int


@dataclasses.dataclass(frozen=True)
class HloProgram:
    """A parsed program.

    Attributes:
      header: The first line.
      computations: Instructions by name of the computation, in the order in which they run.
      entry: The name of the computation that runs first.
      callers: Name -> the computations that run it: which, how many times, whether as a loop.
    """

    header: str
    computations: dict[str, list[Instruction]]
    entry: str
    callers: dict[str, list[tuple[str, int, bool]]]

    @property
    def devices(self) -> int:
        """How many devices run it."""
        counts = [re.search(rf"{name}=(\d+)", self.header) for name in ("replica_count", "num_partitions")]
        return math.prod(int(found[1]) for found in counts if found)

    @property
    def on_tpu(self) -> bool:
        """Whether it was compiled for TPUs: only they have tiled layouts."""
        return ":T(" in self.header

    @property
    def on_cpu(self) -> bool:
        """Whether it was compiled for CPUs: nothing begins in one instruction and ends in another."""
        return not self.on_tpu and not any(x.op.endswith("-start") for body in self.computations.values() for x in body)

    def times(self, computation: str) -> int:
        """How often a computation runs: loops in loops multiply, a branch counts as taken."""
        if computation not in self.callers:
            return 1
        return sum(trip_count * self.times(caller) for caller, trip_count, _ in self.callers[computation])

    def looped(self, computation: str) -> bool:
        """Whether it runs in the body of a loop."""
        return any(loop or self.looped(caller) for caller, _, loop in self.callers.get(computation, ()))

    def is_product(self, instruction: Instruction) -> bool:
        """Whether a matrix product or convolution is in an instruction, or in what it calls."""
        if instruction.op in ("dot", "convolution") or _PRODUCT.search(instruction.line):
            return True
        return any(name in self._with_products for name in called(instruction.line))

    @functools.cached_property
    def _with_products(self) -> set[str]:
        found = {
            name
            for name, body in self.computations.items()
            if any(x.op in ("dot", "convolution") or _PRODUCT.search(x.line) for x in body)
        }
        pending = list(found)
        while pending:
            for caller, *_ in self.callers.get(pending.pop(), ()):
                if caller not in found:
                    found.add(caller)
                    pending.append(caller)
        return found

    def arguments(self) -> list[HloArgument]:
        """The arguments of the program."""
        out = []
        for x in self.computations.get(self.entry, ()):
            if x.op == "parameter":
                number = re.search(r" parameter\((\d+)\)", x.line)
                name = re.search(r'op_name="((?:[^"\\]|\\.)*)"', x.line)
                text = name[1].replace("\\'", "'").replace('\\"', '"') if name else ""
                out.append(HloArgument(int(number[1]) if number else -1, text, array_type(x.type)[1], nbytes(x.type)))
        return sorted(out)

    def reused(self) -> set[int]:
        """Numbers of the arguments whose memory a result takes over."""
        table = re.search(r"input_output_alias=\{(.*?) \}(?:,|$)", self.header)
        return {int(n) for n in re.findall(r": \((\d+), \{[^}]*\}", table[1])} if table else set()


def parse(text: str) -> HloProgram:
    """A program from its text."""
    lines = text.splitlines()
    computations: dict[str, list[Instruction]] = {}
    callers: dict[str, list[tuple[str, int, bool]]] = {}
    here = entry = ""
    for line in lines:
        if head := _HEAD.match(line):
            here = head[2]
            entry = here if head[1] else entry
            computations[here] = []
        elif found := _LINE.match(line):
            computations.setdefault(here, []).append(Instruction(found[1], found[2], found[3], line))
            runs = trip_count(line, computations)
            for name in called(line):
                callers.setdefault(name, []).append((here, runs, f"body=%{name}" in line or f"body={name}" in line))
    return HloProgram(lines[0] if lines else "", computations, entry, callers)


def trip_count(line: str, computations: dict[str, list[Instruction]]) -> int:
    """How often a loop runs: from XLA's annotation, or from its condition that counts up to a constant (TPU)."""
    if known := _TRIP_COUNT.search(line):
        return int(known[1])
    loop = re.search(r" while\(.*condition=%?([\w.\-]+)", line)
    for x in computations.get(loop[1], ()) if loop else ():
        if x.op == "compare" and "direction=LT" in x.line:
            limits = {y.name: re.search(r"constant\((\d+)\)", y.line) for y in computations[loop[1]]}  # type: ignore[index]
            for operand in re.findall(r"%([\w.\-]+)", x.line.partition(" compare(")[2]):
                if limit := limits.get(operand):
                    return int(limit[1])
    return 1


def body_of(line: str) -> str:
    """The computation that a loop repeats."""
    found = re.search(r"body=%?([\w.\-]+)", line)
    return found[1] if found else ""


def branches_of(line: str) -> list[str]:
    """The computations of which a conditional runs one."""
    if branches := _BRANCHES.search(line):
        return [name.strip().lstrip("%") for name in branches[1].split(",")]
    return re.findall(r"(?:true|false)_computation=%?([\w.\-]+)", line)


def called(line: str) -> list[str]:
    """The computations that an instruction calls."""
    called = _CALLEES.findall(line)
    if branches := _BRANCHES.search(line):
        called += [name.strip().lstrip("%") for name in branches[1].split(",")]
    return called


def operand_names(x: Instruction) -> list[str]:
    """The names of the operands of an instruction."""
    text, depth = x.line.partition(f" {x.op}(")[2], 1
    for i, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            text = text[:i]
            break
    return re.findall(r"%([\w.\-]+)", text)


# --- types ---------------------------------------------------------------------------------------


def sizes(type_text: str) -> list[int]:
    """Bytes of each array of a type, `f32[8,16]{1,0}` or a tuple of such."""
    return [_width(kind) * _count(dims) for kind, dims in _ARRAY.findall(type_text)]


def nbytes(type_text: str) -> int:
    """Bytes of a type."""
    return sum(sizes(type_text))


def array_type(type_text: str) -> tuple[str, tuple[int, ...]]:
    """Dtype and shape of an array; of the first one of a tuple."""
    found = _ARRAY.search(type_text)
    return (found[1], tuple(int(d) for d in found[2].split(",") if d)) if found else ("", ())


def _width(kind: str) -> int:
    return _WIDTH.get(kind) or max(1, int(re.sub(r"\D", "", kind)) // 8)


def _count(dims: str) -> int:
    return math.prod(int(d) for d in dims.split(",") if d)


# --- groups of devices ---------------------------------------------------------------------------


def groups(line: str, devices: int) -> Groups:
    """The devices that take part together in a collective, by their place in the mesh."""
    if found := re.search(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{}]+\})\}", line):
        return tuple(tuple(map(int, group.split(","))) for group in re.findall(r"\{([\d,]+)\}", found[1]))
    if found := re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line):
        shape = _numbers(found[3])
        order = _numbers(found[4]) if found[4] else tuple(range(len(shape)))
        return _cut(_transposed(shape, order), int(found[2]))
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", line):
        pairs = [pair.split("=") for pair in re.sub(r"['\s]", "", found[1]).split(",")]
        names, shape = [name for name, _ in pairs], tuple(int(size) for _, size in pairs)
        inside = [names.index(name) for name in re.sub(r"['\s]", "", found[2]).split(",")]
        order = (*(i for i in range(len(names)) if i not in inside), *inside)
        return _cut(_transposed(shape, order), math.prod(shape[i] for i in inside))
    return (tuple(range(devices)),)


def axes(group: tuple[int, ...], mesh: dict[str, int]) -> tuple[str, ...]:
    """The axes of a mesh (its sizes in order, devices in row-major order) along which devices of a group differ."""
    places = [_unravel(device, tuple(mesh.values())) for device in group]
    return tuple(a for i, a in enumerate(mesh) if len({place[i] for place in places}) > 1)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def _cut(devices: list[int], size: int) -> Groups:
    return tuple(tuple(devices[i : i + size]) for i in range(0, len(devices), size))


def _transposed(shape: tuple[int, ...], order: tuple[int, ...]) -> list[int]:
    """The device numbers of an array of `shape`, read with its dimensions in `order`."""
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    out = [0]
    for dim in order:
        out = [base + i * strides[dim] for base in out for i in range(shape[dim])]
    return out


def _unravel(index: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    out = []
    for size in reversed(shape):
        index, place = divmod(index, size)
        out.append(place)
    return tuple(reversed(out))


# --- compiled objects ----------------------------------------------------------------------------


def text_of(call: str, compiled: object) -> str:
    """The text of a compiled program, which may be given as text already; refuses everything else."""
    found = compiled
    if not isinstance(compiled, str):
        as_text = getattr(compiled, "as_text", None)
        found = as_text() if as_text is not None else None
    if not isinstance(found, str) or not found.lstrip().startswith("HloModule"):
        what = "a text that is no compiled program" if isinstance(compiled, str) else type(compiled).__name__
        if hasattr(compiled, "lower"):
            fix = "compile it: f.lower(*args).compile()."
        elif hasattr(compiled, "compile"):
            fix = "compile it: lowered.compile()."
        else:
            fix = "pass what jax.jit(f).lower(*args).compile() returns."
        raise ValueError(f"{call}: found {what}, which has no text of a compiled program. Fix: {fix}")
    return found.lstrip()
