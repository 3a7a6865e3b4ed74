"""Executes notebooks and keeps their outputs, without the times of the run: `python notebooks/execute.py [01 05]`."""

import pathlib
import sys

import nbclient
import nbformat

FOLDER = pathlib.Path(__file__).parent


def main(*names: str) -> None:
    """All notebooks, or those whose file names begin so."""
    for path in sorted(FOLDER.glob("*.ipynb")):
        if names and not path.name.startswith(names):
            continue
        notebook = nbformat.read(path, as_version=4)
        nbclient.NotebookClient(notebook, timeout=600, record_timing=False, coalesce_streams=True).execute(cwd=FOLDER)
        notebook.metadata = {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
        nbformat.write(notebook, path)
        print(f"executed {path.name}")


if __name__ == "__main__":
    main(*sys.argv[1:])
