"""A training problem on a machine: what is known of a way without a compiler, and what a compile shows."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import optax

from .._text import path_text, size_text
from .._types import PyTree
from ..analysis.machine import Machine
from ..analysis.memory import memory
from ..analysis.network import transfer
from ..analysis.predict import predict
from ..sharding.options import param_leaves
from ..zero import Zero
from . import cache
from .search import Known, Measured
from .step import lower_step
from .ways import Way


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """What is trained, and where.

    Attributes:
      losses: The loss by whether it computes activations again.
      params: Abstract parameters.
      batch: The rest of the loss's arguments, abstract.
      inner: The optimizer.
      machine: The figures of the machine.
      devices: Its devices.
      accumulate: Micro-steps.
      whole: Positions of arguments that are no examples.
      folder: Where results are kept; `None`: in this process only.
    """

    losses: dict[bool, Callable[..., PyTree]]
    params: PyTree
    batch: Sequence[PyTree]
    inner: optax.GradientTransformation
    machine: Machine
    devices: np.ndarray
    accumulate: int
    whole: tuple[int, ...]
    folder: str | None

    def known(self, way: Way) -> Known:
        """Bytes at rest, and the time of its planned traffic on the busiest network."""
        rest, wire = self._planned(dataclasses.replace(way, remat=False))
        return Known(rest, wire)

    @functools.cache  # noqa: B019 - lives as long as one search
    def _planned(self, way: Way) -> tuple[int, float]:
        zero = self._observed(way)
        plan = zero.plan(self.params, self.inner, accumulate=self.accumulate)
        wires: dict[str, float] = {}
        for row in plan.traffic:
            network, seconds = transfer(self.machine, _groups(way.axes, row.axes), row.nbytes)
            wires[network] = wires.get(network, 0.0) + seconds
        held = plan.at_rest[way.stage]
        return held.parameters + held.state - held.host, max(wires.values(), default=0.0)

    def _observed(self, way: Way, devices: np.ndarray | None = None) -> Zero:
        loss = self.losses.get(way.remat) or next(iter(self.losses.values()))
        return way.zero(devices).observe(loss, self.params, *self.batch, whole_argnums=self.whole)

    def compile_way(self, way: Way) -> Measured:
        """Compiles a way, or takes its result from an earlier compile of the same program."""
        zero = self._observed(way, self.devices)
        loss = self.losses[way.remat]
        lowered = lower_step(zero, loss, self.params, self.batch, self.inner, self.accumulate, self.whole)
        options = zero.compiler_options()
        key = cache.key(lowered.as_text(), str(self.machine), str(way.axes), str(options), jax.__version__)
        found = cache.read(key, self.folder)
        if found is None:
            found = self._compile(lowered, options, zero, key)
            cache.write(key, found, self.folder)
        return found

    def _compile(self, lowered: jax.stages.Lowered, options: dict[str, Any], zero: Zero, key: str) -> Measured:
        try:
            compiled = lowered.compile(compiler_options=options or None)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            return Measured(None, math.inf, 0.0, key)
        time = predict(compiled, self.machine, zero.mesh)
        return Measured(memory(compiled).total, time.seconds, time.busy, key)

    def largest_layer(self) -> tuple[str, int]:
        """The path and the bytes of the largest parameter of one layer."""
        zero = self._observed(Way(self.devices.size, self.machine.per_node, self.devices.size, 3))
        sizes = {}
        for leaf in param_leaves(zero, self.params, self.devices.size).leaves:
            one = math.prod(leaf.shape[leaf.layers :]) * np.dtype(leaf.dtype).itemsize if leaf.trainable else 0
            sizes[path_text(leaf.path)] = one
        return max(sizes.items(), key=lambda item: item[1])

    def check_memory(self, budget: float) -> None:
        """Refuses a budget that no way can keep."""
        path, size = self.largest_layer()
        if budget < size:
            raise ValueError(
                f"fit: memory={budget!r}, {size_text(budget)}. Expected at least the {size_text(size)} of the "
                f"parameter {path} of one layer, which a device must hold while it is used. Fix: memory in bytes, for "
                "example memory=80e9."
            )


def _groups(axes: dict[str, int], over: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """The devices that take part together in a collective over some axes of a mesh."""
    numbers = np.arange(math.prod(axes.values())).reshape(tuple(axes.values()))
    inside = [i for i, name in enumerate(axes) if name in over]
    outside = [i for i in range(len(axes)) if i not in inside]
    size = math.prod(numbers.shape[i] for i in inside)
    return tuple(map(tuple, numbers.transpose(outside + inside).reshape(-1, size).tolist()))
