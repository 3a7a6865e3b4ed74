"""Training runs through jaxzero beside the same runs without it, and the comparisons between the two.

The comparisons are functions, so that `test_mutations.py` can show that each of them fails when it should.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import chex
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxzero

#: The ways to run one step. "inside" is a user's own `shard_map`; "jax.grad" hands over whole gradients.
WAYS = ("value_and_grad, update", "value_and_grad, apply", "jax.grad, update", "inside, update", "inside, apply")

#: Meshes and options: two worlds, both stages, replicas.
SETTINGS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "stage 1, 8": ((8,), dict(stage=1)),
    "stage 2, 8": ((8,), dict(stage=2)),
    "stage 2, 3": ((3,), dict(stage=2)),
    "MiCS 2x4": (((2, 4), ("replica", "shard")), dict(stage=2, shard_axis="shard", replica_axis="replica")),
}

#: Six of the twenty pairs of setting and way, each of both at least once.
CORNERS = [
    ("stage 1, 8", WAYS[0]),
    ("stage 2, 8", WAYS[1]),
    ("stage 2, 8", WAYS[2]),
    ("stage 2, 3", WAYS[3]),
    ("MiCS 2x4", WAYS[4]),
    ("MiCS 2x4", WAYS[1]),
]


class Run(NamedTuple):
    """What a training run leaves behind."""

    params: Any
    state: Any
    losses: list[float]


def make_zero(setting: str, **options: Any) -> jaxzero.Zero:
    shape, fixed = SETTINGS[setting]
    return jaxzero.Zero(helpers.make_mesh(*shape), **fixed | options)


def axes_of(zero: jaxzero.Zero) -> tuple[str, ...]:
    """The axes over which examples are cut: all that `zero` uses, replicas first."""
    return tuple(
        a for axis in (zero.replica_axis, zero.shard_axis) for a in ([axis] if isinstance(axis, str) else axis or ())
    )


def world(setting: str) -> int:
    """The number of shares."""
    zero = make_zero(setting)
    return zero.mesh.shape[zero.shard_axis]


def shares(x: jax.Array) -> list[np.ndarray]:
    """The distinct pieces of a split array, in order of their position; replicas must agree."""
    helpers.assert_all_shards_equal(x)
    pieces = {tuple(cut.start or 0 for cut in s.index): np.asarray(s.data) for s in x.addressable_shards}
    return [pieces[position] for position in sorted(pieces)]


def place(tree: Any, mesh: Any, spec: P) -> Any:
    return jax.device_put(tree, NamedSharding(mesh, spec))


def no_extra(value: Any, grads: Any, batch: Any) -> dict[str, Any]:
    return {}


def reference(
    inner: optax.GradientTransformation,
    params: Any,
    loss_fn: Callable[..., Any],
    batches: Iterable[Any],
    *,
    extra: Callable[..., dict[str, Any]] = no_extra,
    trained: Callable[[Any], Any] = lambda params: params,
) -> Run:
    """The unsharded run: plain Optax, the whole batch, one device."""
    tx = optax.with_extra_args_support(inner)
    state = tx.init(params)

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss_fn)(trained(params), batch)
        updates, state = tx.update(grads, state, params, **extra(value, grads, batch))
        return optax.apply_updates(params, updates), state, value

    losses = []
    for batch in batches:
        params, state, value = step(params, state, batch)
        losses.append(float(value))
    return Run(params, state, losses)


def train(
    zero: jaxzero.Zero,
    inner: optax.GradientTransformation,
    params: Any,
    loss_fn: Callable[..., Any],
    batches: Iterable[Any],
    way: str = "value_and_grad, apply",
    *,
    extra: Callable[..., dict[str, Any]] = no_extra,
    trained: Callable[[Any], Any] = lambda params: params,
    grows: bool = False,
) -> Run:
    """The same run through jaxzero, its step traced once.

    Args:
      zero: The options.
      inner: The Optax optimizer.
      params: Parameters, whole.
      loss_fn: `loss_fn(params, batch)`, a mean over the batch.
      batches: Trees of arrays, one per step.
      way: One of `WAYS`.
      extra: From loss, gradients and whole batch, the further arguments of `update`.
      trained: The part of `params` that the loss takes.
      grows: The first update adds leaves to the state, so it runs in the global view.

    Returns:
      Parameters and state as they are at rest.
    """
    mesh, axes = zero.mesh, axes_of(zero)
    tx = zero.optimizer(inner)
    params = zero.shard(place(params, mesh, P()))
    state = jax.jit(tx.init)(params)

    chex.clear_trace_counter()  # it counts by source: another run of this function would be one more trace
    traces = 1 + grows  # of the whole run: a new leaf of state is a new program

    @chex.assert_max_traces(n=traces)
    def global_step(params: Any, state: Any, batch: Any, whole_batch: Any) -> Any:
        if way.startswith("jax.grad"):
            given = zero.gather(params) if zero.stage == 3 else params
            value, grads = jax.value_and_grad(loss_fn)(trained(given), batch)
        else:
            value, grads = zero.value_and_grad(loss_fn)(trained(params), batch)
        more = extra(value, grads, whole_batch)
        if way.endswith("apply"):
            return *zero.apply(tx, grads, state, params, **more), value
        updates, state = tx.update(grads, state, params, **more)
        return optax.apply_updates(params, updates), state, value

    @chex.assert_max_traces(n=traces)
    def local_step(params: Any, state: Any, batch: Any, whole_batch: Any) -> Any:
        if way.endswith("apply"):
            value, grads = zero.value_and_grad(loss_fn)(trained(params), batch)
            return *zero.apply(tx, grads, state, params, **extra(value, grads, whole_batch)), value
        given = zero.gather(params) if zero.stage == 3 else params
        local, grads = jax.value_and_grad(loss_fn)(varying(trained(given), axes), batch)
        value = lax.pmean(local, axes)
        updates, state = tx.update(grads, state, params, **extra(value, grads, whole_batch))
        return optax.apply_updates(params, updates), state, value

    def inside(state: Any) -> Any:
        specs = zero.specs(state)
        held = zero.specs(params) if zero.stage == 3 else P()
        return jax.jit(
            jax.shard_map(local_step, mesh=mesh, in_specs=(held, specs, P(axes), P()), out_specs=(held, specs, P()))
        )

    step: Callable[..., Any] = jax.jit(global_step)
    losses = []
    for i, batch in enumerate(batches):
        if way.startswith("inside") and i == grows:
            step = inside(state)  # here the state has all its leaves
        params, state, value = step(params, state, place(batch, mesh, P(axes)), place(batch, mesh, P()))
        losses.append(float(value))
    return Run(zero.gather(params), state, losses)


def apply_step(zero: jaxzero.Zero, tx: Any, loss_fn: Callable[..., Any], way: str) -> Callable[..., Any]:
    """`step(params, state, *batch)` in the global view: `zero.apply`, or `update` and `optax.apply_updates`."""

    def step(params: Any, state: Any, *batch: Any) -> Any:
        _, grads = zero.value_and_grad(loss_fn)(params, *batch)
        if way == "apply":
            return zero.apply(tx, grads, state, params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def varying(tree: Any, axes: Sequence[str]) -> Any:
    """Whole parameters as a user's own `shard_map` must hand them to `jax.grad`; other leaves as they are."""

    def cast(x: Any) -> Any:
        return lax.pcast(x, tuple(axes), to="varying") if jnp.issubdtype(x.dtype, jnp.inexact) else x

    return jax.tree.map(cast, tree)


def update_inside(
    zero: jaxzero.Zero,
    inner: optax.GradientTransformation,
    params: Any,
    local_grads: Callable[[jax.Array, int], Any],
    steps: int = 1,
    **extra: Any,
) -> Run:
    """Steps in a user's own `shard_map`, on gradients that are made per device: `local_grads(device, step)`."""
    mesh, axes = zero.mesh, axes_of(zero)
    tx = zero.optimizer(inner)
    params = place(params, mesh, P())
    state = jax.jit(tx.init)(params)
    specs = zero.specs(state)

    def step(params: Any, state: Any, i: int) -> Any:
        grads = local_grads(lax.axis_index(axes), i)
        updates, state = tx.update(varying_where_it_is_not(grads, axes), state, params, **extra)
        return optax.apply_updates(params, updates), state

    for i in range(steps):
        one = jax.shard_map(lambda p, s, i=i: step(p, s, i), mesh=mesh, in_specs=(P(), specs), out_specs=(P(), specs))
        params, state = jax.jit(one)(params, state)
    return Run(params, state, [])


def varying_where_it_is_not(tree: Any, axes: Sequence[str]) -> Any:
    def cast(x: Any) -> Any:
        need = tuple(set(axes) - jax.typeof(x).manual_axis_type.varying)
        return lax.pcast(x, need, to="varying") if need else x

    return jax.tree.map(cast, tree)


def assert_params_equal(got: Any, want: Any, rtol: float = 2e-5, atol: float = 2e-6) -> None:
    """Values of all leaves, shapes and dtypes, and every replica of them."""
    helpers.assert_all_shards_equal(got)
    chex.assert_trees_all_equal_structs(got, want)
    for (path, b), a in zip(jax.tree_util.tree_leaves_with_path(want), jax.tree.leaves(got), strict=True):
        where = helpers.name(path)
        assert jnp.asarray(a).dtype == jnp.asarray(b).dtype, f"{where}: {a.dtype}, expected {b.dtype}"
        a, b = helpers.host(a), helpers.host(b)
        assert a.shape == b.shape, f"{where}: shape {a.shape}, expected {b.shape}"
        if b.dtype.kind in "fc":
            np.testing.assert_allclose(a, b, rtol, atol, err_msg=where)
        else:
            np.testing.assert_array_equal(a, b, err_msg=where)


def logical(stored: Any, like: Any) -> np.ndarray:
    """A state leaf of logical shape `like.shape`, without its padding, which must be zero.

    A flat leaf is stored as `(*layers, padded)`: the dimensions that count layers, then all others ravelled.
    """
    stored, like = helpers.host(stored), helpers.host(like)
    lead = stored.ndim - 1
    size = int(np.prod(like.shape[lead:])) if lead >= 0 else 0
    if stored.shape == like.shape or lead < 0 or stored.shape[:lead] != like.shape[:lead] or stored.shape[lead] < size:
        return stored
    assert not np.ascontiguousarray(stored[..., size:]).view(np.uint8).any(), "padding is not zero"
    return stored[..., :size].reshape(like.shape)


def assert_state_equal(got: Any, want: Any, rtol: float = 2e-5) -> None:
    """The state at rest beside the unsharded one: its tree, values on the scale of each leaf, padding, replicas."""
    helpers.assert_all_shards_equal(got)
    chex.assert_trees_all_equal_structs(got, want)
    for (path, b), a in zip(jax.tree_util.tree_leaves_with_path(want), jax.tree.leaves(got), strict=True):
        where = "state/" + helpers.name(path)
        assert jnp.asarray(a).dtype == jnp.asarray(b).dtype, f"{where}: {a.dtype}, expected {b.dtype}"
        a, b = logical(a, b), helpers.host(b)
        assert a.shape == b.shape, f"{where}: shape {a.shape}, expected {b.shape}"
        if b.dtype.kind in "fc":
            np.testing.assert_allclose(a, b, rtol, rtol * np.max(np.abs(b), initial=0.0), err_msg=where)
        else:
            np.testing.assert_array_equal(a, b, err_msg=where)


def check(
    setting: str,
    inner: optax.GradientTransformation,
    params: Any,
    loss_fn: Callable[..., Any],
    batches: Sequence[Any],
    way: str = "value_and_grad, apply",
    *,
    rtol: float = 2e-5,
    atol: float = 2e-6,
    options: dict[str, Any] | None = None,
    **how: Any,
) -> Run:
    """Trains with and without jaxzero, asserts that parameters, state and losses agree; the run through jaxzero."""
    want = reference(inner, params, loss_fn, batches, **{k: v for k, v in how.items() if k != "grows"})
    got = train(make_zero(setting, **options or {}), inner, params, loss_fn, batches, way, **how)
    assert_params_equal(got.params, want.params, rtol, atol)
    assert_state_equal(got.state, want.state, rtol)
    np.testing.assert_allclose(got.losses, want.losses, rtol=1e-5)
    return got


def gradients(zero: jaxzero.Zero, params: Any, loss_fn: Callable[..., Any], batch: Any, **how: Any) -> tuple[Any, Any]:
    """Loss and gradient of `zero.value_and_grad` with the global batch, the gradient as plain whole arrays."""
    mesh = zero.mesh
    params, batch = place(params, mesh, P()), place(batch, mesh, P(axes_of(zero)))
    value, grads = jax.jit(zero.value_and_grad(loss_fn, **how))(params, batch)
    helpers.assert_all_shards_equal((value, grads))
    return value, whole(grads)


def whole(tree: Any) -> Any:
    """Split leaves at their logical shapes, on the host; the padding must be zero."""

    def is_split(x: Any) -> bool:
        return isinstance(x, jaxzero.EvenSplit)

    def leaf(x: Any) -> Any:
        return logical(x.value, np.empty(x.shape, x.dtype)) if is_split(x) else helpers.host(x)

    return jax.tree.map(leaf, tree, is_leaf=is_split)


def quadratic(params: Any, batch: Any) -> jax.Array:
    """A mean over examples whose gradient differs for every element and every example; batch: two vectors."""
    leaves = [x for x in jax.tree.leaves(params) if jnp.issubdtype(x.dtype, jnp.inexact)]
    flat = jnp.concatenate([jnp.ravel(x).astype(jnp.result_type(x, jnp.float32)) for x in leaves])

    def one(x: jax.Array, t: jax.Array) -> jax.Array:
        d = flat * (1 + 0.1 * x) - jnp.sin(t + jnp.arange(flat.size))
        return jnp.sum(jnp.real(d * jnp.conj(d))) / 16

    return jnp.mean(jax.vmap(one)(*batch))


def quadratic_batches(steps: int = 3, size: int = 120) -> list[tuple[np.ndarray, np.ndarray]]:
    """Batches for `quadratic`; the default size divides by every world from 1 to 8 but 7."""
    rng = np.random.default_rng(7)
    return [tuple(rng.normal(size=(2, size)).astype(np.float32)) for _ in range(steps)]


def saying(*words: str) -> str:
    """A regular expression for a message that holds all these patterns, in any order."""
    return "(?is)" + "".join(f"(?=.*(?:{word}))" for word in words)
