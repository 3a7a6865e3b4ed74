"""The plan: what each device will hold and send, before anything is allocated or compiled."""

import dataclasses
from typing import Any

import jax
import optax
from jax.sharding import NamedSharding, PartitionSpec

from ..gradients.checks import How
from ..jaxpr.collectives import Sent
from ..jaxpr.flat import nbytes
from ..optimizer import checks, offload, wrapper
from ..partition.record import size_text
from ..sharding.axes import path_text
from ..sharding.layout import Shape
from ..sharding.leaves import Leaf, Leaves, is_key, owner
from ..sharding.options import STAGES, Options
from . import plan_table, planned_traffic
from .planned_traffic import CALL


@dataclasses.dataclass(frozen=True)
class AtRest:
    """Bytes that one device holds between two steps, in its own memory and in the host's.

    Attributes:
      stage: The stage; 0 without sharding.
      parameters: Bytes of parameters.
      gradients: Bytes of gradients, as `value_and_grad` returns them.
      state: Bytes of optimizer state.
      host: Of parameters and state, the bytes that rest in the host's memory (`offload`).
    """

    stage: int
    parameters: int
    gradients: int
    state: int
    host: int = 0

    @property
    def total(self) -> int:
        """Parameters, gradients and state, wherever they rest."""
        return self.parameters + self.gradients + self.state

    @property
    def device(self) -> int:
        """What of it rests in the device's memory."""
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
      padding: Elements of that array that stand for nothing.
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
        """Bytes per device at rest, those in the host's memory among them."""
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
        resting = f"{size_text(self.total)} at rest" + (f" ({size_text(host)} on the host)" if host else "")
        sizes = f"{resting}, {size_text(self.sent)} sent"
        return f"Plan(stage={self.stage}, {len(self.leaves)} leaves, {sizes})"

    def __str__(self) -> str:
        return plan_table.text(self)

    def _repr_html_(self) -> str:
        return plan_table.html(self)

    def plot(self, ax: Any = None) -> Any:
        """Memory at rest per device as stacked bars, one for each stage; needs matplotlib.

        Args:
          ax: The matplotlib axes to draw into; `None`: new ones.

        Returns:
          The axes.
        """
        return plan_table.plot(self, ax)


def make(options: Options, params: Any, inner: optax.GradientTransformation | None, accumulate: int, sync: str) -> Plan:
    """See `Zero.plan`."""
    axes, manual = options.context(CALL)
    if manual:
        raise ValueError(f"{CALL}: called inside shard_map. Expected the global view. Fix: call it outside.")
    how = How(accumulate=accumulate, sync=sync)
    how.check(CALL, options.stage)
    if not jax.tree.leaves(params):
        raise ValueError(
            f"{CALL}: the parameters have no leaf. Found {type(params).__name__}; expected a tree of arrays. Fix: pass "
            "parameters, for example jax.eval_shape(init_fn, key)."
        )
    checks.parameters(CALL, options, params)
    leaves = options.leaves(params, axes.n)
    resting = planned_traffic.at_rest(options, leaves)
    own, other, hosted, unsharded = _state(options, leaves, resting, inner)
    buckets = planned_traffic.buckets(options, leaves, axes)
    traffic, chunks = planned_traffic.trace(options, leaves, inner, resting, how)
    state = sum(own.values()) + other
    return Plan(
        options.stage,
        tuple(options.mesh.shape.items()),
        axes.shard,
        axes.replica,
        tuple(_row(options, leaf, own.get(leaf.path, 0), buckets, chunks) for leaf in leaves.leaves),
        other,
        (
            _at_rest(options, 0, leaves, unsharded, 0),
            *(_at_rest(options, s, leaves, state, hosted + _hosted(options, leaves, s)) for s in STAGES),
        ),
        traffic,
        _notes(options, inner, how, leaves),
    )


def _notes(options: Options, inner: Any, how: How, leaves: Leaves) -> tuple[str, ...]:
    """What the figures depend on."""
    out = ["sent: bytes that leave each device in a ring, in one step of value_and_grad and apply"]
    if inner is None:
        out.append("no optimizer was given: its state and what its update sends are missing")
    kept = [path_text(leaf.path) for leaf in leaves.leaves if leaf.trainable and leaf.beside and leaf.layout is None]
    if kept:
        out.append(f"not cut, since other axes shard every dimension: {', '.join(kept)}")
    if options.stage > 1:
        what = "gathers parameters and reduces gradients" if options.stage == 3 else "reduces gradients"
        once = options.stage == 2 and how.sync == "once"
        out.append(f"accumulate={how.accumulate}: " + ("gradients are reduced once" if once else f"each turn {what}"))
    if options.stage == 3:
        seen = options.observed and options.observed.loss
        out.append(
            "parameters are gathered as the observed loss uses them"
            if seen
            else "no loss was observed: each parameter is taken to be used once forward and once backward, in tree "
            "order; zero.observe(loss_fn, params, *batch) makes this exact"
        )
    return tuple(out)


# --- bytes at rest -------------------------------------------------------------------------------


def _row(options: Options, leaf: Leaf, state: int, buckets: dict[Any, int], chunks: dict[Any, int]) -> PlannedLeaf:
    layout = leaf.layout
    return PlannedLeaf(
        path_text(leaf.path),
        leaf.shape,
        str(leaf.dtype),
        "whole" if layout is None else "stacked" if leaf.layers else layout.kind,
        leaf.shape if layout is None else layout.stored_shape,
        0 if layout is None else layout.padding,
        _param_bytes(options, leaf, options.stage),
        _grad_bytes(options, leaf, options.stage),
        state,
        buckets.get(leaf.path),
        chunks.get(leaf.path),
    )


def _at_rest(options: Options, stage: int, leaves: Leaves, state: int, host: int) -> AtRest:
    return AtRest(
        stage,
        sum(_param_bytes(options, leaf, stage) for leaf in leaves.leaves),
        sum(_grad_bytes(options, leaf, stage) for leaf in leaves.leaves),
        state,
        host,
    )


def _hosted(options: Options, leaves: Leaves, stage: int) -> int:
    """Bytes of parameters in the host's memory."""
    kind = lambda leaf: options.memory_kind("params", leaf.layout)
    return sum(_param_bytes(options, leaf, stage) for leaf in leaves.leaves if kind(leaf))


def _param_bytes(options: Options, leaf: Leaf, stage: int) -> int:
    return _bytes(options, leaf, stage == 3)


def _grad_bytes(options: Options, leaf: Leaf, stage: int) -> int:
    """A key has no gradient; that of other leaves that pass through is zeros."""
    return 0 if is_key(leaf.dtype) else _bytes(options, leaf, stage >= 2)


def _bytes(options: Options, leaf: Leaf, split: bool) -> int:
    shape = leaf.cut.stored_shape if split and leaf.layout else leaf.shape
    return nbytes(local_shape(options, shape, leaf.spec(options.shard_axes if split else None)), leaf.dtype)


def local_shape(options: Options, shape: Shape, spec: PartitionSpec) -> Shape:
    """The shape on one device."""
    return NamedSharding(options.mesh, spec).shard_shape(shape)


def _state(
    options: Options, leaves: Leaves, resting: Any, inner: optax.GradientTransformation | None
) -> tuple[dict[Any, int], int, int, int]:
    """Bytes per device of state: by the key path of its parameter; of other state; on the host; of all unsharded."""
    if inner is None:
        return {}, 0, 0, 0
    by_path = {leaf.path: leaf for leaf in leaves.leaves}
    own: dict[Any, int] = {}
    other = hosted = 0
    for path, x in jax.tree_util.tree_leaves_with_path(wrapper.wrap(options, inner, False).init(resting)):
        size = nbytes(x.sharding.shard_shape(x.shape), x.dtype)
        hosted += size * (x.sharding.memory_kind == offload.KIND)
        leaf = owner(path, None, by_path)
        if leaf is None:
            other += size
        else:
            own[leaf.path] = own.get(leaf.path, 0) + size
    plain = jax.eval_shape(inner.init, leaves.unflatten(leaves.stand_ins()))
    unsharded = 0
    for path, x in jax.tree_util.tree_leaves_with_path(plain):
        leaf = owner(path, x.shape, by_path)
        unsharded += nbytes(x.shape if leaf is None else local_shape(options, x.shape, leaf.spec(None)), x.dtype)
    return own, other, hosted, unsharded
