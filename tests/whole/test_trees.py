"""Trees of other libraries: Equinox modules, Haiku-style dicts, NamedTuples, dataclasses, with nothing to adapt."""

import dataclasses
from typing import Any, NamedTuple

import checks
import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxzero

INNER = optax.sgd(0.1, momentum=0.9)


def drawn(*shapes):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=s).astype(np.float32)) for s in shapes]


def haiku():
    """Two levels: the path of a module, the name of a parameter."""
    w, b, w2 = drawn((5, 16), (16,), (16, 3))
    return {
        "mlp/~/linear_0": {"w": w, "b": b},
        "mlp/~/linear_1": {"w": w2},
    }, lambda p, x: jnp.tanh(x @ p["mlp/~/linear_0"]["w"] + p["mlp/~/linear_0"]["b"]) @ p["mlp/~/linear_1"]["w"]


class Dense(NamedTuple):
    w: Any
    b: Any = None


def named_tuples():
    """One leaf is `None`: it is no leaf."""
    w, b, w2 = drawn((5, 16), (16,), (16, 3))
    return (Dense(w, b), Dense(w2)), lambda p, x: jnp.tanh(x @ p[0].w + p[0].b) @ p[1].w


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Net:
    w: Any
    layers: list[Any]
    act: str = dataclasses.field(metadata=dict(static=True), default="tanh")


def dataclasses_():
    w, b, w2 = drawn((5, 16), (16,), (16, 3))
    call = lambda p, x: getattr(jnp, p.act)(x @ p.w + p.layers[0]) @ p.layers[1]
    return Net(w, [b, w2]), call


@chex.dataclass(frozen=True)
class Layers:
    first: Dense
    second: Dense


def chex_dataclass():
    """Frozen, a mapping too, with another kind of tree in it."""
    w, b, w2 = drawn((5, 16), (16,), (16, 3))
    return Layers(first=Dense(w, b), second=Dense(w2)), lambda p, x: jnp.tanh(x @ p.first.w + p.first.b) @ p.second.w


def equinox():
    """`eqx.partition` and `combine` around the loss: what is no array is static."""
    net = eqx.nn.MLP(5, 3, 16, 1, activation=jnp.tanh, key=jax.random.key(0))
    params, static = eqx.partition(net, eqx.is_inexact_array)
    return params, lambda p, x: jax.vmap(eqx.combine(p, static))(x)


TREES = {"haiku": haiku, "named tuples": named_tuples, "dataclasses": dataclasses_, "equinox": equinox}
TREES["chex"] = chex_dataclass


def batches():
    rng = np.random.default_rng(1)
    return [tuple(rng.normal(size=(16, n)).astype(np.float32) for n in (5, 3)) for _ in range(5)]


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("tree", [*TREES])
@pytest.mark.grid(2)
def test_trees_of_other_libraries(tree, stage, mesh8):
    params, call = TREES[tree]()
    loss_fn = lambda params, batch: jnp.mean(jnp.square(call(params, batch[0]) - batch[1]))
    want = checks.reference(INNER, params, loss_fn, batches())
    got = checks.train(jaxzero.Zero(mesh8, stage=stage), INNER, params, loss_fn, batches())
    checks.assert_params_equal(got.params, want.params)
    checks.assert_state_equal(got.state, want.state)
    np.testing.assert_allclose(got.losses, want.losses, rtol=1e-5)


def test_an_equinox_module_that_holds_what_is_no_array(mesh8):
    net = eqx.nn.MLP(5, 3, 16, 1, key=jax.random.key(0))
    words = ["parameter leaf 'activation'", "eqx.partition"]
    for stage in (2, 3):
        zero = jaxzero.Zero(mesh8, stage=stage)
        with pytest.raises(ValueError, match=checks.saying("shard", *words)):
            zero.shard(net)
        with pytest.raises(ValueError, match=checks.saying("init", *words)):
            zero.optimizer(INNER).init(net)
        with pytest.raises(ValueError, match=checks.saying("value_and_grad", *words)):
            zero.value_and_grad(lambda net, x: jnp.mean(jax.vmap(net)(x)))(net, jnp.ones((8, 5)))
