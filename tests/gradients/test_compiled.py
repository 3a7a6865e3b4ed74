"""Eager calls see what the function reads now, compile only new programs, and keep nothing of a dropped function."""

import gc
import weakref

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxzero
from jaxzero._src.gradients.compiled import kept

PARAMS, X = {"w": jnp.full(5, 2.0)}, jnp.arange(80.0).reshape(16, 5) / 9


class Model:
    """State that a loss reads: a number, an array in a dict."""

    __hash__ = None

    def __init__(self):
        self.weight, self.teacher = 1.0, {"w": jnp.ones(5)}

    def loss(self, p, x):
        return self.weight * jnp.mean((x @ p["w"] - x @ self.teacher["w"] - 1) ** 2)


def make_zero(stage, mesh):
    replica = "replica" if mesh.size > mesh.shape["shard"] else None
    return jaxzero.Zero(mesh, stage=stage, shard_axis="shard", replica_axis=replica)


def programs(owner):
    """How many programs are kept of a function."""
    return sum(len(p._by_key) for p in kept._by_function[id(owner)][1].values())


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_eager_calls_see_state_that_has_changed(mesh24, stage):
    """JZ-206: the first program ran again with what was read first."""
    model, zero = Model(), make_zero(stage, mesh24)
    params = zero.shard(PARAMS)

    def compare(run):
        want = jax.value_and_grad(model.loss)(PARAMS, X)
        value, grads = run(zero.value_and_grad(model.loss))(params, X)
        np.testing.assert_allclose(value, want[0], rtol=1e-5)
        helpers.close(zero.gather(grads), want[1])
        np.testing.assert_allclose(run(zero.forward(model.loss))(params, X), want[0], rtol=1e-5)

    compare(lambda f: f)
    model.weight = 3.0
    compare(lambda f: f)
    model.teacher["w"] = jnp.full(5, 0.5)
    compare(lambda f: f)
    assert programs(model) == 4  # another array is an argument of the same program, another number is not
    model.weight = 5.0
    compare(jax.jit)  # a new jit
    assert programs(model) == 4


def test_jit_reads_state_once_as_jax_does(mesh8):
    model, zero = Model(), jaxzero.Zero(mesh8)
    step = jax.jit(zero.value_and_grad(model.loss))
    first = step(PARAMS, X)[0]
    model.weight = 2.0
    assert step(PARAMS, X)[0] == first
    jax.clear_caches()
    assert step(PARAMS, X)[0] == 2 * first


@jax.custom_vjp
def identity(x):
    return x


identity.defvjp(lambda x: (x, None), lambda _, g: (g,))


def rich_loss(p, x, key):
    """What is made anew at each trace: constants, inner functions, custom rules, what a print holds."""
    mask = np.tril(np.ones((5, 5)))

    @jax.checkpoint
    def body(c, _):
        return jax.nn.gelu(c @ jnp.asarray(mask)) * p["w"], None

    y, _ = jax.lax.scan(body, x, None, length=2)
    jax.debug.print("{}", y[0, 0])
    y = jax.jit(lambda y: jax.nn.relu(y))(identity(y))
    return jnp.mean(y * jax.random.bernoulli(key, 0.5, y.shape))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_unchanged_function_is_compiled_once(mesh8, stage):
    zero, key = jaxzero.Zero(mesh8, stage=stage), jax.random.key(0)
    params = zero.shard(PARAMS)
    kept.cache_clear()
    for _ in range(2):
        zero.value_and_grad(rich_loss)(params, X, key)
        zero.forward(rich_loss)(params, X, key)
    assert programs(rich_loss) == 2


@pytest.mark.parametrize("stage", [2, 3])
def test_nothing_is_kept_of_a_loss_that_was_dropped(mesh8, stage):
    """The last 64 losses of a sweep stayed alive, with the data that they close over."""
    zero = jaxzero.Zero(mesh8, stage=stage)
    params = zero.shard(PARAMS)

    def sweep():
        data = jnp.ones(1000)
        loss = lambda p, x: jnp.mean(x @ p["w"]) * data.sum()
        model = Model()
        for fn in (loss, model.loss):
            zero.value_and_grad(fn)(params, X)
            zero.value_and_grad(fn)(params, X, loss_scale=jnp.float32(8))
            zero.forward(fn)(params, X)
            jax.jit(zero.value_and_grad(fn))(params, X)
        return [weakref.ref(x) for x in (loss, data, model, model.teacher["w"])]

    gc.collect()  # what other tests have dropped
    before = len(kept._by_function)
    alive = sweep()
    gc.collect()
    assert [ref() for ref in alive] == [None] * 4
    assert len(kept._by_function) == before


def test_a_callable_that_weak_references_do_not_hold(mesh8):
    class Slots:
        __slots__ = ("weight",)

        def __call__(self, p, x):
            return self.weight * jnp.mean(x @ p["w"])

    loss, zero = Slots(), jaxzero.Zero(mesh8)
    loss.weight = 1.0
    first = zero.value_and_grad(loss)(PARAMS, X)[0]
    loss.weight = 2.0
    assert zero.value_and_grad(loss)(PARAMS, X)[0] == 2 * first


def looping(p, x):
    """Loops that start from constants, whose carries become values of this device."""
    total, _ = jax.lax.scan(lambda c, row: (c + jnp.tanh(row @ p["w"]), None), jnp.zeros(()), x)
    _, twice = jax.lax.fori_loop(0, 2, lambda i, c: (c[0] + 1, c[1] + total), (0, jnp.zeros(())))
    return jax.lax.cond(x[0, 0] > 3, lambda: twice, lambda: 0.5 * twice) / x.shape[0]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_loops_from_constants_inside_a_users_shard_map(mesh24, stage):
    zero = make_zero(stage, mesh24)
    params, axes = zero.shard(PARAMS), ("replica", "shard")
    run = lambda p, x: zero.value_and_grad(looping, accumulate=2)(p, x)
    specs = (P(), P("shard"))
    region = jax.shard_map(run, mesh=mesh24, in_specs=(zero.specs(params), P(axes)), out_specs=specs)
    value, grads = jax.jit(region)(params, X)
    micro = lambda p: jnp.mean(jnp.stack([looping(p, X[i : i + 1]) for i in range(16)]))
    want = jax.value_and_grad(micro)(PARAMS)
    np.testing.assert_allclose(value, want[0], rtol=1e-6)
    helpers.close(zero.gather(grads), want[1])
