"""What stands in a `jit` and what does not agree: values, shapes, dtypes and placement."""

import checks
import chex
import helpers
import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

import jaxzero

INNER = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))


def params():
    keys = jax.random.split(jax.random.key(0), 2)
    return {"rows": jax.random.normal(keys[0], (16, 3)), "flat": jax.random.normal(keys[1], (13,)), "s": jnp.ones(())}


class EagerAndJit(chex.TestCase):
    """Each test runs with `jit`, and without."""

    def setUp(self):
        super().setUp()
        self.zero = jaxzero.Zero(helpers.make_mesh(8), stage=3)
        self.tx = self.zero.optimizer(INNER)
        self.batch = checks.place(checks.quadratic_batches(1)[0], self.zero.mesh, P("data"))

    @chex.variants(with_jit=True, without_jit=True)
    def test_gather_undoes_shard(self):
        split = self.variant(self.zero.shard)(params())
        placed = jax.tree.map(lambda x: x.sharding.spec, split)
        assert placed == self.zero.specs(split)
        chex.assert_trees_all_equal(self.variant(self.zero.gather)(split), params(), strict=True)

    @chex.variants(with_jit=True, without_jit=True)
    def test_init_is_that_of_the_inner_optimizer(self):
        state = self.variant(self.tx.init)(self.zero.shard(params()))
        checks.assert_state_equal(state, INNER.init(params()))

    @chex.variants(with_jit=True, without_jit=True)
    def test_gradients_and_loss(self):
        value, grads = self.variant(self.zero.value_and_grad(checks.quadratic))(self.zero.shard(params()), self.batch)
        want = jax.value_and_grad(checks.quadratic)(params(), checks.quadratic_batches(1)[0])
        helpers.close((value, checks.whole(grads)), want)

    @chex.variants(with_jit=True, without_jit=True)
    def test_a_step(self):
        split = self.zero.shard(params())
        _, grads = self.zero.value_and_grad(checks.quadratic)(split, self.batch)
        step = self.variant(lambda grads, state, params: self.zero.apply(self.tx, grads, state, params))
        after, state = step(grads, self.tx.init(split), split)
        want = checks.reference(INNER, params(), checks.quadratic, checks.quadratic_batches(1))
        checks.assert_params_equal(self.zero.gather(after), want.params)
        checks.assert_state_equal(state, want.state)
