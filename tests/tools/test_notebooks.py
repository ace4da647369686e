"""Every notebook runs from top to bottom.

What reads notebooks is imported where it is used: machines that run tests of other markers may be without it.
"""

from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=() if path.name.startswith("1_") else pytest.mark.slow) for path in NOTEBOOKS],
    ids=lambda path: path.name,
)
def test_notebook_runs(path):
    import nbformat
    from nbclient import NotebookClient

    where = {"metadata": {"path": str(path.parent)}}  # as Jupyter runs it
    NotebookClient(nbformat.read(path, as_version=4), timeout=300, kernel_name="python3", resources=where).execute()


def test_there_are_notebooks_with_outputs():
    import nbformat

    assert NOTEBOOKS
    for path in NOTEBOOKS:
        cells = nbformat.read(path, as_version=4).cells
        assert len(cells) <= 20 and any(cell.get("outputs") for cell in cells)
