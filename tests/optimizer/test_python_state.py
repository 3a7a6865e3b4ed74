"""Python state that an optimizer reads: it is read when plain Optax would read it, and no step keeps what it read."""

import checks
import helpers
import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxzero

PARAMS = {"w": jnp.ones(13), "b": jnp.ones(16)}
GRADS = jax.tree.map(jnp.ones_like, PARAMS)


class Run:
    """What the optimizers below read."""

    rate: float
    frozen: set[str]
    limit: float


OPTIMIZERS = {
    "a rate": lambda: optax.sgd(lambda count: Run.rate),
    "a mask": lambda: optax.chain(
        optax.sgd(1.0), optax.masked(optax.set_to_zero(), lambda p: {k: k in Run.frozen for k in p})
    ),
    "a limit": lambda: optax.stateless(lambda g, _: jax.tree.map(lambda x: jnp.clip(x, -Run.limit, Run.limit), g)),
}
SETTINGS = {**checks.SETTINGS, "stage 3": ((8,), dict(stage=3))}


def change(last):
    Run.rate, Run.frozen, Run.limit = (0.5, {"w"}, 0.25) if last else (1.0, {"b"}, 0.75)


def steps_of(zero, inner, way):
    """Gives a function that makes steps, and the state: one step for `jit`, as a user would write it."""
    tx = zero.optimizer(inner)
    params = zero.shard(PARAMS)
    if way == "inside":
        tx = jaxzero.zero2(inner, "data")
        state = jaxzero.zero2(inner, "data", mesh=zero.mesh).init(params)
        specs = zero.specs(state)

        def update(g, s, p):
            return tx.update(jax.lax.pcast(g, "data", to="varying"), s, p)

        inside = jax.shard_map(update, mesh=zero.mesh, in_specs=(P(), specs, P()), out_specs=(P(), specs))
        return lambda: jax.jit(lambda g, s, p: inside(g, s, p)), params, state
    if way == "eager":
        return lambda: tx.update, params, tx.init(params)
    return lambda: jax.jit(lambda g, s, p: tx.update(g, s, p)), params, tx.init(params)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    ("setting", "way"),
    [
        ("stage 1, 8", "jit"),
        ("stage 2, 8", "eager"),
        ("stage 2, 8", "inside"),
        ("MiCS 2x4", "jit"),
        ("stage 3", "eager"),
    ],
)
def test_jz_205_what_changed_is_read_again(setting, way, name):
    """A new `jit` reads the new value, and so does every eager call, as with plain Optax."""
    shape, options = SETTINGS[setting]
    zero, inner = jaxzero.Zero(helpers.make_mesh(*shape), **options), OPTIMIZERS[name]()
    change(last=False)
    make, params, state = steps_of(zero, inner, way)
    grads = zero.shard(GRADS)
    for last in (False, True):
        change(last)
        got, _ = make()(grads, state, params)
        want, _ = inner.update(GRADS, inner.init(PARAMS), PARAMS)
        got = got if way == "inside" else zero.gather(got)
        helpers.close(got, want)


def test_jz_205_a_jitted_step_reads_again_when_caches_are_cleared():
    """One `jit` keeps what it read, as JAX does, until `jax.clear_caches()`."""
    tx = jaxzero.Zero(helpers.make_mesh(8)).optimizer(OPTIMIZERS["a rate"]())
    state = tx.init(PARAMS)
    step = jax.jit(tx.update)
    rates = []
    for last, clear in [(False, False), (True, False), (True, True)]:
        change(last)
        if clear:
            jax.clear_caches()
        rates.append(float(step(GRADS, state, PARAMS)[0]["w"][0]))
    assert rates == [-1.0, -1.0, -0.5]


def test_eager_calls_with_one_program_share_what_is_compiled():
    """Though each traces the optimizer."""
    tx = jaxzero.Zero(helpers.make_mesh(8)).optimizer(optax.chain(optax.adam(1e-2), optax.polyak_sgd()))
    params, state = PARAMS, tx.init(PARAMS)
    for i in range(3):
        updates, state = tx.update(GRADS, state, params, value=jnp.float32(i))
        params = optax.apply_updates(params, updates)
    (compiled,) = [f for key, f in tx.calls._compiled.items() if key[0] == "update"]
    assert compiled._cache_size() == 1
