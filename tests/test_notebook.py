"""The notebook of the examples runs, and shows what it showed when it was committed.

``python tests/test_notebook.py`` runs it and writes its outputs anew.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from needs import needs_forward_lines

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")
pytest.importorskip("matplotlib")

NOTEBOOK = Path(__file__).parent.parent / "examples" / "sherlorch_demo.ipynb"
VERDICTS = [
    "NaN in `loss` was born in aten.div.Tensor (0 / 0) at In[2]:3  [forward]",
    "NaN in `loss` began as -Inf in aten.log.default (log(0)) at model.blocks.1.gate, In[3]:7  [forward]",
    "NaN in `x.grad` was born in aten.div.Tensor (backward of sqrt) at In[6]:2  [backward]",
]

# What a kernel and its client warn of by themselves.
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::ResourceWarning", "ignore::RuntimeWarning"
)


def read() -> Any:
    return nbformat.read(NOTEBOOK, as_version=4)


def executed(notebook: Any) -> Any:
    """The notebook with the outputs that it gives now; a cell that raises is an error here."""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    client = nbclient.NotebookClient(
        notebook,
        timeout=300,
        kernel_name="python3",
        record_timing=False,
        resources={"metadata": {"path": str(NOTEBOOK.parent)}},
    )
    client.execute()
    return notebook


def outputs(notebook: Any) -> list[Any]:
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


def printed(notebook: Any) -> str:
    return "".join(output.text for output in outputs(notebook) if output.output_type == "stream")


def kinds(notebook: Any) -> list[str]:
    """What the cells show: a stream's name, or the richest form of the data."""
    return [
        output.name if output.output_type == "stream" else min(output.data) for output in outputs(notebook)
    ]


@needs_forward_lines
def test_it_runs_and_gives_what_it_shows() -> None:
    before, after = read(), executed(read())
    text = printed(after)
    for verdict in VERDICTS:
        assert verdict in text
    assert kinds(after) == kinds(before)
    assert "stderr" not in kinds(after)


def test_its_stored_outputs_are_whole() -> None:
    notebook = read()
    text = printed(notebook)
    for verdict in VERDICTS:
        assert verdict in text
    assert kinds(notebook).count("image/png") == 3
    assert kinds(notebook).count("text/html") == 2
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))


def test_it_names_no_file_of_a_machine() -> None:
    text = NOTEBOOK.read_text(encoding="utf-8")
    text = re.sub(r'"image/png": "[^"]*"', "", text)
    assert not re.findall(r"(?:/tmp|/home|/root|/usr|/work|/opt|/Users|ipykernel_)[/\w.]*", text)


if __name__ == "__main__":
    nbformat.write(executed(read()), NOTEBOOK)
