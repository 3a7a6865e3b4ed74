"""`fit` on the devices of this process: real programs of a small model, and what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxzero
from jaxzero._src.fit import cache

F32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
#: Eight layers of 102 kB.
PARAMS = {"layers": F32(8, 160, 160)}
BATCH = (F32(16, 160),)


def loss(p, x):
    return jnp.mean(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, p["layers"])[0] ** 2)


def options(**more):
    given = {"devices": np.array(jax.devices()), "progress": lambda line: None, "compiles": 3}
    return jaxzero.FitOptions(**given | more)


def test_rows_that_fit_compile_below_the_budget(tmp_path, monkeypatch):
    """Two nodes of four. The budget holds stage 3 and not what stage 2 rests with; results come from the cache then."""
    lines = []
    hardware = jaxzero.machine("h100:2x4")
    found = jaxzero.fit(
        loss, PARAMS, BATCH, optax.adam(1e-3), hardware, memory=1e6,
        options=options(progress=lines.append, cache=str(tmp_path)),
    )  # fmt: skip
    assert found.best.way.stage == 3
    assert len(lines) == sum(x.found is not None for x in found.trials) <= 3
    assert all(x.found.total <= 1e6 for x in found.trials if x.fits)
    ruled = {x.way.stage for x in found.trials if x.found is None}
    assert 2 in ruled
    times = [x.found.seconds for x in found.trials if x.fits]
    assert times == sorted(times)
    best = found.best
    assert best.way.zero(np.array(jax.devices())).mesh.size == 8
    for word in ("predicted", "not compiled", "at rest", found.constructor, "examples"):
        assert word in str(found)

    def compiled(*_):
        raise AssertionError("compiled again")

    monkeypatch.setattr(cache, "_FOUND", {})
    monkeypatch.setattr(jax.stages.Lowered, "compile", compiled)
    again = jaxzero.fit(
        loss, PARAMS, BATCH, optax.adam(1e-3), hardware, memory=1e6, options=options(cache=str(tmp_path))
    )
    assert again.trials == found.trials


def test_nothing_fits_says_what_would():
    found = jaxzero.fit(loss, PARAMS, BATCH, optax.adam(1e-3), "h100:1x8", memory=3e5, options=options(compiles=1))
    assert found.best is None
    assert found.constructor == ""
    for word in ("Nothing fits 300 kB", "Least: stage 3", "What may fit", "offload"):
        assert word in str(found)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (
            dict(memory=9e4),
            r"memory=90000.0, 90 kB. Expected at least the 102.4 kB of the parameter layers of one layer",
        ),
        (dict(memory=-1), "memory=-1. Expected positive bytes"),
        (dict(options=options(compiles=0)), "compiles=0. Expected a positive int"),
        (dict(loss_fn=lambda p, x: x @ p["c"]), "the loss cannot be traced: KeyError: 'c'.*Fix"),
        (dict(options=options(remat=lambda p, x: 1 / 0)), "options.remat cannot be traced: ZeroDivisionError"),
        (dict(batch=(F32(12, 160),)), "the batch has 12 examples. Expected a multiple of 8.*16 examples"),
        (dict(machine="h10"), "no known machine"),
        (dict(machine="v5e:4x4", options=jaxzero.FitOptions()), "needs the TPU plug-in"),
    ],
)
def test_refused_at_once(call, match, monkeypatch):
    from jaxzero._src.analysis import topology

    monkeypatch.setattr(topology, "_installed", lambda module: False)
    given = dict(loss_fn=loss, params=PARAMS, batch=BATCH, inner=optax.adam(1e-3), machine="h100:1x8")
    with pytest.raises(ValueError, match=match):
        jaxzero.fit(**given | {"options": options()} | call)
