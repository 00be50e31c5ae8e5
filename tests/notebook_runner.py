"""Runs notebooks from scratch; as a script it also writes their outputs back: ``python -m tests.notebook_runner``."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"
CELL_TIMEOUT_S = 240


def run_notebook(path: Path) -> Any:
    """The notebook, executed cell by cell in a new kernel of this Python, in the notebook's own folder.

    Raises:
        nbclient.exceptions.CellExecutionError: at the first cell that fails.
        nbclient.exceptions.CellTimeoutError: if one takes longer than ``CELL_TIMEOUT_S`` seconds.
    """
    # The kernels of this environment come first, whatever else is installed for the user.
    os.environ["JUPYTER_PREFER_ENV_PATH"] = "1"
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    # Sockets in the file system in place of ports: nobody else can be listening there.
    with tempfile.TemporaryDirectory(prefix="lrs", dir="/tmp") as sockets:
        manager = AsyncKernelManager(kernel_name="python3", transport="ipc", ip=f"{sockets}/kernel")
        resources = {"metadata": {"path": str(path.parent)}}
        client = NotebookClient(
            notebook,
            km=manager,
            timeout=CELL_TIMEOUT_S,
            record_timing=False,
            coalesce_streams=True,  # however many messages a cell's print calls make
            resources=resources,
        )
        client.execute(cleanup_kc=True)  # a kernel of a manager that is given would be left running
    return notebook


def texts(notebook: Any) -> list[list[str]]:
    """For each cell, what it printed and the plain text of what it showed; pictures are left out."""
    found = []
    for cell in notebook.cells:
        parts = []
        for output in cell.get("outputs", []):
            text = output.get("text") or output.get("data", {}).get("text/plain", "")
            parts.append(f"{output.get('name', output.output_type)}: {text}")
        found.append(parts)
    return found


def main() -> None:
    """Execute the notebooks of the command line, or all, and save them with their outputs."""
    paths = [Path(name).resolve() for name in sys.argv[1:]] or sorted(NOTEBOOKS.glob("*.ipynb"))
    for path in paths:
        print(path.name, flush=True)
        notebook = run_notebook(path)
        # Kept small and the same on every machine: which Python ran it is not part of the tour.
        notebook.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
        nbformat.write(notebook, path)


if __name__ == "__main__":
    main()
