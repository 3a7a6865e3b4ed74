"""Any program on shares, for the tests of the partitioner."""

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxzero._src.comm import collectives
from jaxzero._src.jaxpr.trace import trace
from jaxzero._src.partition import evaluate as partition_evaluate
from jaxzero._src.partition.record import Record
from jaxzero._src.partition.values import Context, Split
from jaxzero._src.sharding import vma
from jaxzero._src.sharding.axes import Axes


def evaluate(f, arrays, layouts, world, deal=False):
    """`f` on shares over `world` devices, NaN in the padding of what goes in: (results, record)."""
    axes = Axes(("data",), (), (world,))
    devices = Mesh(np.array(jax.devices()[:world]), ("data",))
    program = trace(lambda xs: jax.tree.leaves(f(*xs)), list(arrays))
    record = Record()

    def body(arrays):
        ctx = Context(axes, 4096, record, deal=deal)
        values = []
        for x, layout in zip(arrays, layouts, strict=True):
            if layout is not None:
                split = Split(vma.cast(collectives.share(x, layout, ctx.index), ("data",)), layout)
                x = Split(ctx.masked(split, np.nan) if x.dtype == np.float32 else split.local, layout)
            values.append(x)
        out = partition_evaluate.evaluate(ctx, program.jaxpr, program.consts, values)
        return ctx.convert_all(out, [None] * len(out), record=False)

    region = jax.shard_map(body, mesh=devices, in_specs=(P(),), out_specs=P())
    return jax.jit(region)(list(arrays)), record
