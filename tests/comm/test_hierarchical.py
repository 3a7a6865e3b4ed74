"""Gathers and reduce-scatters in hops: the order, the numbers and the bytes of one flat collective, or fewer bytes.

Right shape and right norm prove nothing here: joining node after node gives a permutation with both. So what is
compared is the order of whole numbers, element by element.
"""

import ast
import pathlib

import helpers
import hlo
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checks import assert_params_equal, assert_state_equal, place, quadratic, quadratic_batches, reference, train
from jax import lax
from jax.sharding import PartitionSpec as P
from mutating import mutated

import jaxzero
from jaxzero._src.comm import collectives
from jaxzero._src.comm import hierarchical as comm_hierarchical
from jaxzero._src.sharding.axes import Axes
from jaxzero._src.sharding.layout import Layout, even_split

pytestmark = pytest.mark.grid(11)

NODES = ("node", "local")
MESHES = {
    "2x4": ((2, 4), NODES),
    "4x2": ((4, 2), NODES),
    "one node": ((1, 8), NODES),
    "one device per node": ((8, 1), NODES),
    "three axes": ((2, 2, 2), ("pod", "node", "local")),
    "names swapped": ((2, 4), ("local", "node")),
}
#: With a replica axis; the shard axes are the others.
GROUPS = {
    "in front": ((2, 2, 2), ("replica", "node", "local")),
    "behind": ((2, 2, 2), ("node", "local", "replica")),
    "between": ((2, 2, 2), ("node", "replica", "local")),
    "groups of one node": ((2, 1, 4), ("replica", "node", "local")),
}
CALLS = {f"collectives.{name}" for name in ("all_gather", "gather_inter_node", "gather_intra_node", "reduce_scatter")}
SHAPES = [((16, 3), 0), ((5, 3), 0), ((1,), 0), ((2, 8, 3), 1), ((2, 5, 3), 1), ((2, 3, 7), 2), ((40,), 0)]


def layouts(n: int) -> list[Layout]:
    return [x for shape, lead in SHAPES if (x := even_split(shape, n, lead))]


def whole(found: list[Layout]) -> list[np.ndarray]:
    """Whole numbers: no two elements are equal, so every place shows."""
    return [np.arange(1, x.size + 1, dtype=np.float32).reshape(x.shape) + 1000 * i for i, x in enumerate(found)]


def params():
    keys = iter(jax.random.split(jax.random.key(0), 6))
    shapes = {"a": (13, 3), "b": (3,), "even": (24, 2), "cube": (3, 3, 4, 8), "s": (), "empty": (0, 4)}
    return {k: jax.random.normal(next(keys), shape) for k, shape in shapes.items()}


def make(shape, names, **options):
    axes = tuple(a for a in names if a != "replica")
    replica = "replica" if "replica" in names else None
    return jaxzero.Zero(helpers.make_mesh(shape, names), shard_axis=axes, replica_axis=replica, **options)


# --- collectives ---------------------------------------------------------------------------------


@pytest.mark.parametrize("bucket_bytes", [None, 100, 10**6])
@pytest.mark.parametrize("name", MESHES)
def test_gather_keeps_the_order_of_the_flat_one(name, bucket_bytes):
    """JZ-079: also with one node, with one device per node, for sizes that do not divide."""
    shape, axes = MESHES[name]
    found = layouts(8)
    mesh = helpers.make_mesh(shape, axes)

    def body(arrays):
        index = lax.axis_index(axes)
        shares = [collectives.share(x, layout, index) for x, layout in zip(arrays, found, strict=True)]
        shares = [lax.pcast(x, axes, to="varying") if not jax.typeof(x).manual_axis_type.varying else x for x in shares]
        return [collectives.all_gather(shares, found, over, bucket_bytes=bucket_bytes) for over in (axes, (axes,))]

    in_hops, flat = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P(), out_specs=P()))(whole(found))
    for a, b, x in zip(in_hops, flat, whole(found), strict=True):
        np.testing.assert_array_equal(a, x)
        np.testing.assert_array_equal(b, x)


@pytest.mark.parametrize("bucket_bytes", [None, 10**6])
@pytest.mark.parametrize("name", MESHES)
def test_scatter_gives_the_shares_of_the_flat_one(name, bucket_bytes):
    """Sums of whole numbers are exact in any order."""
    shape, axes = MESHES[name]
    found = layouts(8)

    def body(arrays):
        mine = [x * (1 + lax.axis_index(axes).astype(jnp.float32)) for x in arrays]
        return [collectives.reduce_scatter(mine, found, over, bucket_bytes=bucket_bytes) for over in (axes, (axes,))]

    specs = [x.spec(axes) for x in found]
    region = jax.shard_map(body, mesh=helpers.make_mesh(shape, axes), in_specs=P(), out_specs=[specs, specs])
    in_hops, flat = jax.jit(region)(whole(found))
    for a, b, x, layout in zip(in_hops, flat, whole(found), found, strict=True):
        np.testing.assert_array_equal(collectives.logical(a, layout), x * 36)
        np.testing.assert_array_equal(a, b)


def test_scatter_is_the_transpose_of_the_gather(mesh):
    """`<gather(x), y> = <x, scatter(y)>` for every unit vector: the matrix of one is that of the other, turned."""

    def body(eye):
        index = lax.axis_index(NODES)
        mine = lax.dynamic_slice_in_dim(eye, index, 1)
        scattered = comm_hierarchical.scatter(lax.pcast(eye, NODES, to="varying") / 8, NODES, 0)
        return comm_hierarchical.gather(mine, NODES, 0), scattered

    region = jax.shard_map(body, mesh=mesh((2, 4), NODES), in_specs=P(), out_specs=(P(), P(NODES)))
    gathered, scattered = jax.jit(region)(np.eye(8, dtype=np.float32))
    np.testing.assert_array_equal(gathered.T, scattered)


def test_the_gather_is_typed_as_equal_on_all_devices(mesh):
    def body(x):
        y = comm_hierarchical.gather(x, NODES, 0)
        assert jax.typeof(x).manual_axis_type.varying == {"node", "local"}
        assert not jax.typeof(y).manual_axis_type.varying
        return y

    jax.shard_map(body, mesh=mesh((2, 4), NODES), in_specs=P(NODES), out_specs=P())(jnp.arange(8.0))


@pytest.mark.parametrize(
    ("sizes", "hierarchical", "expected"),
    [
        ((2, 4), True, NODES),
        ((2, 4), False, (NODES,)),
        ((1, 8), True, (NODES,)),
        ((8, 1), True, (NODES,)),
        ((1, 1), True, (NODES,)),
    ],
)
def test_hops_of_two_axes(sizes, hierarchical, expected):
    """An axis of one device is no hop: the compiler would keep its collective."""
    assert Axes(NODES, ("replica",), (3, *sizes), hierarchical).hops == expected


def test_hops_of_other_axes():
    three = ("pod", "node", "local")
    assert Axes(three, (), (2, 2, 2)).hops == three
    assert Axes(three, (), (2, 1, 4)).hops == (("pod", "node"), "local")
    assert Axes(three, (), (1, 2, 4)).hops == (("pod", "node"), "local")
    assert Axes(("data",), (), (8,)).hops == ("data",)


def test_every_caller_passes_hops():
    """One that passed the names of the axes would not hear of `hierarchical=False`."""
    calls = [
        node
        for path in pathlib.Path(jaxzero.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in CALLS
    ]
    assert {ast.unparse(call.func) for call in calls} == CALLS
    assert [text for call in calls if not (text := ast.unparse(call.args[2])).endswith("axes.hops")] == []


# --- training ------------------------------------------------------------------------------------

INNER = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))
#: Every mesh at one stage, one of them at both.
TRAINED = [(name, 1 + i % 2) for i, name in enumerate(MESHES | GROUPS)] + [("2x4", 2)]
BATCHES = quadratic_batches()


@pytest.mark.parametrize(("name", "stage"), TRAINED)
def test_training_is_that_of_the_unsharded_run(name, stage):
    """Norms, scalars, empty and odd leaves; different examples on each device."""
    zero = make(*(MESHES | GROUPS)[name], stage=stage)
    want = reference(INNER, params(), quadratic, BATCHES)
    way = "inside, update" if "one" in name or stage == 1 else "value_and_grad, apply"
    got = train(zero, INNER, params(), quadratic, BATCHES, way)
    assert_params_equal(got.params, want.params)
    assert_state_equal(got.state, want.state)
    helpers.assert_all_shards_equal((got.params, got.state))


@pytest.mark.parametrize("name", ["2x4", "three axes", "in front"])
def test_jz_079_flat_and_hierarchical_are_bitwise_equal(name):
    """From the same gradients: gathers move bits, so parameters and state are the same ones."""

    def steps(hierarchical):
        zero = make(*(MESHES | GROUPS)[name], stage=2, hierarchical=hierarchical)
        tx = zero.optimizer(optax.chain(optax.adam(1e-2), optax.centralize()))
        now = place(params(), zero.mesh, P())
        state = tx.init(now)
        for i in range(3):
            grads = jax.tree.map(lambda x, i=i: jnp.sin(x + i), now)
            now, state = zero.apply(tx, grads, state, now)
        return now, state

    for a, b in zip(jax.tree.leaves(steps(True)), jax.tree.leaves(steps(False)), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("stage", [1, 2])
def test_gradients_of_both_ways_agree_to_rounding(stage):
    """Sums are taken in another order: equal in whole numbers (above), to rounding here."""
    grads = []
    for hierarchical in (True, False):
        zero = make(*MESHES["2x4"], stage=stage, hierarchical=hierarchical)
        batch = place(BATCHES[0], zero.mesh, P(NODES))
        value, found = zero.value_and_grad(quadratic)(place(params(), zero.mesh, P()), batch)
        grads.append((value, zero.gather(found)))
    helpers.close(*grads, 1e-6)
    helpers.close(grads[0], jax.value_and_grad(quadratic)(params(), BATCHES[0]))


def test_gather_of_split_gradients_goes_in_hops(mesh):
    """`Zero.gather` too: a flat leaf on a mesh of nodes."""
    zero = make((2, 4), NODES)
    leaf = jaxzero.EvenSplit(place(jnp.arange(8.0).at[7].set(0), zero.mesh, P(NODES)), (7,))
    np.testing.assert_array_equal(zero.gather(leaf), np.arange(7.0))


# --- what is sent --------------------------------------------------------------------------------

ROWS, COLUMNS = 64, 96
M = ROWS * COLUMNS * 4


def sent(zero):
    """The collectives of one step that carry more than scalars."""
    step = hlo.compiled_step(zero, optax.adamw(1e-3), {"w": jnp.ones((ROWS, COLUMNS))})
    return [x for x in jaxzero.collectives(step, zero.mesh) if x.nbytes > 64]


def of(rows, kind):
    return [(x.axes, x.nbytes) for x in rows if x.kind == kind]


def test_two_gathers_over_node_then_local():
    rows = sent(make((2, 4), NODES, stage=2))
    assert of(rows, "all-gather") == [(("node",), M // 4), (("local",), M)]
    assert of(rows, "reduce-scatter") == [(("local",), M), (("node",), M // 4)]
    assert of(rows, "all-reduce") == []
    across = next(x for x in rows if x.kind == "all-gather")
    assert sorted(across.groups) == [(0, 4), (1, 5), (2, 6), (3, 7)]


def test_one_flat_collective_when_asked_for():
    rows = sent(make((2, 4), NODES, stage=2, hierarchical=False))
    assert of(rows, "all-gather") == of(rows, "reduce-scatter") == [(NODES, M)]


@pytest.mark.parametrize("name", ["one node", "one device per node"])
def test_one_collective_where_there_is_one_level(name):
    rows = sent(make(*MESHES[name], stage=2))
    assert sorted(x.kind for x in rows) == ["all-gather", "reduce-scatter"]


def test_three_hops():
    rows = sent(make(*MESHES["three axes"], stage=2))
    gathers = [x for x in rows if x.kind == "all-gather"]
    assert [x.groups[0] for x in gathers] == [(0, 4), (0, 2), (0, 1)]
    assert [x.nbytes for x in gathers] == [M // 4, M // 2, M]


def test_bytes_into_a_node():
    """`(p-1)M/p` through one ring, `(p-k)M/p` in channels: each of the k devices of a node sends on its own."""
    p, k = 8, 4
    flat, in_hops = (sent(make((2, 4), NODES, stage=2, hierarchical=h)) for h in (False, True))
    ring = sum(x.sent for x in flat if x.kind == "all-gather")
    across, inside = [x for x in in_hops if x.kind == "all-gather"]
    assert ring == (p - 1) * M / p
    assert k * across.sent == (p - k) * M / p
    assert across.sent + inside.sent == ring


def test_stage_1_gathers_in_hops_too():
    rows = sent(make((2, 4), NODES, stage=1))
    assert [axes for axes, _ in of(rows, "all-gather")] == [("node",), ("local",)]
    ((axes, nbytes),) = of(rows, "all-reduce")
    assert (axes, nbytes // 64) == (NODES, M // 64)  # the loss travels along


def test_replicas_stay_apart():
    """With a replica axis the hops stay in the group; only the share crosses."""
    rows = sent(make(*GROUPS["in front"], stage=2))
    found = [(x.kind, x.axes, x.nbytes) for x in rows]
    assert sorted(found) == [
        ("all-gather", ("local",), M),
        ("all-gather", ("node",), M // 2),
        ("all-reduce", ("replica",), M // 4),
        ("reduce-scatter", ("local",), M),
        ("reduce-scatter", ("node",), M // 2),
    ]


# --- mutations -----------------------------------------------------------------------------------


def node_after_node(_):
    """Joined along one dimension: the right shape, the right norm, and a permutation of the shares."""

    def wrong(x, over, axis):
        for hop in over:
            x = lax.all_gather(x, hop, axis=axis, tiled=True, to="invarying")
        return x

    return wrong


def turned(f):
    """Node and local swapped: the hops in the other order."""
    return lambda x, over, axis: f(x, tuple(reversed(over)), axis)


MUTATIONS = {
    "joined node after node": [("gather", node_after_node)],
    "gather swapped": [("gather", turned)],
    "scatter swapped": [("scatter", turned)],
    "both swapped": [("gather", turned), ("scatter", turned)],
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_swapped_node_and_local_shows(monkeypatch, name):
    """Even where gather and reduce-scatter are wrong in the same way: state and parameters are cut by the index."""
    tree = {k: params()[k] for k in ("a", "even")}
    want = reference(optax.sgd(1.0), tree, quadratic, BATCHES[:1])

    def compare():
        got = train(make((2, 4), NODES, stage=2), optax.sgd(1.0), tree, quadratic, BATCHES[:1])
        assert_params_equal(got.params, want.params)

    compare()
    changes = MUTATIONS[name]
    with mutated(monkeypatch, *changes[0], module=comm_hierarchical):
        if len(changes) > 1:
            with mutated(monkeypatch, *changes[1], module=comm_hierarchical), pytest.raises(AssertionError):
                compare()
        else:
            with pytest.raises(AssertionError):
                compare()


@pytest.mark.parametrize("change", [node_after_node, turned])
def test_right_shape_and_norm_hide_it(mesh, change):
    """Why the order is tested: everything else about the wrong gather is right."""
    wrong = change(comm_hierarchical.gather)
    region = jax.shard_map(
        lambda x: (wrong(x, NODES, 0), comm_hierarchical.gather(x, NODES, 0)),
        mesh=mesh((2, 4), NODES),
        in_specs=P(NODES),
        out_specs=P(),
    )
    bad, good = jax.jit(region)(jnp.arange(8.0))
    assert (bad.shape, float(jnp.linalg.norm(bad))) == (good.shape, float(jnp.linalg.norm(good)))
    np.testing.assert_array_equal(good, np.arange(8))
    assert np.asarray(bad).tolist() == [0, 4, 1, 5, 2, 6, 3, 7]


def test_a_lost_reduction_between_nodes_shows(monkeypatch):
    """In the loss region no type check stands guard; the numbers do."""

    def differing(f):
        def wrong(x, over, axis):
            done = f(x, over, axis)
            return done if len(over) < 2 else done - lax.ppermute(done, "node", [(0, 1), (1, 0)])

        return wrong

    tree = {"even": jnp.ones((16, 2))}

    def compare():
        zero = make((2, 4), NODES, stage=2)
        batch = place(BATCHES[0], zero.mesh, P(NODES))
        helpers.close(
            zero.value_and_grad(quadratic)(place(tree, zero.mesh, P()), batch),
            jax.value_and_grad(quadratic)(tree, BATCHES[0]),
        )

    compare()
    with mutated(monkeypatch, "scatter_intra_node", differing, module=comm_hierarchical), pytest.raises(AssertionError):
        compare()
