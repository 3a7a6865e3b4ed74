"""What is refused, and what the refusal says: the call, the leaf, what was found, what was expected, the fix.

Each row gives the patterns that a message must hold, in any order; wording is free.
"""

import dataclasses
import functools

import checks
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxzero

PARAMS = {"block": {"w": jnp.ones((16, 4)), "b": jnp.ones(5)}, "scale": jnp.ones(())}
ONES = jax.tree.map(jnp.ones_like, PARAMS)
FIX = "fix"  # every message ends with what to do


def zero8(**options):
    return jaxzero.Zero(helpers.make_mesh(8), **options)


def refused(*words):
    return pytest.raises(ValueError, match=checks.saying(*words))


def without(tree, *path):
    """A copy of a tree of dictionaries without one leaf."""
    head, *rest = path
    return {k: without(v, *rest) if k == head else v for k, v in tree.items() if k != head or rest}


def inside(f, *args, in_specs=None, out_specs=None, zero=None, check_vma=True):
    """`f(*args)` in a user's own `shard_map` over the mesh of `zero`."""
    mesh = (zero or zero8()).mesh
    specs = in_specs if in_specs is not None else (P(),) * len(args)
    run = jax.shard_map(
        f, mesh=mesh, in_specs=specs, out_specs=P() if out_specs is None else out_specs, check_vma=check_vma
    )
    return jax.jit(run)(*args)


def inside_with_state(zero, local, state):
    """`local(params, state, batch)` in a user's own region, which gives updates and the state."""
    specs, batch = zero.specs(state), checks.quadratic_batches(1)[0]
    inside(local, PARAMS, state, batch, in_specs=(P(), specs, P("data")), out_specs=(P(), specs))


# --- gradients -----------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["update", "apply"])
@pytest.mark.parametrize("where", ["global", "inside"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda g: without(g, "block", "b"), ("block/b", "unused|zero", FIX)),
        (lambda g: g | {"block": g["block"] | {"b": None}}, ("block/b", "None", r"\(5,\)", "unused|zero", FIX)),
        (lambda g: g | {"more": jnp.ones(3)}, ("more", "parameters", FIX)),
        (lambda g: g | {"scale": jnp.ones(3)}, ("scale", r"\(3,\)", r"\(\)", FIX)),
        (lambda g: g | {"block": g["block"] | {"w": jnp.ones((4, 16))}}, ("block/w", r"\(4, 16\)", r"\(16, 4\)", FIX)),
        (lambda g: g | {"block": g["block"] | {"b": jnp.ones(5, jnp.int32)}}, ("block/b", "int32", "float32", FIX)),
    ],
    ids=["missing", "None", "another", "shape of a scalar", "transposed", "integers"],
)
def test_gradients_that_do_not_fit(call, where, change, words):
    zero = zero8()
    tx = zero.optimizer(optax.adam(1e-2))
    state = tx.init(PARAMS)
    run = functools.partial(zero.apply, tx) if call == "apply" else tx.update
    with refused(call, *words):
        if where == "global":
            run(change(ONES), state, PARAMS)
        else:
            specs = zero.specs(state)
            local = lambda s: run(checks.varying_where_it_is_not(change(ONES), ("data",)), s, PARAMS)
            inside(local, state, in_specs=(specs,), out_specs=(P(), specs))


@pytest.mark.parametrize("call", ["update", "apply"])
@pytest.mark.parametrize("setting", list(checks.SETTINGS))
def test_gradients_that_autodiff_has_summed(setting, call):
    """The N-fold gradient: parameters that do not vary, differentiated inside `shard_map`."""
    zero = checks.make_zero(setting)
    axes = zero.mesh.axis_names
    tx = zero.optimizer(optax.sgd(0.1))
    state = tx.init(PARAMS)
    run = functools.partial(zero.apply, tx) if call == "apply" else tx.update

    def local(params, state, batch):
        return run(jax.grad(checks.quadratic)(params, batch), state, params)

    specs = zero.specs(state)
    with refused(call, "block/b", "pcast", "varying", "summed|reduced", r"grads=.?reduced"):
        inside(
            local,
            PARAMS,
            state,
            checks.quadratic_batches(1)[0],
            in_specs=(P(), specs, P(axes)),
            out_specs=(P(), specs),
            zero=zero,
        )


@pytest.mark.parametrize("setting", list(checks.SETTINGS))
def test_the_fixes_for_summed_gradients_work(setting):
    """What the message above proposes: `pcast`, or gradients that are the mean and `grads="reduced"`."""
    zero = checks.make_zero(setting)
    axes = zero.mesh.axis_names
    batch = checks.quadratic_batches(1)[0]
    want = checks.reference(optax.sgd(1.0), PARAMS, checks.quadratic, [batch])
    tx = zero.optimizer(optax.sgd(1.0), grads="reduced")
    state = tx.init(PARAMS)

    def local(params, state, batch):
        loss = lambda p: lax.pmean(checks.quadratic(p, batch), axes)
        updates, state = tx.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    specs = zero.specs(state)
    got, _ = inside(local, PARAMS, state, batch, in_specs=(P(), specs, P(axes)), out_specs=(P(), specs), zero=zero)
    checks.assert_params_equal(got, want.params)
    got = checks.train(zero, optax.sgd(1.0), PARAMS, checks.quadratic, [batch], "inside, update")
    checks.assert_params_equal(got.params, want.params)


def test_reduced_promised_but_not_kept():
    zero = zero8()
    tx = zero.optimizer(optax.sgd(0.1), grads="reduced")
    state = tx.init(PARAMS)
    local = lambda p, s: tx.update(checks.varying_where_it_is_not(p, ("data",)), s, p)
    with refused("update", "block/b", "reduced", "var(y|ies)", FIX):
        inside(local, PARAMS, state, in_specs=(P(), zero.specs(state)), out_specs=(P(), zero.specs(state)))
    with refused("optimizer", "grads", "mean", "reduced", "local"):
        zero.optimizer(optax.sgd(0.1), grads="mean")


def test_split_gradients_without_parameters():
    """A share does not say how large the whole is."""
    zero = zero8()
    tx = zero.optimizer(optax.sgd(0.1))
    state = tx.init(PARAMS)

    def local(params, state, batch):
        _, grads = zero.value_and_grad(checks.quadratic)(params, batch)
        return tx.update(grads, state)

    with refused("update", "params", "split|share", "block/(b|w)", FIX):
        inside_with_state(zero, local, state)


def test_a_mask_around_split_gradients():
    """`optax.masked` outside the wrapper replaces the array inside an `EvenSplit` by a `MaskedNode`."""
    zero = zero8()
    _, grads = zero.value_and_grad(checks.quadratic)(PARAMS, checks.quadratic_batches(1)[0])
    assert isinstance(grads["block"]["b"], jaxzero.EvenSplit)
    holding = jax.tree.map(lambda g: optax.MaskedNode() if g.ndim == 1 else g, grads)
    tx = zero.optimizer(optax.sgd(0.1))
    with refused("update", "block/b", "MaskedNode", "masked inside"):
        tx.update(holding, tx.init(PARAMS), PARAMS)


def test_extra_argument_that_differs_between_devices():
    zero = zero8()
    tx = zero.optimizer(optax.polyak_sgd())
    state = tx.init(PARAMS)

    def local(params, state, batch):
        value, grads = jax.value_and_grad(checks.quadratic)(checks.varying(params, ("data",)), batch)
        return tx.update(grads, state, params, value=value)

    with refused("update", "value", "var(y|ies)", "pmean"):
        inside_with_state(zero, local, state)


def test_function_that_closes_over_what_differs_between_devices():
    zero = zero8()
    tx = zero.optimizer(optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(3)))
    state = tx.init(PARAMS)

    def local(params, state, batch):
        value, grads = jax.value_and_grad(checks.quadratic)(checks.varying(params, ("data",)), batch)
        value_fn = lambda p: checks.quadratic(p, batch)
        return tx.update(grads, state, params, value=lax.pmean(value, "data"), grad=grads, value_fn=value_fn)

    with refused("update", "clos(es|ed) over|value_fn", "var(y|ies)", "pmean"):
        inside_with_state(zero, local, state)


# --- meshes, axes, options -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"shard_axis": "model"}, ("shard_axis", "model", "data", FIX)),
        ({"replica_axis": "pod"}, ("replica_axis", "pod", "data", FIX)),
        ({"shard_axis": ("data", "local")}, ("shard_axis", "local", "data", FIX)),
        ({"shard_axis": ()}, ("shard_axis", "axis|axes")),
        ({"shard_axis": "data", "replica_axis": "data"}, ("shard_axis", "replica_axis", "data", "twice|differ")),
        ({"stage": 0}, ("stage", "0", "1")),
        ({"stage": 4}, ("stage", "4", "1")),
        ({"stage": "2"}, ("stage", "'2'")),
        ({"stage": True}, ("stage", "True")),
        ({"bucket_bytes": 0}, ("bucket_bytes", "0", "positive|at least 1", "None")),
        ({"bucket_bytes": -1}, ("bucket_bytes", "-1", "positive|at least 1", "None")),
        ({"bucket_bytes": 1.5}, ("bucket_bytes", "1.5", "int", "None")),
        ({"bucket_bytes": "4MB"}, ("bucket_bytes", "4MB", "int", "None")),
        ({"bucket_bytes": True}, ("bucket_bytes", "True", "int", "None")),
        ({"reduce_dtype": jnp.int32}, ("reduce_dtype", "int32", "float")),
        ({"reduce_dtype": "float99"}, ("reduce_dtype", "float99", "float")),
        ({"bucket_byte": 100}, ("bucket_byte", "unknown|unexpected", "bucket_bytes")),
        ({"offload_everything": True}, ("offload_everything", "unknown|unexpected")),
    ],
    ids=str,
)
@pytest.mark.parametrize("make", ["Zero", "zero2"])
def test_options(make, options, words):
    mesh = helpers.make_mesh(8)
    if make == "Zero":
        with refused("Zero", *words):
            jaxzero.Zero(mesh, **options)
        return
    options = {"axis_name" if k == "shard_axis" else k: v for k, v in options.items()}
    if "stage" in options:  # zero2 is stage 2: it has no such option
        with pytest.raises((TypeError, ValueError), match="stage"):
            jaxzero.zero2(optax.sgd(0.1), mesh=mesh, **options)
        return
    with refused("zero", *words):
        jaxzero.zero2(optax.sgd(0.1), mesh=mesh, **options)


@pytest.mark.parametrize("mesh", ["data", 8, [0, 1]])
def test_a_mesh_that_is_none(mesh):
    with refused("Zero", "mesh", FIX):
        jaxzero.Zero(mesh)


def test_options_are_keyword_only():
    with pytest.raises((TypeError, ValueError)):
        jaxzero.Zero(helpers.make_mesh(8), 2)


@pytest.mark.parametrize("call", ["init", "update", "value_and_grad", "apply"])
def test_no_mesh_in_the_global_view(call):
    zero = jaxzero.Zero(stage=2)
    tx = zero.optimizer(optax.adam(1e-2))
    state = zero8().optimizer(optax.adam(1e-2)).init(PARAMS)
    calls = {
        "init": lambda: tx.init(PARAMS),
        "update": lambda: tx.update(ONES, state, PARAMS),
        "value_and_grad": lambda: zero.value_and_grad(checks.quadratic)(PARAMS, checks.quadratic_batches(1)[0]),
        "apply": lambda: zero.apply(tx, ONES, state, PARAMS),
    }
    with refused(call, "mesh", "shard_map", FIX):
        calls[call]()
    with refused("mesh", FIX):
        jaxzero.zero2(optax.adam(1e-2)).init(PARAMS)


@pytest.mark.parametrize("traced", [True, False])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("what", ["parameter", "gradient"])
def test_leaf_sharded_over_another_axis(what, kind, traced):
    """Tensor parallelism is a later issue: such a leaf is refused by name, not gathered in silence."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4), ("model", "data"), axis_types=(kind,) * 2)
    zero = jaxzero.Zero(mesh, stage=2)
    tx = zero.optimizer(optax.adam(1e-2))
    put = lambda spec: jax.device_put(jnp.ones((16, 4)), NamedSharding(mesh, spec))
    params, grads = {"deep": {"w": put(P())}}, {"deep": {"w": put(P())}}
    state = tx.init(params)
    other = {"deep": {"w": put(P(None, "model"))}}
    if what == "parameter":
        params = other
    else:
        grads = other
    run = jax.jit(tx.update) if traced else tx.update
    if traced and kind == AxisType.Auto:
        updates, _ = run(
            grads, state, params
        )  # an Auto mesh hides shardings under jit: right numbers, never wrong ones
        checks.assert_params_equal(updates, {"deep": {"w": jnp.full((16, 4), -0.01)}})
        return
    with refused("update", "deep/w", "model", "data", FIX):
        run(grads, state, params)
    if what == "parameter":
        with refused("init", "deep/w", "model", "data", FIX):
            (jax.jit(tx.init) if traced else tx.init)(params)


# --- state of another layout ---------------------------------------------------------------------


@pytest.mark.parametrize("call", ["update", "apply"])
@pytest.mark.parametrize("traced", [True, False])
def test_state_of_another_world_shows_in_its_length(call, traced):
    zero = zero8()
    tx = zero.optimizer(optax.adam(1e-2))
    three = jaxzero.Zero(helpers.make_mesh(3)).optimizer(optax.adam(1e-2))
    state = jax.tree.map(np.asarray, three.init(PARAMS))  # on no mesh at all
    run = functools.partial(zero.apply, tx) if call == "apply" else tx.update
    with refused(call, "mu/block/b", r"\(6,\)", r"\(8,\)", FIX):
        (jax.jit(run) if traced else run)(ONES, state, PARAMS)


def test_state_of_another_mesh_shows_in_its_placement():
    """Lengths agree, devices do not: rows over 4 devices where 8 are expected."""
    params = {"w": jnp.ones((16, 4))}
    zero = zero8()
    tx = zero.optimizer(optax.adam(1e-2))
    state = jaxzero.Zero(helpers.make_mesh(4)).optimizer(optax.adam(1e-2)).init(params)
    with refused("update", "mu/w", r"\(4, 4\)", r"\(2, 4\)", FIX):
        tx.update({"w": jnp.ones((16, 4))}, state, params)


def test_gradient_split_for_another_world():
    three = jaxzero.Zero(helpers.make_mesh(3))
    _, grads = three.value_and_grad(checks.quadratic)(PARAMS, checks.quadratic_batches(1)[0])
    grads = jax.tree.map(np.asarray, grads)
    zero = zero8()
    tx = zero.optimizer(optax.adam(1e-2))
    with refused("update", "block/(b|w)", FIX):
        tx.update(grads, tx.init(PARAMS), PARAMS)


@pytest.mark.parametrize("call", ["update", "apply"])
def test_state_of_another_optimizer(call):
    zero = zero8()
    tx = zero.optimizer(optax.adam(1e-2))
    run = functools.partial(zero.apply, tx) if call == "apply" else tx.update
    with pytest.raises((ValueError, TypeError, AttributeError)):
        run(ONES, zero.optimizer(optax.sgd(0.1)).init(PARAMS), PARAMS)


# --- inside shard_map ----------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["init", "update", "value_and_grad"])
def test_region_without_the_type_check(call):
    zero = zero8()
    tx = zero.optimizer(optax.sgd(0.1))
    calls = {
        "init": lambda p: tx.init(p),
        "update": lambda p: tx.update(p, tx.init(p), p)[0],
        "value_and_grad": lambda p: zero.value_and_grad(lambda p: jnp.sum(p["scale"]))(p)[0],
    }
    with refused(call if call != "update" else "init|update", "check_vma", FIX):
        inside(calls[call], PARAMS, check_vma=False)


def test_region_that_is_manual_over_half_of_the_axes(mesh24):
    zero = jaxzero.Zero(mesh24, shard_axis="shard", replica_axis="replica")
    tx = zero.optimizer(optax.sgd(0.1))
    run = jax.shard_map(tx.init, mesh=mesh24, in_specs=P(), out_specs=P(), axis_names={"shard"})
    with refused("init", "replica", "shard_map", FIX):
        jax.jit(run)(PARAMS)


def test_loss_that_is_reduced_already():
    """A `pmean` in the loss makes the gradient N times too small; the library takes the mean itself."""
    zero = zero8()
    loss = lambda p, batch: lax.pmean(checks.quadratic(p, batch), "data")
    with refused("value_and_grad", "loss", "var(y|ies)|reduced", "pmean", FIX):
        inside(
            lambda p, b: zero.value_and_grad(loss)(p, b)[0],
            PARAMS,
            checks.quadratic_batches(1)[0],
            in_specs=(P(), P("data")),
        )


# --- value_and_grad ------------------------------------------------------------------------------


@pytest.mark.parametrize("traced", [True, False])
@pytest.mark.parametrize("size", [1, 7, 12, 121])
@pytest.mark.parametrize("setting", ["stage 2, 8", "MiCS 2x4"])
def test_batch_that_does_not_divide(setting, size, traced):
    zero = checks.make_zero(setting)
    loss = lambda p, batch: checks.quadratic(p, (batch["x"], batch["deep"]["t"]))
    run = zero.value_and_grad(loss)
    batch = {"x": jnp.ones(8), "deep": {"t": jnp.ones(size)}}
    with refused("value_and_grad", "deep/t", str(size), "8", "divide", FIX):
        (jax.jit(run) if traced else run)(PARAMS, batch)


def test_raw_key_as_data():
    """An old-style key is an array of two integers: it would be cut as examples."""
    with refused("value_and_grad", "key", r"\(2,\)", "jax.random.key|whole_argnums"):
        zero8().value_and_grad(lambda p, key: jnp.sum(p))(jnp.ones(3), jax.random.PRNGKey(0))


@pytest.mark.parametrize("where", ["global", "inside"])
@pytest.mark.parametrize("kind", ["int", "bool", "device"])
def test_aux_that_depends_on_the_device(where, kind):
    """Integers cannot be averaged: whose would it be?"""
    zero = zero8()
    value = {
        "int": lambda x: jnp.sum(x > 0),
        "bool": lambda x: jnp.any(x > 0),
        "device": lambda x: lax.axis_index("data"),
    }[kind]
    loss = lambda p, x: (jnp.sum(p) * jnp.mean(x), {"metrics": {"fine": jnp.mean(x), "hits": value(x)}})
    run = zero.value_and_grad(loss, has_aux=True)
    with refused("value_and_grad", "metrics/hits", "int32|bool", "device", FIX):
        if where == "global":
            run(jnp.ones(3), jnp.arange(16.0))
        else:
            inside(lambda p, x: run(p, x)[0][0], jnp.ones(3), jnp.arange(16.0), in_specs=(P(), P("data")))


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda p, x: x * jnp.sum(p), ("scalar|shape", r"\(2,\)")),
        (lambda p, x: jnp.sum(x).astype(jnp.int32), ("float", "int32")),
    ],
    ids=["vector", "integer"],
)
def test_loss_that_is_no_floating_scalar(loss, words):
    with refused("value_and_grad", "loss", *words):
        zero8().value_and_grad(loss)(jnp.ones(3), jnp.arange(16.0))


@pytest.mark.parametrize("position", [0, 3, -1])
def test_whole_argnums_out_of_range(position):
    run = zero8().value_and_grad(checks.quadratic, whole_argnums=(position,))
    with refused("value_and_grad", "whole_argnums", str(position), FIX):
        run(PARAMS, checks.quadratic_batches(1)[0])


# --- wrapping ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrap",
    [
        lambda zero: optax.sgd(0.1),
        lambda zero: optax.chain(optax.clip(1.0), zero.optimizer(optax.sgd(0.1))),
        lambda zero: optax.masked(zero.optimizer(optax.sgd(0.1)), True),
        lambda zero: zero.optimizer(optax.sgd(0.1))._replace(update=optax.sgd(0.2).update),
        lambda zero: None,
    ],
    ids=["plain", "chain", "masked", "replaced", "None"],
)
def test_apply_takes_the_wrapper_itself(wrap):
    zero = zero8()
    with refused("apply", "wrap the whole chain"):
        zero.apply(wrap(zero), ONES, None, PARAMS)


def test_wrapper_inside_wrapper():
    zero = zero8()
    with refused("optimizer", "wrapped|zero inside", FIX):
        zero.optimizer(zero.optimizer(optax.sgd(0.1)))


def test_wrapper_deep_inside_wrapper():
    """Inside a chain it cannot be seen before it is called; then it is refused, or exact."""
    zero = zero8()
    tx = zero.optimizer(optax.chain(optax.clip(1.0), zero.optimizer(optax.sgd(0.5))))
    with refused("init|optimizer", "wrap|outermost"):
        tx.init(PARAMS)


@pytest.mark.parametrize(
    "inner",
    [None, 0.1, optax.adam, optax.MultiSteps(optax.sgd(0.1), 2)],
    ids=["None", "float", "factory", "MultiSteps"],
)
def test_what_is_no_optimizer(inner):
    if isinstance(inner, optax.MultiSteps):
        zero8().optimizer(inner).init(PARAMS)  # it has init and update: fine
        return
    with refused("optimizer", "GradientTransformation", FIX):
        zero8().optimizer(inner)


def test_errors_do_not_hide_the_optimizers_own():
    """An error of the inner optimizer comes through as it is."""
    tx = zero8().optimizer(optax.adamw(1e-2))
    with pytest.raises(ValueError, match="params"):
        tx.update(ONES, tx.init(PARAMS))
    tx = zero8().optimizer(optax.polyak_sgd())
    with pytest.raises(TypeError, match="value"):
        tx.update(ONES, tx.init(PARAMS), PARAMS)


def test_errors_do_not_hide_those_of_init_fn():
    """No error of a second trace in its place, where the size would be no number any more."""

    def init_fn(key, size):
        if size % 3:
            raise ValueError("an odd size")
        return {"w": jax.random.normal(key, (size,))}

    with pytest.raises(ValueError, match="^an odd size"):
        jax.jit(lambda key: zero8().init(init_fn, key, 4))(jax.random.key(0))


# --- meshes without devices ----------------------------------------------------------------------


@pytest.mark.parametrize("stage", [2, 3])
def test_an_abstract_mesh_holds_no_arrays(stage):
    zero = jaxzero.Zero(jax.sharding.AbstractMesh((8,), ("data",)), stage=stage)
    for call, f in {
        "shard": lambda: zero.shard(PARAMS),
        "gather": lambda: zero.gather(PARAMS),
        "init": lambda: zero.init(lambda key: {"w": jax.random.normal(key, (5,))}, jax.random.key(0)),
    }.items():
        with refused(f"^{call}: the mesh of this Zero holds no arrays", "devices", FIX):
            f()


# --- what a loss may not do ----------------------------------------------------------------------


@functools.partial(jax.tree_util.register_dataclass, data_fields=["a"], meta_fields=["fixed"])
@dataclasses.dataclass
class Stats:
    a: jax.Array
    fixed: object


VALUE_NEEDED = {
    "float": (lambda x: float(x.sum()), "needs the value of an array"),
    "NumPy": (np.asarray, "needs the value of an array"),
    "a branch": (lambda x: x if x.sum() > 0 else -x, "needs the value of an array"),
    "static int": (lambda x: Stats(x.sum(), int(x.mean())), "needs the value of an array"),
    "static array": (lambda x: {"s": Stats(x.sum(), x.mean())}, "Stats with a traced array as static data"),
}


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("name", VALUE_NEEDED)
def test_results_that_need_the_value_of_a_traced_array(name, stage):
    aux, words = VALUE_NEEDED[name]
    zero, params, x = zero8(stage=stage), {"w": jnp.ones(8)}, jnp.ones((8, 8))
    params = zero.shard(params)
    loss = lambda p, x: (jnp.mean(x @ p["w"]), aux(x))
    with refused("value_and_grad", words, FIX):
        zero.value_and_grad(loss, has_aux=True)(params, x)
    with refused("forward", words, FIX):
        jax.jit(zero.forward(lambda p, x: aux(x)))(params, x)
    if stage == 3 and "static array" not in name:
        with refused("observe", words, FIX):
            zero.observe(loss, params, x)


PLACEMENTS = {
    "a NamedSharding": lambda mesh, x: lax.with_sharding_constraint(x, NamedSharding(mesh, P("data", None))),
    "in a scan": lambda mesh, x: lax.scan(
        lambda c, _: (lax.with_sharding_constraint(c, NamedSharding(mesh, P("data"))), None), x, None, length=2
    )[0],
    "a PartitionSpec": lambda mesh, x: lax.with_sharding_constraint(x, P("data")),
    "two axes": lambda mesh, x: lax.with_sharding_constraint(x, P(mesh.axis_names)),
    "a shard_map": lambda mesh, x: jax.shard_map(lambda x: x, mesh=mesh, in_specs=P("data"), out_specs=P("data"))(x),
}


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("shape", [(8,), (4, 2)])
@pytest.mark.parametrize("name", PLACEMENTS)
def test_placements_over_the_shard_axis_inside_a_loss(name, shape, stage):
    """JZ-212: all of these are fine under plain `jit`."""
    names = ("data", "model")[: len(shape)]
    mesh = jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(shape))
    zero, x = jaxzero.Zero(mesh, stage=stage), jnp.ones((16, 8))
    params = zero.shard({"w": jnp.ones(8)})
    loss = lambda p, x: jnp.mean(PLACEMENTS[name](mesh, x) @ p["w"])
    for f in (zero.value_and_grad(loss), zero.forward(loss)):
        with refused(r"over \['data'\]", "PartitionSpec", FIX):
            jax.eval_shape(f, params, x)
