"""Axes, contexts and types."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxzero.mesh import Axes, cast, check_axes, in_manual_region, match, names, path_text, place, resolve, varying


def test_names_and_sizes():
    assert names(None) == ()
    assert names("a") == ("a",)
    assert names(["a", "b"]) == ("a", "b")
    axes = Axes(("node", "local"), ("replica",), (2, 3, 4))
    assert (axes.n, axes.r, axes.every) == (12, 2, ("replica", "node", "local"))
    assert (Axes(("data",), (), (8,)).r, Axes(("data",), (), (8,)).n) == (1, 8)


def test_paths_are_text():
    ((path, _),) = jax.tree_util.tree_leaves_with_path({"layers": [1]})
    assert path_text(path) == "layers/0"
    assert path_text(()) == "(root)"


@pytest.mark.parametrize(
    ("shard", "replica", "message"),
    [
        ("model", None, r"shard_axis='model' is not an axis.*\{'replica': 2, 'shard': 4\}"),
        ("shard", "node", r"replica_axis='node' is not an axis"),
        ((), None, "shard_axis is empty"),
        ("shard", "shard", "name one axis twice"),
        (("shard", "shard"), None, "name one axis twice"),
        (3, None, "shard_axis=3 is not an axis"),
    ],
)
def test_axes_that_are_refused(mesh24, shard, replica, message):
    with pytest.raises(ValueError, match=message):
        check_axes(mesh24, shard, replica)


def test_axes_that_are_accepted(mesh24):
    check_axes(mesh24, "shard", "replica")
    check_axes(mesh24, ("replica", "shard"), None)
    check_axes(None, "anything", None)


def inside(mesh, f, **keywords):
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P(), out_specs=P(), **keywords))(jnp.zeros(8))


def test_contexts(mesh24):
    assert not in_manual_region("call", ("shard",), ("replica",))
    seen = []

    def body(x):
        seen.append(in_manual_region("call", ("shard",), ("replica",)))
        seen.append(resolve("call", None, ("shard",), ("replica",), True))
        return x

    inside(mesh24, body)
    assert seen == [True, Axes(("shard",), ("replica",), (2, 4))]
    assert resolve("call", mesh24, ("shard",), (), False) == Axes(("shard",), (), (4,))
    with pytest.raises(ValueError, match="call: no mesh"):
        resolve("call", None, ("shard",), (), False)


def test_half_a_context_is_refused(mesh24):
    with pytest.raises(ValueError, match=r"manual over \['shard'\] but not over \['replica'\]"):
        inside(mesh24, lambda x: in_manual_region("call", ("shard",), ("replica",)) or x, axis_names={"shard"})


def test_unchecked_context_is_refused(mesh8):
    with pytest.raises(ValueError, match="check_vma=False"):
        inside(mesh8, lambda x: in_manual_region("call", ("data",), ()) or x, check_vma=False)


def test_types(mesh24):
    def body(x):
        assert varying(x) == frozenset()
        y = cast(x, ("shard",))
        assert varying(y) == {"shard"}
        assert cast(y, ("shard",)) is y
        z = cast(y, ("replica", "shard"))
        assert varying(z) == {"replica", "shard"}
        assert [varying(v) for v in match([x, y, z, np.float32(1)])] == [{"replica", "shard"}] * 4
        assert match([x, x])[0] is x
        return lax.psum(z, ("replica", "shard"))

    inside(mesh24, body)


@pytest.mark.parametrize("explicit", [False, True])
def test_place(mesh, explicit):
    two = mesh((2, 4), ("model", "data"), explicit=explicit)
    x = place("call", two, (), np.arange(8.0), P("data"), ("data",))
    assert x.sharding.spec == P("data")
    traced = jax.jit(lambda x: place("call", two, (), x, P(), ("data",)))(x)
    np.testing.assert_array_equal(traced, np.arange(8.0))
    other = jax.device_put(np.arange(8.0), jax.NamedSharding(two, P("model")))
    with pytest.raises(ValueError, match=r"call: leaf '\(root\)' is already sharded over other mesh axes.*'model'"):
        place("call", two, (), other, P("data"), ("data",))
