"""What compiling a step costs: instructions per leaf beside a hand-written one, regions, growth with leaves."""

import functools
import re

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxzero
from jaxzero._src.optimizer import split_program

pytestmark = pytest.mark.grid(5)

RATE, B1, B2, EPS = 1e-3, 0.9, 0.999, 1e-8


def tree(count, shape=(16,)):
    return {f"p{i:04d}": jnp.full(shape, 1.0 + i) for i in range(count)}


def instructions(compiled):
    """Instructions of every computation of an optimized program."""
    return sum(bool(re.match(r"\s+(ROOT )?%?[\w.\-]+ = ", line)) for line in compiled.as_text().splitlines())


def compiled_step(step, *args):
    return jax.jit(step).lower(*args).compile()


def by_hand(mesh, params):
    """Adam as one would write it in `shard_map`, the new parameters joined in one bucket."""

    def local(params, mu, nu, count, grads):
        count, index = count + 1, lax.axis_index("data")
        new, size = {}, {k: x.shape[0] // 8 for k, x in params.items()}
        for k, g in grads.items():
            mu[k] = B1 * mu[k] + (1 - B1) * g
            nu[k] = B2 * nu[k] + (1 - B2) * g**2
            direction = mu[k] / (1 - B1**count) / (jnp.sqrt(nu[k] / (1 - B2**count)) + EPS)
            new[k] = lax.dynamic_slice_in_dim(params[k], index * size[k], size[k]) - RATE * direction
        joined = lax.all_gather(jnp.concatenate([x.ravel() for x in new.values()]), "data", to="invarying")
        out, start = {}, 0
        for k, x in new.items():
            out[k] = joined[:, start : start + x.size].reshape(params[k].shape)
            start += x.size
        return out, mu, nu, count

    split = P("data")
    return jax.shard_map(local, mesh=mesh, in_specs=(P(), split, split, P(), split), out_specs=(P(), split, split, P()))


@pytest.mark.parametrize("shape", [(16,), (8, 24)])
def test_no_more_instructions_than_by_hand(mesh8, shape):
    """Per leaf at most a tenth more than the hand-written step, counted after optimization."""
    count = 60
    params = tree(count, shape)
    zero = jaxzero.Zero(mesh8, stage=2)
    tx = zero.optimizer(optax.adam(RATE, B1, B2, EPS))
    state = tx.init(params)
    ours = compiled_step(functools.partial(zero.apply, tx), params, state, params)
    mu, nu = state[0].mu, state[0].nu
    hand = compiled_step(by_hand(mesh8, params), params, mu, nu, jnp.int32(0), params)
    assert instructions(ours) <= 1.1 * instructions(hand)
    new, _ = ours(params, state, params)
    want, *_ = hand(params, mu, nu, jnp.int32(0), params)
    helpers.close(new, want, 1e-6)


@pytest.mark.slow
def test_instructions_per_leaf_do_not_grow(mesh8):
    zero = jaxzero.Zero(mesh8, stage=2)
    tx = zero.optimizer(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(RATE)))
    per_leaf = []
    for count in (25, 100):
        params = tree(count)
        state = tx.init(params)
        per_leaf.append(instructions(compiled_step(functools.partial(zero.apply, tx), params, state, params)) / count)
    assert per_leaf[1] <= 1.1 * per_leaf[0]


INNERS = {
    "adamw": (optax.adamw(1e-2), True),
    "lion + schedule": (optax.lion(optax.cosine_decay_schedule(1e-2, 10)), True),
    "clip + adamw": (optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2)), True),
    "loss scale + clip + adamw": (
        jaxzero.dynamic_loss_scale(optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))),
        True,
    ),
    "lamb": (optax.lamb(1e-2), False),
}


@pytest.mark.parametrize("name", INNERS)
def test_several_regions_give_the_numbers_of_one(mesh8, monkeypatch, name):
    """Elementwise optimizers of many leaves are cut into parts; others are not; the results are the same."""
    inner, cuts = INNERS[name]
    wave = lambda i: np.sin(np.arange(3 * i, dtype=np.float32)).reshape(i, 3)  # by NumPy: no program per shape
    params = {f"p{i}": jnp.asarray(wave(i + 1)) for i in range(18)}
    params |= {"scalar": jnp.float32(2.0), "empty": jnp.zeros((0, 3))}
    if "clip" not in name:  # Optax refuses to clip integer leaves
        params["steps"] = jnp.arange(4)
    grads = jax.tree.map(lambda x: jnp.asarray(np.cos(x) if x.dtype == np.float32 else np.zeros_like(x)), params)
    zero = jaxzero.Zero(mesh8, stage=2)

    def train():
        tx = zero.optimizer(inner)
        state, now = tx.init(params), params
        for _ in range(3):
            now, state = zero.apply(tx, grads, state, now)
        updates, _ = tx.update(grads, state, now)
        regions = str(jax.make_jaxpr(functools.partial(zero.apply, tx))(grads, state, now)).count("shard_map")
        return (now, state, updates), regions

    one, regions = train()
    assert regions == 1
    monkeypatch.setattr(split_program, "ONE_REGION", 30)
    monkeypatch.setattr(split_program, "ARRAYS", 20)
    several, regions = train()
    assert (regions > 3) == cuts
    helpers.close(several, one, 1e-6)
    assert jax.tree.structure(several) == jax.tree.structure(one)
    helpers.assert_all_shards_equal(several[0])


def test_parts_give_every_result_once(monkeypatch):
    monkeypatch.setattr(split_program, "ONE_REGION", 6)
    monkeypatch.setattr(split_program, "ARRAYS", 6)

    def f(count, a, b, c):
        rate = 1.0 / count
        return count + 1, a * rate, b + a, c * rate, rate

    jaxpr = jax.make_jaxpr(f)(1.0, *[np.ones(3, np.float32)] * 3).jaxpr
    found = split_program.independent_parts(jaxpr, [False, True, True, True])
    assert sorted(i for part in found for i in part.outputs) == list(range(5))
    assert len(found) > 1
    joined = next(part for part in found if 1 in part.outputs)
    assert 2 in joined.outputs  # a and b meet
    alone = next(part for part in found if 3 in part.outputs)
    assert 1 not in alone.inputs
    assert 0 in alone.inputs


def test_scalars_made_of_all_leaves_come_first(monkeypatch):
    monkeypatch.setattr(split_program, "ONE_REGION", 2)
    monkeypatch.setattr(split_program, "ARRAYS", 2)
    leaves = [np.ones(3, np.float32)] * 4

    def clipped(*leaves):
        norm = sum((x * x).sum() for x in leaves)
        return [x / norm for x in leaves]

    jaxpr = jax.make_jaxpr(clipped)(*leaves).jaxpr
    first, rest = split_program.cut_at_scalars(jaxpr, [True] * 4)
    assert first.inputs == [0, 1, 2, 3]
    (norm,) = first.jaxpr.outvars
    assert rest.invars == [*jaxpr.invars, norm]
    assert {eqn.primitive.name for eqn in rest.eqns} == {"div"}
    assert len(split_program.independent_parts(rest, [True] * 4 + [False])) > 1

    def narrow(*leaves):
        norm = optax.tree.norm(leaves)
        return [x / norm.astype(jnp.bfloat16) for x in leaves]  # a cast for each leaf

    first, rest = split_program.cut_at_scalars(jax.make_jaxpr(narrow)(*leaves * 3).jaxpr, [True] * 12)
    assert len(first.outputs) == 1
    assert len(split_program.independent_parts(rest, [True] * 12 + [False])) > 1

    own = jax.make_jaxpr(lambda *leaves: [x / (x * x).sum() for x in leaves])(*leaves * 3).jaxpr
    assert split_program.cut_at_scalars(own, [True] * 12) is None  # one for each leaf: too many
    mixed = jax.make_jaxpr(lambda *leaves: [x / jnp.cumsum(leaves[0]).sum() for x in leaves])(*leaves).jaxpr
    assert split_program.cut_at_scalars(mixed, [True] * 4) is None  # takes more than sums


def test_one_part_where_leaves_meet(monkeypatch):
    monkeypatch.setattr(split_program, "ONE_REGION", 2)
    monkeypatch.setattr(split_program, "ARRAYS", 2)
    jaxpr = jax.make_jaxpr(lambda a, b: (a + b, a - b))(*[np.ones(3, np.float32)] * 2).jaxpr
    assert len(split_program.independent_parts(jaxpr, [True, True])) == 1
    summed = jax.make_jaxpr(lambda a, b: (a * a.sum(), b))(*[np.ones(3, np.float32)] * 2).jaxpr
    assert len(split_program.independent_parts(summed, [True, True])) == 1
