"""The notebooks run from their first cell to the last."""

import asyncio

import pytest
from conftest import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.filterwarnings("default")  # the kernel's and the client's own
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(ray_cluster, monkeypatch, tmp_path, path):
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=60, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    )
    asyncio.run(client.async_execute())  # raises what a cell raised; execute() keeps its loop open
    assert all(cell.execution_count for cell in notebook.cells if cell.cell_type == "code")


def test_there_are_notebooks():
    assert NOTEBOOKS
