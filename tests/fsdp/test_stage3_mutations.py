"""Each comparison that the tests of stage 3 rest on fails for the errors that it is there to catch."""

import contextlib
import functools

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import stage3_models as models
from jax import lax
from mutating import clear, mutated, no_reduction, rotated, scaled

from jaxzero._src.comm.reduce import GradReducer
from jaxzero._src.fsdp import schedule
from jaxzero._src.fsdp.evaluate import _Evaluation, _Iterations
from jaxzero._src.fsdp.gathering import Gathering
from jaxzero._src.fsdp.gathers import Gather, GatheredParam
from jaxzero._src.fsdp.reductions import Reductions
from jaxzero._src.fsdp.views import View

pytestmark = pytest.mark.grid(5)

OPTIONS = ["default", "alone"]


def loss(p, x):
    """A leaf with three uses, pairs of one shape, a stack, leaves that are cut in rows and such that are padded."""
    x = jnp.tanh(x @ p["e"]) @ p["first"] @ p["second"].T
    x, _ = lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, p["layers"])
    y = x @ p["e"].T + p["b"]
    return jnp.mean(jnp.square(y)) + jnp.mean(jnp.square(y[:, :2] @ p["rows"])) + 0.1 * jnp.sum(p["e"] ** 2)


SHAPES = {"e": (6, 5), "first": (5, 5), "second": (5, 5), "layers": (4, 5, 5), "b": (6,), "rows": (2, 16)}
CASE = models.Case(
    loss, {k: models.normal(i, *s, scale=0.5) for i, (k, s) in enumerate(SHAPES.items())}, (models.examples(1, 6),)
)


@functools.cache
def expected():
    return jax.tree.map(np.asarray, jax.value_and_grad(loss)(CASE.params, *CASE.batch))


def make(mesh, options):
    zero = models.make_zero(mesh, **models.OPTIONS[options])
    return zero.observe(loss, CASE.params, *CASE.batch)


def compare_gradients(mesh, options, run=models.sharded):
    """The comparison of `test_stage3_models.py`."""
    want = expected()
    helpers.close(run(CASE, make(mesh, options))[1], want[1])


def compare_inside(mesh, options):
    compare_gradients(mesh, options, models.inside)


def compare_accumulated(mesh, options):
    want, zero = expected(), make(mesh, options)
    _, grads = zero.value_and_grad(loss, accumulate=3)(zero.shard(CASE.params), *CASE.batch)
    helpers.close(models.whole(grads), want[1])


def compare_step(mesh, options):
    """One step of SGD of size 1, from parameters at rest to parameters at rest."""
    want, zero = expected(), make(mesh, options)
    tx, split = zero.optimizer(optax.sgd(1.0)), zero.shard(CASE.params)
    _, grads = zero.value_and_grad(loss)(split, *CASE.batch)
    after = zero.apply(tx, grads, tx.init(split), split)[0]
    helpers.assert_all_shards_equal(after)
    helpers.close(models.whole(after), jax.tree.map(lambda p, g: p - g, CASE.params, want[1]))


def compare_forward(mesh, options):
    want, zero = expected(), make(mesh, options)
    np.testing.assert_allclose(zero.forward(loss)(zero.shard(CASE.params), *CASE.batch), want[0], rtol=1e-5)


@contextlib.contextmanager
def patched(monkeypatch, owner, name, change):
    """`owner.name` replaced by `change(original)`."""
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, change(getattr(owner, name)))
        clear()
        yield
    clear()


# --- reductions ----------------------------------------------------------------------------------

DIVISORS = {"negated": -1.0, "sum for a mean": 8.0, "divided twice": 1 / 8, "one part in 10^5": 1 + 1e-5}


@pytest.mark.parametrize("name", DIVISORS)
@pytest.mark.parametrize("compare", [compare_gradients, compare_inside, compare_step])
def test_wrong_divisor_shows(monkeypatch, name, compare):
    if compare is compare_step and "part" in name:
        compare = compare_gradients
    options = OPTIONS[len(name) % 2]
    compare("8", options)
    with mutated(monkeypatch, "reduce_scatter", scaled(DIVISORS[name])), pytest.raises(AssertionError):
        compare("8", options)


@pytest.mark.parametrize(
    "count",
    [lambda m: m.axes.n * m.axes.r, lambda m: m.axes.n * m.steps, lambda m: m.axes.r * m.steps],
    ids=["without micro-steps", "without replicas", "without shares"],
)
def test_wrong_count_shows(monkeypatch, count):
    compare_accumulated("MiCS", "default")
    with patched(monkeypatch, GradReducer, "count", lambda f: property(count)), pytest.raises(AssertionError):
        compare_accumulated("MiCS", "default")


@pytest.mark.parametrize("compare", [compare_gradients, compare_step])
def test_dropped_replica_hop_shows(monkeypatch, compare):
    compare("MiCS", "default")
    with mutated(monkeypatch, "all_reduce", no_reduction), pytest.raises(AssertionError):
        compare("MiCS", "default")


def test_dropped_replica_hop_is_refused_by_the_type_check(monkeypatch):
    compare_inside("MiCS", "default")
    with mutated(monkeypatch, "all_reduce", no_reduction), pytest.raises((AssertionError, ValueError)):
        compare_inside("MiCS", "default")


def test_unreduced_loss_shows(monkeypatch):
    """`forward` takes the mean of the loss; a loss that is left alone differs between devices."""
    compare_forward("8", "default")
    with mutated(monkeypatch, "all_reduce", lambda f: lambda x, axes, **_: list(x)), pytest.raises(AssertionError):
        compare_forward("8", "default")


@pytest.mark.parametrize("options", OPTIONS)
def test_permuted_ranks_in_the_reduction_show(monkeypatch, options):
    compare_gradients("8", options)
    with mutated(monkeypatch, "reduce_scatter", rotated), pytest.raises(AssertionError):
        compare_gradients("8", options)


# --- gathers -------------------------------------------------------------------------------------


def shifted_ranks(f):
    """Every device hands in the share of its neighbour."""

    def wrong(shares, layouts, axes, **kwargs):
        n = lax.axis_size(axes)
        around = [(i, (i + 1) % n) for i in range(n)]
        return f([lax.ppermute(x, axes, around) for x in shares], layouts, axes, **kwargs)

    return wrong


def padding_first(f):
    """A padded leaf is read from its end: padding comes into the logical array."""

    def wrong(shares, layouts, axes, **kwargs):
        def spoil(x, layout):
            if layout.kind == "rows" or not layout.padding or layout.lead:
                return x
            return jnp.roll(jnp.ravel(x), 1).at[0].set(0).reshape(x.shape)

        out = f(shares, layouts, axes, **kwargs)
        return [spoil(x, layout) for x, layout in zip(out, layouts, strict=True)]

    return wrong


@pytest.mark.parametrize("change", [shifted_ranks, padding_first])
@pytest.mark.parametrize("compare", [compare_gradients, compare_inside, compare_forward])
def test_wrong_gathers_show(monkeypatch, change, compare):
    options = OPTIONS[compare is compare_inside]
    compare("8", options)
    with mutated(monkeypatch, "all_gather", change), pytest.raises(AssertionError):
        compare("8", options)


def test_dirty_padding_of_gradients_shows(monkeypatch):
    """The padding of a share is not zero: no number differs, the padding is looked at."""

    def dirty(f):
        def wrong(values, layouts, axes, **kwargs):
            last = lax.axis_index(axes) == lax.axis_size(axes) - 1

            def spoil(x, layout):
                if layout.kind == "rows" or not layout.padding:
                    return x
                return jnp.where(last & (jnp.arange(x.shape[-1]) == x.shape[-1] - 1), jnp.ones_like(x), x)

            return [spoil(x, lay) for x, lay in zip(f(values, layouts, axes, **kwargs), layouts, strict=True)]

        return wrong

    with mutated(monkeypatch, "reduce_scatter", dirty), pytest.raises(AssertionError, match="padding"):
        compare_gradients("8", "default")


def other_param(f):
    """A gather brings another parameter of the same layout."""

    def wrong(self, gather):
        layouts = self.schedule.layouts

        def other(param):
            alike = [v for v in layouts if layouts[v] == layouts[param.source]]
            return GatheredParam(alike[alike.index(param.source) - 1], param.dtype)

        params = [other(param) for param in gather.params]
        return f(self, Gather(params, gather.step, gather.large, gather.in_backward))

    return wrong


@pytest.mark.parametrize("compare", [compare_gradients, compare_forward])
@pytest.mark.parametrize("options", OPTIONS)
def test_gather_of_another_parameter_shows(monkeypatch, options, compare):
    """`first` and `second` have one shape."""
    compare("8", options)
    with patched(monkeypatch, Gathering, "operands", other_param), pytest.raises(AssertionError):
        compare("8", options)


def without_transposes(f):
    """Views of square matrices lose their transposes."""

    def wrong(self, x):
        ops = [op for op in self.ops if op.eqn.primitive.name != "transpose" or x.shape[-1] != x.shape[-2]]
        return f(View(self.source, tuple(ops)), x)

    return wrong


@pytest.mark.parametrize("compare", [compare_gradients, compare_forward])
def test_view_without_its_operation_shows(monkeypatch, compare):
    compare("8", "default")
    with patched(monkeypatch, View, "apply", without_transposes), pytest.raises(AssertionError):
        compare("8", "default")


# --- terms ---------------------------------------------------------------------------------------


def dropped_term(which):
    """One term of the gradient of a leaf with several uses is forgotten."""

    def change(f):
        def wrong(flat, layouts, **how):
            found = f(flat, layouts, **how)
            several = [(v, p) for v, ps in found.terms.items() for p in ps if found.count[p] > 1]
            if several:
                v, position = several[which]
                found.terms[v].remove(position)
                found.count[position] -= 1
            return found

        return wrong

    return change


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("which", [0, 1, -1])
def test_dropped_term_of_a_gradient_shows(monkeypatch, options, which):
    compare_gradients("3", options)
    with patched(monkeypatch, schedule, "find_terms", dropped_term(which)), pytest.raises(AssertionError):
        compare_gradients("3", options)


def last_term(f):
    """Of several terms the last one stays instead of their sum."""

    def wrong(self, position, x):
        self.shares[position] = x

    return wrong


def test_terms_that_are_not_added_show(monkeypatch):
    compare_gradients("8", "alone")
    with patched(monkeypatch, Reductions, "add_share", last_term), pytest.raises(AssertionError):
        compare_gradients("8", "alone")


def one_layer(f):
    """The gradient of a stack is that of its first layer, in every layer."""

    def wrong(self, step, ins):
        outs, shares = f(self, step, ins), self.gradients.shares
        for position in self.schedule.scans[step].stacked_grads.values():
            shares[position] = jnp.broadcast_to(shares[position][:1], shares[position].shape)
        return outs

    return wrong


def test_layers_of_a_stack_that_are_mixed_up_show(monkeypatch):
    compare_gradients("8", "default")
    with patched(monkeypatch, _Evaluation, "_scan", one_layer), pytest.raises(AssertionError):
        compare_gradients("8", "default")


def test_a_stack_that_is_scanned_backwards_shows(monkeypatch):
    """The order of layers is a matter of numbers, too."""

    def backwards(f):
        def wrong(self, step, ins):
            scan = self.schedule.scans[step]
            ins = [x[::-1] if i in scan.scanned_params else x for i, x in enumerate(ins)]
            return f(self, step, ins)

        return wrong

    compare_forward("8", "default")
    with patched(monkeypatch, _Evaluation, "_scan", backwards), pytest.raises(AssertionError):
        compare_forward("8", "default")


# --- iterations that gather and reduce for others ------------------------------------------------


def previous_layer(f):
    """An iteration gathers its own layer for the next one."""
    return lambda self, n: f(self, n - 1)


def last_reduction_dropped(f):
    """What the iteration before the last has left is not reduced."""

    def wrong(self, stacks, behind, n):
        return stacks if isinstance(n, int) and n + 1 >= self.length else f(self, stacks, behind, n)

    return wrong


def not_handed_over(f):
    """Gradients that are left to the next iteration are lost."""

    def wrong(self, left, names):
        f(self, jax.tree.map(jnp.zeros_like, left), names)

    return wrong


@pytest.mark.parametrize("compare", [compare_gradients, compare_inside, compare_forward])
def test_weights_of_the_previous_layer_show(monkeypatch, compare):
    compare("8", "ahead")
    with patched(monkeypatch, _Iterations, "_parameters", previous_layer), pytest.raises(AssertionError):
        compare("8", "ahead")


def test_dropped_reductions_of_iterations_show(monkeypatch):
    """With replicas; a sum by one collective is never left to the next iteration."""
    compare_gradients("MiCS", "ahead")
    with patched(monkeypatch, _Iterations, "_put_behind", last_reduction_dropped), pytest.raises(AssertionError):
        compare_gradients("MiCS", "ahead")
    with patched(monkeypatch, Reductions, "take_over", not_handed_over), pytest.raises(AssertionError):
        compare_gradients("MiCS", "ahead")
