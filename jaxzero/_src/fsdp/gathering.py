"""The parameters of one program on one device: shares, what is on its way, and what is whole.

A gather in two hops, over 2 nodes of 4 devices, of a parameter of shape (4096, 1024) whose share is (512, 1024):

    cross    (512, 1024) -> (2, 512, 1024)     between nodes, beside one product
    read     (2, 512, 1024) -> (4096, 1024)    inside the node, beside the next
"""

from collections.abc import Mapping, Sequence

import jax
from jax import lax

from ..comm import collectives
from ..jaxpr.flat import Var
from ..jaxpr.varying import Vary
from ..sharding.axes import Axes
from ..sharding.host import on_host, to_device
from ..sharding.layout import Layout
from .gathers import Gather, GatheredParam
from .schedule import Residual, Schedule

Array = jax.Array
Residuals = dict[Residual, Array]
#: What one iteration of a scan leaves of a gather for the next: whole parameters, and what its outer hops brought.
Arrived = tuple[list[Array], list[Array]]


class Gathering:
    """The parameters of one program on one device.

    Attributes:
      shares: Input -> this device's share.
      prefetched: Gather -> what it starts from, from a barrier with the data for which it waits.
      crossed: Gather -> what its outer hops brought, where they ran before the last hop.
      arrived: Gather -> the parameters, gathered in the iteration before.
      whole: Gather -> the gathered parameters, until no step reads them any more.
      residuals: What is kept of gathered parameters: the whole (`persist_bytes`), and the `1/k` that this device
        fetched from other nodes (`regather="local"`).
    """

    def __init__(
        self, schedule: Schedule, shares: Mapping[Var, Array], axes: Axes, vary: Vary, residuals: Residuals
    ) -> None:
        self.schedule, self.axes, self.vary = schedule, axes, vary
        self.shares = shares
        self.prefetched: dict[Gather, list[Array]] = {}
        self.crossed: dict[Gather, list[Array]] = {}
        self.arrived: dict[Gather, list[Array]] = {}
        self.whole: dict[Gather, dict[GatheredParam, Array]] = {}
        self.residuals = residuals

    def operands(self, gather: Gather) -> list[Array]:
        """The arrays from which a gather, or its last hop, starts."""
        if gather in self.crossed:
            return self.crossed[gather]
        if gather.intra_node:
            return [self.residuals[Residual(p, 0, False)] for p in gather.params]
        shares = [(self.shares[p.source], p.dtype) for p in gather.params]
        # One on the host waits there, as it is.
        return [x if on_host(x) else lax.convert_element_type(x, dtype) for x, dtype in shares]

    def cross(self, gather: Gather, operands: Sequence[Array]) -> None:
        """Runs all hops but the last."""
        operands, layouts = self._on_device(gather, operands), self._layouts(gather)
        if self.schedule.node_shards:
            done = collectives.gather_inter_node(operands, layouts, self.axes.hops)
        else:
            done = [collectives.gather_outer_hops(x, s, self.axes.hops) for x, s in zip(operands, layouts, strict=True)]
        self.crossed[gather] = [self.vary(x) for x in done]
        self._keep_node_shards(gather, self.crossed[gather])

    def fetch(self, gather: Gather) -> None:
        """Gathers parameters for the next iteration."""
        self.arrived[gather] = self._gather(gather)

    def read(self, number: int, param: GatheredParam) -> Array:
        """A whole parameter for the step with this number; gathered, if it is the first that reads it."""
        gather = self.schedule.served_by[number][param]
        if gather.stacked:
            return self.residuals[Residual(param, 0, True)]
        if gather not in self.whole:
            done = self.arrived.pop(gather) if gather in self.arrived else self._gather(gather)
            if gather.large:
                self.whole = {g: x for g, x in self.whole.items() if not g.large or g.keep}
            self.whole[gather] = dict(zip(gather.params, done, strict=True))
            self.residuals.update((Residual(p, 0, True), x) for p, x in self.whole[gather].items())
        return self.whole[gather][param]

    def hand_over(self) -> list[Arrived]:
        """What was gathered for the next iteration, or is on its way."""
        left = []
        for gather in self.schedule.ahead:
            keeps = self.schedule.node_shards and not gather.intra_node
            node_shards = (
                [self.residuals[Residual(p, 0, False)] for p in gather.params]
                if keeps
                else self.crossed.get(gather, [])
            )
            left.append((self.arrived.get(gather, []), node_shards))
        return left

    def take_over(self, left: Sequence[Arrived]) -> None:
        """Goes on with the results of `hand_over`; there are none where no iteration gathers for another."""
        for gather, (whole, crossed) in zip(self.schedule.ahead if left else [], left, strict=True):
            if whole:
                self.arrived[gather] = whole
            elif crossed:
                self.crossed[gather] = crossed
            if crossed:
                self._keep_node_shards(gather, crossed)

    def _gather(self, gather: Gather) -> list[Array]:
        operands = self.prefetched.pop(gather, []) or self.operands(gather)
        done = [self.vary(x) for x in self._last_hops(gather, self._on_device(gather, operands))]
        # XLA:CPU of jaxlib 0.10.2 can read beyond the joined array when it fuses the cutting into the loss.
        return lax.optimization_barrier(done) if len(done) > 1 else done

    def _last_hops(self, gather: Gather, operands: Sequence[Array]) -> list[Array]:
        """All hops of a gather, or the last one where the others have run."""
        layouts = self._layouts(gather)
        crossed = self.crossed.pop(gather, None) is not None
        if not self.schedule.node_shards:
            if crossed:
                return [
                    collectives.gather_last_hop(x, s, self.axes.hops) for x, s in zip(operands, layouts, strict=True)
                ]
            return collectives.all_gather(operands, layouts, self.axes.hops, bucket_bytes=collectives.NO_LIMIT)
        if not gather.intra_node and not crossed:
            operands = [self.vary(x) for x in collectives.gather_inter_node(operands, layouts, self.axes.hops)]
            self._keep_node_shards(gather, operands)
        return collectives.gather_intra_node(operands, layouts, self.axes.hops)

    def _keep_node_shards(self, gather: Gather, arrays: Sequence[Array]) -> None:
        if self.schedule.node_shards:
            self.residuals.update(zip([Residual(p, 0, False) for p in gather.params], arrays, strict=True))

    def _layouts(self, gather: Gather) -> list[Layout]:
        return [self.schedule.layouts[p.source] for p in gather.params]

    def _on_device(self, gather: Gather, operands: Sequence[Array]) -> list[Array]:
        pairs = zip(operands, gather.params, strict=True)
        return [lax.convert_element_type(to_device(x), p.dtype) for x, p in pairs]
