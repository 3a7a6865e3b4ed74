"""Local gradients become the mean over all devices: the one place that divides.

Every function runs inside a manual region. A gradient here is that of the *local* loss, the mean over
this device's examples of one micro-step. It is summed over the shard axis (the first hop), over
micro-steps, over the replica axis (the second hop), and divided once, by `n * r * steps` or by the total
weight.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..sharding.axes import Axes
from ..sharding.layout import Layout, OtherAxes
from ..sharding.options import Options
from ..sharding.vma import cast
from . import collectives

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class GradReducer:
    """How sums over devices and micro-steps become means.

    Attributes:
      axes: The mesh axes.
      options: `reduce_dtype`, `predivide` and `bucket_bytes` are read.
      steps: The number of micro-steps that are summed.
    """

    axes: Axes
    options: Options
    steps: int = 1

    @property
    def count(self) -> int:
        """How many local means are summed."""
        return self.axes.n * self.axes.r * self.steps

    def wire(self, dtype: Any) -> Any:
        """The dtype in which values of `dtype` are summed."""
        return wire_dtype(dtype, self.options.reduce_dtype)

    def before(self, wire: Any) -> float:
        """What values are divided by before they are summed in the dtype `wire`; what is left comes after.

        Unless the user says so: all of it for a narrow dtype, whose sum could overflow, and nothing for others.
        """
        if self.options.predivide is not None:
            return self.options.predivide
        return self.count if _narrow(wire) else 1

    def send(self, x: Array, dtype: Any = None) -> Array:
        """To the wire of `dtype` (its own)."""
        wire = self.wire(x.dtype if dtype is None else dtype)
        divisor = self.before(wire)
        if divisor != 1:
            x = x.astype(jnp.promote_types(x.dtype, wire)) / divisor
        return x.astype(wire)

    def receive(self, x: Array, dtype: Any, weight: Array | None = None) -> Array:
        """A sum of what `send` sent, divided by the rest of the count or of the total weight, in `dtype` again."""
        before = self.before(self.wire(dtype))
        x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        if weight is None:
            return (x if before == self.count else x / (self.count / before)).astype(dtype)
        total = weight.astype(x.real.dtype)
        mean = (x if before == 1 else x * before) / jnp.where(total == 0, 1, total)
        return jnp.where(total == 0, jnp.zeros_like(mean), mean).astype(dtype)

    def reduce_scatter_shares(self, local: Sequence[Array], layouts: Sequence[Layout]) -> list[Array]:
        """Full local gradients -> this device's share of their sum over the shard axis (reduce-scatter)."""
        sent = [self.send(x) for x in local]
        return collectives.reduce_scatter(sent, layouts, self.axes.hops, bucket_bytes=self.options.bucket_bytes)

    def all_reduce_replicas(
        self, shares: Sequence[Array], layouts: Sequence[Layout], dtypes: Sequence[Any], weight: Array | None = None
    ) -> list[Array]:
        """Shares that are sums over the shard axis -> the mean: one all-reduce over the replica axis."""
        if self.axes.replica:
            # Sums over micro-steps may be wider than the wire.
            shares = [x.astype(self.wire(dtype)) for x, dtype in zip(shares, dtypes, strict=True)]
            shares = self._sum(shares, self.axes.replica, [layout.other_axes for layout in layouts])
        return [self.receive(x, dtype, weight) for x, dtype in zip(shares, dtypes, strict=True)]

    def all_reduce_then_slice(self, local: Sequence[Array], layouts: Sequence[Layout]) -> list[Array]:
        """The first hop of stage 1: an all-reduce over the shard axis, then a slice."""
        sent = [self.send(x) for x in local]
        whole = self._sum(sent, self.axes.shard, [layout.other_axes for layout in layouts])
        index = lax.axis_index(self.axes.shard)
        return [collectives.share(x, layout, index) for x, layout in zip(whole, layouts, strict=True)]

    def whole(
        self,
        local: Sequence[Array],
        dtypes: Sequence[Any],
        weights: Sequence[Array | None] | None = None,
        other_axes: Sequence[OtherAxes] | None = None,
    ) -> list[Array]:
        """The mean over devices of local values; every device gets all of it (one all-reduce per bucket)."""
        weights = [None] * len(local) if weights is None else weights
        sent = [self.send(x, dtype) for x, dtype in zip(local, dtypes, strict=True)]
        done = self._sum(sent, self.axes.every, other_axes)
        return [self.receive(x, dtype, w) for x, dtype, w in zip(done, dtypes, weights, strict=True)]

    def _sum(self, sent: Sequence[Array], axes: tuple[str, ...], other_axes: Sequence[OtherAxes] | None) -> list[Array]:
        return collectives.all_reduce(sent, axes, bucket_bytes=self.options.bucket_bytes, other_axes=other_axes)

    def total(self, weight: Array) -> Array:
        """The sum of the weights of all devices; never narrow."""
        wide = jnp.asarray(weight, jnp.promote_types(jnp.result_type(weight), jnp.float32))
        return lax.psum(cast(wide, self.axes.every), self.axes.every)


def wire_dtype(dtype: Any, reduce_dtype: Any) -> Any:
    """The dtype in which gradients of `dtype` are summed: float32 unless wider, or as asked for."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return jnp.dtype(dtype)
    if reduce_dtype is not None:
        return jnp.dtype(reduce_dtype)
    return jnp.promote_types(dtype, jnp.float32)


def mean_shares(local: Sequence[Array], layouts: Sequence[Layout], axes: Axes, options: Options) -> list[Array]:
    """The mean over devices of full local gradients; each device keeps its share.

    Stage 1 all-reduces and slices, stages 2 and 3 reduce-scatter over the shard axis; then comes one
    all-reduce of the share over the replica axis.
    """
    mean = GradReducer(axes, options)
    first = mean.all_reduce_then_slice if options.stage == 1 else mean.reduce_scatter_shares
    return mean.all_reduce_replicas(first(local, layouts), layouts, [x.dtype for x in local])


def mean_whole(local: Sequence[Array], other_axes: Sequence[OtherAxes], axes: Axes, options: Options) -> list[Array]:
    """The mean over devices of local values; every device gets all of it."""
    return GradReducer(axes, options).whole(local, [x.dtype for x in local], other_axes=other_axes)


def _narrow(dtype: Any) -> bool:
    return jnp.dtype(dtype).itemsize < 4
