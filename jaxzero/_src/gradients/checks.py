"""What a loss may return, and which of its results is which."""

import dataclasses
from collections.abc import Hashable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from .._types import PyTree
from ..jaxpr.calls import inner_programs
from ..jaxpr.primitives import IO_CALLBACK, SHARD_MAP, SHARDING_CONSTRAINT
from ..jaxpr.trace import AnyJaxpr
from ..sharding.axes import Axes
from ..sharding.options import is_wire_dtype
from ..sharding.place import used
from ..sharding.scalars import is_int, python_scalar
from ..sharding.vma import varying


@dataclasses.dataclass(frozen=True)
class GradOptions:
    """How a loss is differentiated; see `Zero.value_and_grad`."""

    has_aux: bool = False
    accumulate: int = 1
    accumulate_dtype: DTypeLike = jnp.float32
    sync: str = "each"
    weighted: bool = False
    aux: Hashable = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "accumulate", python_scalar(self.accumulate))
        if is_wire_dtype(self.accumulate_dtype):
            object.__setattr__(self, "accumulate_dtype", jnp.dtype(self.accumulate_dtype))

    def check(self, call: str, stage: int) -> None:
        """Refuses what is out of range, by name."""
        if not is_int(self.accumulate, 1):
            raise ValueError(
                f"{call}: accumulate={self.accumulate!r}. Expected a positive int, the number of micro-steps. "
                "Fix: accumulate=1 for none."
            )
        if self.sync not in ("each", "once"):
            raise ValueError(
                f"{call}: sync={self.sync!r}. Expected 'each' (reduce-scatter at every micro-step) or 'once' (add "
                "whole local gradients, reduce after the last). Fix: sync='each' takes less memory."
            )
        if self.sync == "once" and stage == 3:
            raise ValueError(
                f"{call}: sync='once' with stage=3. Found both options; expected sync='each', because whole "
                "gradients between micro-steps would undo the split. Fix: drop sync, or use stage=2."
            )
        if not is_wire_dtype(self.accumulate_dtype):
            raise ValueError(
                f"{call}: accumulate_dtype={self.accumulate_dtype!r}. Expected a floating dtype of 16 bits or more. "
                "Fix: jnp.float32."
            )


def is_mean(dtype: DTypeLike) -> bool:
    """Whether an aux leaf of this dtype is averaged."""
    return bool(jnp.issubdtype(dtype, jnp.inexact))


def split_result(call: str, out: PyTree, how: GradOptions) -> tuple[jax.Array, jax.Array | None, PyTree]:
    """The loss, its weight and aux (`None` without) from what a user's loss returns; refuses what does not fit."""
    if how.has_aux and not (isinstance(out, tuple) and len(out) == 2):
        raise ValueError(
            f"{call}: has_aux=True, but the loss returns {type(out).__name__}. Expected (loss, aux). "
            "Fix: return a pair, or drop has_aux."
        )
    value, aux = out if how.has_aux else (out, None)
    weight = None
    if how.weighted:
        value, weight = _pair(call, value, how)
    if isinstance(value, tuple):
        raise ValueError(
            f"{call}: the loss returns a tuple of {len(value)}. Expected a scalar. Fix: has_aux=True if "
            "it is (loss, aux), weighted=True if it is (sum, weight)."
        )
    shape, dtype = np.shape(value), jnp.result_type(value)
    if shape or not jnp.issubdtype(dtype, jnp.floating):
        kind = "the sum" if how.weighted else "the mean"
        fix = "jnp.sum(...)" if how.weighted else "jnp.mean(...)"
        raise ValueError(
            f"{call}: the loss has shape {shape} and dtype {dtype}. Expected a floating scalar, {kind} "
            f"over examples. Fix: {fix} of the losses."
        )
    return value, weight, aux


def _pair(call: str, value: PyTree, how: GradOptions) -> tuple[jax.Array, jax.Array]:
    """The sum and the weight that a weighted loss returns; refuses what is no pair of scalars."""
    wanted = "((sum, weight), aux)" if how.has_aux else "(sum, weight)"
    if not (isinstance(value, tuple) and len(value) == 2):
        found = f"shape {np.shape(value)}" if hasattr(value, "shape") else type(value).__name__
        raise ValueError(
            f"{call}: weighted=True, but the loss returns {found}. Expected {wanted}: the summed losses and "
            "what they are divided by. Fix: return both, or drop weighted=True."
        )
    dtype = jnp.result_type(value[1])
    if np.shape(value[1]) or not (jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)):
        raise ValueError(
            f"{call}: weighted=True, but the weight has shape {np.shape(value[1])} and dtype {dtype}. Expected a real "
            "scalar, for example the number of tokens that count. Fix: jnp.sum(mask)."
        )
    return value[0], jax.lax.stop_gradient(jnp.asarray(value[1], jnp.promote_types(dtype, jnp.float32)))


def check_types(call: str, value: jax.Array, axes: Axes) -> None:
    """Inside `shard_map`: refuses a loss that is reduced already."""
    missing = [a for a in axes.every if a not in varying(value)]
    if missing:
        raise ValueError(
            f"{call}: the loss does not vary over {missing} inside shard_map. Found a loss that is "
            "reduced over devices already (lax.pmean?), whose gradient would be divided twice; "
            "expected the mean over this device's own examples. Fix: return the local mean; the "
            "mean over devices is taken here."
        )


def check_effects(jaxpr: AnyJaxpr, call: str) -> None:
    """Refuses effects that need an order between devices, or a result from the host."""
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name == IO_CALLBACK or eqn.params.get("ordered"):
            what = "an io_callback" if name == IO_CALLBACK else f"an ordered effect ({name})"
            raise ValueError(
                f"{call}: the loss contains {what}. Found it while tracing; expected a function of its "
                "arguments. Fix: move it out of the loss (return what it needs as aux), or print with "
                "jax.debug.print(...) without ordered=True."
            )
        for inner in inner_programs(eqn):
            check_effects(inner, call)


def check_static(call: str, out: PyTree) -> None:
    """Refuses results whose tree holds a traced array as static data: nothing would give it a value."""
    for node, data in _nodes(jax.tree.structure(out)):
        if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(data)):
            raise ValueError(
                f"{call}: the function returns a {node.__name__} with a traced array as static data. Expected arrays "
                "as leaves of the tree: static data is read when the function is traced, before there are values. Fix: "
                "make the field data (data_fields, pytree_node=True), or return the array beside it."
            )


def _nodes(tree: Any) -> Iterator[tuple[type, Any]]:
    """Type and static data of each node of a tree's structure."""
    if (node := tree.node_data()) is not None:
        yield node
    for child in tree.children():
        yield from _nodes(child)


def check_placements(call: str, jaxpr: AnyJaxpr, axes: Axes) -> None:
    """Refuses a function that places values over the library's own axes: its programs run on each device alone."""
    for eqn in jaxpr.eqns:
        name, over = eqn.primitive.name, set()
        if name == SHARDING_CONSTRAINT:
            over = used(getattr(eqn.params["sharding"], "spec", PartitionSpec()))
        elif name == SHARD_MAP:
            over = set(eqn.params["newly_manual_axes"])
        if own := sorted(over & {*axes.every}):
            what = "with_sharding_constraint" if name == SHARDING_CONSTRAINT else name
            raise ValueError(
                f"{call}: the function places values over {own} ({what}), axes over which jaxzero cuts the batch and "
                "the state. Expected placements over other mesh axes: the function sees one device's examples, which "
                f"are cut over {own} already. Fix: leave these axes out, PartitionSpec(None, 'model') or "
                "shard_map(..., axis_names={'model'}) for another axis 'model'; or drop the placement."
            )
        for inner in inner_programs(eqn):
            check_placements(call, inner, axes)
