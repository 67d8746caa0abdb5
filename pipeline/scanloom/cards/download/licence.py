"""Licences of models, and whether they have conditions that a user has to accept."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_FILES: Final = re.compile(r"(licen[cs]e|copying|weights_licen[cs]e)([._-][\w.-]*)?", re.IGNORECASE)
_FOLDERS: Final = (".", "docs")
_MAX_BYTES: Final = 1 << 20
_CONDITIONS: Final = re.compile(
    r"non-?\s?commercial|BY[- ]NC|(academic|research) (use|purposes?) only"
    r"|only for (academic|research)",
    re.IGNORECASE,
)
_GNU: Final = re.compile(r"GNU (LESSER |AFFERO )?GENERAL PUBLIC LICENSE", re.IGNORECASE)
"""Licences that mention non-commercial distribution without asking for it."""


@dataclass(frozen=True)
class Licence:
    """Licence of a model.

    Parameters
    ----------
    name : str
        As the model or its source states it.
    text : str
        Text of the licence files, empty if there are absent.
    """

    name: str
    text: str = ""

    @property
    def has_conditions(self) -> bool:
        """Whether the licence excludes commercial use."""
        text = "" if _GNU.search(self.text) else self.text
        return _CONDITIONS.search(f"{self.name}\n{text}") is not None


def read_licence(folder: Path, name: str) -> Licence:
    """Return the licence of a model with the text of its licence files."""
    files = sorted(
        file
        for folder_name in _FOLDERS
        if (folder / folder_name).is_dir()
        for file in (folder / folder_name).iterdir()
        if _FILES.fullmatch(file.name) and file.is_file()
    )
    texts = []
    for file in files:
        with file.open("rb") as stream:
            texts.append(stream.read(_MAX_BYTES).decode("utf-8", errors="replace"))
    return Licence(name, "\n\n".join(texts))
