"""Eight CPU devices for every test and doctest, before anything touches a device."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["NPROC"] = (
    "32"  # XLA sizes a thread pool by it; 8 devices on fewer cores can otherwise wait for each other for ever
)

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--sample N`: a short run that still enters every file."""
    parser.addoption(
        "--sample", type=int, default=1, metavar="N", help="run each file's first test and every N-th after it"
    )


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
