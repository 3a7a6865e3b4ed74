"""Any Optax optimizer on shares: reduce the gradients, evaluate the inner update, gather its result."""

import dataclasses
from collections.abc import Callable
from typing import Any

from jax.sharding import PartitionSpec

from . import entry
from .layout import Layout
from .mesh import Axes
from .options import Options
from .partition import Context, Program, run
from .programs import UpdateProgram
from .state import Leaf, StateLeaf


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
    def out_specs(self) -> Any:
        """Specs of the state."""
        return [leaf.spec(self.axes.shard) for leaf in self.state]

    def __call__(self, params: Any, consts: Any) -> Any:
        """Runs inside a manual region: evaluate the inner init on shares."""
        ctx = Context(self.axes, self.options.bucket_bytes, None)
        values = entry.parameters(ctx, params, self.params, self.split_params)
        out = run(ctx, self.program.jaxpr, consts, values)
        return entry.at_rest(ctx, ctx.settle(out, [leaf.layout for leaf in self.state]))


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
    def out_specs(self) -> Any:
        """Specs of the updates (or new parameters) and of the new state."""
        return (
            [leaf.spec(self.axes.shard if self.rest(leaf) else None) for leaf in self.traced.moving],
            [leaf.spec(self.axes.shard) for leaf in self.traced.changing],
        )

    def __call__(self, grads: Any, state: Any, params: Any, extra: Any, consts: Any, record: Any = None) -> Any:
        """Runs inside a manual region: reduce, evaluate the inner update on shares, gather."""
        ctx = Context(self.axes, self.options.bucket_bytes, record)
        mean = entry.gradients(ctx, self.options, grads, self.grads, self.split_grads, self.local)
        inputs = self.traced.inputs(
            mean,
            entry.state(ctx, state, self.traced.state),
            entry.parameters(ctx, params, self.params, self.split_params),
            extra,
        )
        out = run(ctx, self.traced.program.jaxpr, consts, inputs)
        new, new_state = self.traced.results(out)
        new_state = ctx.settle(new_state, [e.layout for e in self.traced.changing])
        new = ctx.settle(new, [self.rest(leaf) for leaf in self.traced.moving], record=False)
        return entry.at_rest(ctx, new), entry.at_rest(ctx, new_state)

    def rest(self, leaf: Leaf) -> Layout | None:
        """The layout of updates and parameters between steps: whole at stages 1 and 2."""
        return None if self.options.stage < 3 else leaf.layout


_WHOLE = PartitionSpec()


def _given(leaves: tuple[Leaf, ...], shares: tuple[bool, ...], axes: Axes) -> list[PartitionSpec]:
    return [leaf.spec(axes.shard if is_share else None) for leaf, is_share in zip(leaves, shares, strict=True)]
