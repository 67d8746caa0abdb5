"""The engines of an output folder, and what is left of them where nothing was written."""

from __future__ import annotations

from pathlib import Path

import pytest

from scanloom.core.engines import EngineRecord
from scanloom.io.output.engines import OutputEngines, remove_unused_engines


@pytest.mark.parametrize("beside", ["", "cases", ".work/b.new", "notes.txt"])
def test_a_new_folder_of_nothing_but_engines_is_removed(beside: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    OutputEngines(out).record("net", EngineRecord("torch", "float32"))
    if beside:
        (out / beside).mkdir(parents=True)

    remove_unused_engines(out)

    assert out.exists() is bool(beside)
    assert (OutputEngines(out).recorded("net") is not None) is bool(beside)
