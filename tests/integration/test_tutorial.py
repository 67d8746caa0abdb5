"""The cells of `docs/tutorial.ipynb` run from first to last, and the notebook is kept small."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.real_scans import ROOT

NOTEBOOK = ROOT / "docs" / "tutorial.ipynb"


SHOW = """
def show_value(value):
    print(value._repr_html_() if hasattr(value, "_repr_html_") else repr(value))
"""


def as_script(cell: dict[str, list[str]]) -> str:
    """Return the code of a cell, which shows its last expression as a notebook does."""
    module = ast.parse("".join(cell["source"]))
    last = module.body[-1]
    if isinstance(last, ast.Expr) and not isinstance(last.value, ast.Call):
        call = ast.Call(ast.Name("show_value", ast.Load()), [last.value], [])
        module.body[-1] = ast.fix_missing_locations(ast.copy_location(ast.Expr(call), last))
    return ast.unparse(ast.fix_missing_locations(module))


def cells() -> list[dict[str, list[str]]]:
    listed = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in listed if cell["cell_type"] == "code"]


def test_the_notebook_is_stored_without_outputs() -> None:
    assert len(cells()) > 8
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells())
    assert NOTEBOOK.stat().st_size < 300_000


@pytest.mark.thorough
def test_the_notebook_runs(tmp_path: Path) -> None:
    """The last line of a cell is shown by its HTML or text, as a notebook shows it."""
    pytest.importorskip("pandas")
    program = "\n".join([SHOW, *map(as_script, cells())])
    (tmp_path / "tutorial.py").write_text(program, encoding="utf-8")
    variables = {"SCANLOOM_KEY": str(tmp_path / "key"), "TMPDIR": str(tmp_path)}

    ended = subprocess.run(
        [sys.executable, tmp_path / "tutorial.py"],
        cwd=NOTEBOOK.parent,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )

    assert ended.returncode == 0, ended.stderr
    assert "2 of 2 scans\n" in ended.stdout
    assert ended.stdout.count("<img") == 3
    assert "Reason.NOT_FOUND" in ended.stdout
