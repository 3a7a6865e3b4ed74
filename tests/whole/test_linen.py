"""Flax Linen: `TrainState`, mutable collections, lifted transformations and boxes equal the unsharded run."""

import contextlib
import functools
from typing import Any

import checks
import flax.linen as nn
import helpers
import jax
import jax.numpy as jnp
import nnx_models as models
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import jaxzero

SGD = optax.sgd(0.1, momentum=0.9)


def slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


class State(TrainState):
    batch_stats: Any


class Normed(nn.Module):
    """A mutable collection. The bias in front of the statistics would have no gradient but rounding."""

    axis: Any

    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False, axis_name=self.axis)(nn.Dense(16, use_bias=False)(x))
        return nn.Dense(3)(nn.tanh(x))


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + nn.tanh(nn.Dense(8)(x)), None


class Scanned(nn.Module):
    """Three rematerialised layers, stacked and walked over by `nn.scan`."""

    axis: Any

    @nn.compact
    def __call__(self, x):
        layers = nn.scan(nn.remat(Layer), variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        return nn.Dense(3)(layers()(nn.Dense(8)(x), None)[0])


def boxed(*names):
    return nn.with_partitioning(nn.initializers.lecun_normal(), names)


class Boxed(nn.Module):
    """Kernels in boxes that name the axis over which they would be sharded."""

    axis: Any

    @nn.compact
    def __call__(self, x):
        name = "shard" if self.axis is None or "shard" in self.axis else "data"
        x = nn.tanh(nn.Dense(16, kernel_init=boxed(None, name))(x))
        return nn.Dense(3, kernel_init=boxed(name, None))(x)


MODELS = {"BatchNorm": Normed, "scan, remat": Scanned, "Partitioned": Boxed}
QUICK = {("BatchNorm", "MiCS, stage 3"), ("scan, remat", "stage 3")}


def start(model, tx, zero=None):
    """Drawn for the unsharded run and for ours alike."""
    variables = model.init(jax.random.key(0), models.batches()[0][0])
    params = variables["params"] if zero is None else zero.shard(variables["params"])
    return State.create(apply_fn=model.apply, params=params, tx=tx, batch_stats=variables.get("batch_stats", {}))


def loss_of(model):
    def loss_fn(params, batch_stats, x, y):
        out, changed = model.apply({"params": params, "batch_stats": batch_stats}, x, mutable=["batch_stats"])
        return jnp.mean(jnp.square(out - y)), changed.get("batch_stats", {})

    return loss_fn


def train(state, grad_fn, zero=None):
    @jax.jit
    def step(state, x, y):
        (loss, batch_stats), grads = grad_fn(state.params, state.batch_stats, x, y)
        return state.apply_gradients(grads=grads).replace(batch_stats=batch_stats), loss

    losses = []
    for batch in models.batches():
        state, loss = step(state, *(batch if zero is None else checks.place(batch, zero.mesh, P(checks.axes_of(zero)))))
        losses.append(float(loss))
    return state, losses


@functools.cache
def unsharded(name):
    model = MODELS[name](None)
    return train(start(model, SGD), jax.value_and_grad(loss_of(model), has_aux=True))


def grid():
    pairs = [(name, setting) for name in MODELS for setting in models.SETTINGS]
    return [pytest.param(*p, marks=[] if p in QUICK else pytest.mark.slow) for p in pairs]


@pytest.mark.parametrize(("name", "setting"), grid())
def test_train_state(name, setting):
    """`apply_gradients` of a `TrainState` whose `tx` is wrapped, as Flax has it."""
    zero = models.make_zero(setting)
    model = MODELS[name](checks.axes_of(zero))
    loss_fn = loss_of(model)
    if name == "scan, remat":
        params = MODELS[name](None).init(jax.random.key(0), models.batches()[0][0])["params"]
        zero = zero.observe(loss_fn, params, {}, *models.batches()[0], whole_argnums=1)
        assert zero.stacked.paths
    state = start(model, zero.optimizer(SGD), zero)
    got, losses = train(state, zero.value_and_grad(loss_fn, has_aux=True, whole_argnums=1), zero)
    want, losses_ = unsharded(name)
    names = lambda tree: [helpers.name(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    assert names(got.params) == names(state.params)
    helpers.close(nn.unbox(zero.gather(got.params)), nn.unbox(want.params))
    helpers.close(got.batch_stats, want.batch_stats)
    checks.assert_state_equal(nn.unbox(got.opt_state), nn.unbox(want.opt_state))
    assert int(got.step) == 5
    np.testing.assert_allclose(losses, losses_, rtol=1e-5)


def test_the_program_of_the_guide(tmp_path):
    """A `TrainState` whose `apply_fn` takes split parameters, and a checkpoint that another mesh reads."""
    model, inner, (x, y) = Scanned(None), optax.adamw(1e-2), models.batches()[0]
    params = model.init(jax.random.key(0), x)["params"]
    loss_fn = lambda params, x, y: jnp.mean(jnp.square(model.apply({"params": params}, x) - y))

    def start(zero):
        predict = zero.forward(lambda params, x: model.apply({"params": params}, x))
        return TrainState.create(apply_fn=predict, params=zero.shard(params), tx=zero.optimizer(inner))

    one, other = (jaxzero.Zero(helpers.make_mesh(n), stage=3) for n in (8, 2))
    state = start(one)
    state = state.apply_gradients(grads=one.value_and_grad(loss_fn)(state.params, x, y)[1])
    jaxzero.save(tmp_path, 1, one, state.params, state.opt_state).wait()
    restored = jaxzero.restore(tmp_path, other, jax.eval_shape(lambda: params), inner)
    again = start(other).replace(step=restored.step, params=restored.params, opt_state=restored.opt_state)
    np.testing.assert_allclose(again.apply_fn(again.params, x), state.apply_fn(state.params, x), rtol=1e-5, atol=1e-6)
    assert int(again.step) == int(state.step) == 1
    helpers.close(other.gather(again.opt_state[0].mu, like=params), one.gather(state.opt_state[0].mu, like=params))


@pytest.mark.parametrize("explicit", [False, True])
def test_boxes_stay_where_the_mesh_is_set(explicit):
    """Under `jax.set_mesh` a box constrains its value as the model reads it; inside the loss there is none."""
    mesh = helpers.make_mesh(8, explicit=explicit)
    model = Boxed(("data",))
    params = model.init(jax.random.key(0), models.batches()[0][0])["params"]
    zero = jaxzero.Zero(mesh, stage=2)
    loss_fn = lambda params, x, y: jnp.mean(jnp.square(model.apply({"params": params}, x) - y))
    batch = checks.place(models.batches()[0], mesh, P("data"))
    with jax.set_mesh(mesh):
        _, grads = zero.value_and_grad(loss_fn)(zero.shard(params), *batch)
        predicted = zero.forward(lambda p, x: model.apply({"params": p}, x))(zero.shard(params), batch[0])
    assert grads["Dense_0"]["kernel"].names == (None, "data")
    assert isinstance(grads["Dense_0"]["kernel"].value, jaxzero.EvenSplit)
    want = jax.grad(loss_fn)(nn.unbox(params), *models.batches()[0])
    helpers.close(zero.gather(nn.unbox(grads)), want)
    np.testing.assert_allclose(predicted, model.apply({"params": params}, batch[0]), rtol=1e-5, atol=1e-6)


class Named(nn.Module):
    names: Any
    logical: bool = False

    @nn.compact
    def __call__(self, x):
        box = nn.with_logical_partitioning if self.logical else nn.with_partitioning
        return nn.Dense(16, kernel_init=box(nn.initializers.lecun_normal(), self.names))(x)


def named(*names, logical=False):
    return Named(names, logical).init(jax.random.key(0), jnp.ones((8, 5)))["params"]


@pytest.fixture
def mesh42():
    return Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


CALLS = {
    "shard": lambda zero, params: zero.shard(params),
    "init": lambda zero, params: zero.optimizer(SGD).init(params),
    "value_and_grad": lambda zero, params: zero.value_and_grad(
        lambda p, x: jnp.mean(Named((None, None)).apply({"params": p}, x))
    )(params, jnp.ones((8, 5))),
}


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("call", CALLS)
def test_a_box_with_an_unknown_axis(call, stage, mesh42):
    words = ["parameter leaf 'Dense_0/kernel'", "Partitioned box", r"names=\(None, 'modle'\)", "did you mean 'model'"]
    with pytest.raises(ValueError, match=checks.saying(call, *words, r"\('data', 'model'\)")):
        CALLS[call](jaxzero.Zero(mesh42, stage=stage), named(None, "modle"))


LOOKS = {
    "observe": lambda zero, params: zero.observe(lambda p: jnp.mean(nn.unbox(p)["Dense_0"]["kernel"]), params),
    "plan": lambda zero, params: zero.plan(params),
    "explain": lambda zero, params: zero.explain(SGD, params),
}


@pytest.mark.parametrize("call", LOOKS)
def test_calls_that_only_look_check_boxes_too(call, mesh42):
    with pytest.raises(ValueError, match=checks.saying(f"{call}: parameter leaf 'Dense_0/kernel'", "'modle'")):
        LOOKS[call](jaxzero.Zero(mesh42), named(None, "modle"))


@pytest.mark.parametrize("set_mesh", [False, True])
@pytest.mark.parametrize("stage", [2, 3])
def test_parameters_born_in_a_box_with_an_unknown_axis(stage, set_mesh, mesh42):
    """Where the mesh is set, Flax constrains the value as the box is read, and JAX would name the axis alone."""
    zero = jaxzero.Zero(mesh42, stage=stage)
    born = lambda key: Named((None, "modle")).init(key, jnp.ones((8, 5)))["params"]
    run = functools.partial(zero.init, born)
    with jax.set_mesh(mesh42) if set_mesh else contextlib.nullcontext():
        for init in (run, jax.jit(run)):
            with pytest.raises(ValueError, match=checks.saying("init", "'Dense_0/kernel'", "'modle'", "mean 'model'")):
                init(jax.random.key(0))


def test_an_error_of_the_users_own_stays(mesh42):
    def born(key):
        raise ValueError("mine")

    with jax.set_mesh(mesh42), pytest.raises(ValueError, match="^mine"):
        jaxzero.Zero(mesh42).init(born, jax.random.key(0))
    wrong = lambda key: {"w": jax.lax.with_sharding_constraint(jnp.ones((4, 4)), P("modle"))}
    with jax.set_mesh(mesh42), pytest.raises(ValueError, match="Resource axis: modle"):
        jaxzero.Zero(mesh42).init(wrong, jax.random.key(0))


def test_a_box_with_an_axis_that_is_not_this_zeros(mesh42):
    words = ["'Dense_0/kernel'", "'model'", "tensor parallel", r"Fix: .*param_specs=flax\.linen\.get_partition_spec"]
    for zero in (jaxzero.Zero(mesh42), jaxzero.Zero(mesh42, param_specs=lambda path, leaf: None)):
        with pytest.raises(ValueError, match=checks.saying(*words)):
            zero.shard(named(None, "model"))


class Parallel(nn.Module):
    """Two kernels of a tensor-parallel pair, in boxes."""

    @nn.compact
    def __call__(self, x):
        x = nn.tanh(nn.Dense(16, kernel_init=boxed(None, "model"))(x))
        return nn.Dense(3, kernel_init=boxed("model", None))(x)


@pytest.mark.parametrize("set_mesh", [False, True])
@pytest.mark.parametrize(("stage", "boxes"), [(3, True), slow(2, True), slow(2, False), slow(3, False)])
def test_the_fix_that_the_error_names(stage, boxes, set_mesh, mesh42):
    """`param_specs` of the boxes, for boxed parameters and unboxed ones: placed so, and the unsharded run."""
    x, y = models.batches()[0]
    loss_fn = lambda params, x, y: jnp.mean(jnp.square(Parallel().apply({"params": params}, x) - y))
    born = lambda key: (lambda p: p if boxes else nn.unbox(p))(Parallel().init(key, x)["params"])
    specs = nn.get_partition_spec(jax.eval_shape(Parallel().init, jax.random.key(0), x)["params"])
    zero = jaxzero.Zero(mesh42, stage=stage, param_specs=specs)
    with jax.set_mesh(mesh42) if set_mesh else contextlib.nullcontext():
        params = zero.init(born, jax.random.key(0))
        state = TrainState.create(apply_fn=None, params=params, tx=zero.optimizer(SGD))
        _, grads = zero.value_and_grad(loss_fn)(params, *checks.place((x, y), mesh42, P("data")))
        state = state.apply_gradients(grads=grads)
        got = zero.gather(state.params)
    kernels = [p["Dense_0"]["kernel"] for p in (params, state.params, got)]
    assert [isinstance(k, nn.Partitioned) for k in kernels] == [boxes] * 3
    kernels = [k.value if boxes else k for k in kernels]
    rest = P(None, "model") if stage == 2 else P("data", "model")
    assert [getattr(k, "value", k).sharding.spec for k in kernels] == [rest, rest, P(None, "model")]
    start = nn.unbox(jax.jit(born)(jax.random.key(0)))
    want = jax.tree.map(lambda p, g: p - 0.1 * g, start, jax.grad(loss_fn)(start, x, y))
    helpers.close(nn.unbox(got), want)


def test_logical_names_mean_what_the_rules_say(mesh42):
    zero = jaxzero.Zero(mesh42)
    params = named("embed", "mlp", logical=True)
    assert zero.shard(params)["Dense_0"]["kernel"].names == ("embed", "mlp")  # no rule: not sharded
    with nn.logical_axis_rules([("embed", "data")]):
        zero.shard(params)
    with (
        nn.logical_axis_rules([("mlp", "modle")]),
        pytest.raises(ValueError, match=checks.saying("LogicallyPartitioned", "'modle'", "'model'")),
    ):
        zero.shard(params)


def test_a_scanned_axis_needs_no_name():
    """`nn.scan` over boxes with `PARTITION_NAME: None`, as Flax wants it where layers are not sharded."""

    class Body(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return nn.tanh(nn.Dense(5, kernel_init=boxed(None, "data"))(x)), None

    layers = nn.scan(
        Body,
        variable_axes={"params": 0},
        split_rngs={"params": True},
        length=3,
        metadata_params={nn.PARTITION_NAME: None},
    )()
    x = models.batches()[0][0]
    params = layers.init(jax.random.key(0), x, None)
    loss_fn = lambda params, x: jnp.mean(jnp.square(layers.apply(params, x, None)[0]))
    zero = jaxzero.Zero(helpers.make_mesh(8), stage=3).observe(loss_fn, params, x)
    _, grads = zero.value_and_grad(loss_fn)(zero.shard(params), x)
    assert grads["params"]["Dense_0"]["kernel"].names == (None, None, "data")
    helpers.close(nn.unbox(zero.gather(grads)), nn.unbox(jax.grad(loss_fn)(params, x)))
