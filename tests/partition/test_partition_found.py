"""Programs that the partitioner once got wrong, each as small as it could be made."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import close
from jax import lax
from jax.experimental import io_callback
from on_shares import evaluate

from jaxzero._src.sharding.layout import Layout


def eighths(*shape):
    """Multiples of 1/8: sums of them are exact, in any order."""
    return np.random.default_rng(sum(shape)).integers(-16, 17, shape).astype(np.float32) / 8


def whole_numbers(*shape):
    return np.random.default_rng(sum(shape)).integers(-9, 20, shape).astype(np.int32)


def rows(*shape, lead=0, world=8):
    return Layout(shape, world, "rows", lead)


def flat(*shape, lead=0, world=8):
    return Layout(shape, world, "flat", lead)


def stop_each(x):
    """`vmap` of a loop: one predicate for each row, and each row stops by itself."""
    return jax.vmap(lambda r: lax.while_loop(lambda c: jnp.sum(c * c) > 1, lambda c: c / 2, r))(x)


def stop_each_of_each(x):
    return jax.vmap(stop_each)(x)


def stop_with_constants(x):
    """The test and the body close over values of their own."""
    turn = lambda r: lax.while_loop(lambda c: c[0] < r.sum(), lambda c: (c[0] + 1, c[1] + r), (jnp.float32(0), r))
    return jax.vmap(turn)(x)


def prints(x):
    jax.debug.print("{} {}", jnp.sum(x), x[0, 0])
    io_callback(lambda _: None, None, jnp.max(x))
    return x * 2


def one_element(x):
    s = x.reshape(())
    return s * 2, jnp.where(s > 0, s, 2.0), lax.cond(s > 0, lambda: 1.0, lambda: 2.0), jnp.arange(3.0) * s, s + x


PROGRAMS = {
    "an integer sum, divided": (lambda x: (lax.div(x.sum(), jnp.int32(4)), x.sum() // 3, x.mean()), flat(5, 3)),
    "a sum times infinity where a device has only padding": (lambda x: (x.sum() / 0.0, x.sum() * jnp.inf), flat(3)),
    "a sum times what is no constant": (lambda x: x.sum() / (x.sum() - x.sum()), flat(3)),
    "bits": (lambda x: (lax.reduce_and(x, (0,)), lax.reduce_or(x, (0, 1)), lax.reduce_xor(x, (0, 1))), rows(16, 3)),
    "bits flat": (lambda x: (jnp.bitwise_and.reduce(x), jnp.bitwise_or.reduce(x, 1)), flat(5, 3)),
    "complex maximum": (lambda x: lax.reduce_max(x + 1j * x[::-1], (0, 1)), flat(5, 3)),
    "one predicate per row": (stop_each, rows(16, 3)),
    "one predicate per row, flat": (stop_each, flat(5, 3)),
    "one predicate per row of each layer": (stop_each_of_each, rows(2, 8, 3, lead=1)),
    "one predicate per row with constants": (stop_with_constants, rows(16, 3)),
    "no turns": (lambda x: lax.scan(lambda c, v: (c + v, v * c), x, jnp.zeros((0, 16, 3))), rows(16, 3)),
    "no turns, flat": (lambda x: lax.scan(lambda c, v: (c + v, c), x, jnp.zeros((0, 5, 3))), flat(5, 3)),
    "a scalar": (one_element, flat(1)),
    "a scalar on one device": (one_element, rows(1, world=1)),
    "a key beside an array": (lambda x: jax.random.gamma(jax.random.key(0), jnp.abs(x) + 1), rows(16, 3)),
    "a key beside a flat array": (lambda x: jax.random.gamma(jax.random.key(0), jnp.abs(x) + 1), flat(5, 3)),
    "a type without infinity": (lambda x: x.astype(jnp.float8_e4m3fn).max(0).astype(jnp.float32), flat(5, 3)),
    "no results": (prints, rows(16, 3)),
}
INTEGERS = {"an integer sum, divided", "bits", "bits flat"}


@pytest.mark.parametrize("name", PROGRAMS)
def test_found(name):
    f, layout = PROGRAMS[name]
    x = whole_numbers(*layout.shape) if name in INTEGERS else eighths(*layout.shape)
    x = np.abs(x) + 1 if "infinity where" in name else x
    got, _ = evaluate(f, [x], [layout], layout.n)
    want = [jnp.asarray(y) for y in jax.tree.leaves(jax.jit(f)(x))]
    assert [y.dtype for y in got] == [y.dtype for y in want]
    close(got, want)
    for y in got:
        assert len({np.asarray(s.data).tobytes() for s in y.addressable_shards}) == 1
