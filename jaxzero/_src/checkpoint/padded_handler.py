"""Padded leaves in a checkpoint: on disk each has its logical shape, written and read share by share.

An Orbax type handler. What Orbax does for other arrays it does around this one too: directories, atomic commit, the
merge of what processes wrote. The share of a flat leaf ends in mid-chunk, so each device also takes the first elements
of the next share, up to the end of its last chunk; flat leaves with small shares are gathered instead, a slab at a
time. Padded rows, of leaves that other mesh axes shard too, are boxes, which chunks are made to fill.
"""

import asyncio
import dataclasses
import functools
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from ..comm import collectives
from ..sharding import place
from ..sharding.axes import Axes
from ..sharding.layout import Layout, Shape
from ..sharding.regions import open_region
from .chunks import Box, Chunks, boxes, extents, filling, within

#: The size of chunks: what a reader of another layout reads too much, at each end of its share.
CHUNK_BYTES = 4 * 2**20
#: Leaves whose shares (of one layer) are smaller are gathered by the process that writes them.
SMALL_SHARE = 128 * 2**10
#: What a device takes of the next share is at most one part in this many of its own.
_HALO = 8

Part = tuple[Box, np.ndarray]


@dataclasses.dataclass(frozen=True)
class PaddedLeaf:
    """A padded leaf to be saved.

    Attributes:
      name: Its name in the checkpoint.
      value: The stored array.
      layout: Its layout.
      mesh: The mesh.
      axes: The axes that split it.
    """

    name: str
    value: jax.Array
    layout: Layout
    mesh: Any
    axes: Axes


@dataclasses.dataclass(kw_only=True)
class PaddedTarget(ocp.RestoreArgs):
    """What a padded leaf is to be read into.

    Attributes:
      layout: The layout that it shall have.
      sharding: The placement of the stored array.
    """

    layout: Layout
    sharding: NamedSharding


class PaddedHandler(ocp.type_handlers.TypeHandler):
    """Writes and reads padded leaves; other programs see ordinary arrays of the logical shape."""

    def typestr(self) -> str:
        """As for any array."""
        return "jax.Array"

    async def metadata(self, infos: Sequence[Any]) -> Any:
        """Orbax describes what is on disk by the handler of ordinary arrays."""
        return await ocp.type_handlers.ArrayHandler().metadata(infos)

    async def serialize(self, values: Sequence[Any], infos: Sequence[Any], args: Any = None) -> Sequence[Any]:
        """Copies this process's parts to the host, then writes them in the background."""
        copied = [_copied(leaf) for leaf in values]
        return [ocp.future.CommitFutureAwaitingContractedSignals(_write(values, copied, infos), name="padded leaves")]

    async def deserialize(self, infos: Sequence[Any], args: Any = None) -> Sequence[Any]:
        """Reads each device's share; the padding is zero."""
        return [await _read(info, target) for info, target in zip(infos, args or (), strict=True)]


# --- what this process writes -------------------------------------------------------------------


def _copied(leaf: PaddedLeaf) -> tuple[Shape, list[Part]]:
    """The chunk shape on disk, which all processes agree on, and this process's parts, on the host."""
    layout, item = leaf.layout, leaf.value.dtype.itemsize
    spec = layout.spec(leaf.axes.shard)
    value = place.place("save", leaf.mesh, (), leaf.value, spec, leaf.axes.every)
    leaf = dataclasses.replace(leaf, value=value)
    if layout.kind == "rows":
        share = value.sharding.shard_shape(value.shape)
        return filling(share, max(CHUNK_BYTES // item, 1)), list(_rows(value, layout.shape))
    if layout.length * item < SMALL_SHARE:
        chunks = Chunks.of(layout.shape, max(CHUNK_BYTES // item, 1))
        return chunks.chunk, list(_gathered(leaf, chunks))
    inner = layout.shape[layout.lead :]
    chunks = Chunks.of(inner, max(min(CHUNK_BYTES // item, layout.length // _HALO), 1))
    return (1,) * layout.lead + chunks.chunk, list(_shares(leaf, chunks))


def _rows(value: jax.Array, shape: Shape) -> Iterator[Part]:
    """Each share without its padding."""
    for shard in value.addressable_shards:
        box = within(shard.index, shape)
        if shard.replica_id == 0 and all(extents(box)):
            yield box, np.array(np.asarray(shard.data)[tuple(slice(d) for d in extents(box))])


def _shares(leaf: PaddedLeaf, chunks: Chunks) -> Iterator[Part]:
    """Each share from the first chunk that begins in it to the first that begins in the next."""
    layout = leaf.layout
    inner, length = chunks.shape, layout.length
    size = math.prod(inner)
    heads = _heads(leaf, chunks.elements)
    for offset, data in _by_offset(leaf.value, layout).items():
        start, stop = (chunks.start_at(min(x, size)) for x in (offset, offset + length))
        if start == stop:
            continue
        share, head = np.asarray(data), heads(offset)
        for layer in np.ndindex(*layout.shape[: layout.lead]):
            row = np.concatenate([share[layer], head[layer]])[start - offset : stop - offset]
            yield from _parts(layer, inner, start, stop, row)


def _parts(layer: tuple[int, ...], inner: Shape, start: int, stop: int, row: np.ndarray) -> Iterator[Part]:
    at = 0
    before = tuple(slice(i, i + 1) for i in layer)
    for box in boxes(inner, start, stop):
        shape = extents(box)
        yield before + box, row[at : at + math.prod(shape)].reshape((1,) * len(layer) + shape)
        at += math.prod(shape)


def _all_here(leaf: PaddedLeaf) -> bool:
    """Whether this process has every share: then nothing needs to be sent."""
    return leaf.value.is_fully_addressable


def _by_offset(x: jax.Array, layout: Layout) -> dict[int, jax.Array]:
    """This process's shares by the positions at which they begin (in each layer); of replicas the first."""
    return {s.index[layout.lead].start or 0: s.data for s in x.addressable_shards if s.replica_id == 0}


def _heads(leaf: PaddedLeaf, count: int) -> Callable[[int], np.ndarray]:
    """Offset of a share -> the first `count` elements (of each layer) of the share behind it."""
    layout = leaf.layout
    if _all_here(leaf):
        shares = _by_offset(leaf.value, layout)
        nothing = np.zeros((*layout.shape[: layout.lead], 0), leaf.value.dtype)
        return lambda offset: np.asarray(shares.get(offset + layout.length, nothing))[..., :count]
    moved = _by_offset(_next_of(leaf.mesh, leaf.axes, layout, count)(leaf.value), layout)
    return lambda offset: np.asarray(moved[offset // layout.length * count])


@functools.lru_cache(maxsize=512)
def _next_of(on: Any, axes: Axes, layout: Layout, count: int) -> Callable[[Any], Any]:
    """Stored array -> on each device the first `count` elements (of each layer) of the next device's share."""
    from_next = [(i, i - 1) for i in range(1, axes.n)]

    def head(x: Any) -> Any:
        return lax.ppermute(lax.slice_in_dim(x, 0, count, axis=layout.lead), axes.shard, from_next)

    spec = layout.spec(axes.shard)
    return jax.jit(open_region(on, axes, head, spec, spec))


def _gathered(leaf: PaddedLeaf, chunks: Chunks) -> Iterator[Part]:
    """Whole slabs, by turns written by the processes of the mesh."""
    shape, lead = leaf.layout.shape, leaf.layout.lead
    if _all_here(leaf):
        whole = _whole(leaf)
        yield tuple(slice(0, d) for d in shape), whole
        return
    processes = sorted({d.process_index for d in leaf.mesh.devices.flat})
    turn = zlib.crc32(leaf.name.encode())  # the same on all processes
    rows = shape[0] if not lead else chunks.rows if chunks.axis == 0 else 1
    gather = _slab(leaf.mesh, leaf.axes, leaf.layout, rows)
    for i, begin in enumerate(range(0, shape[0], rows)):
        at = min(begin, shape[0] - rows)  # the last slab may overlap the one before
        slab = gather(leaf.value, np.int32(at))
        if processes[(turn + i) % len(processes)] == jax.process_index():
            host = np.array(slab.addressable_shards[0].data)[begin - at :]
            yield (slice(begin, at + rows), *(slice(0, d) for d in shape[1:])), host


def _whole(leaf: PaddedLeaf) -> np.ndarray:
    """The logical array, on the host, of a leaf whose shares are all here."""
    shares = _by_offset(leaf.value, leaf.layout)
    joined = np.concatenate([np.asarray(shares[at]) for at in sorted(shares)], axis=-1)
    return joined[..., : math.prod(leaf.layout.shape[leaf.layout.lead :])].reshape(leaf.layout.shape)


@functools.lru_cache(maxsize=512)
def _slab(on: Any, axes: Axes, layout: Layout, rows: int) -> Callable[..., Any]:
    """Stored array, position -> `rows` of the logical array from that position on, whole on every device."""
    part = dataclasses.replace(layout, shape=(rows, *layout.shape[1:]))

    def take(x: Any, at: Any) -> Any:
        if layout.lead:
            x = lax.dynamic_slice_in_dim(x, at, rows, axis=0)
        return collectives.all_gather([x], [part], axes.hops, bucket_bytes=None)[0]

    whole = PartitionSpec()
    return jax.jit(open_region(on, axes, take, (layout.spec(axes.shard), whole), whole))


async def _write(leaves: Sequence[PaddedLeaf], copied: list[tuple[Shape, list[Part]]], infos: Sequence[Any]) -> None:
    """One transaction for all: what is on disk grows with every commit."""
    transaction = ts.Transaction(atomic=True)
    writes = []
    for leaf, (chunk, parts), info in zip(leaves, copied, infos, strict=True):
        await info.await_path_creation()
        spec = ocp.type_handlers.get_json_tspec_write(
            info,
            use_ocdbt=info.is_ocdbt_checkpoint,
            global_shape=leaf.layout.shape,
            local_shape=chunk,
            dtype=leaf.value.dtype,
            process_index=f"{jax.process_index()}flat",  # its own folder: two transactions in one would be in conflict
        )
        how = dict(context=info.ts_context, transaction=transaction, open=True)
        if jax.process_index() == 0:
            await ts.open(ts.Spec(spec), create=True, **how)
        array = await ts.open(ts.Spec(spec), assume_metadata=True, **how)
        # the parts are this handler's own copies, so no further copy is needed
        writes += [array[box].write(x, can_reference_source_data_indefinitely=True) for box, x in parts]
    await _all(writes)
    await transaction.commit_async()


async def _all(operations: Sequence[Any]) -> None:
    """Waits for all of them, also where one fails: none may outlive its event loop."""
    for result in await asyncio.gather(*operations, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result


# --- reading ------------------------------------------------------------------------------------


async def _read(info: Any, target: PaddedTarget) -> jax.Array:
    layout = target.layout
    spec = ocp.type_handlers.get_json_tspec_read(info, use_ocdbt=info.is_ocdbt_checkpoint)
    array = await ts.open(ts.Spec(spec), open=True, read=True, context=info.ts_context)
    by_index: dict[Any, tuple[Box, list[Any]]] = {}
    for device, index in target.sharding.addressable_devices_indices_map(layout.stored_shape).items():
        assert index is not None
        by_index.setdefault(str(index), (index, []))[1].append(device)
    shards = []
    for index, devices in by_index.values():
        share = await (_read_rows if layout.kind == "rows" else _read_share)(array, layout, index)
        for device in devices:
            here = jax.sharding.SingleDeviceSharding(device, memory_kind=target.sharding.memory_kind)
            shards.append(jax.device_put(share, here))
    return jax.make_array_from_single_device_arrays(layout.stored_shape, target.sharding, shards)


async def _read_rows(array: Any, layout: Layout, index: Box) -> np.ndarray:
    box = within(index, layout.shape)
    share = np.zeros(extents(within(index, layout.stored_shape)), array.dtype.numpy_dtype)
    if all(extents(box)):
        part = share[tuple(slice(d) for d in extents(box))]
        await ts.array(part)[ts.d[:].translate_to[0]].write(array[box][ts.d[:].translate_to[0]])
    return share


async def _read_share(array: Any, layout: Layout, index: Box) -> np.ndarray:
    offset = index[layout.lead].start or 0
    share = np.zeros(layout.local_shape, array.dtype.numpy_dtype)
    inner = layout.shape[layout.lead :]
    stop = min(offset + layout.length, math.prod(inner))
    reads = []
    for layer in np.ndindex(*layout.shape[: layout.lead]):
        at, row = 0, share[layer]
        for box in boxes(inner, offset, stop):
            shape = extents(box)
            part = row[at : at + math.prod(shape)].reshape(shape)
            reads.append(ts.array(part)[ts.d[:].translate_to[0]].write(array[(*layer, *box)][ts.d[:].translate_to[0]]))
            at += math.prod(shape)
    await _all(reads)
    return share
