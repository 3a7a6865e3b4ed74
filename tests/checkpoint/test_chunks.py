"""Ranges as boxes and chunks: against the plain enumeration of an array."""

import itertools
import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxzero._src.checkpoint.chunks import Chunks, boxes, extents

shapes = st.lists(st.integers(1, 6), max_size=4).map(tuple)


@settings(deadline=None, max_examples=80)
@given(shapes, st.data())
def test_boxes_are_the_range_in_order(shape, data):
    size = math.prod(shape)
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    x = np.arange(size).reshape(shape)
    found = list(boxes(shape, start, stop))
    assert len(found) <= max(2 * len(shape) - 1, 1)
    assert all(x[box].shape == extents(box) for box in found)
    np.testing.assert_array_equal(np.concatenate([np.zeros(0), *(x[box].ravel() for box in found)]), range(start, stop))


@settings(deadline=None, max_examples=80)
@given(shapes, st.integers(1, 40))
def test_chunks_are_contiguous_and_start_where_they_say(shape, limit):
    chunks = Chunks.of(shape, limit)
    x = np.arange(math.prod(shape)).reshape(shape)
    corners = itertools.product(*(range(0, d, c) for d, c in zip(shape, chunks.chunk, strict=True)))
    starts = []
    for corner in corners:
        chunk = x[tuple(slice(at, at + c) for at, c in zip(corner, chunks.chunk, strict=True))].ravel()
        assert chunk.size <= chunks.elements <= max(limit, 1)
        np.testing.assert_array_equal(chunk, np.arange(chunk[0], chunk[0] + chunk.size))
        starts.append(int(chunk[0]))
    starts.append(x.size)
    assert [chunks.start_at(p) for p in range(x.size + 1)] == [
        min(s for s in starts if s >= p) for p in range(x.size + 1)
    ]


def test_the_last_chunk_wastes_little():
    for rows in (*range(1, 300), 50257, 32003):
        chunks = Chunks.of((rows, 768), 2**20)
        assert -rows % chunks.rows <= rows / 100
        assert chunks.elements <= 2**20
