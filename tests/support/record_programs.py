"""Records the programs that XLA makes of the steps of `verify_steps`, for machines that are not here.

    python tests/support/record_programs.py cpu
    python tests/support/record_programs.py h100:1x8     # needs pip install ".[cuda]"
    python tests/support/record_programs.py v5e:2x4      # needs pip install ".[tpu]"

Writes `programs/<machine>-<version of jax>.json.xz` beside this file: names and texts, without what the reader does
not read (tables of source lines, most of the compiler's own configuration).
"""

import json
import lzma
import os
import pathlib
import re
import sys

os.environ["JAX_PLATFORMS"] = "cpu"
import jax

jax.config.update("jax_num_cpu_devices", 8)
import numpy as np
import verify_steps

import jaxzero

FOLDER = pathlib.Path(__file__).parent / "programs"


#: What matters inside a fusion or a reduction.
INNER = re.compile(r" (dot|convolution|custom-call|all-[a-z\-]+|reduce-scatter)\(")


def shortened(text: str) -> str:
    """Only what a reader of collectives, arguments and loops needs."""
    head, *lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(("%", "ENTRY")) and line.endswith("{"))
    called = set(re.findall(r"(?:calls|to_apply)=%([\w.\-]+)", text))
    out, inner = [head], False
    for line in lines[start:]:
        if line.endswith("{"):
            inner = line[1:].split()[0] in called
            line = re.sub(r" \(.*", " {", line) if inner else line
        elif inner and line.startswith(" ") and not INNER.search(line):
            continue
        name = re.search(r'op_name="(?:[^"\\]|\\.)*"', line)
        turns = re.search(r'"known_trip_count":\{"n":"\d+"\}', line)
        kept = ['"is_sync":true'] * ('"is_sync":true' in line) + ([turns[0]] if turns else [])
        line = re.sub(r", (metadata|backend_config|sharding)=\{.*", "", line)
        line += f", metadata={{{name[0]}}}" if name else ""
        out.append(line + (f", backend_config={{{','.join(kept)}}}" if kept else ""))
    return "\n".join(out)


def read(path: pathlib.Path) -> dict[str, str]:
    """The recorded texts by name."""
    return json.loads(lzma.decompress(path.read_bytes()))


def main(machine: str) -> None:
    """Compiles and writes."""
    devices = np.array(jax.devices()) if machine == "cpu" else jaxzero.topology(machine)
    steps = verify_steps.HONEST | {name: make for name, (make, _) in verify_steps.SABOTAGED.items()}
    texts = {}
    for name, make in steps.items():
        texts[name] = shortened(make(devices)[2]().as_text())
        print(name, len(texts[name]), flush=True)
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{machine.partition(':')[0]}-{jax.__version__}.json.xz"
    path.write_bytes(lzma.compress(json.dumps(texts).encode(), preset=9 | lzma.PRESET_EXTREME))
    print(path.name, path.stat().st_size)


if __name__ == "__main__":
    main(sys.argv[1])
