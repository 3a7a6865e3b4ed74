"""`reduce_gradients`: inside a user's `shard_map`, what follows it outside the wrapper is the unsharded run."""

import checks
import helpers
import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P
from stage3_models import normal

import jaxzero

PARAMS = {"a": normal(0, 13, 3), "b": normal(1, 3), "d": normal(3, 16, 2), "s": normal(4)}
BATCHES = checks.quadratic_batches(2)
BEFORE = (optax.clip_by_global_norm(0.1), optax.centralize(), optax.clip_by_block_rms(0.01))
MESHES = {
    "stage 1": (8, ("data",), lambda tx: jaxzero.zero1(tx, grads="reduced"), {}),
    "stage 2": (8, ("data",), lambda tx: jaxzero.zero2(tx, grads="reduced"), {}),
    "MiCS": (
        (2, 4),
        ("group", "data"),
        lambda tx: jaxzero.mics(tx, "data", "group", grads="reduced"),
        {"replica_axis": "group"},
    ),
}


def run(mesh, tx, batches, before=lambda grads: grads):
    """Parameters after some steps, all in one `shard_map`."""
    axes = mesh.axis_names

    def steps(params, batches):
        state = tx.init(params)
        for batch in batches:
            own = jax.lax.pcast(params, axes, to="varying")
            updates, state = tx.update(before(jax.grad(checks.quadratic)(own, batch)), state, params)
            params = optax.apply_updates(params, updates)
        return params

    inside = jax.jit(jax.shard_map(steps, mesh=mesh, in_specs=(P(), P(axes)), out_specs=P()))
    return inside(checks.place(PARAMS, mesh, P()), checks.place(batches, mesh, P(axes)))


@pytest.mark.parametrize("name", MESHES)
def test_statistics_between_are_those_of_the_mean(name):
    shape, axes, wrap, options = MESHES[name]
    tx = optax.chain(jaxzero.reduce_gradients("data", **options), *BEFORE, wrap(optax.adamw(0.1)))
    got = run(helpers.make_mesh(shape, axes), tx, BATCHES)
    want, plain = PARAMS, optax.chain(*BEFORE, optax.adamw(0.1))
    state = plain.init(want)
    for batch in BATCHES:
        updates, state = plain.update(jax.grad(checks.quadratic)(want, batch), state, want)
        want = optax.apply_updates(want, updates)
    checks.assert_params_equal(got, want)


def test_split_gradients_are_gathered_on_global_arrays():
    """There they are means already."""
    zero = jaxzero.Zero(helpers.make_mesh(8))
    tx = optax.chain(jaxzero.reduce_gradients("data", mesh=zero.mesh), *BEFORE)
    _, grads = zero.value_and_grad(checks.quadratic)(PARAMS, BATCHES[0])
    got, _ = tx.update(grads, tx.init(PARAMS), PARAMS)
    plain = optax.chain(*BEFORE)
    helpers.close(got, plain.update(jax.grad(checks.quadratic)(PARAMS, BATCHES[0]), plain.init(PARAMS))[0])


@pytest.mark.parametrize(
    ("made", "found"),
    [
        ("shares", r"gradient leaf 'd' is \(2, 2\); expected .*shape \(16, 2\)"),
        ("reduced", r"gradient leaf 'a' does not vary over \['data'\]"),
        ("an EvenSplit", "gradient leaf 'a' is an EvenSplit"),
        ("no params", "update was called without params"),
    ],
)
def test_what_is_not_whole_and_own_is_refused(made, found):
    mesh, tx = helpers.make_mesh(8), jaxzero.reduce_gradients("data")
    change = {
        "shares": lambda grads: grads | {"d": grads["d"][:2]},
        "reduced": lambda grads: jax.lax.pmean(grads, "data"),
        "an EvenSplit": lambda grads: grads | {"a": jaxzero.EvenSplit(jnp.zeros(5), (13, 3))},
        "no params": lambda grads: grads,
    }[made]
    if made == "no params":
        tx = optax.GradientTransformation(tx.init, lambda g, s, _, update=tx.update: update(g, s))
    with pytest.raises(ValueError, match=checks.saying("reduce_gradients: ", found, "Fix: ")):
        run(mesh, tx, BATCHES[:1], change)
