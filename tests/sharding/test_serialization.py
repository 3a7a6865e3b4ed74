"""JZ-214: steps, gradients and losses of split trees, exported with `jax.export`, serialized, read back and called."""

import helpers
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxzero

pytest.importorskip("flatbuffers")  # JAX serializes with it

for kind in (optax.ScaleByAdamState, optax.EmptyState):
    jax.export.register_namedtuple_serialization(kind, serialized_name=f"test.{kind.__name__}")


def there_and_back(function, *args):
    data = jax.export.export(jax.jit(function))(*args).serialize()
    return jax.export.deserialize(bytearray(data)).call(*args)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("wrap", [lambda x: x, jaxzero.master_weights, jaxzero.dynamic_loss_scale])
def test_what_was_exported_gives_the_same_numbers(stage, wrap):
    zero = jaxzero.Zero(helpers.make_mesh(8), stage=stage)
    tx = zero.optimizer(wrap(optax.adam(1e-2)))
    rng = np.random.default_rng(0)
    dtype = jnp.bfloat16 if wrap is jaxzero.master_weights else jnp.float32
    # the second and third have padding, the last is whole
    shapes = {"rows": (8, 4), "flat": (5, 3), "vector": (4,), "scalar": ()}
    params = zero.shard({k: jnp.asarray(rng.normal(size=s), dtype) for k, s in shapes.items()})
    state = tx.init(params)
    x = jnp.asarray(rng.normal(size=(16, 8)), jnp.float32)

    def loss(p, x):
        return jnp.mean((x @ p["rows"] + p["vector"]) ** 2) * p["scalar"] + jnp.sum(p["flat"] ** 2)

    def step(params, state, x):
        _, grads = zero.value_and_grad(loss)(params, x)
        return zero.apply(tx, grads, state, params)

    functions = [(zero.value_and_grad(loss), params, x), (step, params, state, x), (zero.forward(loss), params, x)]
    for function, *args in functions:
        want, got = jax.jit(function)(*args), there_and_back(function, *args)
        assert jax.tree.structure(got) == jax.tree.structure(want)
        jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize("shape", [(5, 3), (7,), (3, 5, 2), (2**40,), (np.int64(5), np.int64(3))])
def test_shapes_come_back(shape):
    leaf = jaxzero.EvenSplit(jnp.ones(8), shape)
    assert there_and_back(lambda x: x, leaf).shape == tuple(shape)
    assert {type(d) for d in there_and_back(lambda x: x, leaf).shape} == {int}
