"""Run `docs/tutorial.ipynb` and store its outputs in it: texts, tables and pictures.

    pip install nbclient ipykernel
    python docs/write_tutorial.py

What belongs to one machine is left out: numbers of executions, folders, warnings. Pictures are made
as wide as they are shown.
"""

from __future__ import annotations

import base64
import io
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from PIL import Image

NOTEBOOK = Path(__file__).with_name("tutorial.ipynb")
KINDS = ("text/html", "text/plain")
"""Kinds of results that are stored; of several, the first."""

WIDTH = 900
"""Pixels of a picture, as `scanloom.interop.notebook` shows it."""
FOLDER = re.compile(rf"{re.escape(tempfile.gettempdir())}/[\w/]+/(?=out/cases)")
PICTURE = re.compile(r"(?<=base64,)[\w+/=]+")


def smaller(match: re.Match[str]) -> str:
    """Return a PNG in base64 that is no wider than it is shown, in 128 colours."""
    picture = Image.open(io.BytesIO(base64.b64decode(match[0]))).convert("RGB")
    picture.thumbnail((WIDTH, WIDTH), Image.Resampling.LANCZOS)
    png = io.BytesIO()
    picture.quantize(128).save(png, format="PNG", optimize=True)
    return base64.b64encode(png.getvalue()).decode()


def stored(output: Any) -> dict[str, Any] | None:
    """Return an output as it is stored, or None for one of the machine."""
    if output["output_type"] == "stream":
        return dict(output) if output["name"] == "stdout" else None
    kind = next(kind for kind in KINDS if kind in output["data"])
    return {
        "output_type": "execute_result",
        "execution_count": None,
        "metadata": {},
        "data": {kind: PICTURE.sub(smaller, FOLDER.sub("", output["data"][kind]))},
    }


def main() -> None:
    """Run all cells in the folder `docs` with a key of their own."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(SCANLOOM_KEY=str(Path(folder, "key")), TMPDIR=folder)
        client = NotebookClient(
            notebook, resources={"metadata": {"path": NOTEBOOK.parent}}, coalesce_streams=True
        )
        client.execute()
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            kept = [each for output in cell.outputs if (each := stored(output)) is not None]
            cell.update(outputs=[nbformat.from_dict(each) for each in kept], execution_count=None)
    nbformat.write(notebook, NOTEBOOK)


if __name__ == "__main__":
    main()
