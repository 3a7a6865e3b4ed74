"""Parameters whose update is zero in the traced step: not gathered, their gradients not reduced; the same numbers."""

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxzero

FROZEN = {"w": True, "odd": True, "a": False, "b": False}
TRAINED = jax.tree.map(lambda frozen: not frozen, FROZEN)
ADAPTERS = 2 * 64 * 8 * 4  # bytes of `a` and `b`
EVERYTHING = (64 * 64 + 336) * 4 + ADAPTERS  # `odd` travels padded

OPTIMIZERS = {
    "set_to_zero": optax.partition({True: optax.set_to_zero(), False: optax.adam(1e-2)}, FROZEN),
    "selective_transform": optax.selective_transform(optax.adam(1e-2), freeze_mask=FROZEN),
    "freeze": optax.chain(optax.masked(optax.adam(1e-2), TRAINED), optax.transforms.freeze(FROZEN)),
    "all in a norm": optax.chain(optax.clip_by_global_norm(0.1), optax.transforms.freeze(FROZEN), optax.scale(-1.0)),
    "state of all": optax.chain(optax.adam(1e-2), optax.transforms.freeze(FROZEN)),
}


def params():
    k = jax.random.split(jax.random.key(0), 3)
    adapters = {"a": jax.random.normal(k[1], (64, 8)) * 0.1, "b": jax.random.normal(k[2], (8, 64)) * 0.1}
    return {"w": jax.random.normal(k[0], (64, 64)) * 0.1, "odd": jnp.ones((67, 5)), **adapters}


def loss(p, x):
    return jnp.mean(jnp.square(jnp.tanh(x @ (p["w"] + p["a"] @ p["b"])) @ p["odd"][:64]))


EXAMPLES = jax.random.normal(jax.random.key(3), (16, 64))


def by_hand(zero, tx, given, state, *, adds):
    """A step in a user's own `shard_map`: gradients are reduced in the optimizer."""

    def step(p, s, x):
        local = jax.tree.map(lambda a: jax.lax.pcast(a, "data", to="varying"), p)
        grads = jax.grad(loss)(local, x)
        if adds:
            return zero.apply(tx, grads, s, p)
        updates, s = tx.update(grads, s, p)
        return optax.apply_updates(p, updates), s

    specs = jax.tree.map(lambda _: P(), given), zero.specs(state)
    return jax.jit(jax.shard_map(step, mesh=zero.mesh, in_specs=(*specs, P("data")), out_specs=specs))


def global_view(zero, tx):
    def step(p, s, x):
        return zero.apply(tx, zero.value_and_grad(loss)(p, x)[1], s, p)

    return jax.jit(step)


def sent(zero, compiled, kind):
    return sum(x.nbytes for x in jaxzero.collectives(compiled, zero.mesh) if x.kind == kind and x.nbytes > 64)


@pytest.mark.parametrize("way", ["apply", "update", "global view"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_only_what_changes_is_sent(mesh8, name, way):
    """In the global view `value_and_grad` reduces before; XLA drops what nothing reads, if it travels alone."""
    given, inner = params(), OPTIMIZERS[name]
    zero = jaxzero.Zero(mesh8, stage=2, bucket_bytes=None)
    tx = zero.optimizer(inner)
    state = tx.init(given)
    step = global_view(zero, tx) if way == "global view" else by_hand(zero, tx, given, state, adds=way == "apply")
    compiled = step.lower(given, state, EXAMPLES).compile()
    read = EVERYTHING if name in ("all in a norm", "state of all") else ADAPTERS
    assert (sent(zero, compiled, "reduce-scatter"), sent(zero, compiled, "all-gather")) == (read, ADAPTERS)
    new, _ = step(given, state, EXAMPLES)
    helpers.assert_all_shards_equal(new)
    updates, _ = inner.update(jax.grad(loss)(given, EXAMPLES), inner.init(given), given)
    want = optax.apply_updates(given, updates)
    helpers.close(new, want)
    np.testing.assert_array_equal(new["w"], given["w"])


def test_stage_3_keeps_the_share(mesh8):
    given, inner = params(), OPTIMIZERS["freeze"]
    zero = jaxzero.Zero(mesh8, stage=3)
    tx, split = zero.optimizer(inner), zero.shard(given)
    new, _ = global_view(zero, tx)(split, tx.init(split), EXAMPLES)
    updates, _ = inner.update(jax.grad(loss)(given, EXAMPLES), inner.init(given), given)
    helpers.close(zero.gather(new), optax.apply_updates(given, updates))
    np.testing.assert_array_equal(zero.gather(new)["odd"], given["odd"])


@pytest.mark.parametrize(
    "update",
    [lambda u, p: 0 * u, lambda u, p: jnp.full_like(u, 1e-3), lambda u, p: p],
    ids=["0*u", "constant", "params"],
)
def test_other_updates_are_added(mesh8, update):
    """Zero times a gradient may be NaN, and what is no zero is no zero."""
    inner = optax.stateless(lambda updates, p: jax.tree.map(update, updates, p))
    zero, given = jaxzero.Zero(mesh8, stage=2), {"w": jnp.ones((16, 8))}
    grads = {"w": jnp.full((16, 8), jnp.nan)}
    tx = zero.optimizer(inner)
    new, _ = zero.apply(tx, grads, tx.init(given), given)
    want = optax.apply_updates(given, inner.update(grads, inner.init(given), given)[0])
    np.testing.assert_array_equal(new["w"], want["w"])


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("how", [{}, dict(accumulate=2)], ids=str)
def test_the_zero_gradient_of_a_frozen_base_is_not_reduced(mesh8, stage, how):
    """Stage 1 summed the zeros of what the loss stops at over all devices."""
    given, zero = params(), jaxzero.Zero(mesh8, stage=stage)

    def frozen(p, x):
        return loss({**p, "w": jax.lax.stop_gradient(p["w"]), "odd": jax.lax.stop_gradient(p["odd"])}, x)

    step = jax.jit(zero.value_and_grad(frozen, **how))
    compiled, kind = step.lower(given, EXAMPLES).compile(), "all-reduce" if stage == 1 else "reduce-scatter"
    assert sent(zero, compiled, kind) == ADAPTERS + 4 * (stage == 1)  # the loss travels with them
    _, grads = step(given, EXAMPLES)
    helpers.close(zero.gather(grads), jax.grad(frozen)(given, EXAMPLES))
    assert not np.any(zero.gather(grads)["w"])
