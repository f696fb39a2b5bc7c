"""The notebooks run from their first cell to the last."""

import pytest
from conftest import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
CELL_SECONDS = 240

# In a process of its own: what the client leaves to the collector is no warning of other tests.
RUN = """
import sys
import nbclient
import nbformat

notebook = nbformat.read(sys.argv[1], as_version=4)
client = nbclient.NotebookClient(
    notebook, timeout=int(sys.argv[2]), kernel_name="python3",
    resources={"metadata": {"path": "."}},
)
client.execute()  # raises what a cell raised
assert all(cell.execution_count for cell in notebook.cells if cell.cell_type == "code")
"""


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize(
    "path",
    # the first for the gate; all of them take long
    [pytest.param(p, marks=[] if p == NOTEBOOKS[0] else pytest.mark.slow) for p in NOTEBOOKS],
    ids=lambda path: path.stem,
)
def test_a_notebook_runs(start, script, path):
    pytest.importorskip("nbclient")
    run = start(script(RUN), str(path), str(CELL_SECONDS))
    assert run.end(CELL_SECONDS) == 0, run.output


def test_there_are_notebooks():
    assert NOTEBOOKS
