"""Random programs over several leaves, with products, factorisations and loops in each: dealt out, and equal."""

import jax.numpy as jnp
import numpy as np
import on_shares
import pytest
from jax import lax

from jaxzero._src.sharding.layout import Layout

LEAVES = [(6, 10), (6, 10), (6, 10), (6, 10), (10, 6), (10, 6), (16, 8), (9, 9), (9, 9)]


def unit(x):
    return x / (jnp.linalg.norm(x) + 1e-3)


def gram(x):
    return unit((x @ x.T) @ x)


def newton(x):
    return lax.scan(lambda c, _: (1.5 * c - 0.5 * (c @ c.T) @ c, None), unit(x), None, length=3)[0]


def until(x):
    step = lambda c: (c[0] + 1, c[1] - 0.3 * (c[1] @ c[1].T) @ c[1])
    return lax.while_loop(lambda c: (c[0] < 5) & (jnp.sum(c[1] * c[1]) > 0.5), step, (0, unit(x)))[1]


def factors(x):
    return jnp.linalg.cholesky(x @ x.T + jnp.eye(len(x))) @ x


def roots(x):
    w, q = jnp.linalg.eigh(x @ x.T + jnp.eye(len(x)))
    return (q * w**-0.5) @ q.T @ x


def turned(x):
    return jnp.tanh(x.T).T


def chosen(x):
    return lax.cond(jnp.sum(x) > 0, lambda x: gram(x), lambda x: 2 * x, x)


STEPS = [gram, newton, until, factors, roots, turned, chosen, lambda x: 0.5 * x + 1]


def program(seed):
    """The same steps for leaves that are alike mostly; scalars of all leaves between them."""
    rng = np.random.default_rng(seed)
    chains = {s: [STEPS[i] for i in rng.integers(len(STEPS), size=3)] for s in [*dict.fromkeys(LEAVES), None]}
    odd = int(rng.integers(len(LEAVES)))  # one leaf goes another way
    between = bool(rng.integers(2))

    def f(*leaves):
        out = list(leaves)
        for turn in range(3):
            out = [chains[None if i == odd else x.shape][turn](x) for i, x in enumerate(out)]
            if between and turn == 1:
                norm = jnp.sqrt(sum(jnp.sum(x * x) for x in out))
                out = [x / jnp.maximum(norm, 1.0) for x in out]
        return [*out, *(jnp.sum(x) for x in out), out[0] @ out[4]]

    return f


@pytest.mark.parametrize("seed", range(6))
def test_equal(seed):
    rng = np.random.default_rng(seed)
    world = [3, 8, 2][seed % 3]
    arrays = [rng.standard_normal(s, np.float32) for s in LEAVES]
    rows = lambda s: [Layout(s, world, "rows", d) for d in range(2) if s[d] % world == 0]
    layouts = [(rows(s) or [Layout(s, world, "flat")])[0] for s in LEAVES]
    f = program(seed)
    got, record = on_shares.evaluate(f, arrays, layouts, world, deal=True)
    for x, y in zip(got, f(*arrays), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-4 * float(np.max(np.abs(y))))
    assert record.dealt
