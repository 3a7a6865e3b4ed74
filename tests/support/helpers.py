"""What many tests need: meshes, comparisons, the unsharded run, a fresh interpreter."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh

PREAMBLE = """\
import jax
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_enable_x64", {x64})
"""


def make_mesh(shape: int | tuple[int, ...] = 8, names: tuple[str, ...] = ("data",), *, explicit: bool = False) -> Mesh:
    """A mesh over the first devices, with Auto or Explicit axes."""
    shape = (shape,) if isinstance(shape, int) else shape
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return Mesh(devices, names, axis_types=(AxisType.Explicit if explicit else AxisType.Auto,) * len(names))


def name(path: Any) -> str:
    """A key path as the library's errors write it."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def host(x: Any) -> np.ndarray:
    """A leaf as a NumPy array that can be compared: keys as their data, bfloat16 and the like widened."""
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    x = np.asarray(x)
    return x.astype(np.float32) if x.dtype.kind == "V" else x


def assert_all_shards_equal(tree: Any) -> None:
    """Every device's copy of each replicated leaf, and each copy of a share, is bitwise the same."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if not isinstance(leaf, jax.Array):
            continue
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        first: dict[str, jax.Shard] = {}
        for shard in leaf.addressable_shards:
            other = first.setdefault(str(shard.index), shard)
            assert np.asarray(other.data).tobytes() == np.asarray(shard.data).tobytes(), (
                f"{name(path)}: {shard.device} and {other.device} hold different values"
            )


def close(a: Any, b: Any, rtol_of_max: float = 5e-6) -> None:
    """Assert `max|a - b| <= rtol_of_max * max|b|` per leaf; other than inexact leaves must be equal, NaN equals NaN."""
    a_leaves, b_leaves = jax.tree_util.tree_leaves_with_path(a), jax.tree_util.tree_leaves_with_path(b)
    assert [name(p) for p, _ in a_leaves] == [name(p) for p, _ in b_leaves]
    for (path, left), (_, right) in zip(a_leaves, b_leaves, strict=True):
        x, y = host(left), host(right)
        assert x.shape == y.shape, f"{name(path)}: shape {x.shape}, expected {y.shape}"
        if y.dtype.kind not in "fc" or not y.size:
            np.testing.assert_array_equal(x, y, err_msg=name(path))
            continue
        finite = np.isfinite(y)
        np.testing.assert_array_equal(x[~finite], y[~finite], err_msg=name(path))
        error = np.max(np.abs(x[finite] - y[finite]), initial=0.0)
        scale = np.max(np.abs(y[finite]), initial=0.0)
        assert error <= rtol_of_max * scale, (
            f"{name(path)}: differs by {error:.3e}, {error / max(scale, 1e-30):.1e} of {scale:.3e}"
        )


def reference_run(tx: optax.GradientTransformation, params: Any, grads_list: Iterable[Any]) -> tuple[Any, Any]:
    """Plain Optax on one device: the parameters and the state after these gradients."""
    one = jax.devices()[0]
    params = jax.device_put(params, one)
    state = jax.jit(tx.init)(params)

    @jax.jit
    def step(params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for grads in grads_list:
        params, state = step(params, state, jax.device_put(grads, one))
    return params, state


def run_python(code: str, *, x64: bool = False, timeout: float = 300) -> str:
    """Run code in a fresh interpreter with 8 CPU devices; its standard output. For float64, and for what may abort."""
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", PREAMBLE.format(x64=x64) + code],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=os.path.dirname(__file__),
        env=os.environ | {"JAX_PLATFORMS": "cpu", "NPROC": "32"},
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stdout


def start_processes(script: str, *arguments: str, processes: int = 2, devices: int = 4) -> list[subprocess.Popen[str]]:
    """Starts `script` of this folder in several processes that JAX joins."""
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = s.getsockname()[1]
    command = [sys.executable, os.path.join(os.path.dirname(__file__), script), f"localhost:{port}", str(processes)]
    return [
        subprocess.Popen(
            [*command, str(i), str(devices), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"JAX_PLATFORMS": "cpu", "NPROC": "32"},
        )
        for i in range(processes)
    ]


def run_processes(script: str, *arguments: str, processes: int = 2, devices: int = 4) -> None:
    """Runs `script` of this folder in several processes that JAX joins, to its end."""
    running = start_processes(script, *arguments, processes=processes, devices=devices)
    try:
        ends = [p.communicate(timeout=300) for p in running]
    finally:
        for p in running:
            p.kill()
    assert not any(p.returncode for p in running), "\n".join(err[-3000:] for _, err in ends)
