"""Any Optax optimizer on shares: reduce the gradients, evaluate the inner update, gather its result."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from .._types import Path
from ..jaxpr.compat import as_weak
from ..jaxpr.trace import Program
from ..partition.evaluate import evaluate
from ..partition.record import Record
from ..partition.values import Context, Value
from ..sharding import host
from ..sharding.axes import Axes
from ..sharding.layout import Layout
from ..sharding.leaves import Leaf, StateLeaf
from ..sharding.options import Options, memory_kind
from . import convert
from .offload import Held, LeafGroup, evaluate_by_group, join
from .trace import UpdateProgram, weak_results

#: A flat list of arrays, of one argument or result of a step.
Arrays = list[jax.Array]
#: The specs of a flat list: one for each array, or one for all.
Specs = list[PartitionSpec] | PartitionSpec
#: The memory kinds of a flat list, `None` where it is the device's.
Kinds = list[str | None] | None


@dataclasses.dataclass(frozen=True)
class Init:
    """One call of `init`, traced: everything but the arrays."""

    options: Options
    axes: Axes
    program: Program
    params: tuple[Leaf, ...]
    split_params: tuple[bool, ...]
    state: list[StateLeaf]

    @property
    def in_specs(self) -> tuple[Specs, ...]:
        """Specs of parameters and constants."""
        return _given(self.params, self.split_params, self.axes), _WHOLE

    @property
    def in_kinds(self) -> tuple[Kinds, ...]:
        """Memory kinds of parameters and constants."""
        return _kinds(self.options, "params", self.params), None

    @property
    def out_specs(self) -> list[PartitionSpec]:
        """Specs of the state."""
        return [leaf.spec(self.axes.shard) for leaf in self.state]

    @property
    def out_kinds(self) -> list[str | None]:
        """Memory kinds of the state."""
        return _kinds(self.options, "state", self.state)

    def __call__(self, params: Arrays, consts: Arrays) -> Arrays:
        """Evaluates the inner init on shares, inside a manual region."""
        ctx = Context(self.axes, self.options.bucket_bytes, None, deal=self.options.deal)
        values = convert.parameters(ctx, list(map(host.to_device, params)), self.params, self.split_params)
        out = evaluate(ctx, self.program.jaxpr, consts, values)
        stored = ctx.stored(ctx.convert_all(out, [leaf.layout for leaf in self.state]))
        return _placed(_typed(stored, weak_results(self.program)), self.out_kinds)


@dataclasses.dataclass(frozen=True)
class Update:
    """One call of `update` or `apply`, traced: everything but the arrays.

    Trees among the extra arguments that are like the parameters follow the gradients.
    """

    options: Options
    axes: Axes
    traced: UpdateProgram
    grads: tuple[Leaf, ...]
    split_grads: tuple[bool, ...]
    local: bool
    params: tuple[Leaf, ...]
    split_params: tuple[bool, ...]

    @property
    def in_specs(self) -> tuple[Specs, ...]:
        """Specs of gradients, state, parameters, extra arguments, constants."""
        return (
            _given(self.grads, self.split_grads, self.axes),
            [leaf.spec(self.axes.shard) for leaf in self.traced.state],
            _given(self.params, self.split_params, self.axes),
            _WHOLE,
            _WHOLE,
        )

    @property
    def in_kinds(self) -> tuple[Kinds, ...]:
        """Memory kinds of the same."""
        state = _kinds(self.options, "state", self.traced.state)
        return None, state, _kinds(self.options, "params", self.params), None, None

    @property
    def out_specs(self) -> tuple[list[PartitionSpec], list[PartitionSpec]]:
        """Specs of the updates (or new parameters) and of the new state."""
        return (
            [leaf.spec(self.axes.shard if self.stored_layout(leaf) else None) for leaf in self.traced.moving],
            [leaf.spec(self.axes.shard) for leaf in self.traced.changing],
        )

    def __call__(
        self, grads: Arrays, state: Arrays, params: Arrays, extra: Arrays, consts: Arrays, record: Record | None = None
    ) -> tuple[Arrays, Arrays]:
        """Reduces, evaluates the inner update on shares and gathers, inside a manual region."""
        ctx = Context(self.axes, self.options.bucket_bytes, record, deal=self.options.deal)
        mean = convert.gradients(ctx, self.options, grads, self.grads, self.split_grads, self.local)
        if self.options.offload:
            return self._by_group(ctx, mean, state, params, extra, consts)
        state, params = (list(map(host.to_device, x)) for x in (state, params))  # of another `Zero`, on the host
        inputs = self.traced.inputs(
            mean,
            convert.state(ctx, state, self.traced.state),
            convert.parameters(ctx, params, self.params, self.split_params),
            extra,
        )
        out = evaluate(ctx, self.traced.program.jaxpr, consts, inputs)
        new, new_state = self.traced.results(out)
        new_state = ctx.convert_all(new_state, [leaf.layout for leaf in self.traced.changing])
        new = ctx.convert_all(new, [self.stored_layout(leaf) for leaf in self.traced.moving], record=False)
        weak, weak_state = self.traced.results(self.traced.weak)
        return _typed(ctx.stored(new), weak), _typed(ctx.stored(new_state), weak_state)

    def stored_layout(self, leaf: Leaf) -> Layout | None:
        """The layout of updates and parameters between steps: whole at stages 1 and 2."""
        return None if self.options.stage < 3 else leaf.layout

    # --- with state or parameters on the host ---

    def _by_group(
        self, ctx: Context, mean: list[Value], state: Arrays, params: Arrays, extra: Arrays, consts: Arrays
    ) -> tuple[Arrays, Arrays]:
        """The same where state or parameters are stored on the host: fetched, updated and sent back group by group."""
        traced = self.traced
        state_kinds = _kinds(self.options, "state", traced.state)
        param_kinds = _kinds(self.options, "params", self.params)
        load_state = lambda leaf: lambda x: convert.state(ctx, [x], [leaf])[0]
        load_param = lambda leaf, split: lambda x: convert.parameters(ctx, [x], [leaf], [split])[0]
        rows = zip(state, traced.state, state_kinds, strict=True)
        held_state = [_held(x, kind, load_state(leaf)) for x, leaf, kind in rows]
        columns = zip(params, self.params, self.split_params, param_kinds, strict=True)
        held_params = [_held(x, kind, load_param(leaf, split)) for x, leaf, split, kind in columns]
        layouts = [*map(self.stored_layout, traced.new.leaves), *(leaf.layout for leaf in traced.new_state)]
        what = "params" if traced.adds else "update"
        kinds = _kinds(self.options, what, traced.new.leaves) + _kinds(self.options, "state", traced.new_state)

        weak = traced.weak

        def store(positions: list[int], values: list[Value]) -> Arrays:
            stored = ctx.stored(ctx.convert_all(values, [layouts[i] for i in positions]))
            return _placed(_typed(stored, [weak[i] for i in positions]), [kinds[i] for i in positions])

        inputs = traced.inputs(mean, held_state, held_params, extra)
        out = evaluate_by_group(ctx, traced.program.jaxpr, consts, inputs, self._leaf_groups(), store)
        stored: list[Any] = [out.get(i) for i in range(len(layouts))]  # none for leaves that pass through
        return traced.results(stored)

    def _leaf_groups(self) -> list[LeafGroup]:
        """The state of each parameter with the parameter, in tree order; small ones joined."""
        traced = self.traced
        groups: dict[Path, tuple[LeafGroup, list[int]]] = {}
        first_state, first_param = traced.grads, traced.grads + len(traced.state)
        first_new_state = len(traced.new.leaves)
        rows: list[tuple[Path, Leaf | StateLeaf, int | None, int | None]]  # where it is among inputs, or results
        rows = [(leaf.path, leaf, first_param + i, None) for i, leaf in enumerate(self.params)]
        rows += [(leaf.path, leaf, None, i) for i, leaf in enumerate(traced.new.leaves) if leaf.trainable]
        rows += [(leaf.owner, leaf, first_state + i, None) for i, leaf in enumerate(traced.state)]
        rows += [(x.owner, x, None, first_new_state + i) for i, x in enumerate(traced.new_state) if not x.frozen]
        for path, leaf, input_, result in rows:
            group, sizes = groups.setdefault(path, (LeafGroup([], []), []))
            if input_ is not None and leaf.layout is not None:
                group.inputs.append(input_)
                sizes.append(math.prod(leaf.layout.local_shape) * np.dtype(leaf.dtype).itemsize)
            if result is not None:
                group.results.append(result)
        return join(((group, sum(sizes)) for group, sizes in groups.values()), self.options.bucket_bytes)


_WHOLE = PartitionSpec()


def _held(x: jax.Array, kind: str | None, load: Callable[[jax.Array], Value]) -> Value | Held:
    return Held(x, load) if kind else load(x)


def _kinds(options: Options, what: str, leaves: Sequence[Leaf] | Sequence[StateLeaf]) -> list[str | None]:
    return [memory_kind(options, what, leaf.layout) for leaf in leaves]


def _typed(arrays: Sequence[jax.Array], weak: Sequence[bool]) -> Arrays:
    """The arrays, of weak type where the results of the unsharded program are."""
    return [as_weak(x) if is_weak else x for x, is_weak in zip(arrays, weak, strict=True)]


def _placed(arrays: Sequence[jax.Array], kinds: Sequence[str | None]) -> Arrays:
    """The arrays, those with a memory kind on the host."""
    return [host.to_host(x) if kind else x for x, kind in zip(arrays, kinds, strict=True)]


def _given(leaves: tuple[Leaf, ...], shares: tuple[bool, ...], axes: Axes) -> list[PartitionSpec]:
    return [leaf.spec(axes.shard if is_share else None) for leaf, is_share in zip(leaves, shares, strict=True)]
