"""The cells of `docs/tutorial.ipynb` run from first to last, and the notebook is kept small."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.real_scans import ROOT

NOTEBOOK = ROOT / "docs" / "tutorial.ipynb"


SHOW = """
def show_value(value):
    print(value._repr_html_() if hasattr(value, "_repr_html_") else repr(value))
"""


def as_script(cell: dict[str, Any]) -> str:
    """Return the code of a cell, which shows its last expression as a notebook does."""
    module = ast.parse("".join(cell["source"]))
    last = module.body[-1]
    if isinstance(last, ast.Expr) and not isinstance(last.value, ast.Call):
        call = ast.Call(ast.Name("show_value", ast.Load()), [last.value], [])
        module.body[-1] = ast.fix_missing_locations(ast.copy_location(ast.Expr(call), last))
    return ast.unparse(ast.fix_missing_locations(module))


def without_numbers(text: str) -> str:
    """Return a text with a sign for each number, and single spaces."""
    return " ".join(re.sub(r"-?\d[\d.]*", "#", text).split())


def cells() -> list[dict[str, Any]]:
    listed = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in listed if cell["cell_type"] == "code"]


def test_the_notebook_is_stored_with_texts_and_pictures() -> None:
    """`docs/write_tutorial.py` writes them; nothing in them is of one machine."""
    text = NOTEBOOK.read_text(encoding="utf-8")
    kinds = [output["output_type"] for cell in cells() for output in cell["outputs"]]

    assert kinds.count("execute_result") == 4
    assert kinds.count("stream") == 6
    assert text.count("<img") == 3
    assert all(cell["execution_count"] is None for cell in cells())
    assert "/tmp/" not in text
    assert "Traceback" not in text
    assert NOTEBOOK.stat().st_size < 500_000


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
    # What it printed, but for numbers: those of half precision differ between processors
    for cell in cells():
        for output in cell["outputs"]:
            if output["output_type"] == "stream":
                assert without_numbers("".join(output["text"])) in without_numbers(ended.stdout)
