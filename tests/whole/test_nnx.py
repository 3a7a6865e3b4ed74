"""Flax NNX: every kind of model, trained at every stage, equals the unsharded `nnx.Optimizer` run."""

import functools
import pathlib
import re

import checks
import helpers
import hlo
import jax
import jax.numpy as jnp
import nnx_models as models
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxzero
import jaxzero.nnx

SGD = optax.sgd(0.1, momentum=0.9)

#: What runs by default; the rest of the thirty pairs is marked slow.
QUICK = {("BatchNorm", "stage 3"), ("Dropout", "stage 2"), ("scan", "MiCS, stage 3")}


def grid(quick, cases, settings):
    """Every pair of case and setting; those not in `quick` are slow."""
    pairs = [(case, setting) for case in cases for setting in settings]
    return [pytest.param(*p, marks=[] if p in quick else pytest.mark.slow) for p in pairs]


@pytest.mark.parametrize(
    ("case", "setting"),
    grid({("shared", "stage 1")}, ["BatchNorm", "LoRA", "scan", "shared"], ["stage 1", "stage 2", "MiCS"]),
)
def test_a_wrapped_optimizer_is_all_it_takes(case, setting):
    case, zero = models.CASES[case], models.make_zero(setting)
    models.compare(models.plain(case, SGD, zero), models.unsharded(case, SGD))


@pytest.mark.parametrize(("case", "setting"), grid(QUICK, models.CASES, models.SETTINGS))
def test_split_and_merge(case, setting):
    case, zero = models.CASES[case], models.make_zero(setting)
    models.compare(models.split(case, SGD, zero), models.unsharded(case, SGD))


DROP_IN = {("BatchNorm", "stage 3"), ("Dropout", "MiCS, stage 3"), ("LoRA", "stage 2")}


@pytest.mark.parametrize(("case", "setting"), grid(DROP_IN, models.CASES, models.SETTINGS))
def test_calls_in_place_of_those_of_flax(case, setting):
    """Losses of the model: statistics, counts of draws, adapters and stacked layers are those of the unsharded run."""
    case, zero = models.CASES[case], models.make_zero(setting)
    models.compare(models.drop_in(case, SGD, zero), models.unsharded(case, SGD))


class DroppedLayers(nnx.Module):
    """Two stacked layers, each with the keys that `nnx.split_rngs` made."""

    def __init__(self, rngs):
        make = lambda rngs: nnx.Dropout(0.5, rngs=rngs)
        self.layers = nnx.split_rngs(splits=2)(nnx.vmap(make))(rngs)
        self.scale = nnx.Param(jnp.ones(5))

    def __call__(self, x):
        return nnx.scan(lambda f, x: f(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.layers, x) * self.scale[...]


def test_arguments_of_a_model_in_place_of_parameters():
    """Keys of layers are folded, positions count the model as 0, aux is joined as asked; on a model made split."""
    zero = models.make_zero("stage 3")
    model = jaxzero.nnx.init(zero, lambda: DroppedLayers(nnx.Rngs(0)))
    assert model.scale.get_value().value.addressable_shards[0].data.shape == (1,)

    def loss_fn(model, x, weights):
        out = model(x)
        return jnp.mean(out * weights), {"out": out, "largest": jnp.max(jnp.sum(weights) + out)}

    join = lambda path, leaf: "max" if path[0].key == "largest" else None
    grad_fn = jaxzero.nnx.value_and_grad(zero, loss_fn, has_aux=True, whole_argnums=2, aux=join)
    (_, aux), grads = grad_fn(model, jnp.ones((16, 5)), jnp.arange(5.0))
    assert len({row.tobytes() for row in np.asarray(aux["out"]).reshape(8, -1)}) > 4  # devices draw differently
    assert float(aux["largest"]) == float(jnp.max(aux["out"])) + 10
    out = np.asarray(aux["out"])
    np.testing.assert_allclose(zero.gather(grads)["scale"].get_value(), out.mean(0) * np.arange(5) / 5, rtol=1e-6)
    assert np.asarray(model.layers.rngs.count.get_value()).tolist() == [1, 1]
    model.eval()
    kept = jaxzero.nnx.forward(zero, lambda model, x: model(x), whole_argnums=1)(model, jnp.ones((3, 5)))
    np.testing.assert_array_equal(kept, np.ones((3, 5)))


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["stage 3", "MiCS"])
def test_norms_over_the_whole_model(setting):
    """LAMB after clipping by global norm: neither sees that leaves are cut."""
    case, inner = models.CASES["shared"], optax.chain(optax.clip_by_global_norm(0.1), optax.lamb(1e-2))
    got, want = models.split(case, inner, models.make_zero(setting)), models.unsharded(case, inner)
    models.compare(got, want, rtol=2e-5)


@pytest.mark.parametrize("setting", ["stage 2", pytest.param("stage 3", marks=pytest.mark.slow)])
def test_the_program_of_the_guide_runs(setting):
    guide = pathlib.Path(__file__).parents[2] / "docs/guide.md"
    (program,) = [p for p in re.findall(r"```python\n(.*?)```", guide.read_text(), re.DOTALL) if "nnx" in p]
    names = dict(jax=jax, jnp=jnp, nnx=nnx, optax=optax, zero=models.make_zero(setting))
    names["model"] = models.Shared(nnx.Rngs(0), None)
    exec(program, names)
    losses = [names["step"](names["model"], names["optimizer"], *models.batches()[0]) for _ in range(3)]
    assert losses[2] < losses[0]


def test_observed_stacks_are_cut_inside_a_layer():
    """`observe` sees that `nnx.scan` walks over the layers; one layer is gathered at a time."""
    zero = models.make_zero("stage 3")
    graph, params = nnx.split(models.Scanned(nnx.Rngs(0), None))
    loss_fn = lambda params, x, y: models.mse(nnx.merge(graph, params), x, y)
    x, y = models.batches()[0]
    zero = zero.observe(loss_fn, params, x, y)
    assert {helpers.name(path) for path, _ in zero.stacked.paths} == {
        "layers/linear/bias/value",
        "layers/linear/kernel/value",
    }
    params = zero.shard(params)
    assert params["layers"]["linear"]["kernel"].get_value().sharding.spec == P(None, "data")
    text = jax.jit(zero.value_and_grad(loss_fn)).lower(params, x, y).compile().as_text()
    gathers = [row for row in hlo.collectives(text) if row.kind == "all-gather"]
    assert any(row.looped for row in gathers)
    assert max(row.nbytes for row in gathers) < 3 * 8 * 8 * 4


def test_a_frozen_base_is_split_and_has_no_state_and_no_gradient():
    zero, case = models.make_zero("stage 3"), models.CASES["LoRA"]
    model = case.model(nnx.Rngs(0), None)
    graph, params = nnx.split(model)
    base = jax.tree.map(jnp.copy, nnx.as_pure(nnx.state(model, nnx.All(nnx.Param, nnx.Not(nnx.LoRAParam)))))
    nnx.update(model, zero.shard(params))
    kernel = model.inner.base_module.kernel.get_value()
    assert kernel.value.addressable_shards[0].data.size == 5 * 64 // 8
    optimizer = nnx.Optimizer(model, zero.optimizer(optax.adam(1e-2)), wrt=nnx.LoRAParam)
    held = [x for x in jax.tree.leaves(optimizer.opt_state) if x.ndim]
    assert sum(x.size for x in held) == 2 * (16 + 128 + 128 + 8)  # of the adapters alone, two of them padded

    def loss_fn(params, x, y):
        adapters, base = nnx.split_state(params, nnx.LoRAParam, ...)
        return models.mse(nnx.merge(graph, adapters, jax.lax.stop_gradient(base)), x, y)

    @nnx.jit
    def step(model, optimizer, x, y):
        loss, grads = zero.value_and_grad(loss_fn)(nnx.state(model), x, y)
        optimizer.update(model, grads)
        return loss

    batch = models.batches()[0]
    rows = hlo.collectives(step.lower(model, optimizer, *batch).compile().as_text())
    assert hlo.nbytes(rows, "reduce-scatter") <= (16 + 128 + 128 + 8) * 4
    for _ in range(2):
        step(model, optimizer, *batch)
    after = zero.gather(nnx.as_pure(nnx.state(model, nnx.All(nnx.Param, nnx.Not(nnx.LoRAParam)))))
    jax.tree.map(np.testing.assert_array_equal, after, base)


def test_metadata_stays_and_the_inner_optimizer_can_read_it():
    """A mask that asks the variables: the inner optimizer is traced with them."""
    zero = models.make_zero("stage 3")
    is_variable = lambda x: isinstance(x, nnx.Variable)
    decays = lambda params: jax.tree.map(lambda v: v.get_metadata("decay", False), params, is_leaf=is_variable)
    inner = optax.chain(optax.masked(optax.add_decayed_weights(0.5), decays), optax.sgd(0.1))
    model = models.Annotated(nnx.Rngs(0), None)
    whole = nnx.state(model, nnx.Param)
    tx, params = zero.optimizer(inner), zero.shard(whole)
    grads = jax.tree.map(jnp.zeros_like, params)
    after, _ = jax.jit(functools.partial(zero.apply, tx))(grads, tx.init(params), params)
    assert jax.tree.structure(after) == jax.tree.structure(params)
    assert after["inner"]["kernel"].get_metadata("note") == "a kernel"
    after = zero.gather(after)
    helpers.close(after["inner"]["kernel"].get_value(), 0.95 * whole["inner"]["kernel"].get_value())
    np.testing.assert_array_equal(after["inner"]["bias"].get_value(), whole["inner"]["bias"].get_value())
    ours, theirs = (nnx.Optimizer(model, t, wrt=nnx.Param).opt_state for t in (zero2(optax.adam(0.1)), optax.adam(0.1)))
    assert ours[0].mu["inner"]["kernel"].get_metadata("note") == "a kernel"
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)


def zero2(inner):
    return models.make_zero("stage 2").optimizer(inner)


def test_one_compilation_and_parameters_that_stay_in_place():
    zero = models.make_zero("stage 2")
    model = models.Shared(nnx.Rngs(0), None)
    nnx.update(model, zero.shard(nnx.state(model)))
    optimizer = nnx.Optimizer(model, zero2(optax.adam(1e-2)), wrt=nnx.Param)
    place = lambda tree: jax.tree.map(lambda x: (x.sharding, x.aval), nnx.as_pure(tree))
    optimizer.step[...] = jax.device_put(optimizer.step[...], NamedSharding(zero.mesh, P()))
    before = place((nnx.state(model), optimizer.opt_state))
    traces = []

    @nnx.jit
    def step(model, optimizer, x, y):
        traces.append(None)
        _, grads = nnx.value_and_grad(models.mse)(model, x, y)
        optimizer.update(model, grads)

    for batch in models.batches():
        step(model, optimizer, *batch)
    assert len(traces) == 1
    assert place((nnx.state(model), optimizer.opt_state)) == before


# --- what cannot work --------------------------------------------------------------------------


def test_an_optimizer_without_wrt():
    """Flax says so itself; jaxzero is not called."""
    with pytest.raises(TypeError, match="Missing required argument `wrt`"):
        nnx.Optimizer(models.Shared(nnx.Rngs(0), None), zero2(optax.adam(1e-2)))


def test_a_wrt_that_asks_for_more_than_was_differentiated():
    model = models.Adapted(nnx.Rngs(0), None)
    optimizer = nnx.Optimizer(model, zero2(optax.adam(1e-2)), wrt=nnx.Param)
    grads = jax.tree.map(jnp.zeros_like, nnx.state(model, nnx.LoRAParam))
    with pytest.raises(ValueError, match=checks.saying("update", "the gradients lack leaf 'inner/base_module/bias'")):
        optimizer.update(model, grads)


class Parallel(nnx.Module):
    """Two kernels of a tensor-parallel pair, annotated as NNX does it."""

    def __init__(self, rngs, name="model"):
        on = lambda *axes: dict(kernel_init=nnx.with_partitioning(nnx.initializers.lecun_normal(), axes), rngs=rngs)
        self.inner, self.outer = nnx.Linear(5, 16, **on(None, name)), nnx.Linear(16, 3, **on(name, None))

    def __call__(self, x):
        return self.outer(nnx.tanh(self.inner(x)))


@pytest.fixture
def mesh42():
    mesh = helpers.make_mesh((4, 2), ("data", "model"))
    with jax.set_mesh(mesh):
        yield mesh


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_parameters_on_an_axis_that_is_not_this_zeros(stage, mesh42):
    """Eager or under jit, where their placement does not show: what the variables say does."""
    zero = jaxzero.Zero(mesh42, stage=stage)
    born = lambda: nnx.state(Parallel(nnx.Rngs(0)))
    calls = [
        ("shard", lambda: zero.shard(born())),
        ("shard", lambda: jax.jit(lambda: zero.shard(born()))()),
        ("init", lambda: zero.init(born)),
        ("init", lambda: nnx.Optimizer(Parallel(nnx.Rngs(0)), zero.optimizer(SGD), wrt=nnx.Param)),
    ]
    words = ["parameter leaf 'inner/kernel'", r"Param with out_sharding=\(None, 'model'\)", "tensor parallel"]
    for call, f in calls:
        with pytest.raises(ValueError, match=checks.saying(call, *words, r"param_specs=flax\.nnx\.get_partition_spec")):
            f()
    with pytest.raises(ValueError, match="Resource axis: modle .*not found in mesh"):  # Flax's and JAX's own words
        zero.init(lambda: nnx.state(Parallel(nnx.Rngs(0), "modle")))


@pytest.mark.parametrize("stage", [3, pytest.param(2, marks=pytest.mark.slow)])
def test_the_fix_that_the_error_names(stage, mesh42):
    model = Parallel(nnx.Rngs(0))
    graph, whole = nnx.split(Parallel(nnx.Rngs(0)), nnx.Param)
    zero = jaxzero.Zero(mesh42, stage=stage, param_specs=nnx.get_partition_spec(whole))
    params = zero.init(lambda: nnx.state(Parallel(nnx.Rngs(0)), nnx.Param))
    nnx.update(model, params)
    optimizer = nnx.Optimizer(model, zero.optimizer(SGD), wrt=nnx.Param)
    loss_fn = lambda params, x, y: models.mse(nnx.merge(graph, params), x, y)

    @nnx.jit
    def step(model, optimizer, x, y):
        _, grads = zero.value_and_grad(loss_fn)(nnx.state(model, nnx.Param), x, y)
        optimizer.update(model, grads)

    batch = models.batches()[0]
    step(model, optimizer, *checks.place(batch, mesh42, P("data")))
    after = nnx.state(model, nnx.Param)
    kernel = after["inner"]["kernel"].get_value()
    assert getattr(kernel, "value", kernel).sharding.spec == (P(None, "model") if stage == 2 else P("data", "model"))
    got = nnx.as_pure(zero.gather(after))
    assert got["inner"]["kernel"].sharding.spec == P(None, "model")
    plain = lambda p, x, y: models.mse(nnx.merge(graph, p), x, y)
    want = jax.tree.map(lambda p, g: p - 0.1 * g, whole, jax.grad(plain)(whole, *batch))
    helpers.close(got, nnx.as_pure(want))


@pytest.mark.parametrize(
    ("stage", "explicit"),
    [(3, False), (2, True), *(pytest.param(*x, marks=pytest.mark.slow) for x in ((2, False), (3, True)))],
)
def test_born_where_the_mesh_is_set(stage, explicit):
    """Annotated with the shard axis, or with another one that `param_specs` keeps; eagerly and under jit."""
    mesh = helpers.make_mesh((4, 2), ("data", "model"), explicit=explicit)
    for axis, rest in (("data", P()), ("model", P(None, "model"))):
        born = lambda axis=axis: nnx.state(Parallel(nnx.Rngs(0), axis), nnx.Param)
        with jax.set_mesh(mesh):
            want = nnx.as_pure(born())
            specs = nnx.get_partition_spec(nnx.eval_shape(born)) if axis == "model" else None
            zero = jaxzero.Zero(mesh, stage=stage, param_specs=specs)
            for params in (zero.init(born), jax.jit(lambda born=born: zero.init(born))()):  # noqa: B023
                kernel = params["inner"]["kernel"].get_value()
                spec = P("data", *rest[1:]) if stage == 3 else rest
                stored = getattr(kernel, "value", kernel)
                assert stored.sharding.is_equivalent_to(NamedSharding(mesh, spec), stored.ndim)
                helpers.close(jax.tree.map(np.asarray, nnx.as_pure(zero.gather(params))), want)


@pytest.fixture
def elsewhere():
    """A model whose parameters are split for three devices, and a `Zero` for eight."""
    model = models.Shared(nnx.Rngs(0), None)
    zero = jaxzero.Zero(helpers.make_mesh(3), stage=3)
    graph, params = nnx.split(model)
    nnx.update(model, zero.shard(params))
    return graph, model, models.make_zero("stage 3")


SPLIT_ELSEWHERE = ["leaf 'again/bias/value'", "zero.gather", "zero.shard"]


def test_a_model_split_for_another_mesh(elsewhere):
    graph, model, zero = elsewhere
    x, y = models.batches()[0]
    with pytest.raises(ValueError, match=checks.saying("init", *SPLIT_ELSEWHERE)):
        nnx.Optimizer(model, zero.optimizer(optax.adam(1e-2)), wrt=nnx.Param)
    with pytest.raises(ValueError, match=checks.saying("value_and_grad", *SPLIT_ELSEWHERE)):
        zero.value_and_grad(lambda p, x, y: models.mse(nnx.merge(graph, p), x, y))(nnx.state(model), x, y)
    with pytest.raises(ValueError, match="shard: leaf 'again/bias/value'.*split for another mesh"):
        zero.shard(nnx.state(model))
    zero = models.make_zero("stage 2")
    with pytest.raises(ValueError, match="at stage 2 parameters are whole"):
        zero.value_and_grad(lambda p, x, y: models.mse(nnx.merge(graph, p), x, y))(nnx.state(model), x, y)


def test_a_split_model_called_as_if_it_were_whole(elsewhere):
    _, model, _ = elsewhere
    with pytest.raises(ValueError, match="EvenSplit.*was used as an array.*zero.value_and_grad"):
        model(models.batches()[0][0])


@pytest.mark.parametrize(
    "inner", [optax.adamw(1e-2), optax.adafactor(1e-2, min_dim_size_to_factor=4)], ids=["adamw", "adafactor"]
)
def test_a_checkpoint_of_an_nnx_optimizer(inner, tmp_path):
    """Its state goes to disk as the inner optimizer has it, and comes back as the guide says."""

    def start(zero):
        model = nnx.Linear(131, 140, rngs=nnx.Rngs(0))
        jaxzero.nnx.shard(zero, model)
        return model, jaxzero.nnx.optimizer(zero, model, inner)

    def step(zero, model, optimizer):
        optimizer.update(model, jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param)))
        return zero.gather(nnx.state(model, nnx.Param))

    one, other = (jaxzero.Zero(helpers.make_mesh(n), stage=3) for n in (8, 3))
    model, optimizer = start(one)
    step(one, model, optimizer)
    params = nnx.state(model, nnx.Param)
    jaxzero.save(tmp_path, 1, one, params, optimizer.opt_state, inner).wait()
    if hasattr(optimizer.opt_state[0], "mu"):
        jaxzero.save(tmp_path, 2, one, params, optimizer.opt_state).wait()  # without the optimizer, too
    restored = jaxzero.restore(tmp_path, other, jax.eval_shape(one.gather, params), inner)
    again, fresh = start(other)
    nnx.update(again, restored.params)
    nnx.update(fresh.opt_state, nnx.state(restored.opt_state))
    helpers.close(step(other, again, fresh), step(one, model, optimizer))
