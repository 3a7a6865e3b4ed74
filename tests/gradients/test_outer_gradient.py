"""`jax.grad` of functions that call `forward` and `value_and_grad` equals the unsharded one, to second order."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from helpers import close, make_mesh
from jax.sharding import PartitionSpec as P

import jaxzero

X = jnp.sin(jnp.arange(120.0)).reshape(24, 5)
Y = jnp.cos(jnp.arange(24.0))
WORLDS: dict[str, Any] = {
    "3": ((3,), ("data",), {}),
    "8": ((8,), ("data",), {}),
    "MiCS": ((2, 4), ("replica", "data"), {"replica_axis": "replica"}),
    "hierarchical": ((2, 4), ("node", "local"), {"shard_axis": ("node", "local")}),
    "hpZ": ((2, 4), ("node", "local"), {"shard_axis": ("node", "local"), "regather": "local", "chunk_bytes": None}),
    "tensor parallel": ((4, 2), ("data", "model"), {"param_specs": {"w": P(None, "model"), "v": P("model"), "l": P()}}),
}


def params() -> Any:
    """Two matrices of which no dimension divides, and three scanned layers."""
    draw = lambda i, *shape: 0.4 * jax.random.normal(jax.random.key(i), shape)
    return {"w": draw(0, 5, 6), "v": draw(1, 6, 7), "l": draw(2, 3, 7, 7)}


def net(p: Any, x: jax.Array) -> jax.Array:
    """One number per example."""
    return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), jnp.tanh(x @ p["w"]) @ p["v"], p["l"])[0].sum(-1)


def loss(p: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """The mean over examples."""
    return jnp.mean((net(p, x) - y) ** 2)


def squares(tree: Any) -> jax.Array:
    """The squared norm; padding is zero."""
    return sum(jnp.sum(x**2) for x in jax.tree.leaves(tree))  # type: ignore[return-value]


def outer(f: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """A loss outside the library, of the outputs of `f`."""
    return lambda p: jnp.mean((f(p, X) - Y) ** 2)


CASES: dict[str, Callable[[Any, Any], Callable[[Any], jax.Array]]] = {
    "a loss of the outputs of forward": lambda forward, grad: outer(forward),
    "a penalty on the norm of the gradient": lambda forward, grad: lambda p: squares(grad(p, X, Y)[1]),
    "forward twice differentiated": lambda forward, grad: lambda p: squares(jax.grad(outer(forward))(p)),
    "a step, differentiated through": lambda forward, grad: (
        lambda p: grad(jax.tree.map(lambda x, g: x - 0.1 * g, p, grad(p, X, Y)[1]), X, Y)[0]
    ),
}


def check(zero: jaxzero.Zero, case: str, how: Callable[..., Any] = jax.jit) -> None:
    """The sharded gradient, as arrays, against the plain one."""
    plain = CASES[case](net, jax.value_and_grad(loss))
    sharded = CASES[case](zero.forward(net), zero.value_and_grad(loss))
    close(zero.gather(how(jax.grad(sharded))(zero.shard(params()))), jax.grad(plain)(params()), 2e-5)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.grid(3)
def test_outer_gradients_at_stage_3(world: str, case: str) -> None:
    """Equal to `jax.grad` without sharding on every kind of mesh."""
    sizes, names, options = WORLDS[world]
    check(jaxzero.Zero(make_mesh(sizes, names), stage=3, **options).observe(loss, params(), X, Y), case)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("world", ["8", "MiCS"])
@pytest.mark.grid(2)
def test_outer_gradients_of_whole_parameters(world: str, stage: int) -> None:
    """The same at stages 1 and 2."""
    sizes, names, options = WORLDS[world]
    zero = jaxzero.Zero(make_mesh(sizes, names), stage=stage, **options)
    check(zero, "a penalty on the norm of the gradient")
    check(zero, "a loss of the outputs of forward")


def test_eager_outer_gradient() -> None:
    """The same outside `jit`, and in float32 of an unscanned layout."""
    check(jaxzero.Zero(make_mesh(4), stage=3), "a loss of the outputs of forward", lambda f: f)


def test_gradient_of_the_examples() -> None:
    """The gradient with respect to the batch of an outer loss comes back whole, in order."""
    zero = jaxzero.Zero(make_mesh(8), stage=3)
    got = jax.jit(jax.grad(lambda x, p: zero.forward(net)(p, x).sum()))(X, zero.shard(params()))
    close(got, jax.grad(lambda x, p: net(p, x).sum())(X, params()))
