"""The plan: its bytes are those of real arrays, its traffic is that of compiled programs."""

import itertools
import json
import sys

import checks
import helpers
import hlo
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import traffic
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import jaxzero
from jaxzero._src import _text
from jaxzero._src.analysis import default_loss
from jaxzero._src.analysis import plan as analysis_plan
from jaxzero._src.sharding.leaves import leaves_of


def normal(*shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(sum(shape)), shape, dtype)


def layers(count):
    return {"embed": normal(33, 8), "layers": [{"w": normal(8, 24), "b": normal(24)} for _ in range(count)]}


TREES = {
    "bare": lambda: normal(13, 3),
    "odd": lambda: {"conv": normal(3, 3, 2, 4), "scale": jnp.float32(2), "tiny": normal(3), "even": normal(48, 4)},
    "layers": lambda: layers(3),
    "stacked": lambda: {"stack": {"w": normal(4, 24, 8), "b": normal(4, 5), "s": normal(4)}, "head": normal(8, 7)},
    "bf16": lambda: {"w": normal(30, 7, dtype=jnp.bfloat16), "b": normal(7, dtype=jnp.bfloat16)},
    "mixed": lambda: {"a": normal(9, dtype=jnp.float16), "b": normal(16, 2), "c": normal(5, dtype=jnp.complex64)},
    "not trained": lambda: {"w": normal(12), "n": jnp.arange(7), "on": jnp.ones(3, bool), "key": jax.random.key(0)},
    "empty": lambda: {"w": normal(5, 5), "none": jnp.zeros((0, 4)), "gone": None},
    "tuple": lambda: (normal(2), [normal(1), (normal(100),)]),
    "large": lambda: {"a": normal(300, 300), "b": normal(301, 299), "c": normal(17)},
}
REPLICAS = dict(shard_axis="shard", replica_axis="replica")
HOPS = dict(shard_axis=("node", "local"), replica_axis="replica")
MESHES = {
    "8": (8, ("data",), {}),
    "3": (3, ("data",), {}),
    "2x4": ((2, 4), ("replica", "shard"), REPLICAS),
    "2x2x2": ((2, 2, 2), ("replica", "node", "local"), HOPS),
}
#: With state for each parameter, with state of other shapes, with state of its own, with parameters in the state.
INNERS = {
    "adamw": lambda: optax.adamw(1e-2),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "clip, momentum": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1, momentum=0.9)),
    "master weights": lambda: jaxzero.master_weights(optax.adam(1e-2)),
}


def make_zero(mesh, stage, **options):
    sizes, names, axes = MESHES[mesh]
    return jaxzero.Zero(helpers.make_mesh(sizes, names), stage=stage, **axes, **options)


def stacked(path):
    return int("stack" in jax.tree_util.keystr(path))


def held(tree):
    """Bytes on one device."""
    arrays = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]  # the gradient of a key is none
    keys = lambda x: jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
    return sum((jax.random.key_data(x) if keys(x) else x).addressable_shards[0].data.nbytes for x in arrays)


# --- bytes ---------------------------------------------------------------------------------------


@pytest.mark.grid(63)
@pytest.mark.parametrize(("tree", "stage", "mesh"), [*itertools.product(TREES, (1, 2, 3), MESHES)])
def test_planned_bytes_are_those_of_arrays(tree, stage, mesh):
    zero = make_zero(mesh, stage, stacked=stacked if tree == "stacked" else None)
    inner = INNERS["adamw"]()
    params = TREES[tree]()
    plan = zero.plan(jax.eval_shape(lambda: params), inner)
    split = zero.shard(params)
    _, grads = zero.value_and_grad(checks.quadratic)(split, checks.quadratic_batches(1, 24)[0])
    state = zero.optimizer(inner).init(split)
    row = plan.at_rest[stage]
    assert (row.parameters, row.gradients, row.state) == (held(split), held(grads), held(state))
    assert row.total == plan.total == sum(x.parameters + x.gradients + x.state for x in plan.leaves) + plan.other_state
    one = lambda tree: [held(x) for x in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, jaxzero.EvenSplit))]
    assert [x.parameters for x in plan.leaves] == one(split)
    assert [x.gradients for x in plan.leaves] == one(grads)


@pytest.mark.grid(11)
@pytest.mark.parametrize(("inner", "mesh"), [*itertools.product(INNERS, MESHES)])
def test_planned_state_is_that_of_any_optimizer(inner, mesh):
    inner, params = INNERS[inner](), TREES["layers"]() | TREES["bf16"]()
    zero = make_zero(mesh, 2)
    assert zero.plan(params, inner).at_rest[2].state == held(zero.optimizer(inner).init(params))
    assert zero.plan(params, inner).at_rest[0].state == held(inner.init(params))


def test_an_optimizer_that_closes_over_arrays():
    """A learning rate that is an array is no reason to need devices."""
    zero = jaxzero.Zero(AbstractMesh((8,), ("data",)))
    params = {"w": jax.ShapeDtypeStruct((16, 4), jnp.float32)}
    plans = [zero.plan(params, optax.adam(rate)) for rate in (0.1, jnp.float32(0.1), jnp.full((16, 4), 0.1))]
    assert [plan.sent for plan in plans] == [plans[0].sent] * 3


def test_a_program_elsewhere_takes_arrays_beside_traced_values():
    """Of two extra arguments one is traced, the other a constant."""

    def update(grads, state, params=None, *, value, scale):
        return jax.tree.map(lambda g: g * value * scale, grads), state

    zero = jaxzero.Zero(AbstractMesh((8,), ("data",)))
    tx = zero.optimizer(optax.GradientTransformationExtraArgs(lambda p: optax.EmptyState(), update))
    params, scale = {"w": jax.ShapeDtypeStruct((16, 4), jnp.float32)}, jnp.float32(2)
    step = lambda p, s, v: zero.apply(tx, p, s, p, value=v, scale=scale)
    lowered = jax.jit(step).lower(params, tx.init(params), jax.ShapeDtypeStruct((), jnp.float32))
    after, _ = lowered.out_info
    assert (after["w"].shape, after["w"].dtype) == ((16, 4), jnp.float32)


def test_totals_of_all_stages_are_those_of_their_own_plans(mesh8):
    inner, params = INNERS["clip, momentum"](), TREES["odd"]()
    plans = [jaxzero.Zero(mesh8, stage=stage).plan(params, inner) for stage in (1, 2, 3)]
    for plan in plans:
        assert plan.at_rest == plans[0].at_rest
        assert plan.total == plans[0].at_rest[plan.stage].total
    assert plans[0].at_rest[0].parameters == held(params)


@pytest.mark.parametrize(
    ("stage", "offload"),
    [
        (3, ("state", "params")),
        *(
            pytest.param(s, o, marks=pytest.mark.slow)
            for s, o in [(1, ("state", "params")), (2, ("state",)), (3, ("state",))]
        ),
    ],
)
def test_what_rests_on_the_host(mesh8, stage, offload):
    inner, params = INNERS["adamw"](), TREES["odd"]() | {"n": jnp.arange(3)}
    zero = jaxzero.Zero(mesh8, stage=stage, offload=offload)
    plan, without = zero.plan(params, inner), jaxzero.Zero(mesh8, stage=stage).plan(params, inner)
    split = zero.shard(params)
    arrays = jax.tree.leaves((split, zero.optimizer(inner).init(split)))
    row = plan.at_rest[stage]
    assert row.host == held([x for x in arrays if x.sharding.memory_kind == "pinned_host"]) > 0
    assert row.device + row.host == row.total == without.total
    assert (plan.at_rest[0].host, without.at_rest[stage].host) == (0, 0)
    abstract = jaxzero.Zero(AbstractMesh((8,), ("data",)), stage=stage, offload=offload)
    assert abstract.plan(params, inner).at_rest == plan.at_rest
    (line,) = [line for line in str(plan).splitlines() if line.startswith("of it on the host")]
    assert _text.size_text(row.host) in line
    assert "on the host" in repr(plan)
    assert "host" not in f"{without} {without!r}"


def test_a_plan_of_split_parameters_is_that_of_whole_ones(mesh8):
    zero = jaxzero.Zero(mesh8, stage=3)
    params = TREES["odd"]()
    assert zero.plan(zero.shard(params), optax.adam(1.0)) == zero.plan(params, optax.adam(1.0))


# --- layout, buckets, chunks ---------------------------------------------------------------------


def test_layouts_by_name(mesh8):
    plan = jaxzero.Zero(mesh8, stage=1, stacked=stacked).plan(TREES["stacked"]() | {"scale": jnp.float32(1)})
    found = {leaf.path: (leaf.layout, leaf.stored_shape, leaf.padding) for leaf in plan.leaves}
    assert found == {
        "head": ("rows", (8, 7), 0),
        "scale": ("whole", (), 0),
        "stack/b": ("stacked", (4, 8), 12),
        "stack/s": ("whole", (4,), 0),
        "stack/w": ("stacked", (4, 24, 8), 0),
    }


@pytest.mark.parametrize(("stage", "expected"), [(1, [[0, 1], [2, 4], [3]]), (2, [[0, 1], [2], [3], [4]])])
def test_buckets_are_the_collectives_of_the_gradients(mesh8, stage, expected):
    """At stage 1 the loss and the scalar, which nobody splits, are in the first."""
    params = {"a": jnp.ones(20), "b": jnp.ones(20), "c": jnp.ones(30), "d": jnp.ones(512), "e": jnp.ones(40)}
    params = params if stage == 2 else {"0": jnp.float32(1), **params}
    zero = jaxzero.Zero(mesh8, stage=stage, bucket_bytes=168)
    leaves = [leaf for leaf in zero.plan(params).leaves if leaf.path != "0"]
    found: dict = {}
    for i, leaf in enumerate(leaves):
        found.setdefault(leaf.bucket, []).append(i)
        assert leaf.chunk is None
    assert list(found.values()) == expected
    kind = "all-reduce" if stage == 1 else "reduce-scatter"
    assert [row.calls for row in zero.plan(params).traffic if row.kind == kind][0] == len(expected)
    if stage == 2:  # the compiler joins all-reduces
        assert hlo.count(hlo.step_collectives(zero, optax.sgd(0.1), params), kind) == len(expected)


def test_chunks_follow_the_order_of_use(mesh8):
    params = {"a": jnp.ones((8, 8)), "b": jnp.ones((8, 8)), "c": jnp.ones((64, 64)), "d": jnp.ones(8)}

    def loss(p, x):
        return jnp.mean((jnp.tanh(x @ p["b"]) @ p["a"] + p["d"]) @ p["c"][:8])

    zero = jaxzero.Zero(mesh8, stage=3, persist_bytes=0, chunk_bytes=530)
    seen = zero.observe(loss, params, jnp.ones((8, 8)))
    chunk = lambda zero: {leaf.path: leaf.chunk for leaf in zero.plan(params).leaves}
    assert chunk(zero) == {"a": 0, "b": 0, "c": 1, "d": 2}
    assert chunk(seen) == {"b": 0, "a": 0, "d": 1, "c": 2}
    assert {leaf.bucket for leaf in seen.plan(params).leaves} == {None}


def test_layers_of_a_scan_share_its_chunk(mesh8):
    params = {"w": jnp.ones((3, 8, 8)), "b": jnp.ones((3, 8)), "head": jnp.ones((8, 8))}

    def loss(p, x):
        layer = lambda x, p: (jnp.tanh(x @ p["w"] + p["b"]), None)
        return jnp.mean(jax.lax.scan(layer, x, {"w": p["w"], "b": p["b"]})[0] @ p["head"])

    zero = jaxzero.Zero(mesh8, stage=3).observe(loss, params, jnp.ones((8, 8)))
    found = {leaf.path: (leaf.chunk, leaf.layout) for leaf in zero.plan(params).leaves}
    assert found == {"w": (0, "stacked"), "b": (0, "stacked"), "head": (1, "rows")}


# --- traffic -------------------------------------------------------------------------------------


def planned(plan):
    out: dict = {}
    for row in plan.traffic:
        key = (row.axes, row.kind)
        out[key] = out.get(key, 0) + row.nbytes
    return out


def counted(rows):
    out: dict = {}
    for row in rows:
        if row.sent:
            key = (row.axes, row.kind)
            out[key] = out.get(key, 0) + row.sent
    return out


def assert_within_a_percent(plan, count):
    assert plan.keys() == count.keys()
    for key, value in count.items():
        assert abs(plan[key] - value) <= 0.01 * value, key


@pytest.mark.grid(13)
@pytest.mark.parametrize("schedule", traffic.schedules()[1:], ids=lambda s: s.name)
def test_planned_traffic_is_that_of_each_schedule(schedule):
    mesh = helpers.make_mesh(*schedule.mesh)
    zero = jaxzero.Zero(mesh, **schedule.options)
    params, x = traffic.init(), jax.ShapeDtypeStruct((16, traffic.WIDTH), jnp.float32)
    zero = zero.observe(traffic.loss_fn, params, x) if zero.stage == 3 else zero
    plan = zero.plan(params, optax.adamw(1e-3), accumulate=schedule.steps)
    large = {key: nbytes for key, nbytes in planned(plan).items() if nbytes > traffic.SCALARS}
    assert_within_a_percent(large, counted(traffic.counted(schedule)))


@pytest.mark.grid(39)
@pytest.mark.parametrize(
    ("tree", "stage", "mesh", "inner"),
    [
        *itertools.product(
            ("odd", "layers", "tuple", "large"), (1, 2), ("8", "2x4", "2x2x2"), ("adafactor", "clip, momentum")
        )
    ],
)
def test_planned_traffic_is_that_of_compiled_steps(tree, stage, mesh, inner):
    """All of it, to the last scalar: buckets, padding, what the optimizer sends for itself."""
    zero, inner, params = make_zero(mesh, stage), INNERS[inner](), TREES[tree]()
    text = hlo.compiled_step(zero, inner, params).as_text()
    assert_within_a_percent(planned(zero.plan(params, inner)), counted(jaxzero.collectives(text, zero.mesh)))


@pytest.mark.parametrize("mesh", ["8", pytest.param("2x2x2", marks=pytest.mark.slow)])
def test_planned_traffic_of_stage_3_follows_the_observed_loss(mesh):
    """The embedding is not needed in the backward pass, small leaves stay."""
    params = {
        "emb": normal(40, 64),
        "head": normal(64, 40),
        "w": normal(3, 64, 64),
        "b": normal(3, 64),
        "g": normal(64),
    }

    def loss(p, x):
        h = p["emb"][x]
        h, _ = jax.lax.scan(lambda h, p: (jnp.tanh(h @ p["w"] + p["b"]), None), h, {"w": p["w"], "b": p["b"]})
        return jnp.mean((h * p["g"]) @ p["head"])

    x = jnp.zeros(16, jnp.int32)
    zero = make_zero(mesh, 3, persist_bytes=1000, chunk_bytes=2000)
    seen = zero.observe(loss, params, x)
    inner = optax.adamw(1e-3)
    tx, split = seen.optimizer(inner), seen.shard(params)

    def step(params, state, x):
        value, grads = seen.value_and_grad(loss)(params, x)
        return seen.apply(tx, grads, state, params), value

    text = jax.jit(step).lower(split, tx.init(split), x).compile().as_text()
    count = counted(jaxzero.collectives(text, seen.mesh))
    # The last layer is gathered behind the forward scan and before the backward scan; XLA merges the two on CPU alone.
    layer = 64 * 64 * 4
    for axes, merged in {"8": {"data": layer * 7 / 8}, "2x2x2": {"node": layer / 4, "local": layer / 2}}[mesh].items():
        count[(axes,), "all-gather"] += merged
    assert_within_a_percent(planned(seen.plan(params, inner)), count)
    assert planned(zero.plan(params, inner)) != planned(seen.plan(params, inner))


def test_the_stand_in_uses_every_parameter_forward_and_backward(mesh8):
    """What is planned without a loss is what its stand-in would send."""
    params = TREES["stacked"]()
    zero = jaxzero.Zero(mesh8, stage=3, stacked=stacked, persist_bytes=0, chunk_bytes=None)
    loss = default_loss.loss(leaves_of(params, 8, stacked))
    text = jax.jit(zero.value_and_grad(loss)).lower(zero.shard(params), jnp.ones(8)).compile().as_text()
    assert_within_a_percent(planned(zero.plan(params)), counted(jaxzero.collectives(text, mesh8)))
    grad = jax.grad(loss)(params, jnp.ones(8))
    assert all(np.any(np.asarray(x)) for x in jax.tree.leaves(grad))


def test_parameters_travel_in_their_own_dtype(mesh8):
    """In a program for GPUs: the compiler for CPUs widens bfloat16."""
    zero = jaxzero.Zero(mesh8, stage=2)
    wide, narrow = ({"w": jnp.ones((64, 64), dtype)} for dtype in (jnp.float32, jnp.bfloat16))
    wide, narrow = planned(zero.plan(wide)), planned(zero.plan(narrow))
    assert wide[("data",), "all-gather"] == 2 * narrow[("data",), "all-gather"]
    assert wide[("data",), "reduce-scatter"] == narrow[("data",), "reduce-scatter"]


def test_accumulation_and_sync_multiply_what_they_do(mesh8):
    zero, params = jaxzero.Zero(mesh8, stage=2), TREES["layers"]()
    scattered = lambda **how: planned(zero.plan(params, **how))[("data",), "reduce-scatter"]
    assert scattered(accumulate=3) == 3 * scattered()
    assert scattered(accumulate=3, sync="once") == scattered()


# --- an abstract mesh, and what is shown ---------------------------------------------------------


def big(stage, count=75):
    """300 leaves on a mesh that no machine here has."""
    mesh = AbstractMesh((4, 16, 8), ("replica", "node", "local"))
    zero = jaxzero.Zero(mesh, stage=stage, **HOPS)
    leaf = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    block = {
        "attention": {"kernel": leaf(4096, 6144), "bias": leaf(6144)},
        "mlp": leaf(4096, 11008),
        "norm": leaf(4096),
    }
    return zero.plan({"layers": [block] * count}, optax.sgd(0.1, momentum=0.9))


@pytest.fixture(scope="module")
def plan():
    return big(3)


def test_shown_in_100_columns(plan, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    text = str(plan)
    assert max(map(len, text.splitlines())) <= 100
    assert len(text.splitlines()) < 60
    assert "layers/[0-74]/attention/kernel" in text
    assert "split over node=16 x local=8, repeated over replica=4" in text
    assert "bf16[4096,6144]" in text
    assert "stage 3 *" in text


def test_as_a_dict_of_json(plan):
    again = json.loads(json.dumps(plan.to_dict()))
    assert again["total"] == plan.total == again["at_rest"][3]["total"]
    assert again["sent"] == sum(row["nbytes"] for row in again["traffic"])
    assert len(again["leaves"]) == 300
    assert again["leaves"][0]["path"] == "layers/0/attention/bias"
    assert again["mesh"] == {"replica": 4, "node": 16, "local": 8}


def test_as_html(plan):
    html = plan._repr_html_()
    assert html.startswith("<pre")
    assert "bf16[4096,6144]" in html


def test_as_bars(plan):
    pytest.importorskip("matplotlib").use("Agg")
    ax = plan.plot()
    heights = np.array([bar.get_height() for bar in ax.patches]).reshape(3, 4).sum(0)
    np.testing.assert_allclose(heights, [row.total / 1e9 for row in plan.at_rest])
    assert plan.plot(ax) is ax


def test_blocks_join_what_differs_in_numbers_only(mesh8):
    params = {"Dense_0": {"w": jnp.ones(8)}, "Dense_1": {"w": jnp.ones(8)}, "Dense_2": {"w": jnp.ones(16)}}
    plan = jaxzero.Zero(mesh8).plan(params)
    assert [(name, len(rows)) for name, rows in analysis_plan.blocks(plan.leaves)] == [
        ("Dense_[0-1]/w", 2),
        ("Dense_2/w", 1),
    ]


def test_a_missing_package_is_named(plan, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ImportError, match=r'plan.plot\(\) needs matplotlib. Fix: pip install "\.\[plot\]"'):
        plan.plot()
    assert repr(plan).startswith("Plan(stage=3, 300 leaves, ")


@pytest.mark.parametrize(
    ("params", "options", "words"),
    [
        ({}, {}, ["plan", "no leaf", "dict", "Fix"]),
        ({"a": {"b": "text"}}, {}, ["plan", "a/b", "str", "Fix"]),
        ({"w": jnp.ones(8)}, {"accumulate": 0}, ["plan", "accumulate=0", "Fix"]),
        ({"w": jnp.ones(8)}, {"sync": "never"}, ["plan", "sync='never'", "Fix"]),
    ],
)
def test_bad_input(mesh8, params, options, words):
    with pytest.raises(ValueError, match=checks.saying(*words)):
        jaxzero.Zero(mesh8).plan(params, **options)


def test_not_inside_shard_map(mesh8):
    zero = jaxzero.Zero(mesh8)

    def body(x):
        zero.plan({"w": x})
        return x

    with pytest.raises(ValueError, match="plan: called inside shard_map"):
        jax.shard_map(body, mesh=mesh8, in_specs=P("data"), out_specs=P("data"))(jnp.ones(8))
    with pytest.raises(ValueError, match="plan: no mesh"):
        jaxzero.Zero().plan({"w": jnp.ones(8)})
