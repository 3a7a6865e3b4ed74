"""Whole gradients are made after the product that is the parameter's last use."""

import jax
import jax.numpy as jnp

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
