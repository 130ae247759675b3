"""The notebooks run from top to bottom, and were saved with the resulting outputs."""

import json
import os
import re
import sys
from pathlib import Path

import pytest
from programs import warnings_of

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


pytestmark = [pytest.mark.interop, pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)]


def read_cells(path):
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    return notebook, [cell for cell in notebook.cells if cell.cell_type == "code"]


def output_kinds(cells):
    """Return the kinds of the outputs of each cell, less the notice that there are no compiled kernels."""
    shown = [[output for output in cell.outputs if warnings_of(output.get("text", "x"))] for cell in cells]
    return [[output.get("name", output.output_type) for output in outputs] for outputs in shown]


def execute(notebook, folder, home, python, tools):
    """Run all cells in a fresh kernel of *python*, regardless of installed kernels; briefly, if they can.

    The folder *tools* takes the place of that in which tools are installed.
    """
    from jupyter_client.kernelspec import KernelSpecManager
    from jupyter_client.manager import AsyncKernelManager
    from nbclient import NotebookClient

    for cell in notebook.cells:
        cell.source = cell.source.replace(
            'sysconfig.get_path("scripts")', repr(f"{tools}{os.pathsep}{Path(sys.executable).parent}")
        )
    manager = AsyncKernelManager(kernel_name="python3", kernel_spec_manager=KernelSpecManager(kernel_dirs=[]))
    manager.kernel_spec.argv = [python, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    client = NotebookClient(
        notebook, km=manager, timeout=120, coalesce_streams=True, resources={"metadata": {"path": folder}}
    )
    environment = {**os.environ, "CI": "true", "IPYTHONDIR": str(home), "JUPYTER_RUNTIME_DIR": str(home)}
    client.execute(env=environment, cleanup_kc=True)


def test_a_notebook_runs_without_errors_and_warnings(path, tmp_path, python_with_torch, path_with_tools):
    notebook, cells = read_cells(path)
    saved = output_kinds(cells)
    execute(notebook, path.parent, tmp_path, python_with_torch, path_with_tools.split(":")[0])
    assert output_kinds(cells) == saved
    assert not any("stderr" in kinds for kinds in saved)


def test_a_notebook_is_saved_as_it_ran(path):
    _, cells = read_cells(path)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    kinds = {kind for kinds in output_kinds(cells) for kind in kinds}
    assert "display_data" in kinds
    assert not kinds & {"error", "stderr"}


def test_a_saved_notebook_tells_nothing_of_the_machine_it_ran_on(path):
    _, cells = read_cells(path)
    outputs = [output for cell in cells for output in cell.outputs]
    for output in outputs:
        output.get("data", {}).pop("image/png", None)
    assert not re.search(r"/(work|root|home|tmp)/|0x[0-9a-f]{6}", json.dumps(outputs))
