"""Runs every benchmark that this machine can run, then writes `benchmarks/RESULTS.md`.

    python benchmarks/run.py      # make bench

Each benchmark is a separate process. Those for GPUs and TPUs run if the JAX plug-in is installed.
"""

import importlib.util
import pathlib
import subprocess
import sys

HERE = pathlib.Path(__file__).parent
#: Arguments, and the module that must be installed.
ALL: list[tuple[list[str], str]] = [
    (["step_time.py"], "jax"),
    (["step_model.py"], "jax"),
    (["buckets.py"], "jax"),
    (["traffic.py"], "jax"),
    (["mics_model.py"], "jax"),
    (["node_traffic.py"], "jax_plugins"),
    (["overlap.py"], "jax_plugins"),
    (["machines.py", "h100:2x8"], "jax_plugins"),
    (["machines.py", "v5e:4x4"], "libtpu"),
    (["commands.py", "h100:8x8", "llama_8b"], "jax_plugins"),
    (["commands.py", "v5e:4x4", "gpt_3b"], "libtpu"),
    (["report.py"], "matplotlib"),
]


def main() -> int:
    """Runs them one after another; the status is 1 if any failed."""
    failed = []
    for (script, *arguments), module in ALL:
        name = " ".join([script, *arguments])
        if importlib.util.find_spec(module) is None:
            print(f"== {name}: left out, {module} is not installed", flush=True)
            continue
        print(f"== {name}", flush=True)
        if subprocess.run([sys.executable, HERE / script, *arguments]).returncode:
            failed.append(name)
    print(f"failed: {', '.join(failed)}" if failed else "all ran", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
