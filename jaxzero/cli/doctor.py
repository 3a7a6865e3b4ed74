"""Check this installation: versions, devices, plug-ins, and a training step on virtual devices at every stage.

With DIR, check the checkpoints there instead: each step against the checksums that were written with it.

Examples:
  jaxzero doctor
  jaxzero doctor --json
  jaxzero doctor runs/gpt
"""

import dataclasses
import importlib.metadata
import os
import platform
import subprocess
import sys
from typing import Annotated, Any

import tyro

from .._src._optional import install
from .._src.checkpoint import checksums, orbax_io
from . import output

#: Distributions: those that must be here, and those that may be.
NEEDED = ("jaxzero", "jax", "jaxlib", "optax", "numpy")
OPTIONAL = ("flax", "orbax-checkpoint", "rich", "tyro", "matplotlib")
#: What lets JAX compile for, or run on, other devices than CPUs; any of those in one row.
PLUGINS = {
    "CUDA plug-in": ("cuda", ("jax-cuda12-plugin", "jax-cuda13-plugin")),
    "TPU plug-in": ("tpu", ("libtpu",)),
}
#: Seconds after which a child process counts as failed.
PATIENCE = 120

_DEVICES = """\
import collections, jax
kinds = collections.Counter((d.platform, d.device_kind) for d in jax.devices())
alone = "; with one device nothing is split" if sum(kinds.values()) == 1 else ""
print(", ".join(f"{n} x {kind} ({platform})" for (platform, kind), n in kinds.items()) + alone)
"""


@dataclasses.dataclass(frozen=True)
class Finding:
    """The result of one check: ``"ok"``, ``"failed"`` or ``"absent"``."""

    name: str
    status: str
    detail: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Doctor:
    """The arguments of `jaxzero doctor`."""

    directory: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")] = None
    """A directory that jaxzero.save wrote to. Default: check the installation."""
    step: int | None = None
    """The step in DIR. Default: all."""
    json: bool = False
    """Print one JSON document."""

    def run(self) -> int:
        """Checks and prints; the status is 1 if anything failed."""
        if self.directory is not None:
            with output.working(f"reading {self.directory}"):
                checks = checkpoints(self.directory, self.step)
        elif self.step is not None:
            raise ValueError(
                "doctor: --step without DIR. Expected a directory that jaxzero.save wrote to. Fix: name it."
            )
        else:
            with output.working("checking versions, devices and a training step on virtual devices"):
                checks = [*versions(), *plugins(), devices(), self_test()]
        failed = any(check.status == "failed" for check in checks)
        if self.json:
            output.document({"ok": not failed, "checks": [dataclasses.asdict(check) for check in checks]})
        else:
            rows = [(check.status, check.name, check.detail) for check in checks]
            output.table("jaxzero doctor", ("", "check", "found"), rows, left=3)
            print("something failed, see above" if failed else "all is well")
        return int(failed)


def checkpoints(directory: str, step: int | None) -> list[Finding]:
    """The steps in a directory, each against its checksums."""
    folder = orbax_io.folder(directory)
    steps = [step] if step is not None else orbax_io.steps_in(directory)
    if not any((folder / str(number)).exists() for number in steps):
        raise ValueError(
            f"doctor: there is no checkpoint in {directory}. Expected a directory that jaxzero.save wrote to. Fix: the "
            "directory, not one of its steps; or another --step."
        )
    return [_checkpoint(folder / str(number), number) for number in steps]


def _checkpoint(path: Any, step: int) -> Finding:
    """One step: its manifest, its index and its pieces."""
    manifest, problem = orbax_io.read_manifest(path)
    if problem:
        return Finding(f"step {step}", "failed", f"{path}: {problem}")
    found = checksums.check(path)
    detail = f"{len(manifest['leaves'])} leaves, jaxzero {manifest['jaxzero']}, {found}"
    return Finding(f"step {step}", "failed" if found.problems else "ok", "; ".join(found.problems) or detail)


def versions() -> list[Finding]:
    """Python and the packages."""
    out = [Finding("python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}")]
    for name in (*NEEDED, *OPTIONAL):
        found = _version(name)
        status = "ok" if found else "failed" if name in NEEDED else "absent"
        out.append(Finding(name, status, found or f"pip install {name}"))
    return out


def plugins() -> list[Finding]:
    """What compiles for accelerators, here or not."""
    out = []
    for label, (extra, names) in PLUGINS.items():
        found = [f"{name} {version}" for name in names if (version := _version(name))]
        detail = ", ".join(found) or f"{install(extra)} to compile for it"
        out.append(Finding(label, "ok" if found else "absent", detail))
    return out


def devices() -> Finding:
    """The devices that a program started here would use; listed in a child process, since they may be in use."""
    return _child("devices", ["-c", _DEVICES], {})


def self_test() -> Finding:
    """A training step at every stage beside plain Optax, on 8 virtual devices."""
    settings = {"JAX_PLATFORMS": "cpu", "NPROC": "32"}
    return _child("self-test", ["-m", "jaxzero.cli.self_test"], settings)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _child(name: str, arguments: list[str], settings: dict[str, str]) -> Finding:
    command = [sys.executable, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=os.environ | settings)
    except subprocess.TimeoutExpired:
        return Finding(name, "failed", f"no answer after {PATIENCE} s")
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return Finding(name, "failed", lines[-1] if lines else f"exit status {done.returncode}")
    return Finding(name, "ok", done.stdout.strip().splitlines()[-1])


COMMAND = Doctor
