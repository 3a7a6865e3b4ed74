"""Padded leaves in a checkpoint: on disk each has its logical shape, written and read share by share.

This is an Orbax type handler: Orbax makes the directories, commits atomically and merges what the processes wrote, as
for other arrays. A flat leaf of logical shape `(d0, ..., dk)` is stored as `(n * k,)`, and the share of a device ends
in the middle of a chunk of the file. So each device also gets the first elements of the next share, up to the end of
its last chunk, by one `ppermute`. Flat leaves with small shares are gathered instead, one slab at a time. Padded rows
(leaves that other mesh axes shard too) are boxes, and chunks divide them evenly.
"""

import asyncio
import dataclasses
import functools
import math
import zlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from jax import lax
from jax.sharding import Mesh, PartitionSpec, Sharding

from .._types import ArrayLike
from ..comm.collectives import all_gather
from ..sharding.axes import Axes
from ..sharding.layout import Layout, Shape
from ..sharding.place import place
from ..sharding.regions import open_region
from .chunks import Box, Chunks, boxes, extents, filling, within
from .orbax_compat import Info, commit, open_to_read, open_to_write

#: The size of chunks: a reader of another layout reads at most this much more, at each end of its share.
CHUNK_BYTES = 4 * 2**20
#: Leaves with smaller shares (of one layer) are gathered by the process that writes them.
SMALL_SHARE = 128 * 2**10
#: A device takes at most `1 / _HALO` of its own share's size from the next one.
_HALO = 8

#: A box of a leaf's positions, and the elements there.
BoxData = tuple[Box, np.ndarray]


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
    mesh: Mesh
    axes: Axes


@dataclasses.dataclass(kw_only=True)
class PaddedTarget(ocp.RestoreArgs):
    """The array that a padded leaf is read into.

    Attributes:
      layout: Its layout.
      sharding: The sharding of the stored array.
    """

    layout: Layout
    sharding: Sharding


class PaddedHandler(ocp.type_handlers.TypeHandler):
    """Writes and reads padded leaves; on disk they are ordinary arrays of the logical shape."""

    def typestr(self) -> str:
        """As for any array."""
        return "jax.Array"

    async def metadata(self, infos: Sequence[Info]) -> Any:
        """As for any array: on disk there is no difference."""
        return await ocp.type_handlers.ArrayHandler().metadata(infos)

    async def serialize(
        self, values: Sequence[PaddedLeaf], infos: Sequence[Info], args: object = None
    ) -> Sequence[ocp.future.Future]:
        """Copies this process's parts to the host, then writes them in the background."""
        copied = [_copied(leaf) for leaf in values]
        return [commit(_write(values, copied, infos), "padded leaves")]

    async def deserialize(
        self, infos: Sequence[Info], args: Sequence[PaddedTarget] | None = None
    ) -> Sequence[jax.Array]:
        """Reads each device's share; the padding is zero."""
        return [await _read(info, target) for info, target in zip(infos, args or (), strict=True)]


# --- the parts that this process writes ---------------------------------------------------------


def _copied(leaf: PaddedLeaf) -> tuple[Shape, list[BoxData]]:
    """The chunk shape on disk, equal on all processes, and this process's parts, on the host."""
    layout, item = leaf.layout, leaf.value.dtype.itemsize
    spec = layout.spec(leaf.axes.shard)
    value = place("save", leaf.mesh, (), leaf.value, spec, leaf.axes.every)
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


def _rows(value: jax.Array, shape: Shape) -> Iterator[BoxData]:
    """Each share without its padding."""
    for shard in value.addressable_shards:
        box = within(shard.index, shape)
        if shard.replica_id == 0 and all(extents(box)):
            yield box, np.array(np.asarray(shard.data)[tuple(slice(d) for d in extents(box))])


def _shares(leaf: PaddedLeaf, chunks: Chunks) -> Iterator[BoxData]:
    """The elements from the first chunk that begins in each share to the first that begins in the next share."""
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


def _parts(layer: tuple[int, ...], inner: Shape, start: int, stop: int, row: np.ndarray) -> Iterator[BoxData]:
    at = 0
    before = tuple(slice(i, i + 1) for i in layer)
    for box in boxes(inner, start, stop):
        shape = extents(box)
        yield before + box, row[at : at + math.prod(shape)].reshape((1,) * len(layer) + shape)
        at += math.prod(shape)


def _all_here(leaf: PaddedLeaf) -> bool:
    """Whether this process has all shares, so that nothing is sent."""
    return leaf.value.is_fully_addressable


def _by_offset(x: jax.Array, layout: Layout) -> dict[int, jax.Array]:
    """This process's shares by the position at which they begin (in each layer), from the first replica."""
    return {s.index[layout.lead].start or 0: s.data for s in x.addressable_shards if s.replica_id == 0}


def _heads(leaf: PaddedLeaf, count: int) -> Callable[[int], np.ndarray]:
    """A function from the offset of a share to the first `count` elements (of each layer) of the next share."""
    layout = leaf.layout
    if _all_here(leaf):
        shares = _by_offset(leaf.value, layout)
        nothing = np.zeros((*layout.shape[: layout.lead], 0), leaf.value.dtype)
        return lambda offset: np.asarray(shares.get(offset + layout.length, nothing))[..., :count]
    moved = _by_offset(_next_of(leaf.mesh, leaf.axes, layout, count)(leaf.value), layout)
    return lambda offset: np.asarray(moved[offset // layout.length * count])


@functools.lru_cache(maxsize=512)
def _next_of(on: Mesh, axes: Axes, layout: Layout, count: int) -> Callable[[jax.Array], jax.Array]:
    """A function from a stored array to the first `count` elements (of each layer) of the next device's share."""
    from_next = [(i, i - 1) for i in range(1, axes.n)]

    def head(x: jax.Array) -> jax.Array:
        return lax.ppermute(lax.slice_in_dim(x, 0, count, axis=layout.lead), axes.shard, from_next)

    spec = layout.spec(axes.shard)
    return jax.jit(open_region(on, axes, head, spec, spec))


def _gathered(leaf: PaddedLeaf, chunks: Chunks) -> Iterator[BoxData]:
    """Whole slabs; the processes of the mesh write them in turn."""
    shape, lead = leaf.layout.shape, leaf.layout.lead
    if _all_here(leaf):
        whole = _whole(leaf)
        yield tuple(slice(0, d) for d in shape), whole
        return
    processes = sorted({d.process_index for d in leaf.mesh.devices.flat})
    first = zlib.crc32(leaf.name.encode())  # the same on all processes
    rows = shape[0] if not lead else chunks.rows if chunks.axis == 0 else 1
    gather = _slab(leaf.mesh, leaf.axes, leaf.layout, rows)
    for i, begin in enumerate(range(0, shape[0], rows)):
        at = min(begin, shape[0] - rows)  # the last slab may overlap the one before
        slab = gather(leaf.value, np.int32(at))
        if processes[(first + i) % len(processes)] == jax.process_index():
            host = np.array(slab.addressable_shards[0].data)[begin - at :]
            yield (slice(begin, at + rows), *(slice(0, d) for d in shape[1:])), host


def _whole(leaf: PaddedLeaf) -> np.ndarray:
    """The logical array, on the host; this process has all shares."""
    shares = _by_offset(leaf.value, leaf.layout)
    joined = np.concatenate([np.asarray(shares[at]) for at in sorted(shares)], axis=-1)
    return joined[..., : math.prod(leaf.layout.shape[leaf.layout.lead :])].reshape(leaf.layout.shape)


@functools.lru_cache(maxsize=512)
def _slab(on: Mesh, axes: Axes, layout: Layout, rows: int) -> Callable[[jax.Array, ArrayLike], jax.Array]:
    """A function of a stored array and a position: `rows` of the logical array from there on, on every device."""
    part = dataclasses.replace(layout, shape=(rows, *layout.shape[1:]))

    def take(x: jax.Array, at: jax.Array) -> jax.Array:
        if layout.lead:
            x = lax.dynamic_slice_in_dim(x, at, rows, axis=0)
        return all_gather([x], [part], axes.hops, bucket_bytes=None)[0]

    whole = PartitionSpec()
    return jax.jit(open_region(on, axes, take, (layout.spec(axes.shard), whole), whole))


async def _write(
    leaves: Sequence[PaddedLeaf], copied: list[tuple[Shape, list[BoxData]]], infos: Sequence[Info]
) -> None:
    """Writes all parts in one transaction, since the files grow with every commit."""
    transaction = ts.Transaction(atomic=True)
    writes = []
    for leaf, (chunk, parts), info in zip(leaves, copied, infos, strict=True):
        array = await open_to_write(info, leaf.layout.shape, chunk, leaf.value.dtype, transaction)
        # the parts are this handler's own copies, so no further copy is needed
        writes += [array[box].write(x, can_reference_source_data_indefinitely=True) for box, x in parts]
    await _all(writes)
    await transaction.commit_async()


async def _all(operations: Sequence[Awaitable[object]]) -> None:
    """Waits for all operations, also where one fails: none may outlive its event loop."""
    for result in await asyncio.gather(*operations, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result


# --- reading ------------------------------------------------------------------------------------


async def _read(info: Info, target: PaddedTarget) -> jax.Array:
    layout = target.layout
    array = await open_to_read(info)
    by_index: dict[str, tuple[Box, list[jax.Device]]] = {}
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
