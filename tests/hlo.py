"""Collectives counted in compiled programs."""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import checks
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import jaxzero

WIDTH = {"f32": 4, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "pred": 1, "f64": 8, "s8": 1, "u8": 1, "s64": 8, "u64": 8}
_ARRAY = re.compile(rf"({'|'.join(WIDTH)})\[([\d,]*)\]")
_CALL = re.compile(r"= (\(.*?\)|\S+) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")


class Row(NamedTuple):
    """One collective.

    Attributes:
      kind: What it is.
      nbytes: The bytes of its full operand (of a reduce-scatter: all shares together).
      group: How many devices take part in each group.
      times: How often it runs; loops around it multiply.
      looped: Whether it stands in a loop.
      branched: Whether it stands in a branch of a conditional.
    """

    kind: str
    nbytes: int
    group: int = 8
    times: int = 1
    looped: bool = False
    branched: bool = False


def _group(line: str) -> int:
    """The number of devices in a group, from either way of printing it."""
    if found := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return len(found[1].split(","))
    if found := re.search(r"replica_groups=\[(\d+),(\d+)\]", line):
        return int(found[2])
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", line):
        sizes = dict(pair.split("=") for pair in found[1].replace("'", "").replace(" ", "").split(","))
        return int(np.prod([int(sizes[a]) for a in found[2].replace("'", "").replace(" ", "").split(",")]))
    return 8


def _computations(text: str) -> Iterator[tuple[str, str]]:
    """(computation, line) for every line inside a computation."""
    here = ""
    for line in text.splitlines():
        if head := re.match(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$", line):
            here = head[1]
        elif here:
            yield here, line


def _frames(text: str) -> dict[str, tuple[int, bool, bool]]:
    """Computation -> how often it runs, whether in a loop, whether in a branch; through any nesting."""
    parents: dict[str, tuple[str, int, bool, bool]] = {}
    for here, line in _computations(text):
        loop = re.search(r"body=%?([\w.\-]+)", line)
        trips = re.search(r"known_trip_count\W+n\W+(\d+)", line)
        for name in re.findall(r"(?:calls|to_apply|condition|body)=%?([\w.\-]+)", line):
            body = loop is not None and name == loop[1]
            parents[name] = (here, int(trips[1]) if body and trips else 1, body, False)
        for names in re.findall(
            r"(?:branch_computations=\{|true_computation=|false_computation=)([^},]*(?:,[^}]*)?)", line
        ):
            for name in re.findall(r"%?([\w.\-]+)", names.split("}")[0]):
                parents.setdefault(name, (here, 1, False, True))
    frames: dict[str, tuple[int, bool, bool]] = {}

    def frame(name: str) -> tuple[int, bool, bool]:
        if name not in frames:
            if name not in parents:
                return (1, False, False)
            parent, times, looped, branched = parents[name]
            t, lo, br = frame(parent)
            frames[name] = (t * times, lo or looped, br or branched)
        return frames[name]

    for name in parents:
        frame(name)
    return frames


def collectives(text: str) -> list[Row]:
    """All collectives of an optimized HLO text, those in loops and branches too."""
    rows, frames = [], _frames(text)
    for here, line in _computations(text):
        if found := _CALL.search(line):
            sizes = [
                int(np.prod([int(d) for d in dims.split(",") if d])) * WIDTH[dtype]
                for dtype, dims in _ARRAY.findall(found[1])
            ]
            group = _group(line)
            full = sum(sizes) * (group if found[2] == "reduce-scatter" else 1)
            rows.append(Row(found[2], full, group, *frames.get(here, (1, False, False))))
    return rows


def count(rows: list[Row], kind: str, above: int = -1) -> int:
    """How many collectives of a kind have more than `above` bytes."""
    return sum(row.kind == kind and row.nbytes > above for row in rows)


def nbytes(rows: list[Row], kind: str, *, group: int | None = None, looped: bool | None = None, above: int = -1) -> int:
    """Bytes of all collectives of a kind, each as often as it runs."""
    return sum(
        row.nbytes * row.times
        for row in rows
        if row.kind == kind
        and row.nbytes > above
        and (group is None or row.group == group)
        and (looped is None or row.looped == looped)
    )


def instructions(text: str) -> int:
    """Instructions of all computations of an HLO text."""
    return len(re.findall(r"^\s+(?:ROOT )?%?[\w.\-]+ = ", text, re.M))


def reduced_dtypes(lowered: Any, minimum: int) -> set[str]:
    """Element types of the reductions of at least `minimum` elements in a lowered, not yet optimized program."""
    found = set()
    operand = re.compile(r"stablehlo\.(?:reduce_scatter|all_reduce)\"?.*?:\s*\(tensor<([^>]*)>", re.S)
    for signature in operand.findall(lowered.as_text()):
        *dims, dtype = signature.split("x")
        if np.prod([int(d) for d in dims]) >= minimum:
            found.add(dtype)
    return found


def step_collectives(
    zero: jaxzero.Zero, inner: optax.GradientTransformation, params: Any, way: str = "apply"
) -> list[Row]:
    """The collectives of one training step in the global view."""
    return collectives(compiled_step(zero, inner, params, way).as_text())


def compiled_step(zero: jaxzero.Zero, inner: optax.GradientTransformation, params: Any, way: str = "apply") -> Any:
    tx = zero.optimizer(inner)
    params = checks.place(params, zero.mesh, P())
    state = jax.jit(tx.init)(params)
    batch = checks.place((jnp.zeros(16), jnp.zeros(16)), zero.mesh, P(zero.mesh.axis_names))

    def step(params: Any, state: Any, batch: Any) -> Any:
        value, grads = zero.value_and_grad(checks.quadratic)(params, batch)
        if way == "apply":
            return *zero.apply(tx, grads, state, params), value
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return jax.jit(step, donate_argnums=(0, 1)).lower(params, state, batch).compile()
