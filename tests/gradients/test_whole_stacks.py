"""Layers that a scan reads one by one, but that were split as one array, are named."""

import warnings

import helpers
import jax
import jax.numpy as jnp
import pytest

import jaxzero

LAYERS, WIDTH = 3, 320  # 1.2 MB
PARAMS = {"layers": jnp.full((LAYERS, WIDTH, WIDTH), 1e-3), "out": jnp.ones((WIDTH, WIDTH))}
BATCH = jnp.ones((8, WIDTH))


def loss(params, x):
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["layers"])
    return jnp.mean(x @ params["out"])


def abstract(zero, call):
    return jax.eval_shape(call, jax.eval_shape(zero.shard, PARAMS), BATCH)


@pytest.mark.parametrize("name", ["value_and_grad", "forward"])
def test_a_scan_over_layers_split_as_one_array_warns(name):
    zero = jaxzero.Zero(helpers.make_mesh(8), stage=3)
    call = zero.value_and_grad(loss) if name == "value_and_grad" else zero.forward(loss)
    said = rf"{name}: a scan reads \['layers'\] layer by layer.* 1\.2 MB .*Fix: .*zero\.observe\(loss_fn"
    with pytest.warns(UserWarning, match=said):
        abstract(zero, call)


@pytest.mark.parametrize(
    "options", [dict(stage=3, persist_bytes=2**21), dict(stage=3, stacked=lambda path: True), dict(stage=2)]
)
def test_stacks_that_are_kept_whole_or_known_do_not_warn(options):
    zero = jaxzero.Zero(helpers.make_mesh(8), **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        abstract(zero, zero.value_and_grad(loss))


def test_an_observed_loss_does_not_warn():
    zero = jaxzero.Zero(helpers.make_mesh(8), stage=3).observe(loss, PARAMS, BATCH)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        abstract(zero, zero.value_and_grad(loss))
