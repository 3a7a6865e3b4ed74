"""Devices of machines that are not here. Compiling for them needs a plug-in: what stands before that is tested here."""

import importlib.util
import os
from types import SimpleNamespace

import helpers
import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxzero
from jaxzero._src.analysis.topology import _GPUS, _target

has = lambda module: importlib.util.find_spec(module) is not None


@pytest.fixture
def plugins(monkeypatch):
    """Both plug-ins, whose topologies are as many devices as were asked for; the calls are recorded."""
    calls = []

    def make(name, platform, **options):
        calls.append((name, platform, options, dict(os.environ)))
        grid = options.get("topology") or name.partition(":")[2]
        count = 1
        for size in grid.split("x"):
            count *= int(size)
        return SimpleNamespace(devices=[SimpleNamespace(id=i) for i in range(count)])

    monkeypatch.setattr(importlib.util, "find_spec", lambda module: module)
    monkeypatch.setattr(topologies, "get_topology_desc", make)
    return calls


@pytest.mark.parametrize(
    ("name", "sizes", "grid"),
    [
        ("h100:2x8", {}, "2x8x1"),
        ("h100", dict(nodes=2, per_node=8), "2x8x1"),
        ("A100", {}, "1x8x1"),
        ("h200", dict(nodes=4), "4x8x1"),
        ("v5e:4x4", {}, "v5e:4x4"),
        ("v5p:4x4x4", {}, "v5p:4x4x4"),
        ("v6e:2x4", {}, "v6e:2x4"),
    ],
)
def test_devices_as_asked_for(plugins, name, sizes, grid):
    devices = jaxzero.topology(name, **sizes)
    ((target, platform, options, _),) = plugins
    assert platform == ("tpu" if name.startswith("v") else "cuda")
    assert (target if platform == "tpu" else options["topology"]) == grid
    assert [d.id for d in devices] == list(range(len(devices)))
    if platform == "cuda":
        assert f'"NVIDIA {name[:4].upper()}"' in options["target_config"]


def test_libtpu_finds_its_variables_and_they_go_again(plugins, monkeypatch):
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v5p-8")
    monkeypatch.delenv("TPU_SKIP_MDS_QUERY", raising=False)
    before = dict(os.environ)
    jaxzero.topology("v5e:4x4")
    ((*_, seen),) = plugins
    assert seen["TPU_SKIP_MDS_QUERY"] == "1"
    assert seen["TPU_ACCELERATOR_TYPE"] == "v5p-8"  # the user's own stays
    assert dict(os.environ) == before


def test_target_configs_differ_by_their_figures():
    texts = {kind: _target(kind) for kind in _GPUS}
    assert "shared_memory_per_core: 233472" in texts["h100"]
    assert "shared_memory_per_block_optin: 166912" in texts["a100"]
    assert "major: 8" in texts["a100"]
    assert "device_memory_size: 151397597184" in texts["h200"]
    assert len(set(texts.values())) == len(_GPUS)


WRONG = {
    "an unknown name": (("h10",), {}, r"topology: 'h10' is no known machine.*did you mean 'h100'\?"),
    "a name near nothing": (("laptop",), {}, r"no known machine.*Fix: for example topology\('h100:2x8'\)"),
    "no name": ((8,), {}, "8 is no known machine"),
    "no grid": (("v5e",), {}, r"'v5e' with sizes ''.*grid of chips in 2 dimensions.*topology\('v5e:4x4'\)"),
    "a flat v5p": (("v5p:4x4",), {}, r"\(4, 4\).*3 dimensions"),
    "one size": (("h100:16",), {}, r"\(16,\).*nodes x GPUs in each"),
    "text": (("h100:2xeight",), {}, "'2xeight'.*nodes x GPUs in each"),
    "no nodes": (("h100",), dict(nodes=0), r"\(0, 8\).*positive"),
    "half a node": (("h100",), dict(per_node=0.5), r"\(1, 0\.5\).*positive"),
    "sizes twice": (("h100:2x8",), dict(nodes=2), "sizes in one place"),
    "nodes of a TPU": (("v5e:4x4",), dict(per_node=4), "a grid of TPU chips has no nodes"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(plugins, name):
    args, options, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        jaxzero.topology(*args, **options)
    assert plugins == []


@pytest.mark.parametrize(("name", "extra"), [("h100", "cuda"), ("v5e:4x4", "tpu")])
def test_a_missing_plugin_is_named_with_its_command(monkeypatch, name, extra):
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    fix = rf'plug-in.*none installed. Fix: pip install "\.\[{extra}\]" in the folder of jaxzero'
    with pytest.raises(ValueError, match=fix):
        jaxzero.topology(name)


def test_a_parent_module_that_is_missing_is_a_missing_plugin(monkeypatch):
    def find(module):
        raise ModuleNotFoundError(module)

    monkeypatch.setattr(importlib.util, "find_spec", find)
    with pytest.raises(ValueError, match="none installed"):
        jaxzero.topology("h100")


def test_too_late(plugins, monkeypatch):
    def refuse(*_, **__):
        raise NotImplementedError("topology not implemented for cuda")

    monkeypatch.setattr(topologies, "get_topology_desc", refuse)
    with pytest.raises(ValueError, match="came too late.*JAX_PLATFORMS=cpu"):
        jaxzero.topology("h100")


def test_what_libtpu_refuses_is_one_line(plugins, monkeypatch):
    def refuse(*_, **__):
        raise jax.errors.JaxRuntimeError("INVALID_ARGUMENT: not divisible\nmore")

    monkeypatch.setattr(topologies, "get_topology_desc", refuse)
    with pytest.raises(ValueError, match=r"makes no v5e of 3x3 chips \(INVALID_ARGUMENT: not divisible\)") as caught:
        jaxzero.topology("v5e:3x3")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("platforms", "started", "after"), [("", False, "cpu"), ("", True, ""), ("cuda", False, "cuda")]
)
def test_no_accelerator_is_started(plugins, monkeypatch, platforms, started, after):
    """JAX stays on the CPU, unless the process or its environment has decided already."""
    monkeypatch.setattr("jaxzero._src.analysis.topology.backends_started", lambda: started)
    before = jax.config.jax_platforms
    try:
        jax.config.update("jax_platforms", platforms)
        jaxzero.topology("h100")
        assert jax.config.jax_platforms == after
    finally:
        jax.config.update("jax_platforms", before)


def test_whether_devices_were_used_is_asked_without_using_them():
    ask = "print(compat.backends_started())"
    out = helpers.run_python(f"from jaxzero._src.jaxpr import compat\n{ask}\njax.devices()\n{ask}")
    assert out.split() == ["False", "True"]


@pytest.mark.skipif(not has("libtpu") and not has("jax_plugins"), reason="no plug-in of JAX here")
@pytest.mark.parametrize("name", ["h100:2x4", "a100:1x8", "h200:2x4", "v5e:2x4", "v5p:2x2x2", "v6e:2x4"])
def test_compiles_for_it(name):
    """With the plug-in, and still on CPU devices."""
    if not has("libtpu" if name.startswith("v") else "jax_plugins"):
        pytest.skip("the other plug-in")
    mesh = Mesh(jaxzero.topology(name), ("data",))
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=NamedSharding(mesh, P("data")))
    compiled = jax.jit(lambda x: x @ x.T, out_shardings=NamedSharding(mesh, P())).lower(x).compile()
    assert "all-gather" in compiled.as_text()
    assert jax.devices()[0].platform == "cpu"
