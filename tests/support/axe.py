"""axe-core in a browser: the rules of accessible pages."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest


def axe_core() -> str:
    """Return the script of axe-core."""
    package = find_spec("axe_playwright_python")
    installed = Path(package.origin).with_name("axe.min.js") if package and package.origin else None
    file = Path(os.environ["SCANLOOM_AXE"]) if "SCANLOOM_AXE" in os.environ else installed
    if file is None or not file.is_file():
        pytest.skip("axe-core is not installed (axe-playwright-python, or SCANLOOM_AXE)")
    return file.read_text(encoding="utf-8")


def violations(tab: Any) -> list[str]:
    result = tab.evaluate("axe.run()")
    assert len(result["passes"]) > 10
    return [f"{v['id']}: {v['nodes'][0]['html'][:200]}" for v in result["violations"]]
