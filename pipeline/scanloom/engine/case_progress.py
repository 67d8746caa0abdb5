"""Progress of a case in a small file, which the process of the run reads, wherever the worker is.

A worker may be on another machine: what they share is the output folder.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from scanloom.core.timing import WindowCount, WindowPace
from scanloom.io.system.regular_files import read_regular_file

FOLDER = "progress"
"""Folder in that of a run; it is removed at its end."""
_PERIOD_S = 1.0
_MAX_BYTES = 10_000
_FIELDS = MappingProxyType(
    {"step": str, "model": str, "network": int, "networks": int, "done": int, "total": int}
)


class CaseProgress:
    """Writes step and windows of a case, about once a second; does nothing without a folder.

    The folder is that of all cases, in which a file has the id of its case; created if missing.
    """

    def __init__(self, folder: Path | None, case_id: str) -> None:
        self._file = None if folder is None else _file_of(folder, case_id)
        self._now: dict[str, Any] = {}
        self._pace, self._written = WindowPace(), -_PERIOD_S
        self._told: set[str] = set()

    def on_step(self, name: str) -> None:
        """Record that a step begins."""
        self._now["step"] = name
        self._write(name)

    def on_windows(self, count: WindowCount) -> None:
        """Record the windows that are done."""
        remaining = self._pace.left(count)
        self._now |= {
            "model": count.model,
            "network": count.network,
            "networks": count.networks,
            "done": count.done,
            "total": count.total,
            "left_s": None if remaining is None else round(remaining, 1),
        }
        self._write(f"network {count.network}")

    def _write(self, subject: str) -> None:
        """Write the progress; at once where a step or network begins, which may take long."""
        now = time.monotonic()
        is_late = now - self._written >= _PERIOD_S
        if self._file is None or (subject in self._told and not is_late):
            return
        self._told.add(subject)
        self._written = now
        draft = self._file.with_suffix(".new")
        with suppress(OSError):  # no case fails for lack of progress on a screen
            self._file.parent.mkdir(exist_ok=True)
            draft.write_text(json.dumps(self._now), encoding="utf-8")
            draft.replace(self._file)

    def close(self) -> None:
        """Remove the file: the case has ended."""
        if self._file is not None:
            with suppress(OSError):
                self._file.unlink(missing_ok=True)


def read_progress(folder: Path, case_id: str) -> Mapping[str, Any] | None:
    """Return step and windows of a case; None without a valid file."""
    try:
        read = json.loads(read_regular_file(_file_of(folder, case_id), _MAX_BYTES))
        remaining = read.get("left_s")
        known = {name: kind(read[name]) for name, kind in _FIELDS.items() if name in read}
        return {**known, "left_s": None if remaining is None else float(remaining)}
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def _file_of(folder: Path, case_id: str) -> Path:
    return folder / f"{case_id}.json"
