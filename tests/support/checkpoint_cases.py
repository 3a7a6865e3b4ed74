"""A small training run that can be saved on one layout and restored on another."""

import functools
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxzero

#: Worlds x stages, and replica groups: `"6/3"` is six devices at stage 3, `"2x4/2"` two groups of four at stage 2.
LAYOUTS = [f"{world}/{stage}" for world in ("1", "2", "3", "4", "6", "8", "2x4") for stage in (1, 2, 3)]

INNER = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2, weight_decay=0.1))


def make_params() -> Any:
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    return {"w": draw(48, 5), "odd": draw(7, 5, 3), "b": draw(5), "scale": draw()}


def loss_fn(params: Any, x: jax.Array) -> jax.Array:
    hidden = jnp.tanh(x @ params["w"] + params["b"])
    return jnp.mean((jnp.einsum("bi,oij->boj", hidden, params["odd"]) * params["scale"] - 1.0) ** 2)


def batch(step: int) -> np.ndarray:
    return np.random.default_rng(step).normal(size=(24, 48)).astype(np.float32)


def make_zero(layout: str, **options: Any) -> jaxzero.Zero:
    world, stage = layout.split("/")
    if "x" in world:
        shape = tuple(int(n) for n in world.split("x"))
        mesh = helpers.make_mesh(shape, ("replica", "data"))
        return jaxzero.Zero(mesh, stage=int(stage), replica_axis="replica", **options)
    return jaxzero.Zero(helpers.make_mesh(int(world)), stage=int(stage), **options)


@functools.cache
def step_of(layout: str, **options: Any) -> Any:
    """`step(params, state, batch) -> (params, state, loss)`, compiled once for a layout."""
    zero = make_zero(layout, **options)
    tx = zero.optimizer(INNER)

    def step(params: Any, state: Any, x: jax.Array) -> Any:
        loss, grads = zero.value_and_grad(loss_fn)(params, x)
        return *zero.apply(tx, grads, state, params), loss

    return jax.jit(step)


def train(layout: str, params: Any, state: Any, first: int, count: int, **options: Any) -> tuple[Any, Any, list[float]]:
    """`count` steps from step `first`."""
    zero = make_zero(layout, **options)
    axes = tuple(zero.mesh.axis_names)
    losses = []
    for i in range(first, first + count):
        whole, count = batch(i), 24 // jax.process_count()
        mine = whole[jax.process_index() * count :][:count]
        x = jax.make_array_from_process_local_data(NamedSharding(zero.mesh, P(axes)), mine)
        params, state, loss = step_of(layout, **options)(params, state, x)
        losses.append(float(loss))
    return params, state, losses


def start(layout: str, **options: Any) -> tuple[Any, Any]:
    zero = make_zero(layout, **options)
    params = zero.shard(make_params())
    return params, jax.jit(zero.optimizer(INNER).init)(params)


def whole(zero: Any, params: Any, state: Any, inner: Any = INNER) -> dict[str, np.ndarray]:
    """Every leaf at its logical shape on the host, by name; padding must be zero."""
    params = jax.tree.map(helpers.host, zero.gather(params) if zero else params)
    like = jax.tree.leaves(jax.eval_shape(inner.init, jax.tree.map(jnp.asarray, params)))
    out = {f"params/{helpers.name(p)}": x for p, x in jax.tree_util.tree_leaves_with_path(params)}
    for (path, x), want in zip(jax.tree_util.tree_leaves_with_path(state), like, strict=True):
        x = helpers.host(x)
        if x.shape != want.shape:
            assert not x.reshape(-1)[want.size :].any(), "padding"
            x = x.reshape(-1)[: want.size].reshape(want.shape)
        out[f"opt_state/{helpers.name(path)}"] = x
    return out


def abstract(params: Any) -> Any:
    return jax.eval_shape(lambda: params)


def same_bits(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype, name
        assert a[name].shape == b[name].shape, name
        assert a[name].tobytes() == b[name].tobytes(), name
