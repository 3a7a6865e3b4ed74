"""The comparisons that other tests rely on do find a difference."""

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P


def placed(mesh, spec, values):
    """An array whose parts are given device by device, whether or not they agree."""
    parts = [jax.device_put(v, d) for v, d in zip(values, mesh.devices.flat, strict=True)]
    sharding = NamedSharding(mesh, spec)
    shape = (values[0].shape[0] * (mesh.shape["shard"] if spec else 1),)
    return jax.make_array_from_single_device_arrays(shape, sharding, parts)


def test_devices_and_kinds_of_mesh(mesh, mesh8, mesh24, explicit8, explicit24):
    assert mesh8.size == explicit8.size == mesh24.size == explicit24.size == 8
    assert mesh(3).shape == {"data": 3}
    assert {t for m in (mesh8, mesh24) for t in m.axis_types} == {AxisType.Auto}
    assert {t for m in (explicit8, explicit24) for t in m.axis_types} == {AxisType.Explicit}


@pytest.mark.parametrize("spec", [P(), P("shard")])
def test_one_device_that_differs_is_found(mesh24, spec):
    values = [np.ones(2, np.float32)] * 8
    helpers.assert_all_shards_equal({"w": placed(mesh24, spec, values)})
    values[5] = values[5] + np.float32(1e-7)
    with pytest.raises(AssertionError, match="w: "):
        helpers.assert_all_shards_equal({"w": placed(mesh24, spec, values)})


def test_close_measures_against_the_largest_element():
    a = {"w": np.array([1.0, 1e-9, np.nan]), "n": np.array(3), "k": jax.random.key(0), "h": jnp.ones(2, jnp.bfloat16)}
    helpers.close(a, a, 0)
    helpers.close(a | {"w": np.array([1.0, 1e-6, np.nan])}, a)
    for wrong in (
        {"w": np.array([1.0, 1e-5, np.nan])},
        {"w": np.array([1.0, 1e-9, 1.0])},
        {"w": np.array([1.0, np.inf, np.nan])},
        {"w": a["w"][None]},
        {"n": np.array(4)},
        {"k": jax.random.key(1)},
        {"h": jnp.array([1, 1.01], jnp.bfloat16)},
        {"other": np.ones(1)},
    ):
        with pytest.raises(AssertionError):
            helpers.close(a | wrong, a)


def test_reference_run_is_optax():
    params, state = helpers.reference_run(optax.sgd(0.5, momentum=0.5), {"w": jnp.ones(3)}, [{"w": jnp.ones(3)}] * 2)
    np.testing.assert_array_equal(params["w"], np.full(3, 1 - 0.5 - 0.75))
    np.testing.assert_array_equal(jax.tree.leaves(state)[0], np.full(3, 1.5))


def test_run_python():
    code = "print(jax.device_count(), jax.numpy.ones(1).dtype)"
    assert helpers.run_python(code).split() == ["8", "float32"]
    assert helpers.run_python(code, x64=True).split() == ["8", "float64"]
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        helpers.run_python("1 / 0")


def test_strict_arithmetic(strict):
    with pytest.raises(ValueError, match="rank_promotion"):
        jnp.ones((2, 2)) + jnp.ones(2)
    with pytest.raises(ValueError, match="dtype_promotion"):
        jnp.ones(2) + jnp.ones(2, jnp.bfloat16)
