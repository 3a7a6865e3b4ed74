"""Dealing out work on whole matrices: odd shapes, NaN, other ways to call, and what the tests would see go wrong."""

import functools

import helpers
import jax
import jax.numpy as jnp
import matrix_optimizers
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxzero
from jaxzero._src.comm import collectives
from jaxzero._src.partition import deal

SHAPES = {**{f"a{i}": (7, 9) for i in range(5)}, **{f"b{i}": (9, 6) for i in range(4)}, "bias": (11,)}


def tree(shapes=SHAPES, seed=0):
    rng = np.random.default_rng(seed)
    return {k: jnp.asarray(rng.standard_normal(s), jnp.float32) for k, s in shapes.items()}


def one_step(inner, shapes=SHAPES, world=3, grads=None, **options):
    """Updates of one step, and those of plain Optax."""
    zero = jaxzero.Zero(helpers.make_mesh(world), **{"stage": 2, **options})
    params, grads = tree(shapes), tree(shapes, 1) if grads is None else grads
    tx = zero.optimizer(inner)
    got, _ = jax.jit(tx.update)(grads, jax.jit(tx.init)(params), params)
    expected, _ = jax.jit(inner.update)(grads, inner.init(params), params)
    return got, expected


def dealt(inner, shapes=SHAPES, world=3, **options):
    zero = jaxzero.Zero(helpers.make_mesh(world), **{"stage": 2, **options})
    return zero.explain(inner, tree(shapes))


@pytest.mark.parametrize(
    ("shapes", "world"),
    [
        ({"a": (0, 4), "b": (4, 0), "c": (1, 1), "d": (1, 1), "e": (3, 5), "f": (3, 5)}, 8),
        ({"a": (3, 5), "b": (3, 5)}, 8),
        ({"a": (64, 48), "b": (3, 2), "c": (2, 3), "d": (5, 5)}, 3),
        (SHAPES, 1),
        ({"a": (6, 5)}, 3),
    ],
)
def test_sizes(shapes, world):
    helpers.close(*one_step(matrix_optimizers.polar_express(), shapes, world), 1e-5)


def test_one_leaf_of_a_kind_alone_and_deal_false_are_not_dealt_out():
    inner = matrix_optimizers.polar_express()
    assert dealt(inner).dealt[0].jobs == 9
    assert dealt(inner, {"a": (6, 5)}).dealt == ()
    off = dealt(inner, deal=False)
    assert off.dealt == ()
    assert off.whole["dot_general"] > 0
    # Far from singular: Polar Express magnifies the rounding along small singular values, in its reference too.
    grads = {k: 0.1 * g + jnp.eye(*g.shape) if g.ndim == 2 else g for k, g in tree(seed=1).items()}
    helpers.close(*one_step(inner, grads=grads, deal=False), 1e-5)
    with pytest.raises(ValueError, match="deal=1. Expected True or False"):
        jaxzero.Zero(helpers.make_mesh(3), deal=1)


@pytest.mark.parametrize("name", matrix_optimizers.OPTIMIZERS)
def test_no_work_is_done_in_full_but_on_a_matrix_alone(name):
    inner = matrix_optimizers.OPTIMIZERS[name]()
    report = dealt(inner)
    assert sorted(count for count, _, _ in report.dealt[0].kinds) == [4, 5]
    assert report.whole == {}
    alone = dealt(inner, {"a": (6, 5)})
    assert sum(d.jobs for d in alone.dealt) == (2 if name == "soap" else 0)  # its two bases do not need each other
    assert alone.whole


def test_nan_stays_in_its_leaf():
    grads = tree(seed=1)
    grads["a1"] = grads["a1"].at[2, 3].set(jnp.nan)
    got, expected = one_step(matrix_optimizers.polar_express(), grads=grads)
    assert np.isnan(got.pop("a1")).all()
    expected.pop("a1")
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(got))
    helpers.close(got, expected, 1e-5)


def test_stacked_layers_are_dealt_out_one_by_one():
    shapes = {"layers": (5, 7, 9), "other": (5, 9, 7), "bias": (11,)}
    unrolled = lambda x: jnp.linalg.qr(x @ x.T + jnp.eye(x.shape[0]))[0] @ x
    update = lambda g, s, p=None: (jax.tree.map(lambda x: jax.vmap(unrolled)(x) if x.ndim == 3 else x, g), s)
    inner = optax.GradientTransformation(lambda p: optax.EmptyState(), update)
    stacked = dict(stacked=lambda path: "bias" not in jax.tree_util.keystr(path))
    helpers.close(*one_step(inner, shapes, **stacked), 1e-4)
    assert dealt(inner, shapes, **stacked).dealt[0].jobs == 10


@pytest.mark.parametrize("around", ["multi steps", "finite", "hyperparams", "clip after", "offload"])
def test_with_other_transformations(around):
    inner, options = matrix_optimizers.polar_express(), {}
    if around == "multi steps":
        inner = optax.MultiSteps(inner, 1).gradient_transformation()
    elif around == "finite":
        inner = optax.apply_if_finite(inner, 3)
    elif around == "hyperparams":
        inner = optax.inject_hyperparams(
            lambda rate: optax.chain(matrix_optimizers.polar_express(), optax.scale(rate))
        )(rate=0.5)
    elif around == "clip after":  # a second level: what follows the norm of all results works on matrices again
        inner = optax.chain(inner, optax.clip_by_global_norm(0.01), matrix_optimizers.polar_express())
    else:
        options = dict(offload=("state",), bucket_bytes=None)
    helpers.close(*one_step(inner, **options), 1e-4)


def in_all(params, grads):
    """A loss whose gradient is `grads`."""
    return sum(jnp.vdot(grads[k], params[k]) for k in grads)


def assert_trains(zero, inner, params, batches):
    """Steps on `zero` give dealt-out work and the parameters of plain Optax."""
    assert zero.explain(inner, params).dealt[0].jobs == 9
    tx = zero.optimizer(inner)
    shares = zero.shard(params)
    state = jax.jit(tx.init)(shares)
    grad_fn = zero.value_and_grad(in_all, whole_argnums=(1,))

    @jax.jit
    def step(shares, state, grads):
        return zero.apply(tx, grad_fn(shares, grads)[1], state, shares)

    for grads in batches:
        shares, state = step(shares, state, grads)
    helpers.assert_all_shards_equal(shares)
    expected, _ = helpers.reference_run(inner, params, batches)
    helpers.close(zero.gather(shares), expected, 1e-4)


@pytest.mark.parametrize("stage", [2, 3])
def test_multi_steps(stage):
    inner = optax.MultiSteps(matrix_optimizers.polar_express(), 2).gradient_transformation()
    assert_trains(jaxzero.Zero(helpers.make_mesh(3), stage=stage), inner, tree(), [tree(seed=i) for i in range(1, 5)])


def test_master_weights():
    inner = jaxzero.master_weights(matrix_optimizers.polar_express())
    half = lambda seed: jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree(seed=seed))
    assert_trains(jaxzero.Zero(helpers.make_mesh(3), stage=2), inner, half(0), [half(1), half(2)])


def test_skipped_leaf():
    zero = jaxzero.Zero(helpers.make_mesh(3), stage=2, unused="skip")
    inner, params, grads = matrix_optimizers.polar_express(), tree(), tree(seed=1)
    used = {k: g for k, g in grads.items() if k != "a2"}
    zero = zero.observe(in_all, params, used, whole_argnums=(1,))
    tx = zero.optimizer(inner)
    _, sums = zero.value_and_grad(in_all, whole_argnums=(1,))(params, used)
    got, _ = zero.apply(tx, sums, tx.init(params), params)
    keep = {k: params[k] for k in used}
    expected, _ = helpers.reference_run(inner, keep, [used])
    helpers.close(zero.gather(got), {**expected, "a2": params["a2"]}, 1e-5)
    whole = jaxzero.Zero(zero.mesh, stage=2).explain(inner, params)
    assert zero.explain(inner, params).dealt[0].jobs == whole.dealt[0].jobs - 1  # nobody works on what is skipped


def test_leaves_of_other_axes_are_not_dealt_out():
    mesh = helpers.make_mesh((4, 2), ("data", "model"))
    specs = lambda path, x: P(None, "model") if x.shape == (9, 6) else P()
    zero = jaxzero.Zero(mesh, stage=2, param_specs=specs)
    inner, params, grads = matrix_optimizers.polar_express(), tree(), tree(seed=1)
    report = zero.explain(inner, params)
    assert [count for count, _, _ in report.dealt[0].kinds] == [5]
    assert report.whole["dot_general"] > 0
    tx = zero.optimizer(inner)
    shares = zero.shard(params)
    got, _ = jax.jit(tx.update)(zero.shard(grads), jax.jit(tx.init)(shares), shares)
    expected, _ = jax.jit(inner.update)(grads, inner.init(params), params)
    helpers.close(jax.device_get(got), expected, 1e-4)


def test_inside_a_shard_map():
    mesh = helpers.make_mesh(3)
    inner = matrix_optimizers.polar_express()
    zero = jaxzero.Zero(mesh, stage=2)
    tx = zero.optimizer(inner, grads="reduced")
    params, grads = tree(), tree(seed=1)
    state = tx.init(params)
    region = functools.partial(jax.shard_map, mesh=mesh)
    step = region(lambda g, s, p: tx.update(g, s, p)[0], in_specs=(P(), zero.specs(state), P()), out_specs=P())
    helpers.close(jax.jit(step)(grads, state, params), inner.update(grads, inner.init(params), params)[0], 1e-4)


# --- each of these faults is seen ------------------------------------------------------------------


def wrong_owner(monkeypatch):
    old = deal._Exchange._tables
    roll = lambda tables: {k: np.roll(x, 1, 0) for k, x in tables.items()}
    monkeypatch.setattr(deal._Exchange, "_tables", lambda self: roll(old(self)))


def wrong_row(monkeypatch):
    old = deal._Exchange._to_owners
    monkeypatch.setattr(deal._Exchange, "_to_owners", lambda self, t: jnp.roll(old(self, t), 1, 0))


def padding_as_data(monkeypatch):
    def unblocks(x, layout):
        flat = x.reshape(-1)
        return flat[flat.size - layout.size :].reshape(layout.shape)

    monkeypatch.setattr(deal, "collectives", type("C", (), {**vars(collectives), "unblocks": staticmethod(unblocks)}))


def wrong_leaf(monkeypatch):
    old = deal._Exchange._result
    last = lambda self, k: len(self.kinds[k].members) - 1
    monkeypatch.setattr(deal._Exchange, "_result", lambda self, k, m, *rest: old(self, k, last(self, k) - m, *rest))


@pytest.mark.parametrize("fault", [wrong_owner, wrong_row, padding_as_data, wrong_leaf])
def test_fault_is_seen(fault, monkeypatch):
    fault(monkeypatch)
    got, expected = one_step(matrix_optimizers.polar_express(), world=8)
    with pytest.raises(AssertionError):
        helpers.close(got, expected, 1e-2)
