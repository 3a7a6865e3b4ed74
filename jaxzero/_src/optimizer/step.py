"""Any Optax optimizer on shares: reduce the gradients, evaluate the inner update, gather its result."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec

from ..jaxpr.trace import Program
from ..partition.evaluate import evaluate
from ..partition.values import Context
from ..sharding import host
from ..sharding.axes import Axes
from ..sharding.layout import Layout
from ..sharding.leaves import Leaf, StateLeaf
from ..sharding.options import Options, memory_kind
from . import convert, offload
from .trace import UpdateProgram


class Kept:
    """Keeps what is made once for a traced call: its regions, and for eager callers their `jit`."""

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """`make()`, the same object at every call."""
        if name not in self.__dict__:
            self.__dict__[name] = make()
        return self.__dict__[name]


@dataclasses.dataclass(frozen=True)
class Init(Kept):
    """One call of `init`, traced: everything but the arrays."""

    options: Options
    axes: Axes
    program: Program
    params: tuple[Leaf, ...]
    split_params: tuple[bool, ...]
    state: list[StateLeaf]

    @property
    def in_specs(self) -> Any:
        """Specs of the arrays that go in, all of them flat lists."""
        return _given(self.params, self.split_params, self.axes), _WHOLE

    @property
    def in_kinds(self) -> Any:
        """Memory kinds of the arrays that go in, where they are not the device's."""
        return _kinds(self.options, "params", self.params), None

    @property
    def out_specs(self) -> Any:
        """Specs of the state."""
        return [leaf.spec(self.axes.shard) for leaf in self.state]

    @property
    def out_kinds(self) -> list[str | None]:
        """Memory kinds of the state."""
        return _kinds(self.options, "state", self.state)

    def __call__(self, params: Any, consts: Any) -> Any:
        """Runs inside a manual region: evaluate the inner init on shares."""
        ctx = Context(self.axes, self.options.bucket_bytes, None)
        values = convert.parameters(ctx, list(map(host.to_device, params)), self.params, self.split_params)
        out = evaluate(ctx, self.program.jaxpr, consts, values)
        rest = ctx.stored(ctx.convert_all(out, [leaf.layout for leaf in self.state]))
        return _kept(rest, self.out_kinds)


@dataclasses.dataclass(frozen=True)
class Update(Kept):
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
    def in_specs(self) -> Any:
        """Specs of gradients, state, parameters, extra arguments, constants: flat lists."""
        return (
            _given(self.grads, self.split_grads, self.axes),
            [leaf.spec(self.axes.shard) for leaf in self.traced.state],
            _given(self.params, self.split_params, self.axes),
            _WHOLE,
            _WHOLE,
        )

    @property
    def in_kinds(self) -> Any:
        """Memory kinds of the arrays that go in, where they are not the device's."""
        state, params = (_kinds(self.options, *x) for x in (("state", self.traced.state), ("params", self.params)))
        return None, state, params, None, None

    @property
    def out_specs(self) -> Any:
        """Specs of the updates (or new parameters) and of the new state."""
        return (
            [leaf.spec(self.axes.shard if self.rest(leaf) else None) for leaf in self.traced.moving],
            [leaf.spec(self.axes.shard) for leaf in self.traced.changing],
        )

    def __call__(self, grads: Any, state: Any, params: Any, extra: Any, consts: Any, record: Any = None) -> Any:
        """Runs inside a manual region: reduce, evaluate the inner update on shares, gather."""
        ctx = Context(self.axes, self.options.bucket_bytes, record)
        mean = convert.gradients(ctx, self.options, grads, self.grads, self.split_grads, self.local)
        if self.options.offload:
            return self._by_bucket(ctx, mean, state, params, extra, consts)
        state, params = (list(map(host.to_device, x)) for x in (state, params))  # of another `Zero`, on the host
        inputs = self.traced.inputs(
            mean,
            convert.state(ctx, state, self.traced.state),
            convert.parameters(ctx, params, self.params, self.split_params),
            extra,
        )
        out = evaluate(ctx, self.traced.program.jaxpr, consts, inputs)
        new, new_state = self.traced.results(out)
        new_state = ctx.convert_all(new_state, [e.layout for e in self.traced.changing])
        new = ctx.convert_all(new, [self.rest(leaf) for leaf in self.traced.moving], record=False)
        return ctx.stored(new), ctx.stored(new_state)

    def _by_bucket(self, ctx: Context, mean: Any, state: Any, params: Any, extra: Any, consts: Any) -> Any:
        """The same where state or parameters rest on the host: fetched, updated and sent back bucket by bucket."""
        traced = self.traced
        _, state_kinds, param_kinds, *_ = self.in_kinds
        one = lambda load, leaf, *more: lambda x: load(ctx, [x], [leaf], *([m] for m in more))[0]
        held = lambda x, kind, load: offload.Held(x, load) if kind else load(x)
        state = [held(x, k, one(convert.state, e)) for x, e, k in zip(state, traced.state, state_kinds, strict=True)]
        rows = zip(params, self.params, self.split_params, param_kinds, strict=True)
        params = [held(x, k, one(convert.parameters, leaf, share)) for x, leaf, share, k in rows]
        layouts = [*map(self.rest, traced.new.leaves), *(e.layout for e in traced.new_state)]
        what = "params" if traced.adds else "update"
        kinds = _kinds(self.options, what, traced.new.leaves) + _kinds(self.options, "state", traced.new_state)

        def store(positions: list[int], values: list[Any]) -> list[Any]:
            rest = ctx.stored(ctx.convert_all(values, [layouts[i] for i in positions]))
            return _kept(rest, [kinds[i] for i in positions])

        inputs = traced.inputs(mean, state, params, extra)
        out = offload.evaluate(ctx, traced.program.jaxpr, consts, inputs, self._buckets(), store)
        return traced.results([out.get(i) for i in range(len(layouts))])

    def _buckets(self) -> list[offload.Bucket]:
        """The state of each parameter with the parameter, in tree order; small ones together."""
        traced = self.traced
        groups: dict[Any, tuple[offload.Bucket, list[int]]] = {}
        first_state, first_param = traced.grads, traced.grads + len(traced.state)
        rows: list[tuple[Any, Any, int | None, int | None]]
        rows = [(leaf.path, leaf, first_param + i, None) for i, leaf in enumerate(self.params)]
        rows += [(leaf.path, leaf, None, i) for i, leaf in enumerate(traced.new.leaves) if leaf.trainable]
        rows += [(leaf.owner, leaf, first_state + i, None) for i, leaf in enumerate(traced.state)]
        count = len(traced.new.leaves)
        rows += [(x.owner, x, None, count + i) for i, x in enumerate(traced.new_state) if not x.frozen]
        for path, leaf, taken, given in rows:
            bucket, sizes = groups.setdefault(path, (offload.Bucket([], []), []))
            if taken is not None and leaf.layout is not None:
                bucket.inputs.append(taken)
                sizes.append(math.prod(leaf.layout.local_shape) * np.dtype(leaf.dtype).itemsize)
            if given is not None:
                bucket.results.append(given)
        return offload.join(((bucket, sum(sizes)) for bucket, sizes in groups.values()), self.options.bucket_bytes)

    def rest(self, leaf: Leaf) -> Layout | None:
        """The layout of updates and parameters between steps: whole at stages 1 and 2."""
        return None if self.options.stage < 3 else leaf.layout


_WHOLE = PartitionSpec()


def _kinds(options: Options, what: str, leaves: Sequence[Leaf] | Sequence[StateLeaf]) -> list[str | None]:
    return [memory_kind(options, what, leaf.layout) for leaf in leaves]


def _kept(arrays: Sequence[Any], kinds: Sequence[str | None]) -> list[Any]:
    return [host.to_host(x) if kind else x for x, kind in zip(arrays, kinds, strict=True)]


def _given(leaves: tuple[Leaf, ...], shares: tuple[bool, ...], axes: Axes) -> list[PartitionSpec]:
    return [leaf.spec(axes.shard if is_share else None) for leaf, is_share in zip(leaves, shares, strict=True)]
