"""A training step at every stage in both views, each family of rules of the partitioner, a checkpoint: in a minute.

`make quick` runs this file with the tests that compile nothing. What fails here fails everywhere.
"""

import functools

import checks
import chex
import helpers
import hlo
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from on_shares import evaluate

import jaxzero
from jaxzero._src.sharding.layout import Layout

INNER = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))
#: A leaf cut in rows, one that is flat with padding, and a scalar.
PARAMS = {"rows": np.linspace(-1, 1, 48, dtype=np.float32).reshape(16, 3), "flat": np.ones(13, np.float32)}
PARAMS |= {"scalar": np.float32(1.5)}
BATCHES = checks.quadratic_batches(2)
#: What a step sends at each stage in the global view, leaving out scalars.
SENT = {1: {"all-reduce", "all-gather"}, 2: {"reduce-scatter", "all-gather"}, 3: {"reduce-scatter", "all-gather"}}


@functools.cache
def unsharded():
    return checks.reference(INNER, PARAMS, checks.quadratic, BATCHES)


@pytest.mark.parametrize("way", ["value_and_grad, apply", "inside, apply"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_step_equals_the_unsharded_one(mesh8, stage, way):
    got, want = (
        checks.train(jaxzero.Zero(mesh8, stage=stage), INNER, PARAMS, checks.quadratic, BATCHES, way),
        unsharded(),
    )
    checks.assert_params_equal(got.params, want.params)
    checks.assert_state_equal(got.state, want.state)
    np.testing.assert_allclose(got.losses, want.losses, rtol=1e-5)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_step_sends_what_its_stage_promises(mesh8, stage):
    zero = jaxzero.Zero(mesh8, stage=stage, persist_bytes=0) if stage == 3 else jaxzero.Zero(mesh8, stage=stage)
    tx, params = zero.optimizer(INNER), zero.shard(checks.place(PARAMS, mesh8, P()))
    batch = checks.place(BATCHES[0], mesh8, P("data"))

    @jax.jit
    def step(params, state, batch):
        value, grads = zero.value_and_grad(checks.quadratic)(params, batch)
        return *zero.apply(tx, grads, state, params), value

    rows = hlo.collectives(step.lower(params, tx.init(params), batch).compile().as_text())
    assert {row.kind for row in rows if row.nbytes > 64} == SENT[stage]


def loop(x):
    return lax.scan(lambda c, v: (c + v, c * v), x[0] * 0, x)


#: A program for each family of rules: what stays on the shares, what is reduced, relabelled, looped over, gathered.
PROGRAMS = {
    "elementwise": lambda x: jnp.where(x > 0, jnp.exp(x), -(x**3)) + 2,
    "reductions": lambda x: (x.sum(), x.max(0), x.mean(1), jnp.linalg.norm(x)),
    "shapes": lambda x: (x.reshape(-1) * 2, x[None] + 1, x.T * 2),
    "products": lambda x: (x.T @ x, jnp.tensordot(x, x, 2)),
    "loops": loop,
    "branches": lambda x: lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x),
    "indexing": lambda x: (x[1], x.at[0].set(1.0), jnp.concatenate([x, x * 2])),
    "gathered": lambda x: (jnp.sort(x, 0), jnp.linalg.qr(x)[1]),
    "random": lambda x: x + jax.random.normal(jax.random.key(3), x.shape),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_on_shares_equals_it_on_whole_arrays(name):
    """Split in rows and flat, NaN in the padding, in one compilation."""
    x = np.random.default_rng(0).standard_normal((8, 3), np.float32)
    every = lambda *xs: [PROGRAMS[name](x) for x in xs]
    got, _ = evaluate(every, [x, x], [Layout(x.shape, 8, "rows"), Layout(x.shape, 8, "flat")], 8)
    helpers.assert_all_shards_equal(got)
    helpers.close(got, jax.tree.leaves(jax.jit(every)(x, x)), 2e-5)


def test_a_checkpoint_gives_back_the_same_bits(mesh8, tmp_path):
    zero = jaxzero.Zero(mesh8, stage=3)
    params = zero.shard(PARAMS)
    state = zero.optimizer(INNER).init(params)
    jaxzero.save(tmp_path, 1, zero, params, state).wait()
    abstract = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, PARAMS))
    restored = jaxzero.restore(tmp_path, zero, abstract, INNER)
    chex.assert_trees_all_equal((restored.params, restored.opt_state), (params, state), strict=True)
