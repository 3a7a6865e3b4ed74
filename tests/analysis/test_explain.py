"""The report of what the partitioner did: what it counts, and how it reads."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from on_shares import evaluate

import jaxzero
from jaxzero._src.analysis.explain import Report
from jaxzero._src.sharding.layout import Layout


def report(f, *shapes):
    arrays = [np.ones(s, np.float32) for s in shapes]
    layouts = [Layout(s, 8, "rows" if s[0] % 8 == 0 else "flat") for s in shapes]
    return Report.of(evaluate(f, arrays, layouts, 8)[1], 8)


def test_local_programs_send_nothing():
    found = report(lambda x: jnp.tanh(x) * 2, (16, 3))
    assert (found.whole, found.crossings, found.bytes_gathered, found.bytes_reduced) == ({}, (), 0, 0)
    assert found.local == 2
    assert "0 values gathered: 0 B" in str(found)


def test_bytes_on_the_wire():
    """A ring moves 7/8 of a gathered array, and twice that of a reduced one."""
    found = report(lambda x: (jnp.sort(x, 0), jnp.sqrt(x.sum(0))), (16, 3))
    ((gather,), (total,)) = found.gathers, found.reductions
    assert (gather.primitive, gather.shape, gather.nbytes) == ("sort", (16, 3), 192)
    assert (total.primitive, total.how, total.nbytes) == ("sqrt", "sum", 12)
    assert found.bytes_gathered == 192 * 7 // 8
    assert found.bytes_reduced == 2 * 12 * 7 // 8
    assert found.whole == {"sort": 1, "sqrt": 1}
    assert "1 x gather float32[16, 3] for sort" in str(found)
    assert "in full on every device: " in str(found)


def test_what_is_alike_is_one_line():
    found = report(lambda *xs: [jnp.sort(x, 0) for x in xs], (16,), (16,), (24,))
    assert "2 x gather float32[16] for sort" in str(found)
    assert "1 x gather float32[24] for sort" in str(found)


def test_a_value_crosses_once_however_many_want_it():
    found = report(lambda x: (jnp.sort(x), jnp.flip(x), jnp.cumsum(x)), (16,))
    assert [c.primitive for c in found.crossings] == ["sort"]


def test_optimizers_that_need_more_than_gradients(mesh8):
    """Without what they need: one line that names it. With it: what the update does, value functions included."""
    zero = jaxzero.Zero(mesh8, stage=3)
    params = {"w": jnp.arange(64.0).reshape(16, 4), "b": jnp.ones(5)}
    loss = lambda p: jnp.sum(p["w"] ** 2) + jnp.sum(p["b"] ** 4)
    value, grad = jax.value_and_grad(loss)(params)
    given = {"value": value, "grad": grad, "value_fn": loss}
    cases = {
        "value, grad.* and .*value_fn": (optax.lbfgs(), ("value", "grad", "value_fn")),
        "argument: 'value'": (optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau()), ("value",)),
        "'value'": (optax.polyak_sgd(), ("value",)),
        "obj_fn must be provided": (optax.contrib.sophia(0.1), ("obj_fn",)),
    }
    for message, (inner, needed) in cases.items():
        with pytest.raises(ValueError, match=message.replace(", grad", "', 'grad")) as error:
            zero.explain(inner, params)
        assert str(error.value).startswith("explain: the update of this optimizer needs more than gradients")
        assert "\n" not in str(error.value)
        extra = {name: given.get(name, loss) for name in needed}
        report = zero.explain(inner, params, **extra)
        abstract = {k: x if callable(x) else jax.eval_shape(lambda x: x, x) for k, x in extra.items()}
        assert zero.explain(inner, params, **abstract).crossings == report.crossings
        plan = zero.plan(params, inner)
        (note,) = [note for note in plan.notes if note.startswith("what the update of the optimizer sends is missing")]
        assert re.search(message.replace(", grad", "', 'grad"), note)
        assert "missing" in note
    reductions = zero.explain(optax.lbfgs(), params, **given).reductions
    assert len(reductions) > 10  # dot products of the memory and of the line search
    assert len(zero.explain(optax.sgd(0.1), params).reductions) == 0


def test_the_plan_of_an_optimizer_that_needs_more_counts_its_state(mesh8):
    params = {"w": jax.ShapeDtypeStruct((16, 4), jnp.float32)}
    zero = jaxzero.Zero(mesh8)
    plan = zero.plan(params, optax.lbfgs(memory_size=3, linesearch=None))
    more = zero.plan(params, optax.lbfgs(memory_size=3))
    # two histories of 3, two copies, all split; the line search keeps one gradient more
    assert [leaf.state for leaf in plan.leaves] == [(2 * 3 + 2) * 64 * 4 // 8]
    assert [leaf.state for leaf in more.leaves] == [(2 * 3 + 3) * 64 * 4 // 8]
