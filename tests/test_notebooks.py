"""The notebooks run from scratch, show what is committed with them, and a broken cell is noticed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient.exceptions import CellExecutionError
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from tests.notebook_runner import NOTEBOOKS, run_notebook, texts

PATHS = sorted(NOTEBOOKS.glob("*.ipynb"))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_notebook_runs_and_shows_what_is_committed(path: Path) -> None:
    committed = nbformat.read(path, as_version=4)
    assert texts(run_notebook(path)) == texts(committed)


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_notebook_is_committed_as_it_ran(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1)), "run from the top, once"
    outputs = [output for cell in code for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs), "a tour has pictures"
    for output in outputs:
        assert output.output_type != "error"
        assert output.get("name") != "stderr", "no warnings and logs in a tour"
        without_pictures = {kind: data for kind, data in output.get("data", {}).items() if kind != "image/png"}
        text = json.dumps(without_pictures) + output.get("text", "")
        assert not any(place in text for place in ("/tmp", "/home", "/root", "/var", str(NOTEBOOKS.parent)))
    last = notebook.cells[-1]
    assert last.cell_type == "markdown"
    assert last.source.startswith("## What to remember")


def test_there_are_notebooks() -> None:
    named = {"01_split_layouts", "02_global_batches", "03_resume_elsewhere", "04_elastic_run"}
    assert named <= {path.stem for path in PATHS}


@pytest.mark.timeout(120)
def test_a_broken_cell_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "broken.ipynb"
    cells = [new_markdown_cell("# Broken"), new_code_cell("x = 1"), new_code_cell("assert x == 2, 'x is ' + str(x)")]
    nbformat.write(new_notebook(cells=cells), path)
    with pytest.raises(CellExecutionError, match="x is 1"):
        run_notebook(path)


@pytest.mark.timeout(120)
def test_an_output_that_changed_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "changed.ipynb"
    nbformat.write(new_notebook(cells=[new_code_cell("print(1)\n2 + 2")]), path)
    ran = run_notebook(path)
    assert texts(ran) == [["stdout: 1\n", "execute_result: 4"]]
    ran.cells[0].source = "print(1)\n2 + 3"
    nbformat.write(ran, path)
    assert texts(run_notebook(path)) != texts(ran)


@pytest.mark.timeout(120)
def test_the_kernel_is_this_python_in_the_notebooks_folder(tmp_path: Path) -> None:
    path = tmp_path / "where.ipynb"
    nbformat.write(
        new_notebook(cells=[new_code_cell("import os, sys\nprint(sys.executable)\nprint(os.getcwd())")]), path
    )
    assert texts(run_notebook(path)) == [[f"stdout: {sys.executable}\n{tmp_path}\n"]]
