"""Write the full parameters of a checkpoint to files that other tools read.

Needs neither the model nor the devices that the checkpoint came from, and never holds the model whole.

Examples:
  jaxzero export runs/gpt --to safetensors
  jaxzero export runs/gpt --to safetensors --step 400 --out gpt-400
"""

import dataclasses
import pathlib
from typing import Annotated, Literal

import tyro

from .._src.checkpoint import export
from . import output


@dataclasses.dataclass(frozen=True, kw_only=True)
class Export:
    """The arguments of `jaxzero export`."""

    directory: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
    """The directory that jaxzero.save wrote to."""
    to: Literal["safetensors"] = "safetensors"
    """The format."""
    step: int | None = None
    """The step. Default: the latest complete one."""
    out: str | None = None
    """The folder to write. Default: safetensors/STEP in DIR."""
    json: bool = False
    """Print one JSON document."""

    def run(self) -> int:
        """Writes the files and prints their names."""
        with output.working(f"reading {self.directory}"):
            folder = export.export(self.directory, self.to, step=self.step, out=self.out)
        files = sorted(pathlib.Path(folder).glob("*.safetensors*"))
        if self.json:
            output.document({"folder": str(folder), "files": [file.name for file in files]})
        else:
            print(*files, sep="\n")
        return 0


COMMAND = Export
