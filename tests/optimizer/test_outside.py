"""The table of what may stand outside of the wrapper shows what happens."""

import itertools

import checks
import helpers
import optax
import outside_cases
import pytest

import jaxzero


@pytest.mark.grid(9)
@pytest.mark.parametrize("column", outside_cases.COLUMNS)
@pytest.mark.parametrize("case", outside_cases.CASES, ids=" ".join)
def test_the_table_shows_what_happens(case, column):
    """Exact, refused with an error, or other numbers than the unsharded run."""
    assert outside_cases.outcome(case, column)[0] == outside_cases.written()[case, column]


def test_the_table_has_every_case():
    assert list(outside_cases.written()) == list(itertools.product(outside_cases.CASES, outside_cases.COLUMNS))


@pytest.mark.parametrize("name", ["trace", "add_decayed_weights"])
def test_a_transformation_of_split_and_whole_leaves_is_refused_with_the_fix(name):
    """Stage 2: JAX refuses the tree map, and its words have the fix."""
    outside = {"trace": optax.trace(0.9), "add_decayed_weights": optax.add_decayed_weights(0.1)}[name]
    zero, params = jaxzero.Zero(helpers.make_mesh(8)), {"a": outside_cases.PARAMS["a"]}
    _, grads = zero.value_and_grad(checks.quadratic)(params, outside_cases.BATCHES[0])
    said = checks.saying("<class 'jaxzero.EvenSplit'>", r"Fix: put .* inside the wrapper, zero.optimizer\(optax.chain")
    with pytest.raises(ValueError, match=said):
        outside.update(grads, outside.init(params), params)
