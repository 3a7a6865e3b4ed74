"""What a checkpoint holds, what it refuses, and what happens when something goes wrong."""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

import checkpoint_cases as cases
import checks
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxzero
from jaxzero._src.checkpoint import manifest, orbax_io, padded_handler


def stacked(path):
    return "stack" in jax.tree_util.keystr(path)


def zoo():
    """Every kind of leaf, most of them of sizes that divide by nothing."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    return {
        "embedding": draw(57, 12),
        "rows": draw(48, 16),
        "three": draw(3),
        "scalar": np.float32(2),
        "kernel": draw(3, 3, 4, 7),
        "half": jnp.asarray(draw(7, 9), jnp.bfloat16),
        "complex": jnp.asarray(draw(11, 3) + 1j * draw(11, 3), jnp.complex64),
        "stack": draw(4, 10, 3),
        "stack of rows": draw(4, 16, 3),
        "int": np.int32(2**24 + 1),
        "bool": np.array([True, False, True]),
        "small int": np.arange(16, dtype=np.int8),
        "empty": np.zeros((0, 8), np.float32),
        "key": jax.random.key(3),
        "keys": jax.random.split(jax.random.key(4, impl="rbg"), 3),
        "python": 1.5,
        "nothing": None,
        "tuple": (draw(5), [draw(2, 9)]),
    }


@pytest.fixture(params=["gathered", "by shares", "gathered, sent", "by shares, sent"])
def way(request, monkeypatch):
    """The ways flat leaves are written: small ones whole, large ones by shares; as one process or as many do it."""
    if request.param.startswith("by shares"):
        monkeypatch.setattr(padded_handler, "SMALL_SHARE", 0)
    if request.param.endswith("sent"):
        monkeypatch.setattr(padded_handler, "_all_here", lambda leaf: False)
    monkeypatch.setattr(padded_handler, "CHUNK_BYTES", 64)
    return request.param


def save(directory, zero, params, inner, step=0, given=None, **options):
    params = zero.shard(params)
    state = jax.jit(zero.optimizer(inner).init)(params)
    jaxzero.save(directory, step, zero, params, state, given, **options).wait()
    return params, state


def assert_same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        y = jnp.asarray(y)
        assert (x.shape, x.dtype) == (y.shape, y.dtype), path
        assert helpers.host(x).tobytes() == helpers.host(y).tobytes(), path
        assert not jax.typeof(x).weak_type


def test_every_kind_of_leaf(way, tmp_path):
    params, mesh = zoo(), helpers.make_mesh
    before = jaxzero.Zero(mesh(8), stage=3, stacked=stacked)
    groups = jaxzero.Zero(mesh((2, 3), ("replica", "data")), stage=3, replica_axis="replica")
    save(tmp_path, before, params, optax.identity())
    for zero in (before, groups, jaxzero.Zero(mesh(2)), None):
        restored = jaxzero.restore(tmp_path, zero, cases.abstract(params), optax.identity())
        helpers.assert_all_shards_equal(restored.params)
        if zero is not None:
            want = jax.tree.map(lambda x: x.sharding, zero.shard(params))
            assert jax.tree.map(lambda x: x.sharding, restored.params) == want
        assert_same(zero.gather(restored.params) if zero else restored.params, params)


@pytest.mark.grid(3)
def test_hierarchical_and_explicit_meshes(way, tmp_path):
    params = zoo()
    mesh = helpers.make_mesh((2, 3), ("node", "local"), explicit=True)
    zero = jaxzero.Zero(mesh, stage=3, shard_axis=("node", "local"), stacked=stacked)
    save(tmp_path, zero, params, optax.identity())
    restored = jaxzero.restore(tmp_path, zero, cases.abstract(params), optax.identity())
    placed = lambda tree: jax.tree.map(lambda x: x.sharding, tree)
    assert placed(restored.params) == placed(zero.shard(params))  # or a step would be compiled once more
    assert_same(zero.gather(restored.params), params)


def test_all_sizes_and_no_padding_on_disk(tmp_path):
    """JZ-025, JZ-058, JZ-059: sizes 1 to 80 from 8 devices; what Orbax finds there has the logical shapes."""
    zero = jaxzero.Zero(helpers.make_mesh(8), stage=3)
    params = {f"{n}": np.arange(1.0, n + 1, dtype=np.float32) for n in range(1, 81)}
    padded = {n: np.pad(x, (0, -x.size % 8)) for n, x in params.items()}
    stored = checks.place(padded, zero.mesh, P("data"))
    split = {n: jaxzero.EvenSplit(x, params[n].shape) if x.size != params[n].size else x for n, x in stored.items()}
    jaxzero.save(tmp_path, 0, zero, split, None).wait()
    kept = ocp.PyTreeCheckpointHandler().metadata(tmp_path / "0" / "arrays")
    assert {name: x.shape for name, x in kept.tree.items()} == {f"params/{n}": (int(n),) for n in params}
    for n in (4, 3):
        restored = jaxzero.restore(tmp_path, jaxzero.Zero(helpers.make_mesh(n), stage=3), params, None)
        for name, x in restored.params.items():
            x = np.asarray(x.value if isinstance(x, jaxzero.EvenSplit) else x)
            assert x.size == params[name].size + -params[name].size % n
            np.testing.assert_array_equal(x, np.pad(params[name], (0, -params[name].size % n)))


@pytest.mark.slow  # `test_export.py` reads with plain Orbax too
def test_other_programs_read_it(tmp_path):
    """JZ-062: plain Orbax, one device, another process, no jaxzero."""
    params = {"w": jnp.arange(15.0).reshape(5, 3)}
    save(tmp_path, jaxzero.Zero(helpers.make_mesh(8), stage=3), params, optax.identity())
    code = (
        "import sys, numpy as np, orbax.checkpoint as ocp\n"
        "args = {'params/w': ocp.RestoreArgs(restore_type=np.ndarray)}\n"
        "x = ocp.PyTreeCheckpointer().restore(sys.argv[1], restore_args=args)['params/w']\n"
        "assert x.shape == (5, 3) and (x.ravel() == range(15)).all(), x\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "0" / "arrays")], check=True, timeout=120)


ODD = {"matrix": jnp.ones((131, 140)), "b": jnp.ones(5), "rows": jnp.ones((16, 4)), "n": jnp.zeros((), jnp.int32)}

OPTIMIZERS = {
    "adafactor": optax.adafactor(1e-2),
    "MultiSteps": optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
    "masked": optax.masked(optax.lamb(1e-2), {"matrix": True, "b": False, "rows": True, "n": False}),
    "muon": optax.contrib.muon(1e-2),
    "apply_if_finite": optax.apply_if_finite(optax.adam(1e-2), 3),
    "nothing": optax.set_to_zero(),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_of_any_structure(name, tmp_path):
    inner = OPTIMIZERS[name]
    before, after = jaxzero.Zero(helpers.make_mesh(8), stage=3), jaxzero.Zero(helpers.make_mesh(3))
    _, state = save(tmp_path, before, ODD, inner, given=inner)
    restored = jaxzero.restore(tmp_path, after, cases.abstract(ODD), inner)
    again = jax.jit(after.optimizer(inner).init)(after.shard(ODD))
    assert jax.tree.structure(restored.opt_state) == jax.tree.structure(again)
    for x, y in zip(jax.tree.leaves(restored.opt_state), jax.tree.leaves(again), strict=True):
        assert (x.shape, x.dtype, x.sharding) == (y.shape, y.dtype, y.sharding)
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def test_state_that_grew(tmp_path):
    """`optax.monitor` has no leaf for its measure before the first update."""
    inner = optax.chain(optax.sgd(0.5), optax.monitor({"norm": optax.tree.norm}))
    zero, params = jaxzero.Zero(helpers.make_mesh(8)), {"w": jnp.ones(5)}
    tx = zero.optimizer(inner)
    _, state = tx.update(params, tx.init(params), params)
    for step, given in enumerate((None, inner)):
        jaxzero.save(tmp_path, step, zero, params, state, given).wait()
        restored = jaxzero.restore(tmp_path, zero, cases.abstract(params), inner)
        assert_same(restored.opt_state, state)


def test_state_that_changed_its_dtype(tmp_path):
    """With bfloat16 beside float32, `inject_hyperparams` widens moments in the first step."""
    inner = optax.inject_hyperparams(optax.adam)(1e-2)
    zero, params = jaxzero.Zero(helpers.make_mesh(8)), {"a": jnp.ones(5), "b": jnp.ones(9, jnp.bfloat16)}
    tx = zero.optimizer(inner)
    first = tx.init(params)
    _, second = tx.update(params, first, params)
    assert first.inner_state[0].mu["b"].dtype != second.inner_state[0].mu["b"].dtype
    for step, state in enumerate((first, second)):
        jaxzero.save(tmp_path, step, zero, params, state).wait()
        assert_same(jaxzero.restore(tmp_path, zero, cases.abstract(params), inner).opt_state, state)


def test_a_state_leaf_of_unknown_shape_needs_the_optimizer(tmp_path):
    with pytest.raises(ValueError, match=r"opt_state|state leaf '.*v_row/matrix'.*Fix: jaxzero.save\(.*inner\)"):
        save(tmp_path, jaxzero.Zero(helpers.make_mesh(8)), ODD, optax.adafactor(1e-2))
    assert jaxzero.latest(tmp_path) is None


def test_donation_does_not_change_what_is_written(tmp_path):
    zero = jaxzero.Zero(helpers.make_mesh(8), stage=3)
    params = zero.shard({"w": jnp.full((1024, 128), 3.0), "odd": jnp.full((1025, 127), 3.0)})
    spoil = jax.jit(lambda x: jax.tree.map(lambda x: x * 0 - 1, x), donate_argnums=0)
    spoil(jax.tree.map(jnp.copy, params))
    jaxzero.save(tmp_path, 0, zero, params, None)
    for _ in range(3):
        params = spoil(params)
    restored = jaxzero.restore(tmp_path, zero, cases.abstract(zero.gather(params)), None)
    assert restored.opt_state is None
    whole = zero.gather(restored.params)
    helpers.assert_all_shards_equal(whole)
    assert all((np.asarray(x) == 3).all() for x in jax.tree.leaves(whole))


def test_a_program_that_does_not_wait(tmp_path):
    """Python 3.11 completes the checkpoint; later ones start no thread at exit, and then it is said to be lost."""
    code = helpers.PREAMBLE.format(x64=False) + (
        "import jax.numpy as jnp, sys, jaxzero\n"
        "zero = jaxzero.Zero(jax.make_mesh((8,), ('data',)), stage=3)\n"
        "jaxzero.save(sys.argv[1], 7, zero, zero.shard({'w': jnp.ones((2000, 501))}), None)\n"
    )
    run = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0
    lost = "7 could not be written" in run.stderr and "call .wait() on the last save" in run.stderr
    assert jaxzero.latest(tmp_path) == (None if lost else 7)
    assert not lost or sys.version_info >= (3, 12)


def test_bytes_on_disk(tmp_path):
    params = {"odd": jnp.ones((5003, 251)), "w": jnp.ones((1024, 512)), "stack": jnp.ones((3, 1001, 250))}
    save(tmp_path, jaxzero.Zero(helpers.make_mesh(8), stage=3, stacked=stacked), params, optax.adam(1e-3))
    on_disk = sum(os.path.getsize(os.path.join(at, f)) for at, _, files in os.walk(tmp_path) for f in files)
    logical = 3 * sum(x.nbytes for x in params.values())
    assert abs(on_disk - logical) < 0.02 * logical


# --- what is refused ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A checkpoint, step 3, of `{"a": (5, 3), "b": (4,)}`; Adam's state."""
    directory = tmp_path_factory.mktemp("written")
    zero = jaxzero.Zero(helpers.make_mesh(8), stage=3)
    save(directory, zero, {"a": jnp.ones((5, 3)), "b": jnp.zeros(4)}, optax.adam(1e-3), 3, extra={"at": 1})
    return directory


F32 = jnp.float32


def shapes(**leaves):
    return {k: jax.ShapeDtypeStruct(*v) if isinstance(v, tuple) else v for k, v in leaves.items()}


A, B = ((5, 3), F32), ((4,), F32)


@pytest.mark.parametrize(
    ("params", "inner", "message"),
    [
        (shapes(a=((3, 5), F32), b=B), "adam", r"leaf 'params/a' has shape \(5, 3\), expected \(3, 5\)"),
        (shapes(a=((15,), F32), b=B), "adam", r"leaf 'params/a' has shape \(5, 3\), expected \(15,\)"),
        (shapes(a=A, b=((4,), jnp.bfloat16)), "adam", r"'params/b' has dtype float32, expected bfloat16"),
        (shapes(a2=A, b=B), "adam", r"no leaf 'params/a2'.*leaf 'params/a' was not asked for"),
        (shapes(a=A), "adam", r"leaf 'params/b' was not asked for"),
        (shapes(a=A, b=B, c=B), "adam", r"there is no leaf 'params/c'; there is no leaf 'opt_state/0/mu/c'"),
        (shapes(a=A, b=B), "sgd", r"leaf 'opt_state/0/count' was not asked for.*Fix: the model, dtype and optimizer"),
        (shapes(a=A, b=B), "lion", r"there is no leaf|was not asked for"),
    ],
)
def test_a_checkpoint_of_something_else(written, params, inner, message):
    with pytest.raises(ValueError, match="restore: .*3 is not a checkpoint of these parameters.*" + message):
        jaxzero.restore(written, jaxzero.Zero(helpers.make_mesh(8)), params, getattr(optax, inner)(1e-3))


def test_parameters_alone(written):
    restored = jaxzero.restore(written, None, shapes(a=A, b=B), None)
    assert_same(restored.params, {"a": np.ones((5, 3), np.float32), "b": np.zeros(4, np.float32)})
    with pytest.raises(ValueError, match="restore: parameter leaf 'a' is a str. Expected an array"):
        jaxzero.restore(written, None, {"a": "float32"}, None)


def test_leaves_that_came_and_went(written, tmp_path):
    """JZ-064: a frozen leaf loses its moments, a new one gets fresh ones, if asked; nothing shifts."""
    zero = jaxzero.Zero(helpers.make_mesh(8), stage=3)
    masked = lambda **mask: optax.masked(optax.trace(0.9), mask)
    params = {"a": jnp.ones((5, 3)), "b": jnp.zeros(4)}
    tx = zero.optimizer(masked(a=True, b=True))
    split = zero.shard(params)
    _, state = tx.update(zero.shard({"a": jnp.full((5, 3), 2.0), "b": jnp.ones(4)}), tx.init(split), split)
    jaxzero.save(tmp_path, 3, zero, split, state).wait()
    now, inner = {"aa": jnp.full(9, 7.0), **shapes(a=A, b=B)}, masked(aa=True, a=True, b=False)
    with pytest.raises(ValueError, match=r"no leaf 'params/aa'.*partial=True"):
        jaxzero.restore(tmp_path, zero, now, inner)
    restored = jaxzero.restore(tmp_path, zero, now, inner, partial=True)
    assert_same(zero.gather(restored.params), {"aa": np.full(9, 7.0, np.float32), **params})
    assert restored.params["aa"].value.sharding == NamedSharding(zero.mesh, P("data"))
    trace = restored.opt_state.inner_state.trace
    assert isinstance(trace["b"], optax.MaskedNode)
    np.testing.assert_array_equal(trace["a"], [2.0] * 15 + [0.0])
    np.testing.assert_array_equal(trace["aa"], np.zeros(16))
    with pytest.raises(ValueError, match=r"no leaf 'params/aa', and abstract_params holds no array"):
        jaxzero.restore(tmp_path, zero, shapes(aa=B, a=A, b=B), None, partial=True)
    with pytest.raises(
        ValueError, match="no leaf of params has the name of one that was asked for, such as 'params/x'"
    ):
        jaxzero.restore(tmp_path, zero, {"x": jnp.ones(3)}, None, partial=True)
    with pytest.raises(ValueError, match="no leaf of opt_state has the name of one that was asked for"):
        jaxzero.restore(tmp_path, zero, shapes(a=A, b=B), optax.adam(1e-3), partial=True)
    with pytest.raises(ValueError, match=r"has shape \(5, 3\), expected \(4,\)"):
        jaxzero.restore(tmp_path, zero, shapes(a=B), None, partial=True)


def test_moments_follow_their_leaves(tmp_path):
    """JZ-064: state is keyed by path, so another order of the same leaves changes nothing."""
    zero, inner = jaxzero.Zero(helpers.make_mesh(8)), optax.sgd(0.1, momentum=0.9)
    params = {"a": jnp.ones(5), "b": jnp.ones(5)}
    tx = zero.optimizer(inner)
    _, state = tx.update({"a": jnp.full(5, 1.0), "b": jnp.full(5, 2.0)}, tx.init(params), params)
    jaxzero.save(tmp_path, 0, zero, params, state).wait()
    restored = jaxzero.restore(tmp_path, None, {"b": params["b"], "a": params["a"]}, inner)
    assert_same(restored.opt_state[0].trace, {"a": np.full(5, 1, np.float32), "b": np.full(5, 2, np.float32)})


def test_newer_format(written, tmp_path):
    shutil.copytree(written, tmp_path, dirs_exist_ok=True)
    at = tmp_path / "3" / "jaxzero" / "manifest.json"
    told = json.loads(at.read_text())
    assert (told["format"], told["jaxzero"], told["step"], told["extra"]) == (1, jaxzero.__version__, 3, {"at": 1})
    assert told["layout"]["shards"] == 8
    assert len(told["layout"]["fingerprint"]) == 16
    at.write_text(json.dumps(told | {"format": manifest.FORMAT + 1, "jaxzero": "9.0"}))
    with pytest.raises(ValueError, match=r"format 2, written by jaxzero 9\.0.*Fix: a newer jaxzero"):
        jaxzero.restore(tmp_path, None, shapes(a=A, b=B), None)


@pytest.mark.parametrize(("rows", "world"), [(17, 8), (16, None)])
def test_half_deleted(rows, world, tmp_path):
    """One array and one reader: Orbax abandons other reads when one fails, and pytest would report them."""
    params = {"w": jnp.ones((rows, 999))}
    save(tmp_path, jaxzero.Zero(helpers.make_mesh(8), stage=3), params, optax.identity(), 3)
    zero = None if world is None else jaxzero.Zero(helpers.make_mesh(world), stage=3)
    for step, part in (
        (4, f"arrays/ocdbt.process_0{'flat' if world else ''}/d"),
        (5, "arrays/d"),
        (6, "arrays/manifest.ocdbt"),
        (7, "arrays"),
    ):
        shutil.copytree(tmp_path / "3", tmp_path / f"{step}")
        lost = tmp_path / f"{step}" / part
        shutil.rmtree(lost) if lost.is_dir() else lost.unlink()
        with pytest.raises(ValueError, match=rf"restore: .*{step} (is damaged|could not be read): .*Fix: another step"):
            jaxzero.restore(tmp_path, zero, cases.abstract(params), None)
    for file in ("4", "5", "6", "7"):
        (tmp_path / file / "jaxzero" / "manifest.json").unlink()
    assert jaxzero.latest(tmp_path) == 3, "a step without its manifest is no step"
    with pytest.raises(ValueError, match=r"4 cannot be read: No such file or directory.*steps here are \[3\]"):
        jaxzero.restore(tmp_path, None, params, None, step=4)
    (tmp_path / "3" / "jaxzero" / "manifest.json").write_text("{")
    with pytest.raises(ValueError, match="3 cannot be read: its manifest is damaged"):
        jaxzero.restore(tmp_path, None, params, None)


def test_no_checkpoint(tmp_path):
    assert jaxzero.latest(tmp_path / "none") is None
    with pytest.raises(ValueError, match="there is no complete checkpoint in"):
        jaxzero.restore(tmp_path, None, shapes(a=A), None)
    with pytest.raises(ValueError, match=r"/7 cannot be read: .*steps here are \[\]"):
        jaxzero.restore(tmp_path, None, shapes(a=A), None, step=7)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(step=-1), r"save: step=-1\. Expected an int of at least 0"),
        (dict(step=1.0), r"save: step=1\.0\. Expected an int"),
        (dict(extra={"at": np.arange(3)}), r"save: extra=.* cannot be written as JSON.*x\.tolist\(\)"),
        (dict(extra=float("nan")), r"save: extra=nan cannot be written as JSON"),
        (dict(step=3), r"save: step 3 is in .* already\. Expected a new step"),
        (dict(params={"a/b": jnp.ones(8), "a": {"b": jnp.ones(8)}}), r"two leaves are both written as 'params/a/b'"),
        (dict(params={"a": jnp.ones(3)}), r"save: parameter leaf 'a' has shape \(3,\); expected \(8,\)"),
        (dict(params={"a": jaxzero.EvenSplit(jnp.ones(6), (5,))}), r"save: parameter leaf 'a' has shape \(6,\)"),
        (dict(params={"a": jaxzero.EvenSplit(None, (5,))}), r"save: leaf 'a' is an EvenSplit holding None"),
        (dict(stage=2, params={"a": jaxzero.EvenSplit(jnp.ones(8), (5,))}), r"save: leaf 'a' is EvenSplit.*stage 2"),
        (dict(params={"a": jax.ShapeDtypeStruct((16,), jnp.float32)}), r"save: leaf 'a' is a ShapeDtypeStruct.*arrays"),
        (dict(opt_state=("text",)), r"save: leaf '0' is a str"),
        (dict(extra={"at": [{3: 1}]}), r"save: extra=.* cannot be written as JSON \(the key 3 is no text\)"),
        (dict(directory="file:///runs/a"), r"'file:///runs/a' cannot be reached.*Fix: a path without a scheme"),
        (dict(directory=None), r"the directory is None\. Expected a path"),
        (dict(zero="stage 2"), r"save: zero is a str\. Expected a jaxzero\.Zero, or None"),
        (
            dict(zero=jaxzero.Zero(jax.sharding.AbstractMesh((8,), ("data",)))),
            r"save: the mesh of this Zero holds no arrays",
        ),
    ],
)
def test_what_cannot_be_saved(written, change, message):
    zero = jaxzero.Zero(helpers.make_mesh(8), stage=change.pop("stage", 3))
    arguments = dict(directory=written, step=4, zero=zero, params={"a": jnp.ones(16)}, opt_state=None) | change
    with pytest.raises(ValueError, match=message):
        jaxzero.save(**arguments)
    assert jaxzero.latest(written) == 3


def test_arrays_that_hold_nothing(tmp_path):
    """Donated to a step that has run, or being traced."""
    params = {"a": jnp.ones(8)}
    with pytest.raises(ValueError, match=r"save: leaf 'a' is being traced.*call it outside"):
        jax.jit(lambda p: jaxzero.save(tmp_path, 0, None, p, None))(params)
    params["a"].delete()
    with pytest.raises(ValueError, match=r"save: leaf 'a' was deleted, or donated.*last step returned"):
        jaxzero.save(tmp_path, 0, None, params, None)


def test_split_state_without_its_zero(tmp_path):
    """It would be written with its padding, which no `Zero` finds again."""
    zero, inner = jaxzero.Zero(helpers.make_mesh(8)), optax.adam(1e-3)
    for params in ({"a": jnp.ones(5)}, {"a": jnp.ones((2, 3, 4))}):
        state = zero.optimizer(inner).init(params)
        with pytest.raises(ValueError, match=r"state leaf '0/mu/a' of shape .* is split and padded.*save\(.*zero, "):
            jaxzero.save(tmp_path, 0, None, params, state)
    placed = jax.device_put(state, jax.NamedSharding(zero.mesh, P()))
    with pytest.raises(ValueError, match=r"'0/mu/a' has shape \(24,\); expected \(2, 3, 4\)"):
        jaxzero.save(tmp_path, 0, None, params, placed, inner)
    native = jax.device_put(optax.adam(1e-3).init({"a": jnp.ones(16)}), jax.NamedSharding(zero.mesh, P()))
    native = jax.tree.map(lambda x: jax.device_put(x, jax.NamedSharding(zero.mesh, P(*["data"][: x.ndim]))), native)
    jaxzero.save(tmp_path, 0, None, {"a": jnp.ones(16)}, native).wait()  # JAX's own sharding has no padding


@pytest.mark.parametrize(
    "text",
    ["[]", '{"format": 1, "step": 1}', '{"format": "1", "jaxzero": "0", "step": 1, "leaves": {}, "extra": 0}',
     '{"format": 1, "jaxzero": "0", "step": 1, "leaves": {"params/a": 3}, "extra": 0}'],
)  # fmt: skip
def test_a_manifest_of_something_else(tmp_path, text):
    (tmp_path / "1" / "jaxzero").mkdir(parents=True)
    (tmp_path / "1" / "jaxzero" / "manifest.json").write_text(text)
    with pytest.raises(ValueError, match=r"/1 cannot be read: it is not one of jaxzero's"):
        jaxzero.restore(tmp_path, None, shapes(a=A), None)


def test_inside_shard_map(written):
    zero = jaxzero.Zero(helpers.make_mesh(8))
    inside = jax.shard_map(
        lambda x: jaxzero.save(written, 9, zero, x, None), mesh=zero.mesh, in_specs=P(), out_specs=P()
    )
    with pytest.raises(ValueError, match="save: called inside shard_map"):
        inside(jnp.ones(3))


def test_orbax_is_not_there(monkeypatch):
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    with pytest.raises(ImportError, match=r'need.* orbax. Fix: pip install "\.\[checkpoint\]"'):
        jaxzero.latest("anywhere")


# --- when the disk fails ------------------------------------------------------------------------

FAILING = """
import sys, tempfile, jax.numpy as jnp, jaxzero
zero = jaxzero.Zero(jax.make_mesh((8,), ("data",)), stage=3)
params = zero.shard({"a": jnp.ones((5, 3)), "odd": jnp.ones((1003, 501))})
jaxzero.save(tempfile.mkdtemp(), 0, zero, params, None).wait()  # all that is imported late is there now
CHANGE
try:
    jaxzero.save(sys.argv[1], 1, zero, params, None).wait()
except ValueError as error:
    print(error)
else:
    print("saved")
print(jaxzero.latest(sys.argv[1]))
"""

#: No file may grow beyond 64 KiB: writes fail as on a full disk.
FULL = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, 2**16))
"""
#: Root may write anywhere.
NOBODY = "import os; os.seteuid(65534)"


def run_failing(directory, change):
    code = helpers.PREAMBLE.format(x64=False) + FAILING.replace("CHANGE", change)
    env = os.environ | {"JAX_PLATFORMS": "cpu", "NPROC": "32"}
    run = subprocess.run(
        [sys.executable, "-c", code, str(directory)], capture_output=True, text=True, timeout=120, env=env
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def small(directory):
    zero = jaxzero.Zero(helpers.make_mesh(8), stage=3)
    save(directory, zero, {"a": jnp.ones((5, 3))}, optax.identity())
    return directory


def test_disk_full(tmp_path):
    out = run_failing(small(tmp_path), FULL)
    assert "could not be written" in out
    assert "File too large" in out
    assert "Earlier checkpoints are as they were" in out
    assert out.endswith("\n0\n"), out
    assert jaxzero.restore(tmp_path, None, shapes(a=A), optax.identity()).step == 0
    zero = jaxzero.Zero(helpers.make_mesh(8), stage=3)
    save(tmp_path, zero, {"a": jnp.ones((5, 3))}, optax.identity(), 1)  # what the failure left behind is no hindrance
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0", "1"]


def test_read_only_directory():
    with tempfile.TemporaryDirectory() as made:  # not below pytest's own, which nobody else may enter
        directory = pathlib.Path(made)
        small(directory)
        directory.chmod(0o555)
        try:
            out = run_failing(directory, NOBODY if os.geteuid() == 0 else "")
        finally:
            directory.chmod(0o755)
    assert "cannot be written: Permission denied. Expected a directory that every process can write" in out
    assert out.endswith("\n0\n"), out


def test_a_directory_that_may_not_be_listed(tmp_path, monkeypatch):
    """It is not an empty one: a run that resumes from it must not start anew."""

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(ValueError, match=r"latest: .* cannot be read: Permission denied\. .*Fix: its permissions"):
        jaxzero.latest(tmp_path)


def test_a_directory_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="save: .*file cannot be written: (File exists|Not a directory)"):
        jaxzero.save(tmp_path / "file", 1, None, {"a": jnp.ones(3)}, None)


def test_the_next_save_tells_that_one_failed(tmp_path, monkeypatch):
    async def fail(*_):
        raise OSError(28, "No space left on device")

    zero = jaxzero.Zero(helpers.make_mesh(8), stage=3)
    params = zero.shard({"a": jnp.ones((5, 3))})
    jaxzero.save(tmp_path, 0, zero, params, None).wait()
    with monkeypatch.context() as m:
        m.setattr(padded_handler, "_write", fail)
        failed = jaxzero.save(tmp_path, 1, zero, params, None)
        with pytest.raises(ValueError, match="could not be written: .*No space left on device.*Earlier checkpoints"):
            jaxzero.save(tmp_path, 2, zero, params, None)
    with pytest.raises(ValueError, match="1 was not written: an earlier call raised the reason"):
        failed.wait()
    assert jaxzero.latest(tmp_path) == 0
    jaxzero.save(tmp_path, 2, zero, params, None).wait()
    assert orbax_io.complete_steps(tmp_path) == [0, 2]


def test_a_dtype_that_files_cannot_hold(mesh8, tmp_path):
    """It read as a full disk."""
    params = {"w": jnp.ones(16), "q": jnp.ones(8, jnp.uint4)}
    message = r"save: leaf 'params/q' has dtype uint4. Expected a dtype that TensorStore.* Fix: cast the leaf"
    with pytest.raises(ValueError, match=message):
        save(tmp_path, jaxzero.Zero(mesh8), params, optax.set_to_zero())
    assert jaxzero.latest(tmp_path) is None
