"""The page of measurements: what is compared is one training step, and what is written is what was measured."""

import json

import jax
import machines
import models
import numpy as np
import offload
import optax
import pytest
import report
import results
import step_model
import ways

import jaxzero

TINY = dict(vocabulary=41, width=16, layers=2, heads=2)
LLAMA = dict(vocabulary=19, width=16, hidden=24, layers=2, heads=4, groups=2, batch=(2, 4))


def gpt(how):
    return models.gpt(**TINY, batch=(16, 8), how=how)


def llama(how):
    return models.llama(**LLAMA, how=how)


@pytest.mark.parametrize("model", [gpt, llama])
def test_a_model_is_the_same_stacked_or_not(model):
    params, loss, batch = model(models.How())
    listed, its_loss, _ = model(models.How(stacked=False, wrap=lambda f: f))
    whole = ways.drawn(params)
    again = {**whole, "layers": [jax.tree.map(lambda x, i=i: x[i], whole["layers"]) for i in range(2)]}
    tokens = jax.random.randint(jax.random.key(0), batch.shape, 0, 19)
    value = float(jax.jit(loss)(whole, tokens))
    assert value == pytest.approx(np.log(params["embed"].shape[0]), rel=0.1)  # small weights: nearly even odds
    assert float(jax.jit(its_loss)(again, tokens)) == pytest.approx(value, rel=1e-3)
    kinds = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
    assert kinds(listed) == kinds(again)


@pytest.mark.parametrize("way", [w if w == "stage 2" else pytest.param(w, marks=pytest.mark.slow) for w in ways.WAYS])
def test_every_way_is_the_same_step(mesh8, way):
    """From equal parameters all ways give the loss of the replicated one, and keep their arguments' placement."""
    split, remat, stacked, _ = ways.WAYS[way]
    assert way not in ways.NATIVE_WAY or ways.WAYS[ways.NATIVE_WAY[way]][1:3] == (remat, stacked)
    params, loss, _ = gpt(models.How(stacked))
    whole = ways.drawn(params)
    tokens = jax.random.randint(jax.random.key(1), (16, 9), 0, 41)
    step = ways.step(way, mesh8, gpt, optax.sgd(0.1))
    put = lambda tree, like: jax.tree.map(lambda x, y: jax.device_put(x, y.sharding), tree, like)
    expected = loss(whole, tokens)
    arguments = put(step.shard(whole), step.params), step.init(step.shard(whole)), put(tokens, step.tokens)
    new, _, value = step.compile()(*arguments)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for x, like in zip(jax.tree.leaves(new), jax.tree.leaves(step.params), strict=True):
        assert x.sharding.is_equivalent_to(like.sharding, x.ndim)


def test_large_models_in_the_ways_that_fit(mesh8):
    native, scanned = "FSDP + remat + scan", "stage 3 + remat + scan"
    assert machines.large("llama") == [f"{scanned}, sums in bfloat16", scanned, native]
    assert machines.large("gpt") == [scanned, "stage 3 + remat", "stage 3", native, "FSDP + remat", "FSDP"]
    params, _, tokens = machines.model("llama", mesh8)(models.How())
    assert (tokens.shape, params["head"].dtype) == ((8, 2049), ways.WAYS[machines.large("llama")[0]].reduce_dtype)


@pytest.mark.slow
def test_offload_compiles_the_same_model(mesh8, monkeypatch):
    monkeypatch.setitem(machines.MODELS, "gpt", (lambda texts, how: gpt(how), 2))
    found = offload.compiled(mesh8, offload.OFFLOAD["params"], True).memory_analysis()
    params, loss, tokens = gpt(models.How())
    rest = jaxzero.Zero(mesh8, stage=3).observe(loss, params, tokens).plan(params, optax.adamw(1.0)).at_rest[3]
    arguments = found.argument_size_in_bytes + found.host_argument_size_in_bytes
    assert arguments == rest.parameters + rest.state + 4 * tokens.size // 8


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
    about = dict(parameters=9, batch=16, length=8, rounds=5, **TINY)
    (results.FOLDER / "step_time.json").write_text(json.dumps(document(steps, about)))
    known = dict(
        figures=dict(f32=2e9, bandwidth=3e9, launch=4e-6, local=5e9, local_latency=6e-6), world=8, optimizer="adamw"
    )
    times = [dict(way="FSDP", measured=0.01, predicted=0.005), dict(way="stage 3", measured=0.02, predicted=0.03)]
    predicted = document(times, known | dict(order=step_model.order(times)))
    (results.FOLDER / "step_model.json").write_text(json.dumps(predicted))
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
    assert "Of 1 pairs of ways that differ by more than 15 %, 1 are ordered right." in page
    assert "| FSDP | 10.0 | 5.0 | 0.50 |" in page
    assert page.count("jax 1.2, optax 3.4, jaxzero 5.6; Linux, 2 cores; 2030-01-02.") == 3
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


def test_pairs_are_ordered():
    """Pairs within 15 % are left out; of the others one is predicted the wrong way round."""
    row = lambda measured, predicted: dict(measured=measured, predicted=predicted)
    assert step_model.order([row(1.0, 5.0), row(1.1, 1.0), row(2.0, 3.0), row(4.0, 9.0)]) == (4, 5)
