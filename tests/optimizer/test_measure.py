"""Statistics of split trees are those of full arrays; padding does not count."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import close, make_mesh
from jax.sharding import PartitionSpec as P

import jaxzero

RNG = np.random.default_rng(0)
TREE = {
    "w": jnp.asarray(RNG.normal(size=(5, 3)).astype(np.float32)),
    "rows": jnp.asarray(RNG.normal(size=(16, 2)).astype(np.float32)) + 2,
    "b": jnp.asarray(RNG.normal(size=7).astype(np.float32)) - 3,
    "s": jnp.float32(2.5),
    "half": jnp.asarray(RNG.normal(size=11), jnp.bfloat16),
    "z": jnp.asarray(RNG.normal(size=9) + 1j, jnp.complex64),
    "count": jnp.arange(5),
    "mask": jnp.asarray([True, False, True]),
    "empty": jnp.zeros((0, 3)),
}
FLOATS = {name: TREE[name] for name in ("w", "rows", "b", "s")}
ZEROS = {
    "one": lambda: jaxzero.Zero(make_mesh(8), stage=1),
    "two": lambda: jaxzero.Zero(make_mesh(3), stage=2),
    "three": lambda: jaxzero.Zero(make_mesh(8), stage=3),
    "explicit": lambda: jaxzero.Zero(make_mesh(8, explicit=True), stage=3),
    "stacked": lambda: jaxzero.Zero(make_mesh(8), stage=3, stacked=lambda path: path[-1].key == "w"),
    "mics": lambda: jaxzero.Zero(
        make_mesh((2, 4), ("replica", "shard")), stage=3, shard_axis="shard", replica_axis="replica"
    ),
    "hops": lambda: jaxzero.Zero(make_mesh((2, 4), ("node", "local")), stage=3, shard_axis=("node", "local")),
    "tensor": lambda: jaxzero.Zero(
        make_mesh((4, 2), ("data", "model")),
        stage=3,
        param_specs=lambda path, x: P(None, "model") if x.shape == (16, 2) else P(),
    ),
    "alone": lambda: jaxzero.Zero(make_mesh(1), stage=3),
}
per_leaf = lambda f: lambda tree: jax.tree.map(f, tree)
STATISTICS = {
    "norm": optax.tree.norm,
    "means": per_leaf(lambda x: jnp.mean(jnp.abs(x))),
    "sizes": lambda tree: sum(x.size for x in jax.tree.leaves(tree)),
    "minima": per_leaf(lambda x: jnp.min(x) + jnp.max(jnp.abs(x))),
    "deviations": per_leaf(jnp.std),
    "zeros": lambda tree: sum(jnp.sum(x == 0) for x in jax.tree.leaves(tree)),
    "exponentials": per_leaf(lambda x: jnp.mean(jnp.exp(-x))),
    "quantiles": per_leaf(lambda x: jnp.quantile(x, 0.25)),
    "histogram": lambda tree: jnp.histogram(tree["b"], bins=4, range=(-5.0, 0.0))[0],
    "rows": lambda tree: jnp.linalg.norm(tree["w"], axis=1),
    "finite": lambda tree: jnp.all(jnp.stack([jnp.all(jnp.isfinite(1 / x)) for x in jax.tree.leaves(tree)])),
}


@pytest.mark.parametrize("make", ZEROS)
def test_statistics_are_exact(make):
    zero = ZEROS[make]()
    split = zero.shard(FLOATS)
    every = lambda tree: {name: f(tree) for name, f in STATISTICS.items()}
    expected = every(FLOATS)
    close(zero.measure(every, split), expected, 1e-6)
    close(jax.jit(lambda p: zero.measure(every, p))(split), expected, 1e-6)


@pytest.mark.parametrize("make", ["two", "three", "mics"])
def test_gradients_and_two_trees(make):
    zero = ZEROS[make]()
    batch = jnp.asarray(RNG.normal(size=(24, 5)).astype(np.float32))
    loss = lambda p, x: jnp.mean((x @ p["w"]) ** 2) * p["s"] + jnp.sum(p["b"] ** 3) + jnp.mean(p["rows"] ** 2)
    params = zero.shard(FLOATS)
    _, grads = zero.value_and_grad(loss)(params, batch)
    whole = jax.grad(loss)(FLOATS, batch)
    cosine = lambda a, b: optax.tree.vdot(a, b) / (optax.tree.norm(a) * optax.tree.norm(b))
    close(zero.measure(cosine, grads, params), cosine(whole, FLOATS))
    close(zero.measure(STATISTICS["means"], grads), STATISTICS["means"](whole))
    close(zero.measure(optax.tree.norm, grads), optax.tree.norm(whole))
    close(jax.jit(optax.tree.norm)(grads), optax.tree.norm(whole))  # a sum: padding is zero


def test_every_dtype_and_leaves_that_pass_through():
    zero = ZEROS["three"]()
    f = lambda tree: {name: jnp.sum(x) * 1 for name, x in tree.items()} | {"n": sum(x.size for x in tree.values())}
    close(zero.measure(f, zero.shard(TREE)), f(TREE), 1e-2)
    key = zero.shard({"key": jax.random.key(3), "b": TREE["b"]})
    draw = lambda tree: jax.random.normal(tree["key"], ()) + jnp.mean(tree["b"])
    close(zero.measure(draw, key), draw({"key": jax.random.key(3), "b": TREE["b"]}))


@pytest.mark.parametrize("make", ["two", "three", "mics"])
def test_inside_a_users_shard_map(make):
    zero = ZEROS[make]()
    axes = (*zero.replica_axes, *zero.shard_axes)
    loss = lambda p, x: jnp.mean((x @ p["w"]) ** 2) * p["s"] + jnp.sum(p["b"] ** 3) + jnp.mean(p["rows"] ** 2)
    batch = jnp.asarray(RNG.normal(size=(24, 5)).astype(np.float32))
    params = zero.shard(FLOATS)
    whole = jax.grad(loss)(FLOATS, batch)

    def step(params, x):
        _, grads = zero.value_and_grad(loss)(params, x)
        return zero.measure(STATISTICS["means"], grads), zero.measure(optax.tree.norm, params)

    specs = zero.specs(params) if zero.stage == 3 else P()
    run = jax.jit(jax.shard_map(step, mesh=zero.mesh, in_specs=(specs, P(axes)), out_specs=P()))
    means, norm = run(params, batch)
    close(means, STATISTICS["means"](whole))
    close(norm, optax.tree.norm(FLOATS))


def test_what_is_refused():
    zero = ZEROS["three"]()
    tx, params = zero.optimizer(optax.adam(0.1)), zero.shard(FLOATS)
    with pytest.raises(ValueError, match="measure: leaf '0' is optimizer state.*like=params"):
        zero.measure(optax.tree.norm, tx.init(params))
    run = jax.shard_map(lambda x: zero.measure(jnp.sum, jnp.sum(x)), mesh=zero.mesh, in_specs=P("data"), out_specs=P())
    with pytest.raises(ValueError, match="measure: leaf '.root.' varies over .*'data'"):
        run(jnp.ones(8))
