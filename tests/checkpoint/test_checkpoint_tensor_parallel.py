"""Checkpoints of parameters that other mesh axes shard too: on disk as any, for meshes with such axes or not."""

import functools
import os
import pathlib
import tempfile

import checkpoint_cases as cases
import checks
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensor_parallel_cases as parallel
from jax.sharding import PartitionSpec as P

import jaxzero
from jaxzero._src.checkpoint import padded_handler

INNER = parallel.OPTIMIZERS["adamw"]


def slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


def make(layout):
    """`"4x2/3"`: four shares, the model over two, stage 3; `"2x2x2/2"`: replicas in front; `"8/3"`: no model axis."""
    shape, stage = layout.rstrip("e").split("/")
    shape = tuple(int(n) for n in shape.split("x"))
    if len(shape) == 1:
        return jaxzero.Zero(helpers.make_mesh(shape), stage=int(stage))
    names = ("replica", "data", "model")[-len(shape) :]
    mesh = helpers.make_mesh(shape, names, explicit=layout.endswith("e"))
    replica = "replica" if "replica" in names else None
    return jaxzero.Zero(mesh, stage=int(stage), replica_axis=replica, param_specs=parallel.SPECS)


@functools.cache
def step_of(layout):
    zero = make(layout)
    tx = zero.optimizer(INNER)

    def step(params, state, batch):
        value, grads = zero.value_and_grad(parallel.loss)(params, batch)
        return *zero.apply(tx, grads, state, params), value

    return jax.jit(step)


def train(layout, params, state, first, count):
    for batch in parallel.batches(first + count, 48)[first:]:
        params, state, _ = step_of(layout)(params, state, parallel.placed(make(layout), batch))
    return params, state


def logical(x, shape):
    """A leaf at its logical shape, on the host; its padding must be zero."""
    x = helpers.host(x)
    x = checks.logical(x, np.empty(shape, x.dtype)) if x.ndim != len(shape) else parallel.unpadded(x, shape)
    return np.ascontiguousarray(x)


def whole(params, state):
    """Every leaf at its logical shape on the host, by name; padding must be zero."""
    helpers.assert_all_shards_equal((params, state))
    unwrap = {name: getattr(x, "value", x) for name, x in params.items()}
    found = {"params": unwrap, "opt_state": state}
    want = {"params": parallel.tree(), "opt_state": jax.eval_shape(INNER.init, parallel.tree())}
    rows = zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(want), strict=True)
    return {helpers.name(path): logical(x, np.shape(like)) for (path, x), like in rows}


@functools.cache
def saved(layout):
    """Two steps, saved; then three more: folder, leaves when saved, leaves at the end."""
    zero = make(layout)
    params = zero.shard(parallel.tree())
    state = zero.optimizer(INNER).init(params)
    params, state = train(layout, params, state, 0, 2)
    directory = tempfile.mkdtemp()
    jaxzero.save(directory, 2, zero, params, state).wait()
    return directory, whole(params, state), whole(*train(layout, params, state, 2, 3))


LAYOUTS = ["4x2/1", "4x2/2", "4x2/3", "4x2/3e", "2x2x2/3", "3x2/3", "1x2/3", "4x1/3", "8/3", "3/2"]
QUICK = {("4x2/3", "4x2/3"), ("4x2/3", "8/3"), ("3/2", "4x2/2")}


@pytest.mark.parametrize(
    ("before", "after"), [(a, b) if (a, b) in QUICK else slow(a, b) for a in LAYOUTS for b in LAYOUTS]
)
def test_a_run_goes_on_on_another_layout(before, after):
    directory, then, end = saved(before)
    zero = make(after)
    restored = jaxzero.restore(directory, zero, cases.abstract(parallel.tree()), INNER)
    cases.same_bits(whole(restored.params, restored.opt_state), then)
    assert max(abs(x).max() for name, x in then.items() if "/mu/" in name) > 0
    made = zero.shard(parallel.tree())
    placed = lambda tree: [x.sharding for x in jax.tree.leaves(tree)]
    assert placed(restored.params) == placed(made)
    assert placed(restored.opt_state) == placed(zero.optimizer(INNER).init(made))
    again = whole(*train(after, restored.params, restored.opt_state, 2, 3))
    assert step_of(after)._cache_size() == 1
    if before == after:
        cases.same_bits(again, end)
    else:
        helpers.close(again, end, 5e-6)


def test_without_a_mesh_and_for_other_programs():
    directory, then, _ = saved("4x2/3")
    restored = jaxzero.restore(directory, None, cases.abstract(parallel.tree()), INNER)
    cases.same_bits(whole(restored.params, restored.opt_state), then)
    kept = ocp.PyTreeCheckpointHandler().metadata(pathlib.Path(directory, "2", "arrays"))
    assert {name: x.shape for name, x in kept.tree.items() if name.startswith("params/")} == {
        f"params/{name}": shape for name, shape in parallel.SHAPES.items()
    }


@pytest.mark.parametrize("limit", [64, slow(4), slow(2**22)])
def test_chunks_of_any_size(limit, tmp_path, monkeypatch):
    """Padded rows whose last share is empty, one layer of layers at a time, in half precision too."""
    monkeypatch.setattr(padded_handler, "CHUNK_BYTES", limit)
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    params = {
        "stack": draw(2, 9, 6),
        "five": draw(5, 4),
        "cube": jnp.asarray(draw(4, 5, 2), jnp.bfloat16),
        "whole": draw(6),
    }
    specs = {"stack": P(None, None, "model"), "five": P(None, "model"), "cube": P("model"), "whole": P("model")}
    mesh = helpers.make_mesh((4, 2), ("data", "model"))
    stacked = lambda path: path[-1].key == "stack"
    zero = jaxzero.Zero(mesh, stage=3, param_specs=specs, stacked=stacked)
    other = jaxzero.Zero(helpers.make_mesh((3, 2), ("data", "model")), stage=3, param_specs=specs)
    jaxzero.save(tmp_path, 0, zero, zero.shard(params), None).wait()
    for after in (zero, other, jaxzero.Zero(helpers.make_mesh(8), stage=3)):
        restored = jaxzero.restore(tmp_path, after, cases.abstract(params), None)
        assert jax.tree.map(lambda x: x.sharding, restored.params) == jax.tree.map(
            lambda x: x.sharding, after.shard(params)
        )
        helpers.assert_all_shards_equal(restored.params)
        whole = after.gather(restored.params)
        helpers.assert_all_shards_equal(whole)
        for name, x in whole.items():
            assert np.asarray(x).tobytes() == np.asarray(params[name]).tobytes(), name


@pytest.mark.parametrize("name", ["adafactor", "muon"])
def test_state_that_is_not_like_its_parameter(name, tmp_path):
    inner, zero = parallel.OPTIMIZERS[name], make("4x2/3")
    params = zero.shard(parallel.tree())
    state = zero.optimizer(inner).init(params)
    state = jax.tree.map(lambda x: x + 1 if x.ndim == 0 else x, state)
    jaxzero.save(tmp_path, 0, zero, params, state, inner).wait()
    restored = jaxzero.restore(tmp_path, zero, cases.abstract(parallel.tree()), inner)
    for (path, x), y in zip(
        jax.tree_util.tree_leaves_with_path(restored.opt_state), jax.tree.leaves(state), strict=True
    ):
        assert (x.sharding, x.shape) == (y.sharding, y.shape), helpers.name(path)
        np.testing.assert_array_equal(x, y, err_msg=helpers.name(path))


def test_bytes_on_disk_and_donation(tmp_path):
    """Without padding, and as they were although training went on."""
    params = {"w": jnp.ones((1021, 512)), "b": jnp.ones(512)}
    specs = {"w": P(None, "model"), "b": P("model")}
    zero = jaxzero.Zero(helpers.make_mesh((4, 2), ("data", "model")), stage=3, param_specs=specs)
    spoil = jax.jit(lambda x: jax.tree.map(lambda x: x * 0 - 1, x), donate_argnums=0)
    held = zero.shard(params)
    jaxzero.save(tmp_path, 0, zero, held, None)
    for _ in range(3):
        held = spoil(held)
    restored = jaxzero.restore(tmp_path, zero, cases.abstract(params), None)
    checks.assert_params_equal(zero.gather(restored.params), params, 0, 0)
    on_disk = sum(os.path.getsize(os.path.join(at, f)) for at, _, files in os.walk(tmp_path) for f in files)
    assert abs(on_disk - 1022 * 512 * 4) < 0.02 * 1022 * 512 * 4


def test_specs_that_do_not_fit_what_is_restored(tmp_path):
    directory, _, _ = saved("4x2/3")
    mesh = helpers.make_mesh((4, 2), ("data", "model"))
    zero = jaxzero.Zero(mesh, stage=3, param_specs=parallel.SPECS | {"odd": P("model")})
    with pytest.raises(ValueError, match=checks.saying("param_specs", "'odd'", "dimension 0 of 13", "Fix:")):
        jaxzero.restore(directory, zero, cases.abstract(parallel.tree()), INNER)
