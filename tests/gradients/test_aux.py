"""Aux comes back as the loss of the whole batch would return it, or says how it is joined."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import close, make_mesh
from jax.sharding import PartitionSpec as P

import jaxzero

X = jnp.sin(jnp.arange(48 * 5.0)).reshape(48, 5)
MESHES: dict[str, Any] = {
    "3": (3, ("data",), {}),
    "8": (8, ("data",), {}),
    "MiCS": ((2, 4), ("replica", "data"), {"replica_axis": "replica"}),
    "hierarchical": ((2, 4), ("node", "local"), {"shard_axis": ("node", "local")}),
}


def make(world: str, stage: int) -> jaxzero.Zero:
    """A `Zero` on one of the meshes."""
    sizes, names, options = MESHES[world]
    return jaxzero.Zero(make_mesh(sizes, names), stage=stage, **options)


def params() -> Any:
    """A matrix of which no dimension divides by anything."""
    return {"w": jnp.cos(jnp.arange(50.0)).reshape(5, 10)}


def loss(p: Any, x: jax.Array) -> Any:
    """The loss, and one leaf of every kind."""
    logits = x @ p["w"]
    per = jnp.mean(logits**2, axis=1)
    aux = {
        "logits": logits,
        "right": jnp.argmax(logits, -1) > 4,  # bools, one per example
        "tokens": logits.reshape(-1),  # ten per example
        "mean": per.mean(),
        "statistic": logits.mean(0),
        "max": per.max(),
        "count": jnp.sum(per > 0.5),
        "version": jnp.int32(3),
    }
    return per.mean(), (aux, None)


HOW = (
    {"max": "max", "count": "sum", **dict.fromkeys(["logits", "right", "tokens", "mean", "statistic", "version"])},
    None,
)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("world", MESHES)
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.grid(5)
def test_every_kind_of_leaf(world: str, stage: int, accumulate: int) -> None:
    """Aux of the whole batch: whole, in order, and cut over the devices as the batch is."""
    zero = make(world, stage)
    run = jax.jit(zero.value_and_grad(loss, True, accumulate=accumulate, aux=HOW))
    (value, aux), grads = run(zero.shard(params()), X)
    (want, want_aux), want_grads = jax.value_and_grad(loss, has_aux=True)(params(), X)
    close((value, aux), (want, want_aux), 2e-6)
    close(zero.gather(grads), want_grads)
    logits = aux[0]["logits"]
    assert logits.addressable_shards[0].data.shape == (48 // zero.mesh.size, 10)


@pytest.mark.parametrize("stage", [1, 3])
def test_inside_shard_map(stage: int) -> None:
    """There examples stay on their device, and everything else is equal on all."""
    zero, stored = make("8", stage), make("8", stage).shard(params())
    run = lambda p, x: zero.value_and_grad(loss, True, accumulate=2, aux=HOW)(p, x)[0]
    specs = jax.tree.map(lambda x: P(), loss(params(), X))
    for name in ("logits", "right", "tokens"):
        specs[1][0][name] = P("data")
    mapped = jax.shard_map(
        run, mesh=zero.mesh, in_specs=(zero.specs(stored) if stage == 3 else P(), P("data")), out_specs=specs
    )
    close(jax.jit(mapped)(stored, X), loss(params(), X), 2e-6)


def test_a_statistic_as_long_as_the_local_batch_is_averaged() -> None:
    """Six channels, six examples per device: what counts is whether the leaf grows with the examples."""
    with_aux = lambda p, x: (jnp.mean(x @ p["w"]), {"channels": (x @ p["w"]).mean(0)[:6], "examples": x[:, 0]})
    (_, aux), _ = make("8", 2).value_and_grad(with_aux, True)(params(), X)
    close(aux, with_aux(params(), X)[1], 2e-6)


@pytest.mark.parametrize("how", ["max", lambda path, x: "max" if x.shape == () else None, {"a": "max", "b": None}])
def test_ways_to_say_it(how: Any) -> None:
    """One word for all leaves, a function, a tree or a part of one."""
    with_aux = lambda p, x: (jnp.mean(x @ p["w"]), {"a": x.max(), "b": {"c": jnp.max(x, 0)}})
    (_, aux), _ = make("8", 2).value_and_grad(with_aux, True, accumulate=2, aux=how)(params(), X)
    np.testing.assert_array_equal(aux["a"], X.max())
    if how == "max":
        np.testing.assert_array_equal(aux["b"]["c"], X.max(0))
    else:
        np.testing.assert_allclose(aux["b"]["c"], X.reshape(16, 3, 5).max(1).mean(0), rtol=1e-6, atol=1e-7)


def test_concat_by_name() -> None:
    """What has no examples may be joined along its leading dimension: one row for each device."""
    with_aux = lambda p, x: (jnp.mean(x @ p["w"]), x.mean(0, keepdims=True))
    (_, aux), _ = make("8", 3).value_and_grad(with_aux, True, aux="concat")(make("8", 3).shard(params()), X)
    np.testing.assert_allclose(aux, X.reshape(8, 6, 5).mean(1), rtol=1e-6, atol=1e-7)


REFUSED: dict[str, Any] = {
    "examples second": (lambda x: (x @ jnp.ones((5, 3))).T, None, ("examples first", r"\(3, 6\)", "aux='concat'")),
    "a matrix of pairs": (lambda x: x @ x.T, None, (r"\(6, 6\)", r"\(12, 12\)", "function")),
    "an integer": (lambda x: jnp.sum(x > 0), None, ("int32", "aux='sum'")),
    "a mean of integers": (lambda x: jnp.sum(x > 0), "mean", ("mean", "float")),
    "a scalar is joined": (lambda x: x.mean(), "concat", ("concat", r"x\[None\]")),
    "an unknown word": (lambda x: x.mean(), "average", ("aux='average'", "concat")),
    "another tree": (lambda x: x.mean(), {"b": "mean"}, ("no tree like", "structure")),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_told_is_refused_by_path(name: str) -> None:
    """With the path of the leaf, and the fix."""
    leaf, how, words = REFUSED[name]
    with_aux = lambda p, x: (jnp.mean(x @ p["w"]), {"metrics": leaf(x)})
    with pytest.raises(ValueError, match="value_and_grad") as e:
        make("8", 2).value_and_grad(with_aux, True, aux=how)(params(), X)
    message = str(e.value)
    assert "Fix:" in message
    assert how in ("average",) or isinstance(how, dict) or "metrics" in message
    for word in words:
        assert re.search(word, message), message


def test_a_loss_of_one_batch_size() -> None:
    """One that is written for its number of examples cannot show examples by another: it needs a word."""
    with_aux = lambda p, x: (jnp.mean(x.reshape(6, 5) @ p["w"]), x.mean(0))
    (_, aux), _ = make("8", 2).value_and_grad(with_aux, True)(params(), X)
    np.testing.assert_allclose(aux, X.mean(0), rtol=1e-5, atol=1e-6)
    ambiguous = lambda p, x: (with_aux(p, x)[0], {"rows": x[:, 0]})
    with pytest.raises(ValueError, match=r"'rows' of shape \(6,\) may hold 6 examples or a statistic.*aux='concat'"):
        make("8", 2).value_and_grad(ambiguous, True)(params(), X)
    (_, aux), _ = make("8", 2).value_and_grad(ambiguous, True, aux="concat")(params(), X)
    np.testing.assert_array_equal(aux["rows"], X[:, 0])
