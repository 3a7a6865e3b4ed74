"""State that belongs to a parameter that passes through stays; state that only has its name moves on."""

from typing import Any, NamedTuple

import equinox as eqx
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import close, host, make_mesh, name
from jax.sharding import PartitionSpec as P

import jaxzero
from jaxzero._src.optimizer.ownership import frozen_paths
from jaxzero._src.optimizer.trace import trace_init
from jaxzero._src.optimizer.wrapper import optimizer_leaves
from jaxzero._src.sharding.layout import is_split
from jaxzero._src.sharding.options import resolve_axes


class Params(NamedTuple):
    w: Any
    count: Any


@flax.struct.dataclass
class Model:
    w: Any
    count: Any
    mini_step: Any


class KeyedState(NamedTuple):
    key: Any
    step: Any
    momentum: Any


def keyed() -> optax.GradientTransformation:
    """Signed momentum with noise: its state has a key, a step and a tree like the parameters."""

    def init(params):
        return KeyedState(jax.random.key(7), jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params))

    def update(grads, state, params=None):
        key, use = jax.random.split(state.key)
        momentum = jax.tree.map(lambda m, g: 0.5 * m + g, state.momentum, grads)
        noise = 0.01 * jax.random.normal(use, ())
        updates = jax.tree.map(lambda m: -(0.1 + noise) * m / (1 + state.step), momentum)
        return updates, KeyedState(key, state.step + 1, momentum)

    return optax.GradientTransformation(init, update)


def by_name() -> optax.GradientTransformation:
    """State in a dict whose names are those of parameters."""
    init = lambda params: {
        "step": jnp.zeros((), jnp.int32),
        "scale": jnp.ones(()),
        "m": jax.tree.map(jnp.zeros_like, params),
    }

    def update(grads, state, params=None):
        m = jax.tree.map(lambda m, g: 0.9 * m + g, state["m"], grads)
        scale = state["scale"] * 0.9
        updates = jax.tree.map(lambda m: -0.1 * scale * m / (1 + state["step"]), m)
        return updates, {"step": state["step"] + 1, "scale": scale, "m": m}

    return optax.GradientTransformation(init, update)


def reads_every_leaf() -> optax.GradientTransformation:
    """Adam whose `init` refuses a tree without one of its arrays."""
    inner = optax.adam(0.1)

    def init(params):
        assert all(hasattr(params[name], "shape") for name in ("w", "count"))
        return inner.init(params)

    return optax.GradientTransformation(init, inner.update)


W = np.linspace(-1, 1, 13).astype(np.float32)
INT = np.int32(40)

#: Optimizer and parameters, of which `w` alone is trained.
CASES = {
    "namedtuple": (lambda: optax.adam(0.1), lambda w: Params(w, INT)),
    "flax_struct": (
        lambda: optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
        lambda w: Model(w, INT, INT),
    ),
    "dict": (by_name, lambda w: {"w": w, "step": INT, "m": {"step": INT}}),
    "key": (keyed, lambda w: {"w": w, "key": jax.random.key(3), "step": INT}),
    "nested": (lambda: optax.adamw(0.1), lambda w: {"mu": {"w": w, "count": INT}, "count": INT}),
    "adafactor": (lambda: optax.adafactor(0.1), lambda w: {"w": w, "count": INT, "v_row": np.arange(5)}),
    "masked": (
        lambda: optax.masked(optax.adam(0.1), lambda p: jax.tree.map(lambda x: True, p)),
        lambda w: Params(w, INT),
    ),
    "multi_transform": (
        lambda: optax.multi_transform(
            {"a": optax.adam(0.1), "b": optax.sgd(0.1, 0.9)}, lambda p: jax.tree.map(lambda x: "ab"[x.ndim == 0], p)
        ),
        lambda w: Params(w, INT),
    ),
    "schedule_free": (
        lambda: optax.contrib.schedule_free_adamw(0.1),
        lambda w: {"w": w, "step_size": INT, "weight_sum": INT},
    ),
    "reads_every_leaf": (reads_every_leaf, lambda w: {"w": w, "count": INT}),
    "ema": (
        lambda: optax.chain(optax.ema(0.9), optax.sgd(0.1)),
        lambda w: {"w": w, "ema": INT, "count": np.bool_(True)},
    ),
}


def plain(tree):
    """The tree as plain Optax can take it: zeros for keys, which it cannot."""
    is_key = lambda x: jnp.issubdtype(jnp.asarray(x).dtype, jax.dtypes.prng_key)
    return jax.tree.map(lambda x: jnp.int32(0) if is_key(x) else jnp.asarray(x), tree)


def with_w(tree, new):
    """The tree with its one floating leaf of `W.size` elements replaced."""
    found = lambda x: is_split(x) or (jnp.issubdtype(x.dtype, jnp.floating) and x.size == W.size)
    return jax.tree.map(lambda x: new if found(x) else x, tree, is_leaf=is_split)


def w_of(tree):
    return next(x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating) and x.size == W.size)


def gradient(i):
    return jnp.asarray(np.sin(np.arange(W.size) + i).astype(np.float32))


def reference(tx, tree, steps=4):
    """Plain Optax, with gradients of zero for what passes through, whose updates are dropped."""
    params = plain(tree(W))
    zeros = jax.tree.map(jnp.zeros_like, params)
    state = tx.init(params)
    for i in range(steps):
        updates, state = tx.update(with_w(zeros, gradient(i)), state, params)
        params = with_w(params, w_of(params) + w_of(updates))
    return w_of(params), state


def frozen_names(tx, tree, zero):
    leaves, _ = optimizer_leaves(zero, "init", tree(W), resolve_axes(zero, "init")[0])
    axes = resolve_axes(zero, "init")[0]
    initial = trace_init(tx, leaves, axes).out
    return {name(path) for path in frozen_paths(tx, leaves, initial, initial, axes)}


#: What belongs to a parameter that passes through, in each case.
FROZEN = {
    "namedtuple": {"0/mu/count", "0/nu/count"},
    "flax_struct": {
        f"{a}/{leaf}"
        for a in ("inner_opt_state/0/mu", "inner_opt_state/0/nu", "acc_grads")
        for leaf in ("count", "mini_step")
    },
    "dict": {"m/step", "m/m/step"},
    "key": {"momentum/key", "momentum/step"},
    "nested": {f"0/{m}/{leaf}" for m in ("mu", "nu") for leaf in ("count", "mu/count")},
    "adafactor": {f"0/{m}/{leaf}" for m in ("v_row", "v_col", "v") for leaf in ("count", "v_row")},
    "masked": {"inner_state/0/mu/count", "inner_state/0/nu/count"},
    "multi_transform": {"inner_states/b/inner_state/0/trace/count"},
    "schedule_free": {
        "base_optimizer_state/0/nu/step_size",
        "base_optimizer_state/0/nu/weight_sum",
        "z/step_size",
        "z/weight_sum",
    },
    "reads_every_leaf": {"0/mu/count", "0/nu/count"},
    "ema": {"0/ema/ema", "0/ema/count"},
}


@pytest.mark.parametrize("case", CASES)
def test_what_belongs_to_a_parameter_that_passes_through(case):
    make, tree = CASES[case]
    assert frozen_names(make(), tree, jaxzero.Zero(make_mesh(8))) == FROZEN[case]


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("case", CASES)
def test_state_of_the_same_name_moves_on(case, stage):
    make, tree = CASES[case]
    zero = jaxzero.Zero(make_mesh(8 if stage != 2 else 3), stage=stage)
    w, expected = reference(make(), tree)
    tx = zero.optimizer(make())
    params = zero.shard(jax.tree.map(jnp.asarray, tree(W)))
    before, state = params, tx.init(params)

    @jax.jit
    def step(params, state, g):
        return zero.apply(tx, with_w(params, zero.shard(g)), state, params)

    for i in range(4):
        params, state = step(params, state, gradient(i))
    whole = zero.gather(params)
    close(w_of(whole), w)
    for x, y in zip(jax.tree.leaves(whole), jax.tree.leaves(zero.gather(before)), strict=True):
        assert x.size == W.size or (host(x) == host(y)).all()
    mine = {name(p): x for p, x in jax.tree_util.tree_leaves_with_path(state)}
    for path, y in jax.tree_util.tree_leaves_with_path(expected):
        if name(path) not in FROZEN[case] and jnp.shape(y) == ():
            close(mine[name(path)], y)


def test_equinox_modules():
    class Net(eqx.Module):
        w: Any
        count: Any

    w, _ = reference(optax.adam(0.1), lambda w: Net(w, INT))
    zero = jaxzero.Zero(make_mesh(8), stage=2)
    tx = zero.optimizer(optax.adam(0.1))
    params = Net(jnp.asarray(W), jnp.asarray(INT))
    state = tx.init(params)
    for i in range(4):
        params, state = zero.apply(tx, with_w(params, gradient(i)), state, params)
    close(params.w, w)
    assert int(state[0].count) == 4


def test_a_skipped_scalar_of_the_same_name():
    """`count` is not used by the loss: it and its state stay, Adam's own `count` goes on."""
    zero = jaxzero.Zero(make_mesh(8), stage=2, unused="skip")
    loss = lambda p, x: jnp.mean((x @ p["w"]) ** 2)
    params = {"w": jnp.ones((13, 1)), "count": jnp.float32(5)}
    x = jnp.asarray(np.random.default_rng(0).normal(size=(16, 13)).astype(np.float32))
    zero = zero.observe(loss, params, x)
    tx = zero.optimizer(optax.adamw(0.1, weight_decay=0.1))
    alone, plain_tx = {"w": params["w"]}, optax.adamw(0.1, weight_decay=0.1)
    state, plain_state = tx.init(params), plain_tx.init(alone)
    for _ in range(3):
        _, grads = zero.value_and_grad(loss)(params, x)
        params, state = zero.apply(tx, grads, state, params)
        updates, plain_state = plain_tx.update(jax.grad(loss)(alone, x), plain_state, alone)
        alone = optax.apply_updates(alone, updates)
    close(params["w"], alone["w"])
    assert (float(params["count"]), int(state[0].count)) == (5, 3)


def test_inside_shard_map():
    mesh = make_mesh(8)
    zero, tx = jaxzero.Zero(mesh), jaxzero.zero2(optax.adam(0.1), "data")
    params = Params(jnp.asarray(W), jnp.asarray(INT))
    state = zero.optimizer(optax.adam(0.1)).init(params)

    def step(state, w):
        grads = Params(jax.lax.pcast(jnp.ones(W.size), "data", to="varying"), jnp.int32(0))
        updates, state = tx.update(grads, state, Params(w, jnp.asarray(INT)))
        return state, w + updates.w

    specs = zero.specs(state)
    run = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(specs, P()), out_specs=(specs, P())))
    w = params.w
    for _ in range(3):
        state, w = run(state, w)
    close(w, W - 0.3, 1e-5)
    assert int(state[0].count) == 3


def test_state_that_grows_at_the_first_update():
    """The first update adds leaves; what was frozen stays in its place."""

    def init(params):
        return {"later": None, "trace": jax.tree.map(jnp.zeros_like, params), "count": jnp.zeros((), jnp.int32)}

    def update(grads, state, params=None):
        trace = jax.tree.map(lambda t, g: 0.9 * t + g, state["trace"], grads)
        new = {"later": jnp.ones((3,)), "trace": trace, "count": state["count"] + 1}
        return jax.tree.map(lambda t: -0.1 * t, trace), new

    inner = optax.GradientTransformation(init, update)
    w, _ = reference(inner, lambda w: {"w": w, "count": INT})
    zero = jaxzero.Zero(make_mesh(8), stage=2)
    tx = zero.optimizer(inner)
    params = {"w": jnp.asarray(W), "count": jnp.asarray(INT)}
    state = tx.init(params)
    for i in range(4):
        params, state = zero.apply(tx, with_w(params, gradient(i)), state, params)
    close(params["w"], w)
    assert int(state["count"]) == 4
    assert state["trace"]["count"].dtype == jnp.int32
