"""Whole gradients are made after the product that is the parameter's last use."""

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxzero
from jaxzero._src.fsdp.gradient_terms import find_terms
from jaxzero._src.fsdp.reorder import defer_wgrads, wgrad_steps
from jaxzero._src.jaxpr.flat import flatten
from jaxzero._src.sharding.layout import Layout

ARRAY = jax.ShapeDtypeStruct((8, 8), jnp.float32)


def traced(loss, *args):
    """The flat gradient program of a loss of two weights and data, and the terms of its gradients."""
    flat = flatten(jax.make_jaxpr(jax.value_and_grad(loss, (0, 1)))(*args).jaxpr, [])
    return flat, find_terms(flat, {i: Layout((8, 8), 8, "rows") for i in (1, 2)})


def two_layers(w, v, x):
    return jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ v))


def products(flat, var=None):
    return [s for s in flat.steps if s.name == "dot_general" and (var is None or var in s.ins)]


def test_the_product_behind_moves_is_found():
    flat, found = traced(two_layers, ARRAY, ARRAY, ARRAY)
    made = wgrad_steps(flat, found.terms, lambda position: True)
    assert {s.name for s in made} == {"dot_general"}
    assert len(made) == 2
    assert all(s.name == "transpose" for tail in made.values() for s in tail)
    assert not wgrad_steps(flat, found.terms, lambda position: False)


def test_a_gradient_is_made_after_the_last_product_with_the_parameter():
    flat, found = traced(two_layers, ARRAY, ARRAY, ARRAY)
    made = wgrad_steps(flat, found.terms, lambda position: True)
    steps, last = list(flat.steps), products(flat, flat.inputs[1])[-1]
    flat, behind = defer_wgrads(flat, made, products(flat, flat.inputs[0]) + products(flat, flat.inputs[1]))
    assert last in behind.values()
    assert all(flat.steps.index(maker) > flat.steps.index(use) for maker, use in behind.items())
    assert sorted(map(id, steps)) == sorted(map(id, flat.steps))


def test_every_step_still_comes_after_what_it_reads():
    flat, found = traced(two_layers, ARRAY, ARRAY, ARRAY)
    flat, _ = defer_wgrads(flat, wgrad_steps(flat, found.terms, lambda position: True), products(flat))
    there = set(flat.inputs)
    for step in flat.steps:
        assert not [x for x in step.ins if x not in there and not hasattr(x, "value")]
        there.update(step.outs)


def test_a_gradient_that_something_else_reads_stays_where_it_is():
    def program(w, v, x):
        value, grads = jax.value_and_grad(two_layers, (0, 1))(w, v, x)
        return value, *grads, jnp.sum(grads[0])

    flat = flatten(jax.make_jaxpr(program)(ARRAY, ARRAY, ARRAY).jaxpr, [])
    found = find_terms(flat, {i: Layout((8, 8), 8, "rows") for i in (1, 2)})
    made = wgrad_steps(flat, found.terms, lambda position: True)
    assert [tail[-1].outs[0] for tail in made.values()] == [flat.outs[2]]


def test_no_step_before_the_first_that_may_move_does():
    flat, found = traced(two_layers, ARRAY, ARRAY, ARRAY)
    made = wgrad_steps(flat, found.terms, lambda position: True)
    same, behind = defer_wgrads(flat, made, products(flat), first=len(flat.steps))
    assert (same.steps, behind) == (flat.steps, {})


@jax.custom_vjp
def fused(w, v, x):
    return two_layers(w, v, x)


def fused_forward(w, v, x):
    """The gradients are made in the forward pass, as fused losses of large vocabularies make theirs."""
    return jax.value_and_grad(two_layers, (0, 1, 2))(w, v, x)


fused.defvjp(fused_forward, lambda grads, ct: grads)  # right where the loss is added to others


@pytest.mark.parametrize("prefetch", [0, 2])
def test_gradients_that_the_forward_pass_makes(mesh8, prefetch):
    """What the forward pass makes stays in it, so that the end of the forward pass is the same step."""
    w, v, x = (jax.random.normal(jax.random.key(i), (8, 8)) for i in range(3))
    loss = lambda p, x: fused(p["w"], p["v"], x) + jnp.sum(x @ p["w"])
    zero = jaxzero.Zero(mesh8, stage=3, prefetch=prefetch, chunk_bytes=None, persist_bytes=0)
    params = {"w": w, "v": v}
    value, grads = zero.value_and_grad(loss, whole_argnums=1)(zero.shard(params), x)
    want = jax.value_and_grad(loss)(params, x)
    np.testing.assert_allclose(value, want[0], rtol=1e-5)
    helpers.close(zero.gather(grads), want[1])


def shared_in_a_row(p, x):
    """One matrix, used four times in a row, then another."""
    for _ in range(4):
        x = jnp.tanh(x @ p["w"])
    return jnp.mean(jnp.square(x @ p["v"]))


def tied(p, x):
    """One matrix at the start and at the end, with another between."""
    return jnp.mean(jnp.square(jnp.tanh(jnp.tanh(x @ p["w"]) @ p["v"]) @ p["w"].T))


@pytest.mark.parametrize(
    ("loss", "regather", "times"), [(shared_in_a_row, None, 1), (tied, None, 2), (tied, "never", 1)]
)
def test_a_shared_weight_is_reduced_once_while_it_is_whole_anyway(mesh8, loss, regather, times):
    """Where another parameter is gathered between its uses, the sum would be whole beside that."""
    params = {name: 0.3 * jax.random.normal(jax.random.key(i), (16, 16)) for i, name in enumerate("wv")}
    x = jax.random.normal(jax.random.key(2), (16, 16))
    zero = jaxzero.Zero(mesh8, stage=3, chunk_bytes=None, persist_bytes=0, regather=regather).observe(loss, params, x)
    split = zero.shard(params)
    compiled = jax.jit(zero.value_and_grad(loss)).lower(split, x).compile()
    sent = [c.nbytes for c in jaxzero.collectives(compiled, mesh8) if c.kind == "reduce-scatter"]
    assert sum(sent) == (times + 1) * 16 * 16 * 4
    helpers.close(zero.gather(compiled(split, x)[1]), jax.grad(loss)(params, x))
    plan = zero.plan(params)
    assert sum(s.nbytes for s in plan.traffic if s.kind == "reduce-scatter") == sum(sent) * 7 // 8
    assert any("w 2 times" in note for note in plan.notes) == (times == 2)
