"""Runs every optimizer of Optax on every mesh, at every stage, in every way, beside its unsharded run.

    python benchmarks/grid.py [--workers 2] [--minutes 60] [--passes 5] [optimizers ...]      # make grid

A cell is an optimizer, a mesh, a stage and a way to run a step: it passes when parameters, state and losses after six
steps are those of the run on one device. All cells of an optimizer run in one process, which makes the unsharded run
once. A process that ends or hangs is a failed cell, and the next process goes on behind it.

Writes `benchmarks/measured/optimizers.jsonl` after each optimizer, and at the end `docs/optimizers.md` and the README's
row. The first pass takes every mesh and stage once, each in one of the ways; `--passes 1` ends there. It resumes:
cells that have run on this tree of the library and with these versions are left out, unless their optimizer is named.
"""

import argparse
import datetime as dt
import json
import os
import pathlib
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import optimizer_table
import results

ROOT = pathlib.Path(__file__).parent.parent
#: What decides the result of a cell; a result names the commit that it was measured on, so these must be committed.
SOURCES = ("jaxzero", "tests/support")
#: A cell takes about a second, a line search three.
SECONDS_PER_CELL = 300.0
ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "NPROC": "32", "XLA_FLAGS": "--xla_backend_optimization_level=0"}

Cell = tuple[str, int, str]


def git(*arguments: str) -> str:
    """What git prints."""
    return subprocess.run(["git", *arguments], cwd=ROOT, text=True, capture_output=True, check=True).stdout.strip()


def identity() -> dict[str, str]:
    """The commit, the tree of the library at that commit, and the versions.

    Raises:
      SystemExit: The sources differ from the commit.
    """
    import jax
    import optax

    if git("status", "--porcelain", "--", *SOURCES):
        raise SystemExit(f"grid: {' or '.join(SOURCES)} differs from the last commit. Fix: commit, then run again")
    versions = {"jax": jax.__version__, "optax": optax.__version__, "python": sys.version.split()[0]}
    return {"commit": git("rev-parse", "--short=10", "HEAD"), "tree": git("rev-parse", "HEAD:jaxzero/_src"), **versions}


def run_cells(key: str, first: int, end: int) -> None:
    """In a process of its own: runs an optimizer's cells from `first` to `end`, and prints one line for each."""
    sys.path.append(str(ROOT / "tests/support"))
    import jax

    jax.config.update("jax_num_cpu_devices", 8)
    import optax_grid

    for cell in optax_grid.GRID[first:end]:
        try:
            optax_grid.check(key, *cell)
            message = ""
        except Exception as error:  # noqa: BLE001 (whatever a cell raises is its result)
            message = "".join(traceback.format_exception_only(error))
        print(json.dumps(message[:600]), flush=True)


def lines_of(key: str, first: int, end: int) -> Iterator[str]:
    """What the cells from `first` to `end` say: empty where the run equals the unsharded one.

    Ends early, with why, when the process does.
    """
    command = [sys.executable, "-W", "error", __file__, "--cells", key, str(first), str(end)]
    process = subprocess.Popen(
        command, env=os.environ | ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    errors: list[str] = []
    drain = threading.Thread(target=lambda: errors.append(process.stderr.read()))  # type: ignore[union-attr]
    drain.start()
    try:
        while True:
            timer = threading.Timer(SECONDS_PER_CELL, process.kill)
            timer.start()
            line = process.stdout.readline()
            timer.cancel()
            if not line:
                break
            yield json.loads(line)
        drain.join()
        if process.wait():
            yield f"the process ended with status {process.returncode}: {''.join(errors)[-300:]}"
    finally:
        process.kill()
        process.wait()


def run_optimizer(key: str, cells: list[Cell], old: dict[str, Any], stop: threading.Event) -> dict[str, Any] | None:
    """The row of one optimizer; `None` when it was stopped before all cells had run.

    `old` is a row whose cells, the first of `cells`, are not run again; empty where there is none.
    """
    messages = messages_of(old, cells)
    clock = time.perf_counter() - old.get("seconds", 0.0)
    while len(messages) < len(cells):
        before = len(messages)
        for message in lines_of(key, before, len(cells)):
            messages.append(message)
            if stop.is_set():
                return None
        if len(messages) == before:
            messages.append("the process ended without a result")
    failed = {optimizer_table.cell_name(cell): text for cell, text in zip(cells, messages, strict=True) if text}
    seconds = round(time.perf_counter() - clock, 1)
    return {"optimizer": key, "seconds": seconds, "cells": marks(cells, messages), "failed": failed}


def messages_of(row: dict[str, Any], cells: list[Cell]) -> list[str]:
    """What the cells of a row said; a row holds a whole number of passes, which are the first of `cells`."""
    if not row:
        return []
    return [row["failed"].get(optimizer_table.cell_name(cell), "") for cell in cells[: optimizer_table.ran(row)]]


def marks(cells: list[Cell], messages: list[str]) -> dict[str, str]:
    """For each mesh one character for each stage and way: a dot where it passed, F where it failed, - if not run."""
    import optax_grid

    seen = {cell: "F" if message else "." for cell, message in zip(cells, messages, strict=True)}
    found: dict[str, str] = {}
    for cell in optax_grid.CELLS:
        found[cell[0]] = found.get(cell[0], "") + seen.get(cell, "-")
    return found


def same_tree(rows: list[dict[str, Any]], about: dict[str, str], named: list[str]) -> dict[str, dict[str, Any]]:
    """The rows of this tree and these versions, without the optimizers that are named."""
    same = {k: v for k, v in about.items() if k not in ("commit", "date")}
    return {row["optimizer"]: row for row in rows if same.items() <= row.items() and row["optimizer"] not in named}


def to_run(keys: list[str], done: dict[str, dict[str, Any]], cells: int) -> list[str]:
    """The optimizers of which fewer cells have run."""
    return [key for key in keys if key not in done or optimizer_table.ran(done[key]) < cells]


def main(argv: list[str]) -> int:
    """Runs what is left; the status says whether any cell failed."""
    sys.path.append(str(ROOT / "tests/support"))
    import optax_grid

    every = list(optax_grid.CASES)
    parser = argparse.ArgumentParser(prog="grid", description="Optimizers against their unsharded runs.")
    parser.add_argument("optimizers", nargs="*", choices=[[], *every], metavar="optimizer", help="run these again")
    parser.add_argument("--workers", type=int, default=2, help="processes side by side")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no optimizer after this time")
    parser.add_argument(
        "--passes", type=int, default=len(optax_grid.checks.WAYS), help="ways to run each mesh and stage"
    )
    options = parser.parse_args(argv)
    cells = optax_grid.GRID[: options.passes * optax_grid.PASS]
    about = identity() | {"date": dt.date.today().isoformat()}
    kept = {row["optimizer"]: row for row in results.read_lines("optimizers")}
    done = same_tree(list(kept.values()), about, options.optimizers)
    left = to_run(options.optimizers or every, done, len(cells))
    print(f"{len(left)} of {len(every)} optimizers to run, {len(cells)} cells each", flush=True)
    stop, end = threading.Event(), time.monotonic() + options.minutes * 60

    def work(key: str) -> dict[str, Any] | None:
        late = time.monotonic() > end or stop.is_set()
        return None if late else run_optimizer(key, cells, done.get(key, {}), stop)

    failures = 0
    with ThreadPoolExecutor(options.workers) as pool:
        try:
            for i, row in enumerate(pool.map(work, left), 1):
                if row is None:
                    continue
                failures += len(row["failed"])
                kept[row["optimizer"]] = row | about
                results.write_lines("optimizers", [kept[key] for key in every if key in kept])
                good = len(cells) - len(row["failed"])
                print(f"{i}/{len(left)} {row['optimizer']}: {good} equal in {row['seconds']:.0f} s", flush=True)
                for cell, message in list(row["failed"].items())[:3]:
                    print(f"  failed: {cell}: {message.strip().splitlines()[0]}", flush=True)
        finally:
            stop.set()
    optimizer_table.write()
    return 1 if failures else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--cells"]:
        run_cells(sys.argv[2], *map(int, sys.argv[3:]))
    else:
        sys.exit(main(sys.argv[1:]))
