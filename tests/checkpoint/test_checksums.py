"""Damage to a checkpoint is found, by leaf path and file; and how many steps are kept."""

import json
import re
import shutil
import traceback

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tensorstore as ts

import jaxzero
from jaxzero import cli
from jaxzero._src.checkpoint import checksums, orbax_io
from jaxzero._src.checkpoint.export import export

INNER = optax.adam(1e-3)
ABSTRACT = {
    "rows": jax.ShapeDtypeStruct((512, 32), jnp.float32),
    "flat": jax.ShapeDtypeStruct((301, 7), jnp.float32),
    "small": jax.ShapeDtypeStruct((3,), jnp.float32),
}


def make(world=8, stage=3):
    zero = jaxzero.Zero(helpers.make_mesh(world), stage=stage)
    rng = np.random.default_rng(0)
    params = zero.shard({k: jnp.asarray(rng.normal(size=x.shape), x.dtype) for k, x in ABSTRACT.items()})
    return zero, params, zero.optimizer(INNER).init(params)


def restore(directory, zero=None, inner=INNER, **options):
    return jaxzero.restore(directory, zero, ABSTRACT, inner, **options)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    directory = tmp_path_factory.mktemp("saved")
    zero, params, state = make()
    jaxzero.save(directory, 4, zero, params, state, extra={"position": 12345}).wait()
    return directory


@pytest.fixture
def copy(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "copy")
    return tmp_path / "copy"


def flip(file, at, bit=1):
    data = bytearray(file.read_bytes())
    data[at] ^= bit
    file.write_bytes(data)


def test_whole_steps_are_whole(saved):
    found = checksums.check(orbax_io.folder(saved) / "4")
    assert (found.problems, found.unknown) == ((), 0)
    assert found.checked == 3 * (8 + 1)  # of parameters and two moments: 8 chunks of rows, one of flat; small: index
    assert found.nbytes == 3 * 4 * (512 * 32 + 301 * 7)
    assert "27 pieces as written" in str(found)


@pytest.mark.parametrize("where", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("piece", range(0, 27, 5))
@pytest.mark.parametrize("bit", [1, 128])
def test_one_bit_is_found_in_every_piece(piece, where, bit, copy):
    """The first, middle and last byte of a piece, by the leaf's path and the file; unchecked it reads as that leaf."""
    path = orbax_io.folder(copy) / "4"
    broken = checksums.pieces(path)[piece]
    flip(copy / "4" / broken.file, broken.offset + int(where * (broken.length - 1)), bit)
    with pytest.raises(ValueError, match=f"leaf '{broken.leaf}' is damaged: file .*{broken.file}: bytes") as error:
        restore(copy)
    assert "\n" not in str(error.value)
    assert str(error.value).count("is damaged: file") == 1
    if broken.leaf.startswith("params"):  # it is that leaf that is wrong
        name = broken.leaf.removeprefix("params/")
        same = {k: np.array_equal(x, restore(copy, check=False).params[k]) for k, x in restore_of(copy).items()}
        assert same == {k: k != name for k in ABSTRACT}
        return
    assert restore(copy, inner=None).step == 4  # the parameters alone are whole


def restore_of(_):
    zero, params, _ = make()
    return zero.gather(params)


def test_a_quarter_of_a_file_that_is_zero(copy):
    path = orbax_io.folder(copy) / "4"
    # From the first piece of the parameters on: Adam's moments are zero already.
    first = next(piece for piece in checksums.pieces(path) if "params/rows" in piece.key)
    file = copy / "4" / first.file
    data = bytearray(file.read_bytes())
    end = min(first.offset + len(data) // 4, len(data))
    data[first.offset : end] = bytes(end - first.offset)
    file.write_bytes(data)
    for zero in (None, make(3, 2)[0]):
        with pytest.raises(ValueError, match=r"4 is damaged: leaf '.*rows' is damaged: file .*ocdbt.process_0"):
            restore(copy, zero)
    with pytest.raises(ValueError, match="restore: .*damaged"):
        restore(copy, step=4)


def test_files_that_are_short_or_gone(copy):
    path = orbax_io.folder(copy) / "4"
    file = copy / "4" / checksums.pieces(path)[0].file
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 8])
    with pytest.raises(ValueError, match="the file is too short"):
        restore(copy)
    file.unlink()
    with pytest.raises(ValueError, match="No such file or directory"):
        restore(copy)


def test_damage_to_any_file_is_found_or_does_not_matter(copy, saved):
    """One bit in the middle of every file: one line, never a number that is wrong; the traceback stays short."""
    right = restore(saved)
    refused = 0
    for file in sorted(x for x in (copy / "4").rglob("*") if x.is_file()):
        data = file.read_bytes()
        flip(file, len(data) // 2)
        try:
            error, got = None, restore(copy)
        except ValueError as raised:
            error = raised
        if error is None:
            jax.tree.map(np.testing.assert_array_equal, got, right)
        else:
            refused += 1
            assert "\n" not in str(error)
            assert len("".join(traceback.format_exception(error)).splitlines()) < 40, file
        file.write_bytes(data)
    assert refused >= 6  # the data, the index and its manifest, two texts, the checksums


def test_a_damaged_position_is_found(copy):
    """JSON that reads well with another number in it."""
    file = copy / "4/jaxzero/manifest.json"
    file.write_text(file.read_text().replace("12345", "12245"))
    with pytest.raises(ValueError, match="file .*manifest.json is not as it was written"):
        restore(copy)
    assert restore(copy, check=False).extra == {"position": 12245}


def test_old_steps_are_read_without_checksums(copy, capsys):
    shutil.rmtree(copy / "4/checksums")
    zero, params, _ = make()
    got = restore(copy, zero)
    jax.tree.map(np.testing.assert_array_equal, got.params, params)
    assert cli.main(["doctor", str(copy)]) == 0
    assert "no checksums: an older version wrote it" in " ".join(capsys.readouterr().out.split())


def test_export_refuses_damaged_parameters_only(copy):
    path = orbax_io.folder(copy) / "4"
    by_leaf = {p.leaf: p for p in checksums.pieces(path)}
    broken = by_leaf["opt_state/0/mu/rows"]
    flip(copy / "4" / broken.file, broken.offset)
    export(copy, out=copy / "whole")
    broken = by_leaf["params/rows"]
    flip(copy / "4" / broken.file, broken.offset)
    with pytest.raises(ValueError, match="export: .*leaf 'params/rows' is damaged: file"):
        export(copy, out=copy / "damaged")


def test_doctor_checks_a_checkpoint(copy, capsys):
    zero, params, state = make()
    jaxzero.save(copy, 9, zero, params, state).wait()
    assert cli.main(["doctor", str(copy)]) == 0
    out = capsys.readouterr().out
    assert re.findall(r"^ok +step (\d+)", out, re.MULTILINE) == ["4", "9"]
    piece = checksums.pieces(orbax_io.folder(copy) / "9")[0]
    flip(copy / "9" / piece.file, piece.offset + 5)
    assert cli.main(["doctor", str(copy), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [check["status"] for check in found["checks"]] == ["ok", "failed"]
    assert f"leaf '{piece.leaf}' is damaged" in found["checks"][1]["detail"]
    (copy / "4/jaxzero/manifest.json").write_text("{")
    assert cli.main(["doctor", str(copy)]) == 1
    assert "its manifest is damaged" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("name", ["nothing", "empty", "file"])
def test_doctor_of_no_checkpoint(tmp_path, name, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    assert cli.main(["doctor", str(tmp_path / name)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("jaxzero: latest: " if name == "file" else "jaxzero: doctor: ")
    assert error.count("\n") == 1


def test_the_newest_steps_are_kept(tmp_path):
    zero, params, state = make()
    for step in (1, 2, 3):
        jaxzero.save(tmp_path, step, zero, params, state).wait()
    before = {x.name for x in tmp_path.iterdir()}
    saving = jaxzero.save(tmp_path, 4, zero, params, state, keep=2)
    assert before <= {x.name for x in tmp_path.iterdir()}  # nothing goes before the new one is complete
    saving.wait()
    assert sorted(x.name for x in tmp_path.iterdir()) == ["3", "4"]
    jaxzero.save(tmp_path, 2, zero, params, state, keep=np.int64(1)).wait()  # the one being written stays
    assert sorted(x.name for x in tmp_path.iterdir()) == ["2"]
    jaxzero.save(tmp_path, 7, zero, params, state, keep=5).wait()
    jaxzero.save(tmp_path, 8, zero, params, state).wait()
    assert jaxzero.latest(tmp_path) == 8
    assert sorted(x.name for x in tmp_path.iterdir()) == ["2", "7", "8"]
    restore(tmp_path, step=2)


@pytest.mark.parametrize("keep", [0, -1, True, 1.5, "3"])
def test_keep_is_a_positive_int(keep, tmp_path):
    with pytest.raises(ValueError, match=r"save: keep=.*Expected an int of at least 1"):
        jaxzero.save(tmp_path, 1, None, {"w": jnp.ones(3)}, None, keep=keep)
    assert not list(tmp_path.iterdir())


def test_a_save_that_fails_removes_nothing(tmp_path, monkeypatch):
    zero, params, state = make()
    jaxzero.save(tmp_path, 1, zero, params, state).wait()

    def fail(*_):
        raise OSError("no space left")

    monkeypatch.setattr(orbax_io, "is_complete", lambda path: path.name != "2")
    with pytest.raises(ValueError, match="2 was not written"):
        jaxzero.save(tmp_path, 2, zero, params, state, keep=1).wait()
    assert (tmp_path / "1/jaxzero/manifest.json").exists()
    monkeypatch.undo()
    monkeypatch.setattr(checksums, "write", fail)
    with pytest.raises(ValueError, match="no space left"):
        jaxzero.save(tmp_path, 3, zero, params, state, keep=1).wait()
    assert (tmp_path / "1/jaxzero/manifest.json").exists()


def test_an_index_of_several_levels():
    """Every value of a small database whose index has inner nodes, with keys that share prefixes."""
    config = {"max_inline_value_bytes": 1, "max_decoded_node_bytes": 300}
    store = ts.KvStore.open({"driver": "ocdbt", "base": "memory://", "config": config}).result()
    values = {f"params/layers/{i}/w/{i % 7}.{i % 3}": bytes([i, i + 1, i + 2]) for i in range(90)}
    for key, value in values.items():
        store[key] = value
    dump = lambda node=None: ts.ocdbt.dump(store.base, node).result()
    assert dump()["versions"][-1]["root_height"] > 0
    found = list(checksums.walk(dump))
    assert sorted(p.key for p in found) == sorted(values)
    for p in found:
        data = store.base[p.file.removeprefix("arrays/")]
        assert data[p.offset : p.offset + p.length] == values[p.key]
