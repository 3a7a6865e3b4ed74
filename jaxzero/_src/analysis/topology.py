"""Abstract devices of other machines, so that a step can be compiled for them; nothing runs on them.

The compilers of XLA come with the plug-ins of JAX and need no accelerator. A *target config*,
a text proto of hardware figures, describes the GPU to the GPU compiler; a TPU compiler has a table of chips.
"""

import importlib.util
import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies

from .._optional import install
from .._text import nearest
from ..jaxpr.compat import backends_started
from ..sharding.scalars import is_int, python_scalar

#: What differs between GPUs, as NVIDIA publishes it: memory in bytes, bandwidth in bytes/s, clock in GHz.
_GPUS: dict[str, dict[str, Any]] = {
    "a100": dict(
        major=8, cores=108, fpus=64, clock=1.41, memory=85100068864, bandwidth=2039040000000, l2=41943040, shared=164
    ),
    "h100": dict(
        major=9, cores=132, fpus=128, clock=1.98, memory=84978434048, bandwidth=3352320000000, l2=52428800, shared=228
    ),
    "h200": dict(
        major=9, cores=132, fpus=128, clock=1.98, memory=151397597184, bandwidth=4800000000000, l2=52428800, shared=228
    ),
}
#: Dimensions of the grid of chips, and an example.
_TPUS = {"v5e": (2, "v5e:4x4"), "v5p": (3, "v5p:4x4x4"), "v6e": (2, "v6e:4x4")}

#: What libtpu would otherwise request from a metadata server, and its lock, which matters only where a chip is used.
_LIBTPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def topology(name: str, *, nodes: int | None = None, per_node: int | None = None) -> np.ndarray:
    """Abstract devices of a machine that need not be here: put them in a `Mesh`, then lower and compile for it.

    Sends nothing and touches no accelerator: only the compiler of the plug-in is loaded. In a process that has
    used no device yet and where `JAX_PLATFORMS` is not set, JAX uses CPU devices from then on, so that compiling
    does not start an accelerator either; train in another process, or look at `jax.devices()` first.

    Args:
      name: ``"h100"``, ``"a100"`` or ``"h200"``, with ``":2x8"`` for 2 nodes of 8 GPUs; or ``"v5e:4x4"``,
        ``"v5p:4x4x4"``, ``"v6e:4x4"``, ... with the grid of chips.
      nodes: GPUs: how many nodes (1), where the name does not say it.
      per_node: GPUs: how many in each node (8), where the name does not say it.

    Returns:
      The devices, one-dimensional, those of a node together: `.reshape(2, 8)` for axes `("node", "local")`.

    Raises:
      ValueError: For an unknown name, with the nearest known one; sizes that are no machine; a plug-in that is
        not installed, with the command that installs it.

    Examples:
      >>> import jax, numpy as np, jaxzero
      >>> devices = jaxzero.topology("h100", nodes=2, per_node=8)  # doctest: +SKIP
      >>> mesh = jax.sharding.Mesh(devices.reshape(2, 8), ("node", "local"))  # doctest: +SKIP

    References:
      Ahead-of-time compilation in JAX: `jax.experimental.topologies`.
    """
    kind, sizes = parse_topology(name, nodes, per_node)
    if kind in _TPUS:
        return _tpus(kind, sizes)
    return _gpus(kind, *sizes)


def is_gpu(name: str) -> bool:
    """Whether a name is that of a machine with GPUs."""
    return parse_topology(name)[0] in _GPUS


def parse_topology(name: Any, nodes: Any = None, per_node: Any = None) -> tuple[str, tuple[int, ...]]:
    """The kind of a machine and its sizes."""
    kind, colon, grid = str(name).strip().lower().partition(":")
    if kind not in (*_GPUS, *_TPUS):
        known = [*_GPUS, *_TPUS]
        fix = nearest(kind, known) or "Fix: for example topology('h100:2x8')."
        raise ValueError(f"topology: {name!r} is no known machine. Expected one of {known}. {fix}")
    dims, example = _TPUS.get(kind, (2, f"{kind}:2x8"))
    given = re.fullmatch(r"\d+(x\d+)*", grid)
    sizes = tuple(map(int, grid.split("x"))) if given else ()
    if kind in _GPUS and not colon:
        given_sizes = ((python_scalar(nodes), 1), (python_scalar(per_node), 8))
        sizes = tuple(default if size is None else size for size, default in given_sizes)
    elif nodes is not None or per_node is not None:
        raise ValueError(
            f"topology: {name!r} with nodes={nodes!r}, per_node={per_node!r}. Expected sizes in one place; a grid of "
            f"TPU chips has no nodes. Fix: topology({example!r})."
        )
    fits = all(is_int(n, 1) for n in sizes)
    if len(sizes) != dims or not fits:
        what = "nodes x GPUs in each" if kind in _GPUS else f"a grid of chips in {dims} dimensions"
        raise ValueError(
            f"topology: {name!r} with sizes {sizes or grid!r}. Expected {what}, positive whole numbers. "
            f"Fix: for example topology({example!r})."
        )
    return kind, sizes


def _gpus(kind: str, nodes: int, per_node: int) -> np.ndarray:
    if not any(_installed(f"jax_plugins.{plugin}") for plugin in ("xla_cuda12", "xla_cuda13")):
        raise ValueError(_missing(kind, "CUDA", "cuda"))
    stay_on_cpu()
    try:
        found = topologies.get_topology_desc(
            "any", platform="cuda", target_config=_target(kind), topology=f"{nodes}x{per_node}x1"
        )
    except NotImplementedError as error:
        raise ValueError(
            f"topology: {kind!r} came too late: this process used its devices before, and JAX left the CUDA plug-in "
            "out because there is no GPU. Expected JAX_PLATFORMS=cpu, or the call before the first use of a device. "
            "Fix: set JAX_PLATFORMS=cpu in the environment before Python starts."
        ) from error
    return np.array(found.devices, dtype=object)


def _tpus(kind: str, sizes: tuple[int, ...]) -> np.ndarray:
    if not _installed("libtpu"):
        raise ValueError(_missing(kind, "TPU", "tpu"))
    stay_on_cpu()
    grid = "x".join(map(str, sizes))
    try:
        with _environment(_LIBTPU):
            found = topologies.get_topology_desc(f"{kind}:{grid}", platform="tpu")
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(
            f"topology: libtpu makes no {kind} of {grid} chips ({str(error).splitlines()[0]}). Expected sizes that "
            f"hosts of 2x2 chips fill. Fix: for example topology({_TPUS[kind][1]!r})."
        ) from error
    devices = np.array(found.devices, dtype=object)
    assert devices.size == math.prod(sizes)
    return devices


def _target(kind: str) -> str:
    """The target config of a GPU: the limits that all of these share, and its own figures."""
    gpu = _GPUS[kind]
    return f"""gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_core: {gpu["shared"] * 1024}
  shared_memory_per_block_optin: {(gpu["shared"] - 1) * 1024}
  core_count: {gpu["cores"]}
  fpus_per_core: {gpu["fpus"]}
  clock_rate_ghz: {gpu["clock"]}
  device_memory_size: {gpu["memory"]}
  memory_bandwidth: {gpu["bandwidth"]}
  l2_cache_size: {gpu["l2"]}
  cuda_compute_capability {{ major: {gpu["major"]} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
device_description_str: "NVIDIA {kind.upper()}"
"""


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent is not there either
        return False


def _missing(kind: str, what: str, extra: str) -> str:
    return (
        f"topology: {kind!r} needs the {what} plug-in of JAX, whose compiler it uses (no accelerator is needed). Found "
        f"none installed. Fix: {install(extra)}."
    )


def stay_on_cpu() -> None:
    """Keeps JAX from starting an accelerator, unless the process or its environment has already decided."""
    if not jax.config.jax_platforms and not backends_started():  # type: ignore[attr-defined]
        jax.config.update("jax_platforms", "cpu")


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Environment variables, where they are not set, while a library loads."""
    missing = {k: v for k, v in values.items() if k not in os.environ}
    os.environ.update(missing)
    try:
        yield
    finally:
        for name in missing:
            del os.environ[name]
