"""Local gradients become the mean over all devices: the one place that divides.

Every function runs inside a manual region. A gradient here is that of the *local* loss, the mean over
this device's examples of one microbatch. It is summed over the shard axis (`reduce_scatter`), over
microbatches, over the replica axis (`all_reduce_replicas`), and divided once, by `n * r * steps` or by the
total weight. The one exception are leaves that their gradients overwrite (`overwrite_all`).
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from .._dtypes import promote
from .._positions import replace_at
from ..sharding.axes import Axes
from ..sharding.layout import Layout, OtherAxes
from ..sharding.options import Options, ReduceOptions, reduce_options
from ..sharding.vma import cast
from . import collectives

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Summand:
    """One array of this device that becomes a mean over all devices.

    Attributes:
      value: The array: whole, or with a layout this device's share of a sum over the shard axis.
      dtype: The dtype of the mean.
      layout: The layout of the share; `None` for a whole array.
      weight: The total weight, which divides in the place of the count.
      other_axes: The other mesh axes that shard each dimension of a whole array.
      over_replicas: Whether the share is summed over replicas already.
    """

    value: Array
    dtype: DTypeLike
    layout: Layout | None = None
    weight: Array | None = None
    other_axes: OtherAxes = ()
    over_replicas: bool = False


@dataclasses.dataclass(frozen=True)
class GradReducer:
    """How sums over devices and microbatches become means.

    Attributes:
      axes: The mesh axes.
      options: Dtype, divisor and buckets of the sums.
      steps: The number of microbatches that are summed.
    """

    axes: Axes
    options: ReduceOptions
    steps: int = 1

    @property
    def count(self) -> int:
        """How many local means are summed."""
        return self.axes.n * self.axes.r * self.steps

    def wire(self, dtype: DTypeLike) -> jnp.dtype:
        """The dtype in which values of `dtype` are summed."""
        return wire_dtype(dtype, self.options.reduce_dtype)

    def before(self, wire: DTypeLike) -> float:
        """The divisor of values that are summed in the dtype `wire`, before the sum; the rest divides after it.

        By default it is the whole count for a narrow dtype, whose sum could overflow, and 1 for others.
        """
        if self.options.predivide is not None:
            return self.options.predivide
        return self.count if _narrow(wire) else 1

    def send(self, x: Array, dtype: DTypeLike | None = None) -> Array:
        """`x` in the dtype in which values of `dtype` (its own by default) are summed, divided by `before`."""
        wire = self.wire(x.dtype if dtype is None else dtype)
        divisor = self.before(wire)
        if divisor != 1:
            x = x.astype(promote(x.dtype, wire)) / divisor
        return x.astype(wire)

    def receive(self, x: Array, dtype: DTypeLike, weight: Array | None = None) -> Array:
        """A sum of results of `send`, divided by the rest of the count or by the total weight, in `dtype`."""
        before = self.before(self.wire(dtype))
        x = x.astype(promote(x.dtype, jnp.float32))
        if weight is None:
            return (x if before == self.count else x / (self.count / before)).astype(dtype)
        total = weight.astype(x.real.dtype)
        mean = (x if before == 1 else x * before) / jnp.where(total == 0, 1, total)
        return jnp.where(total == 0, jnp.zeros_like(mean), mean).astype(dtype)

    def reduce_scatter(self, local: Sequence[Array], layouts: Sequence[Layout]) -> list[Array]:
        """This device's share of the sum over the shard axis of whole local gradients (reduce-scatter)."""
        sent = [self.send(x) for x in local]
        return collectives.reduce_scatter(sent, layouts, self.axes.hops, bucket_bytes=self.options.bucket_bytes)

    def all_reduce_then_slice(self, local: Sequence[Array], layouts: Sequence[Layout]) -> list[Array]:
        """The same as `reduce_scatter`, at stage 1: an all-reduce over the shard axis, then a slice."""
        sent = [self.send(x) for x in local]
        whole = self._sum(sent, self.axes.shard, [layout.other_axes for layout in layouts])
        index = lax.axis_index(self.axes.shard)
        return [collectives.share(x, layout, index) for x, layout in zip(whole, layouts, strict=True)]

    def all_reduce_replicas(
        self, shares: Sequence[Array], layouts: Sequence[Layout], dtypes: Sequence[DTypeLike], weight: Array | None
    ) -> list[Array]:
        """Means from shares of sums over the shard axis: one all-reduce over the replica axis, and the division."""
        if self.axes.replica:
            # Sums over microbatches may be wider than the wire.
            shares = [x.astype(self.wire(dtype)) for x, dtype in zip(shares, dtypes, strict=True)]
            shares = self._sum(shares, self.axes.replica, [layout.other_axes for layout in layouts])
        return [self.receive(x, dtype, weight) for x, dtype in zip(shares, dtypes, strict=True)]

    def all_reduce(self, local: Sequence[Summand]) -> list[Array]:
        """The means over devices of whole local values, equal on every device (one all-reduce per bucket)."""
        sent = [self.send(x.value, x.dtype) for x in local]
        done = self._sum(sent, self.axes.every, [x.other_axes for x in local])
        return [self.receive(x, s.dtype, s.weight) for x, s in zip(done, local, strict=True)]

    def finish(self, summands: Sequence[Summand], vary: Callable[[Array], Array]) -> list[Array]:
        """The means of everything that leaves a loss, in order.

        Args:
          summands: Shares, all with one weight, and whole arrays.
          vary: Types a whole array as different on every device.

        Returns:
          The mean of a share is a share, that of a whole array is whole.
        """
        cut = [i for i, s in enumerate(summands) if s.layout is not None and not s.over_replicas]
        done = [i for i, s in enumerate(summands) if s.over_replicas]
        whole = [i for i, s in enumerate(summands) if s.layout is None]
        layouts = [layout for i in cut if (layout := summands[i].layout) is not None]
        weight = summands[cut[0]].weight if cut else None
        shares = self.all_reduce_replicas(
            [summands[i].value for i in cut], layouts, [summands[i].dtype for i in cut], weight
        )
        shares += [self.receive(s.value, s.dtype, s.weight) for s in map(summands.__getitem__, done)]
        means = self.all_reduce([dataclasses.replace(summands[i], value=vary(summands[i].value)) for i in whole])
        return replace_at([s.value for s in summands], [*cut, *done, *whole], [*shares, *means])

    def _sum(self, sent: Sequence[Array], axes: tuple[str, ...], other_axes: Sequence[OtherAxes]) -> list[Array]:
        return collectives.all_reduce(sent, axes, bucket_bytes=self.options.bucket_bytes, other_axes=other_axes)

    def total(self, weight: Array) -> Array:
        """The sum of the weights of all devices; never narrow."""
        wide = jnp.asarray(weight, jnp.promote_types(jnp.result_type(weight), jnp.float32))
        return lax.psum(cast(wide, self.axes.every), self.axes.every)


def overwrite_all(local: Sequence[Array], axes: Axes) -> list[Array]:
    """The next value of leaves that their gradients overwrite: the largest over devices (one all-reduce)."""
    return list(lax.pmax([cast(x, axes.every) for x in local], axes.every)) if local else []


def wire_dtype(dtype: DTypeLike, reduce_dtype: DTypeLike | None) -> jnp.dtype:
    """The dtype in which gradients of `dtype` are summed: `reduce_dtype`, or else at least float32."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return jnp.dtype(dtype)
    if reduce_dtype is not None:
        return jnp.dtype(reduce_dtype)
    return promote(dtype, jnp.float32)


def mean_shares(local: Sequence[Array], layouts: Sequence[Layout], axes: Axes, options: Options) -> list[Array]:
    """The mean over devices of whole local gradients; each device keeps its share.

    Stage 1 all-reduces and slices, stages 2 and 3 reduce-scatter over the shard axis; then comes one
    all-reduce of the share over the replica axis.
    """
    reducer = GradReducer(axes, reduce_options(options))
    first = reducer.all_reduce_then_slice if options.stage == 1 else reducer.reduce_scatter
    return reducer.all_reduce_replicas(first(local, layouts), layouts, [x.dtype for x in local], None)


def mean_whole(local: Sequence[Array], other_axes: Sequence[OtherAxes], axes: Axes, options: Options) -> list[Array]:
    """The mean over devices of local values, equal on every device."""
    summands = [Summand(x, x.dtype, other_axes=others) for x, others in zip(local, other_axes, strict=True)]
    return GradReducer(axes, reduce_options(options)).all_reduce(summands)


def _narrow(dtype: DTypeLike) -> bool:
    return jnp.dtype(dtype).itemsize < 4
