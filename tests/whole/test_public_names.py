"""What `dir`, `help` and `pickle` show of the public names."""

import dataclasses
import pickle
import types

import jax
import pytest
from jax.sharding import AbstractMesh

import jaxzero
import jaxzero.export

MESH = AbstractMesh((8,), ("data",))


def test_dir_shows_public_names_and_no_module():
    assert dir(jaxzero) == sorted(jaxzero.__all__)
    assert not [name for name in dir(jaxzero) if isinstance(getattr(jaxzero, name), types.ModuleType)]


def test_every_public_name_has_a_docstring():
    assert all(getattr(jaxzero, name).__doc__ for name in jaxzero.__all__ if name != "__version__")
    assert jaxzero.export.export.__doc__


def test_zero_has_its_options_and_its_documented_methods_alone():
    options = {field.name for field in dataclasses.fields(jaxzero.Zero)}
    state = {"optimizer", "init", "shard", "gather", "measure", "specs", "apply", "shard_axes", "replica_axes"}
    losses = {"observe", "value_and_grad", "forward"}
    reports = {"explain", "plan", "memory", "verify", "compiler_options"}
    public = {name for name in dir(jaxzero.Zero(MESH)) if not name.startswith("_")}
    assert public - options == state | losses | reports
    assert not [name for name in dir(jaxzero.Zero(MESH)) if name.startswith("_") and not name.startswith("__")]


@pytest.mark.parametrize(
    "value",
    [
        jaxzero.Zero(MESH, stage=3, bucket_bytes=None),
        jaxzero.EvenSplit(3.0, (2,)),
        jaxzero.EvenSplit(jax.sharding.PartitionSpec("data"), (5, 3)),
        jaxzero.Memory(1, 2, 3, 0, None),
    ],
    ids=["zero", "split", "specs", "memory"],
)
def test_pickled(value):
    again = pickle.loads(pickle.dumps(value))
    assert type(again) is type(value)
    assert again == value
