"""Gradients of stage 3 equal the unsharded ones, for models and losses of every kind, on every kind of mesh."""

import functools

import checks
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import stage3_models as models
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxzero

pytestmark = pytest.mark.grid(11)

CASES, MESHES, OPTIONS = list(models.CASES), list(models.MESHES), list(models.OPTIONS)

#: For every case one mesh and one way to plan, in turn; the rest of the grid is marked slow. Two are in float64 only.
HEAVY = {"gpt, dots saved", "gpt, scan, unroll"}
QUICK = {(case, MESHES[1 + i % 3], OPTIONS[i % 2]) for i, case in enumerate(CASES) if case not in HEAVY}
QUICK |= {("mlp", "1", "default"), ("tied", "1", "chunks"), ("cnn", "MiCS", "default")}
GRID = [
    pytest.param(*cell, marks=[] if cell in QUICK else pytest.mark.slow)
    for case in CASES
    for mesh in MESHES
    for options in OPTIONS
    for cell in [(case, mesh, options)]
]


@pytest.mark.parametrize(("case", "mesh", "options"), GRID)
def test_gradients_equal_the_unsharded_ones(case, mesh, options):
    models.compare(case, mesh, options)


@pytest.mark.parametrize(
    ("case", "mesh"),
    [
        ("mlp", "8"),
        ("gpt, scan, remat", "MiCS"),
        ("integers", "3"),
        ("keys as data", "8"),
        ("nnx", "1"),
        ("cnn", "8"),
    ],
)
def test_gradients_inside_a_users_own_region(case, mesh):
    """Under the type check, gradients come as shares."""
    models.compare(case, mesh, "default", run=models.inside)


@pytest.mark.parametrize("case", ["gpt, scan", "layers of layers"])
def test_stacked_leaves_that_are_not_stored_per_layer(case):
    """Without `observe` nobody knows which axis counts layers; the numbers are the same."""
    models.compare(case, "8", "chunks", observe=False)


FLOAT64 = """
import jax
import stage3_models as models
jax.config.update("jax_disable_most_optimizations", True)  # compiles in two thirds of the time
left_out = ["mlp, remat", "gpt", "gpt, remat", "gpt, scan", "gpt, scan, remat", "while of one"]  # and their kind is in
cases = [case for case in models.CASES if ALL or case not in left_out]
for i, case in enumerate(cases):
    rtol = 1e-6 if case == "nnx" else 1e-11  # Flax takes the softmax of attention in float32
    for j in range(12) if ALL else [i]:
        models.compare(case, list(models.MESHES)[j % 4], list(models.OPTIONS)[j % 3], rtol=rtol)
models.compare("layers of layers", "MiCS", "alone", 1e-11, run=models.inside)
print("equal")
"""


@pytest.mark.parametrize("everything", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_float64_gradients(everything):
    """At 1e-11: the comparison that catches real errors."""
    code = f"ALL = {everything}" + FLOAT64
    assert helpers.run_python(code, x64=True, timeout=3600 if everything else 600).split()[-1] == "equal"


# --- dropout -------------------------------------------------------------------------------------


def dropout_loss(p, x, key):
    """One mask for each example and device, from one key."""
    y = jnp.tanh(x @ p["w"] + p["b"])
    keep = jax.random.bernoulli(key, 0.7, y.shape)
    return jnp.mean(jnp.square(jnp.where(keep, y, 0) @ p["v"]))


def by_device(p, x, key, n):
    """The mean over devices, each with its own examples and the key folded with its index."""
    parts = x.reshape(n, -1, *x.shape[1:])
    return jnp.mean(jnp.stack([dropout_loss(p, parts[i], jax.random.fold_in(key, i)) for i in range(n)]))


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("where", ["global", "inside"])
def test_a_key_differs_between_devices(mesh, where):
    p, x, key = models.dense_params(), models.examples(1, 6), jax.random.key(5)
    zero = models.make_zero(mesh)
    run = models.sharded if where == "global" else models.inside
    value, grads = run(models.Case(dropout_loss, p, (x, key)), zero)
    want_value, want = jax.value_and_grad(by_device)(p, x, key, zero.mesh.size)
    np.testing.assert_allclose(value, want_value, rtol=1e-5)
    helpers.close(grads, want)


def test_a_key_named_whole_is_the_same_on_every_device():
    """Then a mask of weights (not of examples) is one mask."""
    p, x, key = models.dense_params(), models.examples(1, 6), jax.random.key(5)

    def loss(p, x, key):
        w = jnp.where(jax.random.bernoulli(key, 0.5, p["w"].shape), p["w"], 0)
        return jnp.mean(jnp.square(jnp.tanh(x @ w + p["b"]) @ p["v"]))

    want = jax.grad(loss)(p, x, key)
    _, grads = models.sharded(models.Case(loss, p, (x, key), (2,)), models.make_zero("8"))
    helpers.close(grads, want)
    _, grads = models.sharded(models.Case(loss, p, (x, key)), models.make_zero("8"))
    with pytest.raises(AssertionError):
        helpers.close(grads, want)


# --- batch statistics ----------------------------------------------------------------------------


def test_batch_statistics_without_an_axis_are_those_of_a_device():
    """The same network without `axis_name`: every device normalizes by its own examples."""
    case = models.cnn(("data",))
    alone = case._replace(loss=case.unsharded)
    _, grads = models.sharded(alone, models.make_zero("8"))
    _, want = models.unsharded("cnn")
    with pytest.raises(AssertionError):
        helpers.close(grads, want, 1e-3)
    stats, x, y = case.batch
    parts = [(x[3 * i : 3 * i + 3], y[3 * i : 3 * i + 3]) for i in range(8)]
    grad = jax.jit(jax.grad(lambda p, x, y: case.unsharded(p, stats, x, y)[0]))
    each = [grad(case.params, *part) for part in parts]
    helpers.close(grads, jax.tree.map(lambda *g: sum(g) / 8, *each), 2e-5)


# --- losses that know the mesh -------------------------------------------------------------------


def contrastive_loss(p, x, axes=None):
    """Every example against those of all devices; without `axes` the batch is whole."""
    e = jnp.tanh(x @ p["w"] + p["b"]) @ p["v"]
    others = e if axes is None else lax.all_gather(e, axes, tiled=True)
    own = jnp.arange(e.shape[0]) + (0 if axes is None else lax.axis_index(axes) * e.shape[0])
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(e @ others.T), own[:, None], -1))


@pytest.mark.parametrize("run", [models.sharded, models.inside])
@pytest.mark.parametrize("mesh", ["8", "MiCS"])
def test_a_loss_that_gathers_examples(run, mesh):
    """Its collectives are differentiated as what they are, with and without the type check."""
    p, x, zero = models.dense_params(), models.examples(1, 6), models.make_zero(mesh)
    loss = functools.partial(contrastive_loss, axes=checks.axes_of(zero))
    want = jax.jit(jax.value_and_grad(contrastive_loss))(p, x)
    got = run(models.Case(loss, p, (x,)), zero)
    helpers.close(got[1], want[1])
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)


def test_a_loss_that_closes_over_what_differs_between_devices():
    """Inside a user's own region: a factor of each device, a sum over devices of what depends on parameters."""
    p, x, zero = models.dense_params(), models.examples(1, 6), models.make_zero("8")
    split = zero.shard(p)

    def local(split, x):
        factor = 2 + lax.axis_index("data").astype(jnp.float32)

        def loss(p, x):
            total = lax.psum(jnp.mean(x @ p["w"], 0), "data")
            return jnp.mean(jnp.tanh(x @ p["w"] @ p["v"])) * factor + jnp.vdot(total, p["b"])

        return zero.value_and_grad(loss)(split, x)

    def unsharded(p, x):
        parts = x.reshape(8, 3, 6)
        total = sum(jnp.mean(part @ p["w"], 0) for part in parts)
        each = [jnp.mean(jnp.tanh(part @ p["w"] @ p["v"])) * (2 + i) for i, part in enumerate(parts)]
        return sum(each) / 8 + jnp.vdot(total, p["b"])

    specs = zero.specs(split)
    value, grads = jax.jit(jax.shard_map(local, mesh=zero.mesh, in_specs=(specs, P("data")), out_specs=(P(), specs)))(
        split, x
    )
    want_value, want = jax.jit(jax.value_and_grad(unsharded))(p, x)
    helpers.close(models.whole(grads), want)
    np.testing.assert_allclose(value, want_value, rtol=1e-5)


def test_a_loss_that_closes_over_what_is_being_traced():
    p, x, zero = models.dense_params(), models.examples(1, 6), models.make_zero("8")
    loss = lambda p, x, scale: jnp.mean(jnp.square(x @ p["w"] + p["b"])) * scale
    run = jax.jit(lambda s, x, scale: zero.value_and_grad(lambda p, x: loss(p, x, scale))(s, x)[1])
    used = {k: p[k] for k in "wb"}
    for scale in (2.0, 3.0):
        helpers.close(models.whole(run(zero.shard(used), x, scale)), jax.grad(loss)(used, x, scale))


def test_a_loss_that_is_reduced_already_is_refused():
    """Inside a user's own region its gradient would be divided twice; in the global view it is exact."""
    zero, p, x = models.make_zero("8"), {"w": models.normal(1, 6)}, models.examples(1, 6)
    loss = lambda p, x: lax.pmean(jnp.mean(x @ p["w"]), "data")
    with pytest.raises(ValueError, match=checks.saying("value_and_grad", "does not vary", "data", "fix")):
        models.inside(models.Case(loss, p, (x,)), zero)
    helpers.close(models.sharded(models.Case(loss, p, (x,)), zero)[1], {"w": jnp.mean(x, 0)})


@pytest.mark.parametrize("run", [models.sharded, models.inside])
@pytest.mark.parametrize("mesh", ["explicit8", "explicit24"])
def test_explicit_meshes(request, mesh, run):
    axes = {} if mesh == "explicit8" else dict(shard_axis="shard", replica_axis="replica")
    zero = jaxzero.Zero(request.getfixturevalue(mesh), stage=3, **axes)
    p, x = models.mlp_params(), models.examples(1, 6)
    want = jax.jit(jax.grad(models.mlp_loss))(p, x)
    helpers.close(run(models.Case(models.mlp_loss, p, (x,)), zero)[1], want)
    np.testing.assert_allclose(zero.forward(models.mlp_loss)(zero.shard(p), x), models.mlp_loss(p, x), rtol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.complex64])
@pytest.mark.parametrize("run", [models.sharded, models.inside])
def test_parameters_of_other_dtypes(dtype, run):
    p = jax.tree.map(lambda w: (w * (1 + 0.5j) if dtype == jnp.complex64 else w).astype(dtype), models.dense_params())
    loss = lambda p, x: jnp.mean(jnp.abs((x.astype(dtype) @ p["w"] + p["b"]) @ p["v"]) ** 2).astype(jnp.float32)
    x = models.examples(1, 6)
    grads = run(models.Case(loss, p, (x,)), models.make_zero("8"))[1]
    helpers.close(grads, jax.grad(loss)(p, x), 5e-6 if dtype == jnp.complex64 else 2e-2)


# --- the rest of the rules -----------------------------------------------------------------------


@jax.custom_vjp
def decay(w):
    """Weight decay by a rule of its own: no equation computes the gradient, it is a multiple of the parameter."""
    return jnp.zeros((), w.dtype)


decay.defvjp(lambda w: (jnp.zeros((), w.dtype), w), lambda w, ct: (0.5 * w,))


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("run", [models.sharded, models.inside])
def test_gradients_that_are_views_do_not_take_others_with_them(options, run):
    """Such a gradient, alone or as one term of two, is in one chunk with others, which are reduced all the same."""
    p = {k: models.normal(i, *s) for i, (k, s) in enumerate({"a": (9,), "b": (7,), "c": (5,), "d": (6, 9)}.items())}

    def loss(p, x):
        return jnp.mean(x @ p["a"]) + decay(p["b"]) + decay(p["c"]) + jnp.sum(p["d"]) + jnp.mean(x[:, :7] @ p["b"])

    case = models.Case(loss, p, (models.examples(1, 9),))
    helpers.close(run(case, models.make_zero("8", **models.OPTIONS[options]))[1], jax.grad(loss)(p, *case.batch))


def test_one_array_that_is_the_gradient_of_two_leaves():
    """`loss = f(a + b)`: both have one gradient, and it is a term of another one too."""
    p = {"a": models.normal(1, 9, 4), "b": models.normal(2, 9, 4), "c": models.normal(3, 9, 4)}

    def loss(p, x):
        return jnp.mean(jnp.sin(x @ (p["a"] + p["b"]))) + jnp.mean(x @ (p["a"] + p["c"]))

    case = models.Case(loss, p, (models.examples(1, 9),))
    want = jax.grad(loss)(p, *case.batch)
    for options in models.OPTIONS.values():
        helpers.close(models.sharded(case, models.make_zero("3", **options))[1], want)


def test_gradients_with_constants_in_them():
    """Linear terms, whose gradients are arrays that the loss closes over, literals, and zero."""
    fixed = models.normal(8, 9, 4)
    p = {"a": models.normal(1, 9, 4), "b": models.normal(2, 16), "c": models.normal(3, 16), "s": models.normal(4)}

    def loss(p, x):
        return jnp.sum(fixed * p["a"]) + 3 * jnp.sum(p["b"]) + 0 * jnp.sum(p["c"]) + 2 * p["s"] + 0 * jnp.sum(x)

    case = models.Case(loss, p, (models.examples(1, 2),))
    want = jax.grad(loss)(p, *case.batch)
    for run in (models.sharded, models.inside):
        helpers.close(run(case, models.make_zero("8"))[1], want)


@pytest.mark.parametrize("options", OPTIONS)
def test_narrow_terms_of_a_wide_gradient_are_added_wide(options):
    """Two uses of a leaf, each cast to bfloat16 on its own: their gradients are added in float32, as unsharded."""
    p = {"w": models.normal(1, 16, 4)}

    def loss(p, x):
        half = lambda: p["w"].astype(jnp.bfloat16)
        x = x.astype(jnp.bfloat16)
        return jnp.mean((x @ half()).astype(jnp.float32)) + 1e-3 * jnp.mean(((2 * x) @ half()).astype(jnp.float32))

    zero, x = models.make_zero("8", **models.OPTIONS[options]), jnp.ones((8, 16))
    lowered = jax.jit(zero.value_and_grad(loss)).lower(zero.shard(p), x)
    sums = [line for line in lowered.as_text().splitlines() if "stablehlo.add" in line]
    assert any("f32" in line for line in sums)
    assert not any("16x4xbf16" in line for line in sums)
    helpers.close(models.whole(zero.value_and_grad(loss)(zero.shard(p), x)[1]), jax.grad(loss)(p, x), 1e-2)


def test_printing_works(capfd):
    """Every device prints, with its own examples."""
    p, x = {"w": models.normal(1, 6)}, models.examples(1, 6)

    def loss(p, x):
        jax.debug.print("seen {}", x.shape[0])
        jax.debug.print("weights {}", jnp.sum(p["w"] * 0 + 1))
        return jnp.mean(x @ p["w"])

    grads = models.make_zero("8").value_and_grad(loss)(models.make_zero("8").shard(p), x)[1]
    jax.effects_barrier()
    out = capfd.readouterr().out
    assert out.count("seen 3\n") == 8
    assert out.count("weights 6.0\n") == 8
    helpers.close(models.whole(grads), jax.grad(loss)(p, x))
