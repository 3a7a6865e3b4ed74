"""The plan: what each device will hold and send, before anything is allocated or compiled."""

import dataclasses
import html
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from .._optional import need
from .._table import fold, table, terminal_width
from .._text import size_text
from ..jaxpr.collectives import Sent
from ..sharding.layout import Shape


@dataclasses.dataclass(frozen=True)
class AtRest:
    """Bytes that one device holds between two steps, in its own memory and in the host's.

    Attributes:
      stage: The stage; 0 without sharding.
      parameters: Bytes of parameters.
      gradients: Bytes of gradients, as `value_and_grad` returns them.
      state: Bytes of optimizer state.
      host: The part of parameters and state in the host's memory (`offload`).
    """

    stage: int
    parameters: int
    gradients: int
    state: int
    host: int = 0

    @property
    def total(self) -> int:
        """Parameters, gradients and state, in both memories."""
        return self.parameters + self.gradients + self.state

    @property
    def device(self) -> int:
        """The part in the device's memory."""
        return self.total - self.host


@dataclasses.dataclass(frozen=True)
class PlannedLeaf:
    """One parameter.

    Attributes:
      path: Its key path, as errors write it.
      shape: Its logical shape.
      dtype: The name of its dtype.
      layout: ``"rows"``, ``"flat"``, ``"stacked"`` (cut inside each layer, in rows or flat) or ``"whole"``: how
        its optimizer state is cut, its gradient from stage 2 on, and at stage 3 the parameter itself.
      stored_shape: The shape of a global array with this layout.
      padding: Elements of that array that are padding.
      parameters: Bytes per device of the parameter at rest.
      gradients: Bytes per device of its gradient.
      state: Bytes per device of the optimizer state that belongs to it.
      bucket: Stages 1 and 2: leaves of the same number are reduced in one collective; `None`: in none.
      chunk: Stage 3: leaves of the same number are brought to their first use by one gather.
    """

    path: str
    shape: Shape
    dtype: str
    layout: str
    stored_shape: Shape
    padding: int
    parameters: int
    gradients: int
    state: int
    bucket: int | None
    chunk: int | None


@dataclasses.dataclass(frozen=True)
class Plan:
    """What each device will hold and send; `print` it.

    Attributes:
      stage: The stage that `leaves` and `traffic` are for.
      mesh: Names and sizes of the mesh axes.
      shard_axis: The axes that split.
      replica_axis: The axes that repeat.
      leaves: The parameters, in tree order.
      other_state: Bytes per device of optimizer state that belongs to no parameter (step counts).
      at_rest: Bytes per device without sharding and at stages 1, 2 and 3: `at_rest[stage]`.
      traffic: What each device sends in one step of `value_and_grad` and `apply`.
      notes: What the figures depend on.
    """

    stage: int
    mesh: tuple[tuple[str, int], ...]
    shard_axis: tuple[str, ...]
    replica_axis: tuple[str, ...]
    leaves: tuple[PlannedLeaf, ...]
    other_state: int
    at_rest: tuple[AtRest, ...]
    traffic: tuple[Sent, ...]
    notes: tuple[str, ...]

    @property
    def total(self) -> int:
        """Bytes per device at rest, including the host's memory."""
        return self.at_rest[self.stage].total

    @property
    def sent(self) -> int:
        """Bytes that each device sends per step."""
        return sum(row.nbytes for row in self.traffic)

    def to_dict(self) -> dict[str, Any]:
        """Everything, in dicts, lists, strings and numbers only: for `json.dumps`."""
        out = dataclasses.asdict(self) | {"mesh": dict(self.mesh)}
        out["at_rest"] = [dataclasses.asdict(row) | {"total": row.total, "device": row.device} for row in self.at_rest]
        return out | {"total": self.total, "sent": self.sent}

    def __repr__(self) -> str:
        host = self.at_rest[self.stage].host
        held = f"{size_text(self.total)} at rest" + (f" ({size_text(host)} on the host)" if host else "")
        sizes = f"{held}, {size_text(self.sent)} sent"
        return f"Plan(stage={self.stage}, {len(self.leaves)} leaves, {sizes})"

    def __str__(self) -> str:
        return _text_of(self)

    def _repr_html_(self) -> str:
        return f"<pre style='line-height: normal'>{html.escape(_text_of(self, NOTEBOOK_WIDTH))}</pre>"

    def plot(self, ax: Any = None) -> Any:
        """Memory at rest per device as stacked bars, one for each stage; needs matplotlib.

        Args:
          ax: The matplotlib axes to draw into; `None`: new ones.

        Returns:
          The axes.
        """
        return _plot_of(self, ax)


# --- how it is shown ------------------------------------------------------------------------------

#: Columns of the tables in a notebook.
NOTEBOOK_WIDTH = 100
NAMES = ("unsharded", "stage 1", "stage 2", "stage 3")
PARTS = {"parameters": "parameters", "gradients": "gradients", "state": "optimizer state"}
PLACES = {"host": "of it on the host", "device": "on the device"}


def _text_of(plan: Plan, width: int | None = None) -> str:
    """The tables as plain text."""
    width = width or terminal_width()
    parts = [
        f"stage {plan.stage}, {not_split(dict(plan.mesh), plan.shard_axis) or _mesh(plan)}",
        _leaves(plan, width),
        _at_rest(plan, width),
        _traffic(plan, width),
    ]
    notes = [line for note in plan.notes for line in fold(note, width)]
    return "\n\n".join(["\n".join(fold(parts[0], width)), *parts[1:], "\n".join(notes)])


def _plot_of(plan: Plan, ax: Any = None) -> Any:
    """Stacked bars of memory at rest."""
    if ax is None:
        ax = need("matplotlib.pyplot", "plot", "plan.plot()").figure().subplots()
    bottom = [0.0] * len(NAMES)
    for part, label in PARTS.items():
        heights = [getattr(row, part) / 1e9 for row in plan.at_rest]
        ax.bar(NAMES, heights, bottom=bottom, label=label)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    for i, row in enumerate(plan.at_rest):
        ax.text(i, bottom[i], size_text(row.total), ha="center", va="bottom")
    hosted = any(row.host for row in plan.at_rest)
    ax.set_ylabel("GB per device at rest" + (", host memory included" if hosted else ""))
    ax.set_title(_mesh(plan))
    ax.legend()
    return ax


def not_split(sizes: Mapping[str, int], shard_axis: tuple[str, ...]) -> str:
    """A line that says so where the shard axis has one device; else empty."""
    if math.prod(sizes[axis] for axis in shard_axis) > 1:
        return ""
    others = ", ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1)
    of = f", of a mesh with {others}" if others else ""
    return f"nothing is split: the shard axis {' x '.join(shard_axis)} has one device{of}"


def _mesh(plan: Plan) -> str:
    sizes = dict(plan.mesh)
    named = lambda axes: " x ".join(f"{a}={sizes[a]}" for a in axes)
    again = f", repeated over {named(plan.replica_axis)}" if plan.replica_axis else ""
    return f"split over {named(plan.shard_axis)}{again}"


def _leaves(plan: Plan, width: int) -> str:
    transport = "chunk" if plan.stage == 3 else "bucket"
    head = ("leaf", "array", "layout", "x", "padding", "parameter", "gradient", "state", transport)
    rows = []
    for name, members in blocks(plan.leaves):
        first, count = members[0], len(members)
        numbers = sorted({n for row in members if (n := row.chunk if plan.stage == 3 else row.bucket) is not None})
        rows.append(
            (
                name,
                f"{_short(first.dtype)}[{','.join(map(str, first.shape))}]",
                first.layout,
                str(count) if count > 1 else "",
                str(first.padding or ""),
                *(size_text(count * getattr(first, part)) for part in ("parameters", "gradients", "state")),
                ranges(numbers),
            )
        )
    if plan.other_state:
        rows.append(("(other state)", *[""] * 6, size_text(plan.other_state), ""))
    title = "bytes per device at rest, of all leaves in a row together"
    empty = [i for i in (3, 4) if not any(row[i] for row in rows)]  # without repeats or padding: more room for names
    shown = lambda row: [cell for i, cell in enumerate(row) if i not in empty]
    return table(shown(head), [*map(shown, rows)], "".join(shown("<<<>>>>>>")), title=title, width=width)


def _at_rest(plan: Plan, width: int) -> str:
    names = [name + (" *" if i == plan.stage else "") for i, name in enumerate(NAMES)]
    places = PLACES if any(row.host for row in plan.at_rest) else {}
    rows = [
        (label, *(size_text(getattr(row, part)) for row in plan.at_rest))
        for part, label in (PARTS | {"total": "total"} | places).items()
    ]
    return table(("", *names), rows, title="per device at rest (* this plan)", width=width)


def _traffic(plan: Plan, width: int) -> str:
    rows = [(x.phase, ", ".join(x.axes), x.kind, str(x.calls), size_text(x.nbytes)) for x in plan.traffic]
    rows.append(("total", "", "", str(sum(x.calls for x in plan.traffic)), size_text(plan.sent)))
    head = ("phase", "mesh axes", "collective", "calls", "bytes")
    return table(head, rows, "<<<>>", title="sent per device and step", width=width)


def _short(dtype: str) -> str:
    """A dtype as JAX prints types: `bf16`, `i32`."""
    return dtype.replace("float", "f").replace("int", "i").replace("complex", "c")


# --- repeated blocks -----------------------------------------------------------------------------


def blocks(leaves: Sequence[PlannedLeaf]) -> list[tuple[str, list[PlannedLeaf]]]:
    """Leaves that differ in nothing but numbers in their paths, under one name, in order of the first.

    Layers are `h/0/w` or `Block_0/Dense_0/kernel`, so any number in a path may count them.
    """
    groups: dict[tuple[object, ...], list[PlannedLeaf]] = {}
    for leaf in leaves:
        same = (leaf.shape, leaf.dtype, leaf.layout, leaf.padding, leaf.parameters, leaf.gradients, leaf.state)
        groups.setdefault((_DIGITS.sub("#", leaf.path), *same), []).append(leaf)
    return [(_name([leaf.path for leaf in group]), group) for group in groups.values()]


_DIGITS = re.compile(r"\d+")


def _name(paths: Sequence[str]) -> str:
    """One name for paths that differ in numbers: `h/[0-11]/w`."""
    numbers = zip(*(map(int, _DIGITS.findall(path)) for path in paths), strict=True)
    seen = iter([sorted(set(column)) for column in numbers])

    def show(found: re.Match[str]) -> str:
        values = next(seen)
        return found[0] if len(values) == 1 else f"[{ranges(values)}]"

    return _DIGITS.sub(show, paths[0])


def ranges(numbers: Sequence[int]) -> str:
    """Sorted numbers, neighbours joined; many gaps are left out.

    Examples:
      >>> ranges([0, 1, 2, 3, 7])
      '0-3,7'
      >>> ranges([0, 2, 4, 6, 8])
      '0..8'
    """
    spans: list[list[int]] = []
    for n in numbers:
        if spans and n == spans[-1][1] + 1:
            spans[-1][1] = n
        else:
            spans.append([n, n])
    if len(spans) > 3:
        return f"{numbers[0]}..{numbers[-1]}"
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
