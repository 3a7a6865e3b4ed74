"""The page of measurements: what is compared is one training step, and what is written is what was measured."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import report
import results
import shapes
import ways

TINY = dict(vocabulary=41, width=16, layers=2, length=8, heads=2)


def test_sizes_of_the_models():
    assert shapes.count(shapes.llama()[0]) / 1e9 == pytest.approx(8.0, abs=0.05)
    for model in (functools.partial(shapes.gpt, **TINY), functools.partial(shapes.llama, width=64, layers=2)):
        assert shapes.count(model(stacked=True)[0]) == shapes.count(model(stacked=False)[0])


def test_the_llama_is_a_loss():
    small = dict(vocabulary=19, width=16, hidden=24, layers=2, heads=4, groups=2)
    params, loss = shapes.llama(**small, wrap=jax.checkpoint)
    values = [float(jax.jit(loss)(shapes.drawn(params), jnp.full((2, 5), i))) for i in (3, 7)]
    assert values == pytest.approx([np.log(19)] * 2, rel=0.1)  # weights are small: nearly even odds


@pytest.mark.parametrize("way", [w if "2" in w else pytest.param(w, marks=pytest.mark.slow) for w in ways.WAYS])
def test_every_way_is_the_same_step(mesh8, way):
    """From equal parameters all ways give the loss of the replicated one, and keep their arguments' placement."""
    model = functools.partial(shapes.gpt, **TINY)
    split, remat, stacked = ways.WAYS[way]
    assert way not in ways.BESIDE or ways.WAYS[ways.BESIDE[way]][1:] == (remat, stacked)
    params, loss = model(stacked=stacked)
    whole = shapes.drawn(params)
    tokens = jax.random.randint(jax.random.key(1), (16, 9), 0, 41)
    step = ways.step(way, mesh8, model, optax.sgd(0.1), tokens.shape)
    put = lambda tree, like: jax.tree.map(lambda x, y: jax.device_put(x, y.sharding), tree, like)
    expected = loss(whole, tokens)
    arguments = put(step.shard(whole), step.params), step.init(step.shard(whole)), put(tokens, step.tokens)
    new, _, value = step.compile()(*arguments)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for x, like in zip(jax.tree.leaves(new), jax.tree.leaves(step.params), strict=True):
        assert x.sharding.is_equivalent_to(like.sharding, x.ndim)


def document(rows, about):
    versions = {"jax": "1.2", "optax": "3.4", "jaxzero": "5.6"}
    return dict(date="2030-01-02", machine="Linux, 2 cores", versions=versions, about=about, rows=rows)


def test_page(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(results, "FOLDER", tmp_path / "measured")
    monkeypatch.setattr(report, "HERE", tmp_path)
    results.FOLDER.mkdir()
    base = dict(world=8, optimizer="adamw", temporaries=1, sent=2e6, compile_seconds=3.0)
    steps = [
        base | dict(way="FSDP", milliseconds=10.0, total=4_000_000),
        base | dict(way="stage 3", milliseconds=15.0, total=1_000_000),
    ]
    about = dict(parameters=9, batch=16, rounds=5, **TINY)
    (results.FOLDER / "step_time.json").write_text(json.dumps(document(steps, about)))
    sizes = dict(model="gpt", arguments=2e9, peak=None, sent=1e9, hidden=0.5, seconds=7.0)
    large = [
        sizes | dict(way="FSDP + remat", total=12e9),
        sizes | dict(way="stage 3 + remat", total=6e9),
        dict(model="gpt", way="FSDP", refused="RESOURCE_EXHAUSTED"),
    ]
    (results.FOLDER / "h100_2x8.json").write_text(json.dumps(document(large, {"gpt": 3.4e9})))
    report.main()
    page = (tmp_path / "RESULTS.md").read_text()
    assert "| stage 3, 8 | 15.0 | 1.50 | 1.00 | 0.25 | 2.00 | 3.0 |" in page
    assert "| stage 3 + remat | 2.00 | 6.00 | 0.50 | 1.0 | 50% | 7 |" in page
    assert "| FSDP |  | does not fit |  |  |  |  |" in page
    assert page.count("jax 1.2, optax 3.4, jaxzero 5.6; Linux, 2 cores; 2030-01-02.") == 2
    assert "16 TPU" not in page
    for name in ("step_time", "h100_2x8"):
        assert (results.FOLDER / f"{name}.svg").exists()
        assert f"(measured/{name}.svg)" in page


def test_results_are_written_with_versions(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "FOLDER", tmp_path / "sub" / "measured")
    (tmp_path / "sub").mkdir()
    assert results.read("some") is None
    results.write("some", [{"a": 1}], {"b": 2})
    found = results.read("some")
    assert (found["rows"], found["about"], found["versions"]["jax"]) == ([{"a": 1}], {"b": 2}, jax.__version__)
