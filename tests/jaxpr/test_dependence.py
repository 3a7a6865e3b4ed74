"""Which results may differ between devices, read from a traced program."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxzero._src.jaxpr.compat import open_program
from jaxzero._src.jaxpr.dependence import depends

AXES = ("replica", "data")


def marks(f, inputs=(True, False)):
    """`f(mine, ours)`, of which the first differs between devices: the marks of its results."""
    avals = [jax.ShapeDtypeStruct((4,), jnp.float32)] * len(inputs)
    closed = jax.make_jaxpr(f, axis_env=[("replica", 2), ("data", 4)])(*avals)
    return depends(open_program(closed)[0], inputs, AXES)


PROGRAMS = [
    (lambda a, b: (a, b, a + b, 2.0, jnp.zeros(3)), [True, False, True, False, False]),
    (lambda a, b: (lax.psum(a, AXES), lax.pmax(a, AXES), lax.pmin(a, AXES)), [False] * 3),
    (lambda a, b: (lax.psum(a, "data"), lax.pmax(lax.psum(a, "data"), "replica")), [True, True]),
    (lambda a, b: lax.psum(a, ("data", "replica")) + a, [True]),
    (lambda a, b: lax.all_gather(a, AXES), [False]),
    (lambda a, b: (lax.axis_index("data"), lax.axis_index(AXES), b[lax.axis_index("data")]), [True] * 3),
    (lambda a, b: (jax.jit(lambda x, y: (x, y))(a, b), jax.checkpoint(jnp.sin)(b)), [True, False, False]),
    (lambda a, b: lax.cond(b.sum() > 0, lambda x, y: (x, y, y), lambda x, y: (y, y, y), a, b), [True, False, False]),
    (lambda a, b: lax.cond(a.sum() > 0, lambda y: y, lambda y: 2 * y, b), [True]),
    (lambda a, b: lax.scan(lambda c, x: (c + b, x), b, a), [False, True]),
    (lambda a, b: lax.scan(lambda c, x: ((c[1], c[0]), c[0]), (a, b), None, length=2), [True, True, True]),
    (lambda a, b: lax.fori_loop(0, 3, lambda i, c: (c[1], c[2], a, c[3]), (b, b, b, b)), [True, True, True, False]),
    (lambda a, b: lax.while_loop(lambda c: c.sum() < a[0], lambda c: c + 1, b), [True]),
    (lambda a, b: lax.while_loop(lambda c: c.sum() < b[0], lambda c: c + 1, b), [False]),
    (lambda a, b: (jax.random.split(jax.random.key(0)), jax.random.normal(jax.random.key(1), a.shape)), [False, False]),
]


@pytest.mark.parametrize(("f", "expected"), PROGRAMS)
def test_marks(f, expected):
    assert marks(f) == expected


def test_constants_and_unused_inputs():
    table = jnp.arange(4.0)
    assert marks(lambda a, b: (table * 2, table + b), (True, True)) == [False, True]


def test_groups_of_an_axis_are_not_all_devices():
    groups = [[0, 1], [2, 3]]
    f = lambda a: lax.psum(a, "data", axis_index_groups=groups)
    closed = jax.make_jaxpr(f, axis_env=[("data", 4)])(jax.ShapeDtypeStruct((4,), jnp.float32))
    assert depends(open_program(closed)[0], [True], ("data",)) == [True]
