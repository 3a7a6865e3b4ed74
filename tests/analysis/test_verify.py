"""`verify` passes honest steps and refuses sabotaged ones: programs recorded for every machine, some compiled here."""

import dataclasses
import functools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import record_programs
import verify_steps
from verify_steps import HONEST, INNER, PARAMS, SABOTAGED

import jaxzero
from jaxzero._src.analysis import compiler_options, planner, verify

RECORDED = sorted(record_programs.FOLDER.glob("*.json.xz"))
#: XLA makes all-reduces of reduce-scatters for TPUs, so there sums are compared, and one step is the honest one.
ON_TPU = {
    "missing pcast": r"traffic over data: more than promised.*jax.lax.pcast\(params, \('data',\)",
    "second hop in the loop": "traffic over replica: more than promised.*once, after the loop over micro-steps",
    "wrong axis": "traffic over replica: more than promised.*reduce over",
}
UNSEEN_ON_TPU = "psum for psum_scatter"


@pytest.fixture(scope="module", autouse=True)
def one_plan_for_many_programs():
    """The plan of a step does not depend on what it was compiled for."""
    made: dict = {}
    make = planner.make_plan

    def once(options, params, *how):
        if params is not PARAMS:
            return make(options, params, *how)
        if (options, *how) not in made:
            made[options, *how] = make(options, params, *how)
        return made[options, *how]

    planner.make_plan = once
    yield
    planner.make_plan = make


@functools.cache
def devices():
    return np.array(jax.devices())


@functools.cache
def prepared(name):
    """The `Zero` of a step, and how it is to be verified."""
    zero, how, _ = (HONEST | {n: f for n, (f, _) in SABOTAGED.items()})[name](devices())
    return zero, how


@functools.cache
def texts(path):
    return record_programs.read(path)


def test_recorded_for_every_machine_and_version():
    recorded = {(path.name.split("-")[0], path.name.split("-")[1][:4]) for path in RECORDED}
    assert recorded == {(machine, version) for machine in ("cpu", "h100", "v5e") for version in ("0.10", "0.12")}
    assert all(texts(path).keys() == HONEST.keys() | SABOTAGED.keys() for path in RECORDED)


@pytest.mark.parametrize("path", RECORDED, ids=lambda p: p.name.removesuffix(".json.xz"))
@pytest.mark.parametrize("name", HONEST)
def test_honest_steps_pass(path, name):
    zero, how = prepared(name)
    report = zero.verify(texts(path)[name], PARAMS, INNER, **how)
    assert not any(check.problem for check in report.checks)
    assert zero.verify(texts(path)[name], PARAMS, **how).collectives == report.collectives  # without the optimizer too


@pytest.mark.parametrize("path", RECORDED, ids=lambda p: p.name.removesuffix(".json.xz"))
@pytest.mark.parametrize("name", SABOTAGED)
def test_sabotaged_steps_are_refused(path, name):
    zero, how = prepared(name)
    message = SABOTAGED[name][1]
    if path.name.startswith("v5e"):
        if name == UNSEEN_ON_TPU:
            assert large(texts(path)[name]) == large(texts(path)["stage 2"])
            return
        message = ON_TPU.get(name, message)
    for inner in (INNER, None):
        with pytest.raises(ValueError, match=message) as caught:
            zero.verify(texts(path)[name], PARAMS, inner, **how)
        assert re.search("promised +found", str(caught.value))


def large(text):
    """What is sent, in kB: the loss may travel with it."""
    return {(x.kind, round(x.nbytes / 1e3), x.times) for x in jaxzero.collectives(text) if x.nbytes > 4096}


LIVE = [(name, None) for name in HONEST] + [(name, message) for name, (_, message) in SABOTAGED.items()]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        pytest.param(*row, id=row[0], marks=[] if row[0] in ("MiCS, stage 3", "missing pcast") else pytest.mark.slow)
        for row in LIVE
    ],
)
def test_compiled_here(name, message):
    """The same steps, compiled by the JAX that runs."""
    zero, how, build = (HONEST | {n: f for n, (f, _) in SABOTAGED.items()})[name](devices())
    if message is None:
        report = zero.verify(build(), PARAMS, INNER, **how)
        assert {check.problem for check in report.checks} == {""}
        assert str(report).splitlines()[0].split() == ["per", "device", "promised", "found"]
        return
    with pytest.raises(ValueError, match=message):
        zero.verify(build(), PARAMS, INNER, **how)


@pytest.mark.parametrize("inner", [INNER, optax.lbfgs(1e-3, memory_size=8, linesearch=None)], ids=["adam", "lbfgs"])
def test_names_and_dtypes_that_mislead(inner):
    """Examples that are called like a parameter, state with more elements than one, and bfloat16, which CPUs widen."""
    zero = jaxzero.Zero(verify_steps.flat(devices()))
    tx, params = zero.optimizer(inner), zero.shard({"x": jnp.ones((64, 64)), "h": jnp.ones((128, 64), jnp.bfloat16)})

    def loss(p, batch):
        return jnp.mean((batch["x"] @ p["x"]) ** 2) + jnp.mean(jnp.square(p["h"].astype(jnp.float32)))

    def step(params, state, batch):
        _, grads = zero.value_and_grad(loss)(params, batch)
        return zero.apply(tx, grads, state, params)

    batch = {"x": jax.ShapeDtypeStruct((1024, 64), jnp.float32)}
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(params, tx.init(params), batch).compile()
    assert zero.verify(compiled, params, inner)


# --- changed texts -------------------------------------------------------------------------------


def recorded(name):
    (path,) = [p for p in RECORDED if p.name.startswith("cpu-0.10")]
    return texts(path)[name], *prepared(name)


def test_without_donation_only_when_said():
    text, zero, how = recorded("donation lost")
    assert zero.verify(text, PARAMS, INNER, donated=False, **how)


def test_a_gather_before_every_product():
    """Unrolled parameters that are all gathered first: what a plain `jit` would do without barriers."""
    zero = jaxzero.Zero(verify_steps.flat(devices()), stage=3, persist_bytes=0, chunk_bytes=None)
    params = {f"w{i}": jax.ShapeDtypeStruct((64, 64), jnp.float32) for i in range(8)}

    def loss(p, x):
        for i in range(8):
            x = jnp.tanh(x @ p[f"w{i}"])
        return jnp.mean(x**2)

    zero = zero.observe(loss, params, jax.ShapeDtypeStruct((16, 64), jnp.float32))
    gather = "  %g{i} = f32[64,64]{{1,0}} all-gather(%p), replica_groups={{}}, dimensions={{0}}"
    product = "  %d = f32[64,64]{1,0} dot(%g0, %g1)"
    scatter = "  %r{i} = f32[8,64]{{1,0}} reduce-scatter(%d), replica_groups={{}}, dimensions={{0}}"
    share = "  %p{i} = f32[8,64]{{1,0}} parameter({i}), metadata={{op_name=\"p['w{i}']\"}}"
    rows = lambda form, count=8: [form.format(i=i) for i in range(count)]
    lazy = [*rows(share), *rows(gather, 4), product, *rows(gather, 10), *rows(scatter)]
    early = [*rows(share), *rows(gather), product, *rows(gather, 6), *rows(scatter)]
    text = lambda lines: "\n".join(["HloModule m, num_partitions=8", "ENTRY %main (p: f32[]) -> f32[] {", *lines, "}"])
    assert zero.verify(text(lazy), params, donated=False)
    with pytest.raises(ValueError, match="8 gathers stand before the first matrix product"):
        zero.verify(text(early), params, donated=False)


def test_what_an_unknown_optimizer_sends_is_asked_for():
    text, zero, how = recorded("stage 2")
    gather = '  %x = f32[4096,64]{1,0} all-gather(%y), replica_groups={}, metadata={op_name="muon"}'
    text = text.replace("\nENTRY", f"\n%extra () -> f32[] {{\n{gather}\n}}\nENTRY")
    with pytest.raises(ValueError, match=r"all-gather over data: more than promised.*pass the optimizer: inner="):
        zero.verify(text, PARAMS, **how)


def test_stage_3_that_has_observed_nothing_knows_no_most():
    text, zero, how = recorded("stage 3")
    blind = jaxzero.Zero(zero.mesh, stage=3, stacked=zero.stacked, persist_bytes=0)
    again = '  %x = f32[4096,64]{1,0} all-gather(%y), replica_groups={}, metadata={op_name="again"}'
    text = text.replace("\nENTRY", f"\n%extra () -> f32[] {{\n{again}\n}}\nENTRY")
    assert blind.verify(text, PARAMS, INNER, **how)
    with pytest.raises(ValueError, match="all-gather over data: more than promised"):
        zero.verify(text, PARAMS, INNER, **how)


WRONG = {
    "no program": (lambda text: 3, PARAMS, "verify: found int, which has no text"),
    "other devices": (
        lambda text: text.replace("num_partitions=8", "num_partitions=4"),
        PARAMS,
        r"compiled for 4 devices; expected 8, the mesh \{'data': 8\}",
    ),
    "other parameters": (
        lambda text: text,
        {"theirs": jax.ShapeDtypeStruct((64, 64), jnp.float32)},
        r"no argument of the program is one of these parameters.*end with \"\['theirs'\]\"",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name):
    change, params, message = WRONG[name]
    text, zero, _ = recorded("stage 2")
    with pytest.raises(ValueError, match=message):
        zero.verify(change(text), params, optax.adam(1e-3))


def test_a_share_of_hidden_bytes_is_demanded():
    """A program for CPUs hides nothing; where a product stands between start and end, its bytes count."""
    text, zero, how = recorded("stage 2")
    report = zero.verify(text, PARAMS, INNER, hidden=0.0, **how)
    assert report.checks[-1].what == "0% of the bytes sent, behind products"
    with pytest.raises(ValueError, match=r"90% of the bytes sent, behind products: 0% are.*compiler_options"):
        zero.verify(text, PARAMS, INNER, hidden=0.9, **how)
    for wrong in (1.5, -0.1, True, "all"):
        with pytest.raises(ValueError, match="Expected a share of the bytes sent"):
            zero.verify(text, PARAMS, INNER, hidden=wrong, **how)
    hidden = (dataclasses.replace(x, hidden=True) for x in report.collectives)
    done = dataclasses.replace(report, collectives=type(report.collectives)(hidden))
    assert verify.verify_hidden(done, zero, 0.9).checks[-1].problem == ""


def test_compiler_options_are_for_gpus():
    assert jaxzero.Zero(verify_steps.flat(devices())).compiler_options() == {}
    devices_of = lambda platform: np.array([types.SimpleNamespace(platform=platform)])
    mesh = lambda platform: types.SimpleNamespace(devices=devices_of(platform))
    assert compiler_options.for_mesh(mesh("cpu")) == compiler_options.for_mesh(mesh("tpu")) == {}
    assert compiler_options.for_mesh(mesh("gpu")).keys() == {
        "xla_gpu_reduce_scatter_combine_threshold_bytes",
        "xla_gpu_all_gather_combine_threshold_bytes",
        "xla_gpu_experimental_parallel_collective_overlap_limit",
    }


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_shard_axis_of_one_device_is_said_first(stage):
    """In the first line of plan and verify; and in neither where something is split."""
    devices = np.array(jax.devices())
    meshes = {
        "nothing is split: the shard axis data has one device": jax.sharding.Mesh(devices[:1], ("data",)),
        "nothing is split: the shard axis data has one device, of a mesh with model=8": jax.sharding.Mesh(
            devices.reshape(1, 8), ("data", "model")
        ),
        "": jax.sharding.Mesh(devices, ("data",)),
    }
    for line, mesh in meshes.items():
        zero, inner = jaxzero.Zero(mesh, stage=stage), optax.adam(1e-3)
        tx, params = zero.optimizer(inner), zero.shard({"w": jnp.ones((64, 64))})

        def step(params, state, x, zero=zero, tx=tx):
            _, grads = zero.value_and_grad(lambda p, x: jnp.mean((x @ p["w"]) ** 2))(params, x)
            return zero.apply(tx, grads, state, params)

        compiled = jax.jit(step, donate_argnums=(0, 1)).lower(params, tx.init(params), jnp.ones((8, 64))).compile()
        first = str(zero.verify(compiled, params, inner)).splitlines()[0]
        planned = " ".join(str(zero.plan(params, inner)).partition("\n\n")[0].split())
        assert first == line or not line
        assert planned == f"stage {stage}, {line or 'split over data=8'}"
        assert ("nothing is split" in first) == bool(line)


def test_stage_3_says_what_an_unseen_loss_may_cost(mesh8):
    """A scan over layers that were split as one array gathers them all; plan and verify cannot see it, and say so."""
    inner, params = optax.sgd(0.1), {"w": jnp.ones((64, 64))}
    loss = lambda p, x: jnp.mean((x @ p["w"]) ** 2)
    for zero, unseen in ((jaxzero.Zero(mesh8, stage=3), True), (jaxzero.Zero(mesh8, stage=2), False)):
        for seen in (zero, zero.observe(loss, params, jnp.ones((8, 64)))):
            tx, split = seen.optimizer(inner), seen.shard(params)

            def step(params, state, x, zero=seen, tx=tx):
                return zero.apply(tx, zero.value_and_grad(loss)(params, x)[1], state, params)

            compiled = jax.jit(step, donate_argnums=(0, 1)).lower(split, tx.init(split), jnp.ones((8, 64))).compile()
            for report in (seen.verify(compiled, split, inner), seen.plan(split, inner)):
                said = "no loss was observed" in str(report) and "all layers are gathered at" in str(report)
                assert said == (unseen and seen is zero)
