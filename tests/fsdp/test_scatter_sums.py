"""The gradient of an embedding that is also the head: the scatter goes onto the head's term."""

import helpers
import jax
import jax.numpy as jnp
import numpy as np

import jaxzero
from jaxzero._src.fsdp.scatter_sums import scatter_onto_sums
from jaxzero._src.jaxpr.bind import bind
from jaxzero._src.jaxpr.flat import Known, flatten

VOCABULARY, WIDTH = 2051, 64


def tied(w, tokens):
    x = jnp.tanh(w[tokens])
    return jnp.mean(jax.nn.logsumexp(x @ w.T, -1))


def run(flat, args):
    """The results of a flat program."""
    env = dict(zip(flat.inputs, args, strict=True))
    read = lambda x: x.value if isinstance(x, Known) else env[x]
    for step in flat.steps:
        env.update(zip(step.outs, bind(step.eqn, [read(x) for x in step.ins]), strict=True))
    return [read(x) for x in flat.outs]


def scatters(flat):
    return [step for step in flat.steps if step.name == "scatter-add"]


def test_what_is_scattered_onto_zeros_and_added_is_scattered_onto_the_other_term():
    w = jax.random.normal(jax.random.key(0), (11, 3))
    tokens = jnp.array([1, 4, 4, 10])
    flat = flatten(jax.make_jaxpr(jax.value_and_grad(tied))(w, tokens).jaxpr, [])
    joined = scatter_onto_sums(flat)
    (scatter,) = scatters(joined)
    assert scatter.outs[0] is flat.outs[1]
    assert len(joined.steps) == len(flat.steps) - 1
    for got, want in zip(run(joined, [w, tokens]), run(flat, [w, tokens]), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)


def test_a_scatter_that_something_else_reads_or_onto_other_values_stays():
    def read_twice(w, tokens, rows):
        scattered = jnp.zeros_like(w).at[tokens].add(rows)
        return w + scattered, scattered

    def onto_values(w, tokens, rows):
        return w + jnp.sin(w).at[tokens].add(rows)

    args = (jnp.ones((11, 3)), jnp.array([1, 4]), jnp.ones((2, 3)))
    for fn in (read_twice, onto_values):
        flat = flatten(jax.make_jaxpr(fn)(*args).jaxpr, [])
        assert scatter_onto_sums(flat).steps == flat.steps


def test_stage_2_holds_the_gradient_of_a_tied_embedding_once():
    zero = jaxzero.Zero(helpers.make_mesh(), stage=2)
    w = jnp.ones((VOCABULARY, WIDTH))
    tokens = jnp.arange(16) % VOCABULARY
    compiled = jax.jit(zero.value_and_grad(tied)).lower(w, tokens).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * w.nbytes
