"""Each comparison that the other tests rest on must fail for the error that it is there to catch.

A mutation replaces one function by a wrong one of the same shapes; the comparison that should see it must then raise.
Whether a mutation is in force is asserted by the comparison itself: it passes without it.
"""

import checks
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from mutating import clear, mutated, no_reduction, rotated, scaled

from jaxzero._src.sharding.layout import Layout

BATCHES = checks.quadratic_batches()


def params():
    k = jax.random.split(jax.random.key(0), 4)
    return {
        "a": jax.random.normal(k[0], (13, 3)),
        "b": jax.random.normal(k[1], (3,)),
        "even": jax.random.normal(k[2], (24, 2)),
        "s": jnp.float32(1.5),
    }


# --- the comparisons -----------------------------------------------------------------------------


def compare_gradients(setting):
    want = jax.value_and_grad(checks.quadratic)(params(), BATCHES[0])
    got = checks.gradients(checks.make_zero(setting), params(), checks.quadratic, BATCHES[0])
    helpers.close(got, want)


def compare_gradients_inside(setting):
    """One SGD step of size 1 on this device's own gradients."""
    want = checks.reference(optax.sgd(1.0), params(), checks.quadratic, BATCHES[:1]).params
    got = checks.train(
        checks.make_zero(setting), optax.sgd(1.0), params(), checks.quadratic, BATCHES[:1], "inside, update"
    )
    checks.assert_params_equal(got.params, want, rtol=5e-6, atol=5e-6)


def compare_norms(setting):
    """Clipping by the global norm; nothing else moves the parameters."""
    inner = optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(1.0))
    checks.check(setting, inner, params(), checks.quadratic, BATCHES[:2])


def compare_training(setting):
    """Adam, from whose parameters a constant factor does not show; its state shows it."""
    checks.check(setting, optax.adamw(1e-2), params(), checks.quadratic, BATCHES)


def compare_padding(setting):
    """An optimizer that maps zero to something: the padding of its state must be zero all the same."""
    inner = optax.chain(optax.stateless(lambda u, p: jax.tree.map(jnp.exp, u)), optax.trace(0.9), optax.scale(-0.01))
    checks.check(setting, inner, params(), checks.quadratic, BATCHES[:2])


def compare_replicas(setting):
    """Only that the devices agree with one another."""
    run = checks.train(checks.make_zero(setting), optax.sgd(1.0), params(), checks.quadratic, BATCHES[:2])
    helpers.assert_all_shards_equal((run.params, run.state))


# --- the mutations -------------------------------------------------------------------------------


def swapped(f):
    """The gather puts the shares together in reverse order: right shapes, right norm."""

    def wrong(shares, layouts, axes, **kwargs):
        n = lax.axis_size(axes)
        around = [(i, n - 1 - i) for i in range(n)]
        return f([lax.ppermute(x, axes, around) for x in shares], layouts, axes, **kwargs)

    return wrong


def shuffled_bucket(f):
    """Two leaves of equal length are cut out of the bucket in each other's place."""

    def wrong(values, layouts, axes, **kwargs):
        out = list(f(values, layouts, axes, **kwargs))
        pairs = [(i, j) for i in range(len(out)) for j in range(i) if out[i].size == out[j].size]
        assert pairs, "no two shares have one length: nothing is shuffled"
        for i, j in pairs[:1]:
            out[i], out[j] = out[j].reshape(out[i].shape), out[i].reshape(out[j].shape)
        return out

    return wrong


REDUCE = "reduce_scatter"

MUTATIONS = {
    "negated gradient": (REDUCE, scaled(-1.0)),
    "sum for a mean": (REDUCE, scaled(8.0)),
    "divided twice": (REDUCE, scaled(1 / 8)),
    "off by one part in 10^5": (REDUCE, scaled(1 + 1e-5)),
    "permuted ranks in the reduction": (REDUCE, rotated),
    "permuted ranks in the gather": ("all_gather", swapped),
}


@pytest.mark.grid(2)
@pytest.mark.parametrize("name", MUTATIONS)
def test_gradients_show_it(monkeypatch, name):
    """The gradient comparison, in the global view or (for the gather) in the parameters that come back."""
    function, change = MUTATIONS[name]
    compare = compare_gradients_inside if function == "all_gather" else compare_gradients
    compare("stage 2, 8")
    with mutated(monkeypatch, function, change), pytest.raises(AssertionError):
        compare("stage 2, 8")


@pytest.mark.grid(3)
@pytest.mark.parametrize("name", [name for name in MUTATIONS if not name.startswith("off by")])
@pytest.mark.parametrize("compare", [compare_gradients_inside, compare_norms, compare_training])
def test_training_shows_it(monkeypatch, name, compare):
    """One step of SGD inside a user's region; clipped steps; Adam with its state."""
    if compare is compare_norms and name in ("sum for a mean", "divided twice"):
        compare = compare_training  # a clipped gradient does not know its scale
    function, change = MUTATIONS[name]
    with mutated(monkeypatch, function, change), pytest.raises(AssertionError):
        compare("stage 2, 8")


@pytest.mark.grid(3)
@pytest.mark.parametrize("factor", [-1.0, 8.0, 1 + 1e-5])
def test_gradients_of_stage_1_show_it(monkeypatch, factor):
    compare_gradients("stage 1, 8")
    with mutated(monkeypatch, "all_reduce", scaled(factor)), pytest.raises(AssertionError):
        compare_gradients("stage 1, 8")


def test_shuffled_bucket_shows(monkeypatch):
    """`a` and `even` have shares of 5 and 6, so two leaves of one length are put in."""
    tree = {"x": jnp.arange(24.0).reshape(8, 3), "y": -jnp.ones((3, 8)), "z": jnp.ones(5)}

    def compare():
        want = jax.value_and_grad(checks.quadratic)(tree, BATCHES[0])
        helpers.close(checks.gradients(checks.make_zero("stage 2, 8"), tree, checks.quadratic, BATCHES[0]), want)

    compare()
    with mutated(monkeypatch, REDUCE, shuffled_bucket), pytest.raises(AssertionError):
        compare()


@pytest.mark.parametrize("compare", [compare_gradients, compare_training])
def test_dropped_replica_hop_shows(monkeypatch, compare):
    """In the global view the values differ; the type check does not stand in the loss region."""
    compare("MiCS 2x4")
    with mutated(monkeypatch, "all_reduce", no_reduction), pytest.raises(AssertionError):
        compare("MiCS 2x4")


def test_dropped_replica_hop_is_refused_by_the_type_check(monkeypatch):
    """Inside a checked region the program does not even trace: replicas provably agree."""
    compare_gradients_inside("MiCS 2x4")
    with mutated(monkeypatch, "all_reduce", no_reduction), pytest.raises((AssertionError, ValueError)):
        compare_gradients_inside("MiCS 2x4")


def test_replicas_that_differ_show():
    """The comparison of replicas reads every device: one wrong bit on one of them is enough."""
    mesh = helpers.make_mesh(8)
    one = checks.place(jnp.ones(4), mesh, jax.sharding.PartitionSpec())
    helpers.assert_all_shards_equal(one)
    pieces = [np.ones(4, np.float32) for _ in range(8)]
    pieces[5][2] = np.nextafter(np.float32(1), np.float32(2))
    arrays = [jax.device_put(x, d) for x, d in zip(pieces, mesh.devices.flat, strict=True)]
    torn = jax.make_array_from_single_device_arrays((4,), one.sharding, arrays)
    with pytest.raises(AssertionError, match="different values"):
        helpers.assert_all_shards_equal(torn)


def test_padding_in_a_norm_shows(monkeypatch):
    """Shares whose padding is one instead of zero: the norm counts it, and the state shows it."""

    def dirty(f):
        def wrong(values, layouts, axes, **kwargs):
            out = f(values, layouts, axes, **kwargs)
            last = lax.axis_index(axes) == lax.axis_size(axes) - 1

            def spoil(x, layout):
                if layout.kind == "rows" or not layout.padding:
                    return x
                return jnp.where(last & (jnp.arange(x.size) == x.size - 1), jnp.ones_like(x), x)

            return [spoil(x, layout) for x, layout in zip(out, layouts, strict=True)]

        return wrong

    compare_norms("stage 2, 8")
    with mutated(monkeypatch, REDUCE, dirty), pytest.raises(AssertionError):
        checks.gradients(checks.make_zero("stage 2, 8"), params(), checks.quadratic, BATCHES[0])


def test_padding_that_is_never_masked_shows(monkeypatch):
    """A library that believes no array is padded reads the padding in reductions and stores it."""
    compare_padding("stage 2, 8")
    with monkeypatch.context() as patch:
        patch.setattr(Layout, "padding", property(lambda layout: 0))
        clear()
        with pytest.raises(AssertionError):
            compare_padding("stage 2, 8")
    clear()


def test_negated_gradients_hide_from_three_adam_steps():
    """Why gradients and SGD come first: at a loose tolerance Adam does not see the sign."""
    start, loss = params(), checks.quadratic
    right = checks.reference(optax.adam(1e-3), start, loss, BATCHES).params
    wrong = checks.reference(optax.adam(1e-3), start, lambda p, b: -loss(p, b), BATCHES).params
    checks.assert_params_equal(wrong, right, rtol=2e-3, atol=6e-3)
    with pytest.raises(AssertionError):
        checks.assert_params_equal(wrong, right)
    helpers.close(jax.grad(loss)(start, BATCHES[0]), jax.grad(loss)(start, BATCHES[0]))
    with pytest.raises(AssertionError):
        helpers.close(jax.grad(lambda p, b: -loss(p, b))(start, BATCHES[0]), jax.grad(loss)(start, BATCHES[0]))
