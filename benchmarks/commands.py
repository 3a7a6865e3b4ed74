"""The output of `jaxzero compile` for the example models, stored for the page of results.

    python benchmarks/commands.py h100:8x8 llama_8b     # needs pip install ".[cli,cuda]"
    python benchmarks/commands.py v5e:4x4 gpt_3b        # needs pip install ".[cli,tpu]"

Writes `benchmarks/measured/compile_<model>.json`.
"""

import json
import os
import pathlib
import subprocess
import sys

import results

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"


def main(machine: str, model: str) -> None:
    """Runs the command and stores its output."""
    command = ["-m", "jaxzero", "compile", f"models:{model}", "--topology", machine, "--stage", "3", "--json"]
    paths = os.pathsep.join([str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, *command],
        cwd=EXAMPLES,
        check=True,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": paths},
    )
    found = json.loads(done.stdout)
    rows = found.pop("collectives")
    large = [row for row in rows if row["kind"] == "all-gather" and row["nbytes"] >= 2**22]
    found["hidden"] = sum(row["times"] for row in large if row["hidden"]) / max(1, sum(row["times"] for row in large))
    results.write(f"compile_{model}", [found], {"command": " ".join(["jaxzero", *command[2:-1]])})


if __name__ == "__main__":
    main(*sys.argv[1:])
