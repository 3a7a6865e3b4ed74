"""One of several processes: trains, saves, restores, gathers, and is refused where the processes disagree.

python many_processes.py COORDINATOR PROCESSES PROCESS DEVICES DIRECTORY
"""

import json
import pathlib
import sys
import zlib

import checkpoint_cases as cases
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxzero
from jaxzero._src.checkpoint import orbax_io, padded_handler
from jaxzero._src.sharding import processes

if __name__ == "__main__":  # pytest imports it, too, to look for doctests
    COORDINATOR, PROCESSES, MINE, DEVICES = sys.argv[1], *map(int, sys.argv[2:5])
    DIRECTORY = pathlib.Path(sys.argv[5])
LAYOUTS = ("8/3", "2x4/2")


def assert_replicas_equal(tree) -> None:
    """Bitwise, on all devices of all processes: each tells digests of what it has, by leaf and place."""
    helpers.assert_all_shards_equal(tree)
    mine = {}
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        for shard in x.addressable_shards:
            mine[f"{helpers.name(path)} {shard.index}"] = zlib.crc32(np.asarray(shard.data).tobytes())
    first, second = processes._exchange(json.dumps(mine).encode())
    both = first.keys() & second.keys()
    assert both
    assert all(first[place] == second[place] for place in both)


def refused(message, f, *arguments) -> None:
    with pytest.raises(ValueError, match=message):
        f(*arguments)


def train() -> dict[str, list[float]]:
    losses = {}
    for layout in LAYOUTS:
        zero = cases.make_zero(layout)
        params, state = cases.start(layout)
        params, state, losses[layout] = cases.train(layout, params, state, 0, 3)
        assert_replicas_equal((params, state))
        where = DIRECTORY / layout.replace("/", "-")
        jaxzero.save(where, 3, zero, params, state, extra={"batch": 3})
        whole = zero.gather(params)
        assert all(x.is_fully_replicated for x in jax.tree.leaves(whole))
        assert_replicas_equal(whole)
        if MINE == 0:
            np.savez(DIRECTORY / f"{layout.replace('/', '-')}.npz", **jax.tree.map(np.asarray, whole))
        restored = jaxzero.restore(where, zero, cases.abstract(cases.make_params()), cases.INNER)
        assert (restored.step, restored.extra) == (3, {"batch": 3})
        for x, y in zip(jax.tree.leaves(restored[:2]), jax.tree.leaves((params, state)), strict=True):
            assert x.sharding == y.sharding
            for a, b in zip(x.addressable_shards, y.addressable_shards, strict=True):
                assert np.asarray(a.data).tobytes() == np.asarray(b.data).tobytes()
    return losses


def other_leaves() -> None:
    """Keys, integers, empty leaves; flat leaves by shares, rows that a model axis shards; restored on other layouts."""
    padded_handler.SMALL_SHARE, padded_handler.CHUNK_BYTES = 0, 64
    rng = np.random.default_rng(0)
    params = {
        "odd": rng.normal(size=(57, 12)).astype(np.float32),
        "stack": rng.normal(size=(3, 10, 5)).astype(np.float32),
        "key": jax.random.key(3),
        "keys": jax.random.split(jax.random.key(4), 3),
        "int": np.int32(7),
        "empty": np.zeros((0, 3), np.float32),
    }
    stacked = lambda path: "stack" in jax.tree_util.keystr(path)
    zero = jaxzero.Zero(helpers.make_mesh(8), stage=3, stacked=stacked)
    on_model = lambda path, x: P(None, "model") if path[-1].key == "odd" else None
    beside = jaxzero.Zero(helpers.make_mesh((4, 2), ("data", "model")), stage=3, param_specs=on_model)
    for step, before in enumerate((zero, beside)):
        jaxzero.save(DIRECTORY / "other", step, before, before.shard(params), None).wait()
    for step, again in ((0, zero), (0, cases.make_zero("2x4/3")), (1, beside), (1, zero)):
        restored = jaxzero.restore(DIRECTORY / "other", again, cases.abstract(params), None, step)
        whole = again.gather(restored.params)
        for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(whole), jax.tree.leaves(params), strict=True):
            if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
                x, y = jax.random.key_data(x), jax.random.key_data(y)
            for shard in x.addressable_shards:
                assert np.asarray(shard.data).tobytes() == np.asarray(y)[shard.index].tobytes(), path
    born = zero.init(lambda key: {"w": jax.random.normal(key, (57, 12))}, jax.random.key(0))
    want = jax.random.normal(jax.random.key(0), (57, 12))
    np.testing.assert_array_equal(zero.gather(born)["w"].addressable_data(0), want)
    norm = jax.jit(optax.tree.norm)(born)
    np.testing.assert_allclose(float(norm), float(jnp.linalg.norm(want)), rtol=1e-6)


def disagreements() -> None:
    params, mesh = {"w": jnp.ones(5)}, helpers.make_mesh(8)
    zero = jaxzero.Zero(mesh)
    split = zero.shard(params)
    both = r" on process 0 and .* on process 1; expected the same on all 2"
    refused("shard: processes disagree on stage. Found 2" + both, jaxzero.Zero(mesh, stage=2 + MINE).shard, params)
    refused("disagree on bucket_bytes", jaxzero.Zero(mesh, bucket_bytes=1 + MINE).init, lambda: params)
    refused("disagree on the value of leaf 'w'. Found float32", zero.shard, {"w": jnp.full(5, float(MINE))})
    refused("disagree on the value of leaf '0'", zero.init, lambda key: params, jax.random.key(MINE))
    refused(
        "disagree on call. Found (shard|init)", zero.init if MINE else zero.shard, (lambda: params) if MINE else params
    )
    refused("save: processes disagree on step", jaxzero.save, DIRECTORY / "none", MINE, zero, split, None)
    refused("disagree on directory", jaxzero.save, DIRECTORY / f"none{MINE}", 0, zero, split, None)
    with pytest.MonkeyPatch.context() as m:
        m.setattr(orbax_io, "obstacle", lambda path: "the disk of this one is full" if MINE else "")
        refused(r"disk of this one is full \(process 1 of 2\)", jaxzero.save, DIRECTORY / "none", 1, zero, split, None)
    refused("restore: there is no complete checkpoint", jaxzero.restore, DIRECTORY / "none", zero, params, None)
    refused("restore: processes disagree on step", jaxzero.restore, DIRECTORY / "8-3", zero, params, None, 3 + MINE)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", DEVICES)
    jax.distributed.initialize(COORDINATOR, PROCESSES, MINE)
    (DIRECTORY / f"losses-{MINE}.json").write_text(json.dumps(train()))
    other_leaves()
    disagreements()
