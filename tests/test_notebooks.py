"""docs/notebooks: their cells run from top to bottom in an empty folder, and the outputs that they hold are whole."""

import json
from pathlib import Path

import pytest
from matplotlib import pyplot

NOTEBOOKS = sorted((Path(__file__).parents[1] / "docs" / "notebooks").glob("*.ipynb"))


def code_cells(notebook):
    """The code cells of a notebook."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.stem)
def test_cells_run(notebook, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    pyplot.switch_backend("agg")
    session: dict[str, object] = {"__name__": "__main__"}
    for number, cell in enumerate(code_cells(notebook), 1):
        exec(compile("".join(cell["source"]), f"{notebook.name}, code cell {number}", "exec"), session)
    assert pyplot.get_fignums(), "a notebook shows pictures"
    pyplot.close("all")


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.stem)
def test_outputs_are_those_of_one_whole_run(notebook):
    cells = code_cells(notebook)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error"]
    assert "site-packages" not in str(outputs), "a path of the machine that ran it is kept"
    assert "\\x1b" not in str(outputs), "a table was printed as for a terminal"
    assert [output for output in outputs if "image/png" in output.get("data", {})], "no picture is kept"
