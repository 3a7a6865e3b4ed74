"""The report of what the partitioner did: what it counts, and how it reads."""

import jax.numpy as jnp
import numpy as np
from on_shares import evaluate

from jaxzero._src.analysis.explain import Report
from jaxzero._src.sharding.layout import Layout


def report(f, *shapes):
    arrays = [np.ones(s, np.float32) for s in shapes]
    layouts = [Layout(s, 8, "rows" if s[0] % 8 == 0 else "flat") for s in shapes]
    return Report.of(evaluate(f, arrays, layouts, 8)[1], 8)


def test_local_programs_send_nothing():
    found = report(lambda x: jnp.tanh(x) * 2, (16, 3))
    assert (found.whole, found.crossings, found.bytes_gathered, found.bytes_reduced) == ({}, (), 0, 0)
    assert found.local == 2
    assert "0 values gathered: 0 B" in str(found)


def test_bytes_on_the_wire():
    """A ring moves 7/8 of a gathered array, and twice that of a reduced one."""
    found = report(lambda x: (jnp.sort(x, 0), jnp.sqrt(x.sum(0))), (16, 3))
    ((gather,), (total,)) = found.gathers, found.reductions
    assert (gather.primitive, gather.shape, gather.nbytes) == ("sort", (16, 3), 192)
    assert (total.primitive, total.how, total.nbytes) == ("sqrt", "sum", 12)
    assert found.bytes_gathered == 192 * 7 // 8
    assert found.bytes_reduced == 2 * 12 * 7 // 8
    assert found.whole == {"sort": 1, "sqrt": 1}
    assert "1 x gather float32[16, 3] for sort" in str(found)
    assert "in full on every device: " in str(found)


def test_what_is_alike_is_one_line():
    found = report(lambda *xs: [jnp.sort(x, 0) for x in xs], (16,), (16,), (24,))
    assert "2 x gather float32[16] for sort" in str(found)
    assert "1 x gather float32[24] for sort" in str(found)


def test_a_value_crosses_once_however_many_want_it():
    found = report(lambda x: (jnp.sort(x), jnp.flip(x), jnp.cumsum(x)), (16,))
    assert [c.primitive for c in found.crossings] == ["sort"]
