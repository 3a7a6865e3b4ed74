"""Saved on one layout, restored on another: the same bits, and training goes on as if nothing had happened."""

import functools
import tempfile

import checkpoint_cases as cases
import helpers
import pytest

import jaxzero


@functools.cache
def saved(layout: str) -> tuple:
    """A run of two steps that was saved and then went on for three: folder, leaves when saved, leaves at the end."""
    zero = cases.make_zero(layout)
    params, state = cases.start(layout)
    params, state, _ = cases.train(layout, params, state, 0, 2)
    directory = tempfile.mkdtemp()
    jaxzero.save(directory, 2, zero, params, state, extra={"batch": 2}).wait()
    then = cases.whole(zero, params, state)
    params, state, losses = cases.train(layout, params, state, 2, 3)
    return directory, then, cases.whole(zero, params, state), losses


QUICK = {("8/3", "3/3"), ("3/3", "2x4/2"), ("2x4/2", "8/3"), ("8/3", "8/3")}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(a, b, marks=[] if (a, b) in QUICK else pytest.mark.slow)
        for a in cases.LAYOUTS
        for b in cases.LAYOUTS
    ],
)
def test_a_run_goes_on_on_another_layout(before, after):
    directory, then, end, losses = saved(before)
    zero = cases.make_zero(after)
    restored = jaxzero.restore(directory, zero, cases.abstract(cases.make_params()), cases.INNER)
    helpers.assert_all_shards_equal((restored.params, restored.opt_state))
    assert (restored.step, restored.extra) == (2, {"batch": 2})
    cases.same_bits(cases.whole(zero, restored.params, restored.opt_state), then)
    assert max(abs(x).max() for name, x in then.items() if "/mu/" in name) > 0
    compiled = cases.step_of(after)._cache_size()
    params, state, again = cases.train(after, restored.params, restored.opt_state, 2, 3)
    assert cases.step_of(after)._cache_size() == max(compiled, 1), (
        "restored arrays are typed or placed unlike those of a run"
    )
    got = cases.whole(zero, params, state)
    if before == after:
        assert again == losses
        cases.same_bits(got, end)
    else:
        helpers.close(got, end, 5e-6)


def test_without_a_mesh_too():
    directory, then, _, _ = saved("3/3")
    restored = jaxzero.restore(directory, None, cases.abstract(cases.make_params()), cases.INNER)
    cases.same_bits(cases.whole(None, restored.params, restored.opt_state), then)
    second = tempfile.mkdtemp()
    jaxzero.save(second, 0, None, restored.params, restored.opt_state).wait()
    zero = cases.make_zero("8/3")
    restored = jaxzero.restore(second, zero, cases.abstract(cases.make_params()), cases.INNER)
    cases.same_bits(cases.whole(zero, restored.params, restored.opt_state), then)
