"""Parameters that other mesh axes shard already: the run of one device, and nothing moved over those axes for it."""

import functools

import checks
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tensor_parallel_cases import OPTIMIZERS, SHAPES, SPECS, batches, loss, placed, tree, unpadded

import jaxzero
from jaxzero._src.comm import collectives

#: What each leaf becomes when 4 devices of "data" cut it, too; `b1` has no dimension left.
CUT = {"emb": P("model", "data"), "w1": P("data", "model"), "b1": P("model"), "w2": P("model", "data")}
CUT |= {"b2": P("data"), "odd": P("data", "model"), "scale": P()}


def slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


def make(stage, *, mics=False, explicit=False, specs=SPECS, **options):
    shape, names = ((2, 2, 2), ("replica", "data", "model")) if mics else ((4, 2), ("data", "model"))
    mesh = helpers.make_mesh(shape, names, explicit=explicit)
    options |= dict(replica_axis="replica") if mics else {}
    return jaxzero.Zero(mesh, stage=stage, param_specs=specs, **options)


def stored_specs(tree):
    return {name: _trimmed(getattr(leaf, "value", leaf).sharding.spec) for name, leaf in tree.items()}


def _trimmed(spec):
    parts = list(spec)
    while parts and parts[-1] is None:
        parts.pop()
    return P(*parts)


def run(zero, inner, steps=5):
    """Five steps; asserts on the way that gradients are right and that one program serves all steps."""
    tx = zero.optimizer(inner)
    params = zero.shard(tree())
    state = tx.init(params)
    grad_fn = zero.value_and_grad(loss)

    @jax.jit
    def step(params, state, batch):
        value, grads = grad_fn(params, batch)
        return *zero.apply(tx, grads, state, params), value, grads

    for i, batch in enumerate(batches(steps)):
        before = [x.sharding for x in jax.tree.leaves((params, state))]
        params, state, _, grads = step(params, state, placed(zero, batch))
        if i == 0:
            for name, want in jax.jit(jax.grad(loss))(tree(), batch).items():
                helpers.close(unpadded(getattr(grads[name], "value", grads[name]), want.shape), want)
            assert stored_specs(grads) == (SPECS | {"w2": P("model")} if zero.stage == 1 else CUT)
        after = jax.tree.leaves((params, state))
        assert all(x.sharding.is_equivalent_to(old, x.ndim) for x, old in zip(after, before, strict=True))
    assert step._cache_size() == 1
    return params, state


@functools.cache
def unsharded(name):
    """Parameters and state of the run on one device."""
    tx, params = OPTIMIZERS[name], tree()

    @jax.jit
    def step(params, state, batch):
        updates, state = tx.update(jax.grad(loss)(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    state = jax.jit(tx.init)(params)
    for batch in batches():
        params, state = step(params, state, batch)
    return params, state


DEFAULT = [(1, {}, "adamw"), (2, {}, "lamb"), (3, {}, "adafactor"), (2, dict(explicit=True), "muon")]
GRID = [(s, how, name) for s in (1, 2, 3) for how in ({}, dict(explicit=True), dict(mics=True)) for name in OPTIMIZERS]
REST = [slow(*case) for case in GRID if case not in DEFAULT]


@pytest.mark.parametrize(("stage", "how", "name"), [*DEFAULT, *REST])
def test_run_equals_the_unsharded_one(stage, how, name):
    zero = make(stage, **how)
    params, state = run(zero, OPTIMIZERS[name])
    want_params, want_state = unsharded(name)
    assert stored_specs(params) == (CUT if stage == 3 else SPECS | {"w2": P("model")})
    whole = zero.gather(params)
    checks.assert_params_equal(whole, want_params)
    assert stored_specs(whole) == SPECS | {"w2": P("model")}
    helpers.assert_all_shards_equal(state)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(want_state), strict=True):
        a, b = unpadded(a, np.shape(b)), np.asarray(b)
        np.testing.assert_allclose(a, b, 2e-5, 2e-5 * np.max(np.abs(b), initial=0), err_msg=helpers.name(path))


@pytest.mark.parametrize(
    ("stage", "explicit"), [(2, True), slow(1, True), slow(3, True), slow(1, False), slow(2, False), slow(3, False)]
)
def test_where_the_mesh_is_set(stage, explicit):
    """`jax.set_mesh` around everything, as for models that annotate their own activations."""
    zero = make(stage, explicit=explicit)
    with jax.set_mesh(zero.mesh):
        params, state = run(zero, OPTIMIZERS["adamw"])
        assert zero.specs(state)[1][0].mu["w1"] == P("data")
        assert zero.plan(params, OPTIMIZERS["adamw"]).total
        whole = zero.gather(params)
    checks.assert_params_equal(whole, unsharded("adamw")[0])


# --- what moves over the other axis --------------------------------------------------------------

LARGE = {"emb": (60, 64), "w1": (64, 128), "w2": (128, 64), "odd": (61, 64), "b1": (128,), "b2": (64,), "scale": ()}
#: Bytes of the smallest share of a matrix; vectors, among them those of Adafactor, are smaller.
LEAST = 60 * 64 * 4 // 8


def over_model(lowered):
    return [x for x in jaxzero.collectives(lowered.compile(), make(2).mesh) if "model" in x.axes]


def update_over_model(name, stage=2):
    zero = make(stage)
    tx = zero.optimizer(OPTIMIZERS[name])
    params = zero.shard(tree(LARGE))
    grads = make(3).shard(tree(LARGE))
    step = jax.jit(lambda g, s, p: zero.apply(tx, g, s, p))
    return over_model(step.lower(grads, tx.init(params), params))


@pytest.mark.parametrize("name", ["adamw", "lamb", "adafactor"])
def test_update_moves_no_parameter_over_the_other_axis(name):
    rows = update_over_model(name)
    assert rows  # norms and factored moments cross it
    assert max(row.nbytes for row in rows) < LEAST


def test_muon_moves_what_newton_schulz_needs_and_explain_prints_it():
    report = make(2).explain(OPTIMIZERS["muon"], tree(LARGE))
    assert {x.axes for x in report.others} == {("model",)}
    assert max(x.nbytes for x in report.others) >= LEAST
    assert f"{len(report.others)} collectives over other mesh axes" in str(report)
    # Over "data" each half travels by itself.
    assert {c.nbytes for c in report.gathers if c.shape[-2:] == (64, 128)} == {128 * 64 * 4 // 2}


def gradient_over_model(stage):
    zero = make(stage)
    params = zero.shard(tree(LARGE))
    batch = placed(zero, [x[:4] for x in batches(1)[0][:1]] + [np.zeros((4, 61), np.float32)])
    return over_model(jax.jit(zero.value_and_grad(loss)).lower(params, tuple(batch)))


@pytest.mark.parametrize("stage", [2, 3])
def test_gradient_moves_no_parameter_over_the_other_axis(stage):
    rows = gradient_over_model(stage)
    assert rows  # activations cross it
    assert max(row.nbytes for row in rows) < LEAST


def test_without_nested_regions_the_compiler_would_move_them(monkeypatch):
    monkeypatch.setattr(collectives, "within", lambda other_axes, f, x, *rest: f(x, *rest))
    assert max(row.nbytes for row in update_over_model("adamw")) >= LEAST


# --- losses, loops, a region of the user's own ---------------------------------------------------


@pytest.mark.parametrize(("stage", "explicit"), [(3, False), slow(2, False), slow(2, True), slow(3, True)])
def test_constraints_and_layers_in_the_loss(stage, explicit):
    """A loss that says where its activations are, over scanned layers, with accumulation."""
    params = {"layers": jax.random.normal(jax.random.key(1), (3, 16, 16)) / 4, "bias": jnp.ones((3, 16))}
    specs = {"layers": P(None, None, "model"), "bias": P(None, "model")}

    def deep(params, x):
        def layer(x, p):
            x = lax.with_sharding_constraint(x @ p["layers"], P(None, "model"))
            return jnp.tanh(x + p["bias"]), None

        return jnp.mean(lax.scan(layer, x, params)[0] ** 2)

    def plain(params, x):
        return jnp.mean(lax.scan(lambda x, p: (jnp.tanh(x @ p["layers"] + p["bias"]), None), x, params)[0] ** 2)

    x = np.random.default_rng(3).normal(size=(16, 16)).astype(np.float32)
    zero = make(stage, specs=specs, explicit=explicit).observe(deep, params, x)
    at_rest = zero.shard(params)
    if stage == 3:
        assert stored_specs(at_rest) == {"layers": P(None, "data", "model"), "bias": P(None, "model")}
    value, grads = zero.value_and_grad(deep, accumulate=2)(at_rest, placed(zero, x))
    want = jax.value_and_grad(plain)(params, x)
    helpers.close((value, zero.gather(grads)), want)
    rows = zero.forward(lambda p, x: x @ p["layers"][0])(at_rest, placed(zero, x))
    helpers.close(rows, x @ params["layers"][0])


@pytest.mark.parametrize(("stage", "shares"), [(3, 4), slow(2, 4), slow(3, 1), slow(2, 1)])
def test_inside_a_users_shard_map(stage, shares):
    mesh = helpers.make_mesh((shares, 2), ("data", "model"))
    zero = jaxzero.Zero(mesh, stage=stage, param_specs=SPECS)
    tx = zero.optimizer(OPTIMIZERS["adamw"])
    params = zero.shard(tree())
    state = tx.init(params)
    held, specs = zero.specs(params), zero.specs(state)
    assert jax.tree.leaves(specs) == [P(*(a if a == "data" else None for a in x)) for x in jax.tree.leaves(specs)]

    def step(params, state, batch):
        _, grads = zero.value_and_grad(loss)(params, batch)
        return zero.apply(tx, grads, state, params)

    step = jax.shard_map(
        step, mesh=zero.mesh, in_specs=(held, specs, P("data")), out_specs=(held, specs), axis_names={"data"}
    )
    for batch in batches():
        params, state = jax.jit(step)(params, state, placed(zero, batch))
    checks.assert_params_equal(zero.gather(params), unsharded("adamw")[0])


@pytest.mark.parametrize("stage", [2, 3])
def test_a_function_gives_the_specs_and_parameters_are_born_in_place(stage):
    by_name = lambda path, leaf: SPECS[path[-1].key] if leaf.ndim else None
    born = lambda key: {name: jax.random.normal(key, SHAPES[name]) for name in ("odd", "b1", "scale")}
    zero = make(stage, specs=by_name)
    params = zero.init(born, jax.random.key(0))
    assert stored_specs(params) == {name: (CUT if stage == 3 else SPECS)[name] for name in params}
    helpers.close(zero.gather(params), jax.jit(born)(jax.random.key(0)))
    tx = zero.optimizer(optax.adam(1e-2))
    state = tx.init(jax.eval_shape(lambda: zero.shard(born(jax.random.key(0)))))
    assert _trimmed(state[0].mu["odd"].sharding.spec) == P("data", "model")
    assert state[0].mu["odd"].shape == (16, 16)  # padded from 13


def test_plan_counts_what_a_device_holds():
    plan = make(3).plan(tree(), optax.adam(1e-2))
    rows = {row.path: row for row in plan.leaves}
    assert (rows["odd"].layout, rows["odd"].stored_shape, rows["odd"].padding) == ("rows", (16, 16), 3 * 16)
    assert rows["odd"].parameters == rows["odd"].gradients == 16 * 16 * 4 // 8
    assert rows["odd"].state == 2 * rows["odd"].parameters
    assert (rows["b1"].layout, rows["b1"].parameters, rows["b1"].state) == ("whole", 64, 128)
    assert "not cut, since other axes shard every dimension: b1" in str(plan)
    params = make(3).shard(tree())
    assert plan.at_rest[3].parameters == sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(params))


# --- bad input -----------------------------------------------------------------------------------

FIX = "Fix:"


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (P("modle"), ["w1", "'modle'", "not in the mesh", "model"]),
        (P("data"), ["w1", "'data'", "splits"]),
        (P(None, None, "model"), ["w1", "3 entries", "at most 2"]),
        (P("model", "model"), ["w1", "'model' twice"]),
        ("model", ["w1", "str", "PartitionSpec"]),
    ],
)
def test_specs_that_do_not_fit_are_refused(spec, words):
    with pytest.raises(ValueError, match=checks.saying("param_specs", *words, FIX)):
        make(2, specs=SPECS | {"w1": spec}).shard(tree())
    with pytest.raises(ValueError, match=checks.saying("param_specs", *words, FIX)):
        make(2, specs=lambda path, leaf: spec if path[0].key == "w1" else None).shard(tree())


def test_more_that_is_refused():
    with pytest.raises(
        ValueError, match=checks.saying("param_specs", "odd", "dimension 0 of 13", "divide by the 2", FIX)
    ):
        make(2, specs=SPECS | {"odd": P("model")}).shard(tree())
    with pytest.raises(ValueError, match=checks.saying("param_specs has no leaf 'scale'", FIX)):
        make(2, specs={k: v for k, v in SPECS.items() if k != "scale"}).shard(tree())
    with pytest.raises(ValueError, match=checks.saying("regather", "param_specs", FIX)):
        make(3, specs=SPECS, mics=True, shard_axis=("replica", "data"), replica_axis=None, regather="local")
    zero = make(2)
    state = zero.optimizer(optax.adam(1e-2)).init(zero.shard(tree()))
    with pytest.raises(ValueError, match=checks.saying("specs: leaf '0/mu/b1'", "NamedSharding", FIX)):
        jax.eval_shape(lambda s: zero.specs(s) and 0, state)


ONE = {"w": np.ones((16, 4), np.float32), "odd": np.ones((5, 4), np.float32)}


def mean(params, x):
    return jnp.mean((x @ params["w"]) ** 2) + jnp.sum(params["odd"] ** 2)


CALLS = {
    "shard": lambda zero, params: zero.shard(params),
    "init": lambda zero, params: zero.optimizer(optax.adam(1e-2)).init(params),
    "gather": lambda zero, params: zero.gather(params),
    "value_and_grad": lambda zero, params: zero.value_and_grad(mean)(params, np.ones((8, 16))),
    "forward": lambda zero, params: zero.forward(lambda p, x: x @ p["w"])(params, np.ones((8, 16))),
    "observe": lambda zero, params: zero.observe(mean, params, np.ones((8, 16))),
    "plan": lambda zero, params: zero.plan(params),
    "explain": lambda zero, params: zero.explain(optax.adam(1e-2), params),
}


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_sharded_leaves_without_param_specs_point_to_it(stage, explicit):
    """Nothing is made whole over an axis of somebody else's without a word, whichever leaf and call it is."""
    zero = make(stage, specs=None, explicit=explicit)
    for name in ONE:
        params = ONE | {name: checks.place(ONE[name], zero.mesh, P(None, "model"))}
        for call, f in CALLS.items():
            words = [f"{call}: leaf '{name}'", r"P\(None, 'model'\)", "Fix: .*param_specs=jax.tree.map", "device_put"]
            with pytest.raises(ValueError, match=checks.saying(*words)):
                f(zero, params)
    if explicit:  # types show it under jit too
        with pytest.raises(ValueError, match=checks.saying("shard: leaf 'odd'", "param_specs=")):
            jax.eval_shape(zero.shard, params)


@pytest.mark.parametrize("stage", [2, 3])
def test_abstract_leaves_too(stage):
    zero = make(stage, specs=None)
    placed = NamedSharding(zero.mesh, P(None, "model"))
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed), {"odd": ONE["odd"]})
    for call in ("init", "observe", "plan", "explain"):
        with pytest.raises(ValueError, match=checks.saying(f"{call}: leaf 'odd'", "param_specs=")):
            CALLS[call](zero, params)


def test_specs_read_from_the_arrays():
    params = checks.place(ONE, make(2).mesh, P(None, "model"))
    zero = make(2, specs=jax.tree.map(lambda x: x.sharding.spec, params))
    assert zero.optimizer(optax.adam(1e-2)).init(params)[0].mu["w"].sharding.spec == P("data", "model")
    assert stored_specs(zero.shard(params)) == {"w": P(None, "model"), "odd": P(None, "model")}


def test_an_axis_of_another_mesh():
    """No spec of this `Zero` could name it."""
    other = helpers.make_mesh((4, 2), ("data", "column"))
    params = ONE | {"w": checks.place(ONE["w"], other, P(None, "column"))}
    with pytest.raises(ValueError, match=checks.saying("shard: leaf 'w'", "'column': 2", "Fix: jax.device_put")):
        make(2, specs=None).shard(params)


def test_other_axis_manual_in_a_users_shard_map_is_refused():
    zero = make(2)
    everywhere = jax.shard_map(zero.optimizer(optax.sgd(0.1)).init, mesh=zero.mesh, in_specs=P(), out_specs=P())
    with pytest.raises(ValueError, match=checks.saying("param_specs", "'b1'", "'model' is", "manual", FIX)):
        jax.eval_shape(everywhere, tree())


def experts(p, x):
    """Experts over `model` in a nested `shard_map` that reads the number of its device there."""

    def local(e, x):
        h = jnp.einsum("bi,eij->bej", x, e) * (1.0 + jax.lax.axis_index("model"))
        return jax.lax.psum(h.sum(1), "model")

    nested = jax.shard_map(local, in_specs=(P("model"), P()), out_specs=P(), axis_names={"model"})
    return jnp.tanh(nested(p["experts"], x)) @ p["w"]


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("specs", [None, {"experts": P("model"), "w": P()}])
def test_axis_index_of_another_axis(stage, specs):
    """In a nested `shard_map` of the loss it is the number along that axis, in gradients and in `forward`."""
    mesh = helpers.make_mesh((4, 2), ("data", "model"))
    params = {"experts": jnp.cos(jnp.arange(192.0)).reshape(4, 8, 6), "w": jnp.eye(6, 3)}
    x = jnp.sin(jnp.arange(64.0)).reshape(8, 8)
    loss = lambda p, x: jnp.mean(experts(p, x) ** 2)
    with jax.set_mesh(mesh):
        want, out = jax.jit(jax.value_and_grad(loss))(params, x), jax.jit(experts)(params, x)
    zero = jaxzero.Zero(mesh, stage=stage, param_specs=specs)
    stored = zero.shard(params)
    value, grads = jax.jit(zero.value_and_grad(loss))(stored, x)
    np.testing.assert_allclose(value, want[0], rtol=1e-6)
    helpers.close(jax.device_get(grads if stage == 1 else zero.gather(grads)), jax.device_get(want[1]))
    helpers.close(jax.device_get(jax.jit(zero.forward(experts))(stored, x)), jax.device_get(out))
