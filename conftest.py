"""Eight CPU devices for every test and doctest, before anything touches a device."""

import gc
import os
import platform
from importlib.metadata import version

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["NPROC"] = (
    "32"  # XLA sizes a thread pool by it; 8 devices on fewer cores can otherwise wait for each other for ever
)

# What is tested is which program is made, not how well its machine code is tuned. Without tuning, and with XLA's older
# generator of fused loops, the tests take three fifths of the processor time; without fused multiply-add (AVX has
# none) bits do not depend on what is fused. XLA_FLAGS= (empty) tests the code that users run; newer versions have no
# such choice.
_UNTUNED = "--xla_backend_optimization_level=0"
if version("jaxlib").startswith("0.10.") and platform.machine() in ("x86_64", "AMD64"):
    _UNTUNED += " --xla_cpu_use_fusion_emitters=false --xla_cpu_max_isa=AVX"
os.environ.setdefault("XLA_FLAGS", _UNTUNED)

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)

# Traces are many small objects, and each search of them for dead ones walks through all that JAX keeps. Searching less
# often saves five percent of the processor time or more; tests of what is kept call `gc.collect` themselves.
gc.set_threshold(20_000, 20, 20)


_CELLS = pytest.StashKey[dict[str, int]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--sample N`: a short run that still enters every file."""
    parser.addoption(
        "--sample", type=int, default=1, metavar="N", help="run each file's first test and every N-th after it"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_itemcollected(item: pytest.Item) -> None:
    """Of the cells of a test marked `grid(n)` make all but every n-th slow, and all notebooks but the first."""
    if item.path.suffix == ".ipynb" and not item.path.name.startswith("01"):
        item.add_marker(pytest.mark.slow)
    marker = item.get_closest_marker("grid")
    if marker is None:
        return
    counts = item.config.stash.setdefault(_CELLS, {})
    cell = counts[item.nodeid.split("[")[0]] = counts.get(item.nodeid.split("[")[0], -1) + 1
    if cell % marker.args[0]:
        item.add_marker(pytest.mark.slow)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep every N-th selected test of each file."""
    every = config.getoption("--sample")
    seen: dict[object, int] = {}
    kept, dropped = [], []
    for item in items:
        index = seen.setdefault(item.path, 0)
        seen[item.path] += 1
        (dropped if index % every else kept).append(item)
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept
