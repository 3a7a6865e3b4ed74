"""Operations and bytes of one instruction of a compiled program.

Operations are those of matrix products and convolutions. Everything else is taken as limited by memory: bytes are those
of operands and results. Where an instruction reads or writes a slice of an array, only the slice counts.
"""

import math
import re
from typing import NamedTuple

from .hlo_parser import HloProgram, Instruction, array_type, called, nbytes, operand_names

#: Instructions that move nothing.
_FREE = {"parameter", "constant", "bitcast", "tuple", "get-tuple-element", "after-all", "partition-id", "replica-id"}
_FREE |= {"opt-barrier", "iota", "copy-done", "add-dependency"}
_SLICES = {"dynamic-slice", "slice", "gather"}
_UPDATE = "dynamic-update-slice"
#: What passes an array on, seen from inside a fusion.
_VIEWS = {"bitcast", "copy", "convert", "reshape", "transpose"}
_DIMS = r"=\{([\d,]*)\}"


class Cost(NamedTuple):
    """What an instruction does.

    Attributes:
      operations: Operations of products, by the dtype of their operands.
      nbytes: Bytes read and written.
    """

    operations: dict[str, float]
    nbytes: float


class Costs:
    """The costs of the instructions of one program."""

    def __init__(self, program: HloProgram) -> None:
        self.program = program
        self._named: dict[str, dict[str, Instruction]] = {}
        self._used: dict[str, dict[str, list[Instruction]]] = {}
        self._counted: dict[str, dict[str, float]] = {}

    def of(self, computation: str, x: Instruction) -> Cost:
        """The cost of an instruction, with what it calls; not for loops, branches and collectives."""
        if x.op in _FREE:
            return Cost({}, 0.0)
        return Cost(self._operations(computation, x), self._bytes(computation, x))

    # --- operations ---

    def _operations(self, computation: str, x: Instruction) -> dict[str, float]:
        if x.op in ("dot", "convolution", "custom-call"):
            return self._product(computation, x)
        out: dict[str, float] = {}
        for name in called(x.line) if x.op in ("fusion", "call", "map") else ():
            for dtype, count in self._inside(name).items():
                out[dtype] = out.get(dtype, 0.0) + count
        return out

    def _inside(self, computation: str) -> dict[str, float]:
        if computation not in self._counted:
            out = self._counted.setdefault(computation, {})
            for x in self.program.computations.get(computation, ()):
                for dtype, count in self._operations(computation, x).items():
                    out[dtype] = out.get(dtype, 0.0) + count
        return self._counted[computation]

    def _product(self, computation: str, x: Instruction) -> dict[str, float]:
        """Two operations for each element of the result and each index that is summed over."""
        types = [y.type for y in self._operands(computation, x)]
        if len(types) < 2 or (x.op == "custom-call" and not self.program.is_product(x)):
            return {}
        (dtype, left), (_, right), (_, result) = (array_type(t) for t in (types[0], types[1], x.type))
        if dims := re.search(rf"lhs_contracting_dim(?:ension)?s{_DIMS}", x.line):
            summed = math.prod(left[int(d)] for d in dims[1].split(",") if d)
        elif dims := re.search(r'lhs_contracting_dimensions":\["?([\d",]*)"?\]', x.line):
            summed = math.prod(left[int(d)] for d in dims[1].replace('"', "").split(",") if d)
        elif dims := re.search(r"dim_labels=\w+_(\w+)->", x.line):
            summed = math.prod(right) // max(1, right[dims[1].index("o")])
        else:
            summed = left[-1] if left else 1
        return {dtype: 2.0 * math.prod(result) * summed}

    # --- bytes ---

    def _bytes(self, computation: str, x: Instruction) -> float:
        operands = self._operands(computation, x)
        if x.op in _SLICES:
            return 2.0 * nbytes(x.type)
        if x.op == _UPDATE:
            return 2.0 * nbytes(operands[1].type) if len(operands) > 1 else 0.0
        inner = called(x.line)
        if x.op != "fusion" or not inner:
            return float(nbytes(x.type) + sum(nbytes(y.type) for y in operands))
        read = sum(min(nbytes(y.type), self._read(inner[0], i, y)) for i, y in enumerate(operands))
        return read + self._written(inner[0], x)

    def _read(self, computation: str, number: int, operand: Instruction) -> float:
        """The bytes that a fusion reads of one operand: its slices, where it takes only slices of it."""
        body = self.program.computations.get(computation, [])
        mine = next((y for y in body if y.op == "parameter" and f" parameter({number})" in y.line), None)
        if mine is None:
            return float(nbytes(operand.type))
        pending, total = [mine.name], 0.0
        while pending:
            name = pending.pop()
            for y in self._users(computation, name):
                names = operand_names(y)
                if y.op in _SLICES and names and names[0] == name:
                    total += nbytes(y.type)
                elif y.op == _UPDATE and names[0] == name:
                    continue  # in place: what is written counts
                elif y.op in _VIEWS and nbytes(y.type) >= nbytes(mine.type) // 4:
                    pending.append(y.name)
                else:
                    return float(nbytes(operand.type))
        return total

    def _written(self, computation: str, x: Instruction) -> float:
        """The bytes that a fusion writes: the updates, where its results are arrays with a slice replaced."""
        body = self.program.computations.get(computation, [])
        updates = [y for y in body if y.op == _UPDATE]
        whole = float(nbytes(x.type))
        for y in updates:
            update = self._named_in(computation).get(operand_names(y)[1])
            if update is not None:
                whole += nbytes(update.type) - nbytes(y.type)
        return max(0.0, whole)

    # --- names ---

    def _operands(self, computation: str, x: Instruction) -> list[Instruction]:
        named = self._named_in(computation)
        return [named[name] for name in operand_names(x) if name in named]

    def _named_in(self, computation: str) -> dict[str, Instruction]:
        if computation not in self._named:
            self._named[computation] = {y.name: y for y in self.program.computations.get(computation, ())}
        return self._named[computation]

    def _users(self, computation: str, name: str) -> list[Instruction]:
        if computation not in self._used:
            table = self._used.setdefault(computation, {})
            for y in self.program.computations.get(computation, ()):
                for operand in set(operand_names(y)):
                    table.setdefault(operand, []).append(y)
        return self._used[computation].get(name, [])
