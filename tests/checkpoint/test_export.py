"""Parameters of a checkpoint, as other tools read them."""

import json
import os
import stat

import checks
import helpers
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
import safetensors.flax
from jax.sharding import PartitionSpec as P

import jaxzero
from jaxzero import cli
from jaxzero._src.checkpoint.export import export


def load(folder):
    return {k: x for file in folder.glob("*.safetensors") for k, x in safetensors.flax.load_file(file).items()}


def save(directory, params, world=8):
    zero = jaxzero.Zero(helpers.make_mesh(world), stage=3)
    split = zero.shard(params)
    jaxzero.save(directory, 4, zero, split, zero.optimizer(optax.adam(1e-3)).init(split)).wait()


def test_every_parameter_and_nothing_else(tmp_path):
    params = {
        "dense": [{"kernel": jnp.arange(35.0).reshape(7, 5), "bias": jnp.ones(3, jnp.bfloat16)}],
        "count": jnp.int32(3),
        "empty": jnp.zeros((0, 4)),
        "key": jax.random.key(1),
    }
    save(tmp_path, params)
    folder = export(tmp_path)
    assert folder == tmp_path / "safetensors" / "4"
    assert jaxzero.latest(tmp_path) == 4
    tensors = load(folder)
    want = {"dense.0.kernel": params["dense"][0]["kernel"], "dense.0.bias": params["dense"][0]["bias"]}
    want |= {k: params[k] for k in ("count", "empty")} | {"key": jax.random.key_data(params["key"])}
    assert tensors.keys() == want.keys()
    for k, x in want.items():
        assert (tensors[k].shape, tensors[k].dtype) == (x.shape, x.dtype), k
        np.testing.assert_array_equal(tensors[k], x)


@pytest.mark.parametrize("total", [1, 57, 63, 64, 65])
def test_odd_totals(total, tmp_path):
    """JZ-061: what does not divide comes back whole, without the live optimizer."""
    flat = np.arange(1.0, total + 1, dtype=ml_dtypes.bfloat16)
    for world in (2, 3, 8):
        mesh = helpers.make_mesh(world)
        stored = checks.place(np.pad(flat, (0, -total % world)), mesh, P("data"))
        leaf = stored if total % world == 0 else jaxzero.EvenSplit(stored, (total,))
        jaxzero.save(tmp_path, world, jaxzero.Zero(mesh, stage=3), {"w": leaf}, None).wait()
        np.testing.assert_array_equal(load(export(tmp_path, step=world))["w"], flat)


def test_several_files(tmp_path):
    params = {f"w{i}": jnp.full((10, 10), float(i)) for i in range(5)}
    save(tmp_path, params)
    folder = export(tmp_path, out=tmp_path / "out", max_bytes=900)
    assert len(list(folder.glob("model-0000?-of-00003.safetensors"))) == 3
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 2000
    for name, file in index["weight_map"].items():
        np.testing.assert_array_equal(safetensors.flax.load_file(folder / file)[name], params[name])


def test_what_cannot_be_exported(tmp_path):
    with pytest.raises(ValueError, match="export: there is no complete checkpoint in"):
        export(tmp_path)
    save(tmp_path, {"w": jnp.ones(3)})
    with pytest.raises(ValueError, match=r"export: to='gguf'\. Expected one of \('safetensors',\)"):
        export(tmp_path, "gguf")
    with pytest.raises(ValueError, match=r"export: .*/5 cannot be read: .*steps here are \[4\]"):
        export(tmp_path, step=5)
    export(tmp_path)
    with pytest.raises(ValueError, match=r"export: .*4 has model\.safetensors already"):
        export(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="export: .*file cannot be written"):
        export(tmp_path, out=tmp_path / "file")
    jaxzero.save(tmp_path, 6, None, {"a.b": jnp.ones(3), "a": {"b": jnp.ones(3)}}, None).wait()
    with pytest.raises(ValueError, match="have the same name when joined by dots"):
        export(tmp_path)


@pytest.mark.parametrize(
    ("params", "options", "message"),
    [
        ({"q": jnp.ones(3, jnp.int4), "w": jnp.ones(3)}, {}, "cannot hold leaf 'q' of dtype int4: Unknown dtype.*cast"),
        ({"__metadata__": jnp.ones(3)}, {}, "cannot hold leaf '__metadata__'.*own notes.*Fix: rename"),
        ({"w": jnp.ones(3)}, dict(max_bytes=0), r"export: max_bytes=0\. Expected a positive int"),
        ({"w": jnp.ones(3)}, dict(max_bytes="1 GB"), "export: max_bytes='1 GB'"),
    ],
)
def test_nothing_is_written_that_cannot_be_read(tmp_path, params, options, message):
    save(tmp_path, params)
    with pytest.raises(ValueError, match=message):
        export(tmp_path, **options)
    assert not (tmp_path / "safetensors").exists()


def test_command_line(tmp_path, capsys):
    save(tmp_path, {"w": jnp.arange(5.0)})
    assert cli.main(["export", str(tmp_path), "--to", "safetensors"]) == 0
    assert capsys.readouterr().out.split() == [str(tmp_path / "safetensors" / "4" / "model.safetensors")]
    np.testing.assert_array_equal(load(tmp_path / "safetensors" / "4")["w"], np.arange(5.0))
    assert cli.main(["export", str(tmp_path), "--step", "5"]) == 2
    assert "jaxzero: export: " in capsys.readouterr().err
    assert cli.main(["export", str(tmp_path), "--out", str(tmp_path / "o"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"folder": str(tmp_path / "o"), "files": ["model.safetensors"]}


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_files_have_the_mode_of_the_umask(umask, tmp_path):
    """As a file that any other program writes; in several files and the index too."""
    save(tmp_path, {"a": jnp.ones(64), "b": jnp.ones(64)})
    before = os.umask(umask)
    try:
        one, many = export(tmp_path), export(tmp_path, out=tmp_path / "many", max_bytes=np.int64(300))
    finally:
        os.umask(before)
    files = [*one.iterdir(), *many.iterdir()]
    assert len(files) == 4
    assert {stat.S_IMODE(os.stat(file).st_mode) for file in files} == {0o666 & ~umask}
    assert load(many).keys() == {"a", "b"}
