"""Open cases of two-level sharding, and axes that are refused."""

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checks import logical, place, update_inside
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxzero

pytestmark = pytest.mark.grid(9)

GROUP = ("replica", "shard")
NODES = ("node", "local")
MIXED = ("replica", "node", "local")
TREE = {"w": np.arange(64, dtype=np.float32).reshape(16, 4), "b": np.arange(5, dtype=np.float32), "s": np.float32(3)}


def make(shape, names, **options):
    axes = tuple(a for a in names if a != "replica")
    replica = "replica" if "replica" in names else None
    return jaxzero.Zero(helpers.make_mesh(shape, names), shard_axis=axes, replica_axis=replica, **options)


# --- JZ-077: the layout has as many shares as the collectives have devices ------------------------


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize(
    ("shape", "names"),
    [((1, 8), GROUP), ((2, 4), GROUP), ((4, 2), GROUP), ((8, 1), GROUP), ((2, 4), NODES), ((2, 2, 2), MIXED)],
)
def test_jz_077_every_element_moves_and_has_one_owner(shape, names, stage):
    """A layout for all 8 devices where a group has 4 would leave the last shares to nobody."""
    zero = make(shape, names, stage=stage)
    tx = zero.optimizer(optax.sgd(1.0, momentum=0.9))
    params = place(TREE, zero.mesh, P())
    state = tx.init(params)
    after, state = zero.apply(tx, jax.tree.map(jnp.ones_like, params), state, params)
    for name, x in after.items():
        np.testing.assert_array_equal(x, TREE[name] - 1)
        trace = state[0].trace[name]
        np.testing.assert_array_equal(logical(trace, TREE[name]), np.ones_like(TREE[name]))
    helpers.assert_all_shards_equal((after, state))
    group = int(np.prod([size for size, name in zip(shape, names, strict=True) if name != "replica"]))
    owned = {str(shard.index): shard.data.size for shard in state[0].trace["w"].addressable_shards}
    assert sorted(owned.values()) == [64 // group] * group


# --- JZ-080: an axis of one device is no reason to leave a reduction out --------------------------


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize(
    ("shape", "names"),
    [
        ((8, 1), GROUP),
        ((1, 8), GROUP),
        ((1, 1), GROUP),
        ((8, 1), NODES),
        ((1, 8), NODES),
        ((8, 1, 1), MIXED),
        ((2, 1, 4), MIXED),
    ],
)
def test_jz_080_gradient_is_the_mean_over_all_devices(shape, names, stage):
    """Each device's gradient is its number: the mean of 0 to 7 is 3.5, everywhere, on every replica."""
    zero = make(shape, names, stage=stage)
    mine = lambda device, _: jax.tree.map(lambda x: jnp.full(np.shape(x), device, jnp.float32), TREE)
    run = update_inside(zero, optax.sgd(1.0), TREE, mine)
    mean = (np.prod(shape) - 1) / 2
    for name, x in run.params.items():
        np.testing.assert_array_equal(x, TREE[name] - np.float32(mean))
    helpers.assert_all_shards_equal((run.params, run.state))


# --- JZ-085: parameters of any placement ----------------------------------------------------------

PLACEMENTS = {
    "NumPy": lambda mesh: TREE,
    "one device": lambda mesh: jax.device_put(TREE, jax.devices()[5]),
    "host memory": lambda mesh: jax.device_put(TREE, NamedSharding(mesh, P(), memory_kind="pinned_host")),
    "replicated": lambda mesh: place(TREE, mesh, P()),
    "rows over the last axis": lambda mesh: TREE | {"w": place(TREE["w"], mesh, P(mesh.axis_names[-1]))},
    "columns over the last axis": lambda mesh: TREE | {"w": place(TREE["w"], mesh, P(None, mesh.axis_names[-1]))},
    "rows over all axes": lambda mesh: TREE | {"w": place(TREE["w"], mesh, P(mesh.axis_names))},
    "other mesh": lambda mesh: place(TREE, helpers.make_mesh(4), P()),
}


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("names", [GROUP, NODES])
def test_jz_085_any_placement_on_two_levels(placement, names, explicit):
    mesh = helpers.make_mesh((2, 4), names, explicit=explicit)
    options = dict(shard_axis=NODES) if names == NODES else dict(shard_axis="shard", replica_axis="replica")
    zero = jaxzero.Zero(mesh, stage=2, **options)
    tx = zero.optimizer(optax.adam(0.5))
    params = PLACEMENTS[placement](mesh)
    after, state = zero.apply(tx, jax.tree.map(np.ones_like, TREE), tx.init(params), params)
    for name, x in after.items():
        np.testing.assert_allclose(x, TREE[name] - 0.5, rtol=1e-5)  # as plain Adam rounds
        assert x.sharding.device_set == set(mesh.devices.flat)
        assert x.sharding.memory_kind == "device"
    assert state[0].mu["w"].addressable_shards[0].data.size == 64 // (8 if names == NODES else 4)


# --- axes that are refused ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(shard_axis="node", replica_axis="node"), "shard_axis='node' and replica_axis='node' name one axis twice"),
        (dict(shard_axis=NODES, replica_axis="local"), r"shard_axis=\('node', 'local'\) and replica_axis='local' name"),
        (dict(shard_axis=NODES, replica_axis="node"), r"shard_axis=\('node', 'local'\) and replica_axis='node' name"),
        (dict(shard_axis="local", replica_axis=NODES), r"shard_axis='local' and replica_axis=\('node', 'local'\) name"),
        (dict(shard_axis=("node", "node")), "name one axis twice"),
        (
            dict(shard_axis=("local", "node")),
            r"hierarchical=None with shard_axis=\('local', 'node'\).*order \('node', 'local'\)"
            r".*Fix: shard_axis=\('node', 'local'\), or hierarchical=False",
        ),
        (
            dict(shard_axis=("local", "node"), hierarchical=True),
            r"hierarchical=True with shard_axis=\('local', 'node'\).*Fix",
        ),
        (
            dict(shard_axis="local", hierarchical=True),
            "hierarchical=True with shard_axis='local'.*tuple of axes.*Fix: shard_axis=.*or drop hierarchical",
        ),
        (dict(shard_axis=("local",), hierarchical=True), "hierarchical=True with shard_axis='local'"),
        (dict(shard_axis=NODES, hierarchical="yes"), "hierarchical='yes'. Expected True, False, or None.*Fix"),
        (dict(shard_axis=NODES, hierarchical=1), "hierarchical=1. Expected True"),
    ],
)
def test_axes_that_are_refused(options, message):
    mesh = helpers.make_mesh((2, 4), NODES)
    with pytest.raises(ValueError, match=f"^Zero: .*{message}"):
        jaxzero.Zero(mesh, **options)


def test_order_against_the_mesh_is_refused_inside_shard_map_too():
    """Where no mesh was given the bound axes say it."""
    mesh = helpers.make_mesh((2, 4), NODES)
    tx = jaxzero.zero2(optax.sgd(1.0), ("local", "node"))
    region = jax.shard_map(lambda x: tx.init(x) and x, mesh=mesh, in_specs=P(), out_specs=P())
    with pytest.raises(ValueError, match=r"hierarchical=None with shard_axis=\('local', 'node'\)"):
        region(jnp.ones(8))


@pytest.mark.parametrize("stage", [1, 2])
def test_any_order_is_right_in_one_flat_collective(stage):
    """`hierarchical=False`: the first name still varies slowest, and the numbers are the same."""
    mesh = helpers.make_mesh((2, 4), NODES)
    zero = jaxzero.Zero(mesh, stage=stage, shard_axis=("local", "node"), hierarchical=False)
    tx = zero.optimizer(optax.sgd(1.0, momentum=0.9))
    grads = jax.tree.map(lambda x: jnp.asarray(x) / 8, TREE)
    after, state = zero.apply(tx, grads, tx.init(TREE), TREE)
    for name, x in after.items():
        np.testing.assert_array_equal(x, TREE[name] - TREE[name] / 8)
    trace = state[0].trace["w"]
    assert trace.sharding.spec == P(("local", "node"))
    np.testing.assert_array_equal(trace, TREE["w"] / 8)


def test_hierarchical_false_says_nothing_about_one_axis():
    assert jaxzero.Zero(helpers.make_mesh(8), hierarchical=False).hierarchical is False


def test_specs_of_state_on_axes_of_one_device():
    """JAX drops such axes from a sharding; in a user's own `shard_map` the state varies over them all the same."""
    zero = make((8, 1), NODES)
    tx = zero.optimizer(optax.adam(1e-2))
    state = jax.jit(tx.init)(place({"w": TREE["w"]}, zero.mesh, P()))
    assert zero.specs(state)[0].mu["w"] == P(NODES)

    def step(state):
        grads = {"w": lax.pcast(jnp.ones((16, 4)), NODES, to="varying")}
        return tx.update(grads, state, {"w": jnp.zeros((16, 4))})[1]

    specs = zero.specs(state)
    after = jax.jit(jax.shard_map(step, mesh=zero.mesh, in_specs=(specs,), out_specs=specs))(state)
    np.testing.assert_allclose(after[0].mu["w"], np.full((16, 4), 0.1), rtol=1e-6)
