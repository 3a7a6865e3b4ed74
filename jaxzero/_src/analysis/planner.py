"""Makes the plan, from shapes and the traced step."""

import jax
import optax
from jax.sharding import NamedSharding, PartitionSpec

from .._text import path_text
from .._types import Path, PyTree
from ..gradients.checks import GradOptions
from ..jaxpr.calls import nbytes
from ..optimizer.trace import MissingExtra
from ..optimizer.wrapper import wrap
from ..sharding.checks import check_params
from ..sharding.host import PINNED_HOST
from ..sharding.layout import Shape
from ..sharding.leaves import Leaf, Leaves, is_key, owner
from ..sharding.options import STAGES, Options, memory_kind, param_leaves, resolve_axes
from . import planned_traffic
from .plan import AtRest, Plan, PlannedLeaf
from .planned_traffic import CALL

#: The note of a plan that lacks the traffic of its optimizer's update.
UNKNOWN_UPDATE = "what the update of the optimizer sends is missing"


#: What a stage 3 without an observed loss cannot know.
NOT_OBSERVED = (
    "If a scan reads layers one by one, each stack of them is split as one array, and all layers are gathered at once; "
    "zero.observe(loss_fn, params, *batch) before zero.shard or zero.init gathers one layer at a time"
)


def make_plan(
    options: Options, params: PyTree, inner: optax.GradientTransformation | None, accumulate: int, sync: str
) -> Plan:
    """See `Zero.plan`."""
    axes, manual = resolve_axes(options, CALL)
    if manual:
        raise ValueError(f"{CALL}: called inside shard_map. Expected the global view. Fix: call it outside.")
    how = GradOptions(accumulate=accumulate, sync=sync)
    how.check(CALL, options.stage)
    if not jax.tree.leaves(params):
        raise ValueError(
            f"{CALL}: the parameters have no leaf. Found {type(params).__name__}; expected a tree of arrays. Fix: pass "
            "parameters, for example jax.eval_shape(init_fn, key)."
        )
    check_params(CALL, options, params)
    leaves = param_leaves(options, params, axes.n)
    stored = planned_traffic.stored_params(options, leaves)
    own, other, hosted, unsharded = _state(options, leaves, stored, inner)
    try:
        traced, missing = planned_traffic.trace(options, leaves, inner, stored, how), ""
    except MissingExtra as error:
        traced, missing = planned_traffic.trace(options, leaves, None, stored, how), str(error.__cause__)
    state = sum(own.values()) + other
    return Plan(
        options.stage,
        tuple(options.mesh.shape.items()),
        axes.shard,
        axes.replica,
        tuple(_row(options, leaf, own.get(leaf.path, 0), traced.buckets, traced.chunks) for leaf in leaves.leaves),
        other,
        (
            _at_rest(options, 0, leaves, unsharded, 0),
            *(_at_rest(options, s, leaves, state, hosted + _hosted(options, leaves, s)) for s in STAGES),
        ),
        traced.traffic,
        _notes(options, inner, how, leaves, missing) + _shared_weights(traced.repeated),
    )


def _notes(
    options: Options, inner: optax.GradientTransformation | None, how: GradOptions, leaves: Leaves, missing: str
) -> tuple[str, ...]:
    """The assumptions behind the figures."""
    out = ["sent: bytes that leave each device in a ring, in one step of value_and_grad and apply"]
    if inner is None:
        out.append("no optimizer was given: its state and what its update sends are missing")
    if missing:
        out.append(f"{UNKNOWN_UPDATE}, since it needs more than gradients ({missing}); zero.explain takes that by name")
    kept = [
        path_text(leaf.path) for leaf in leaves.leaves if leaf.trainable and leaf.other_axes and leaf.layout is None
    ]
    if kept:
        out.append(f"not cut, since other axes shard every dimension: {', '.join(kept)}")
    if options.stage > 1:
        what = "gathers parameters and reduces gradients" if options.stage == 3 else "reduces gradients"
        once = options.stage == 2 and how.sync == "once"
        out.append(
            f"accumulate={how.accumulate}: " + ("gradients are reduced once" if once else f"each micro-step {what}")
        )
    if options.regather == "never":
        out.append(
            "regather='never': a step holds each parameter whole, from its gather to the end of the backward pass"
        )
    if options.stage == 3:
        seen = options.observed and options.observed.loss
        out.append(
            "parameters are gathered as the observed loss uses them"
            if seen
            else "no loss was observed: each parameter is taken to be used once forward and once backward, in tree "
            f"order. {NOT_OBSERVED}"
        )
    return tuple(out)


def _shared_weights(repeated: dict[Path, int]) -> tuple[str, ...]:
    """The parameters whose gradients are reduced more than once per micro-step."""
    if not repeated:
        return ()
    which = ", ".join(f"{path_text(path)} {count} times" for path, count in repeated.items())
    return (f"used in several places, with gathers between them, and reduced for each: {which}",)


def _row(options: Options, leaf: Leaf, state: int, buckets: dict[Path, int], chunks: dict[Path, int]) -> PlannedLeaf:
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
    kind = lambda leaf: memory_kind(options, "params", leaf.layout)
    return sum(_param_bytes(options, leaf, stage) for leaf in leaves.leaves if kind(leaf))


def _param_bytes(options: Options, leaf: Leaf, stage: int) -> int:
    return _bytes(options, leaf, stage == 3)


def _grad_bytes(options: Options, leaf: Leaf, stage: int) -> int:
    """Bytes of a leaf's gradient: none for a key; other leaves that pass through have a zero gradient."""
    return 0 if is_key(leaf.dtype) else _bytes(options, leaf, stage >= 2)


def _bytes(options: Options, leaf: Leaf, split: bool) -> int:
    shape = leaf.cut.stored_shape if split and leaf.layout else leaf.shape
    return nbytes(local_shape(options, shape, leaf.spec(options.shard_axes if split else None)), leaf.dtype)


def local_shape(options: Options, shape: Shape, spec: PartitionSpec) -> Shape:
    """The shape on one device."""
    return NamedSharding(options.mesh, spec).shard_shape(shape)


def _state(
    options: Options, leaves: Leaves, stored: PyTree, inner: optax.GradientTransformation | None
) -> tuple[dict[Path, int], int, int, int]:
    """Bytes per device of state: by the key path of its parameter; other state; on the host; all, unsharded."""
    if inner is None:
        return {}, 0, 0, 0
    by_path = {leaf.path: leaf for leaf in leaves.leaves}
    own: dict[Path, int] = {}
    other = hosted = 0
    for path, x in jax.tree_util.tree_leaves_with_path(wrap(options, inner, False).init(stored)):
        size = nbytes(x.sharding.shard_shape(x.shape), x.dtype)
        hosted += size * (x.sharding.memory_kind == PINNED_HOST)
        leaf = owner(path, None, by_path)
        if leaf is None:
            other += size
        else:
            own[leaf.path] = own.get(leaf.path, 0) + size
    plain = jax.eval_shape(inner.init, leaves.unflatten(leaves.trace_avals()))
    unsharded = 0
    for path, x in jax.tree_util.tree_leaves_with_path(plain):
        leaf = owner(path, x.shape, by_path)
        unsharded += nbytes(x.shape if leaf is None else local_shape(options, x.shape, leaf.spec(None)), x.dtype)
    return own, other, hosted, unsharded
