"""The files of a bundle: regular ones that lie in it, read as text, JSON or an archive's names."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import IO, Any, Final

from scanloom.cards.config import short
from scanloom.core import Reason, ScanError, byte_words

MAX_BYTES: Final = 1 << 20
"""Largest text that is read; the largest of MONAI's model zoo has 60 kB."""
GROWTH: Final = 4
"""Times the size of their file that weights may take when they are read; torch stores them plain,
and what shares memory in the file rarely does so twice."""


def find_file(folder: Path, name: str) -> Path | None:
    """Return a bundle's file, None where it is not there or is no regular file.

    Raises
    ------
    ScanError
        MODEL_UNSAFE where it is reached by a link that leads out of the folder: what it leads to
        was not given with the bundle, and may be anything.
    """
    file = folder / name
    try:
        if not file.is_file():
            return None
        inside = file.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError, ValueError):  # links in a circle; no name that a file can have
        return None
    if not inside:
        detail = f"{short(name)} is a link out of the bundle: copy the file to its place"
        raise ScanError(Reason.MODEL_UNSAFE, detail)
    return file


def read_json(folder: Path, name: str) -> Any:
    """Return what a JSON file of a bundle holds.

    Raises
    ------
    ScanError
        MODEL_DAMAGED where it is missing, too large or no JSON; MODEL_UNSAFE as `find_file`.
    """
    text = read_text(folder, name)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise ScanError(Reason.MODEL_DAMAGED, f"{name} is no JSON") from exc


def read_text(folder: Path, name: str) -> str:
    """Return the text of a file of a bundle; errors as `read_json`."""
    file = find_file(folder, name)
    if file is None:
        raise ScanError(Reason.MODEL_DAMAGED, f"there is no {name}")
    try:
        with file.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
        text = data.decode("utf-8-sig")
    except OSError as exc:
        raise ScanError(Reason.MODEL_DAMAGED, f"{name} can't be read") from exc
    except UnicodeDecodeError as exc:
        raise ScanError(Reason.MODEL_DAMAGED, f"{name} is no text") from exc
    if len(data) > MAX_BYTES:
        raise ScanError(Reason.MODEL_DAMAGED, f"{name} is larger than {byte_words(MAX_BYTES)}")
    return text


def check_archive(stream: IO[bytes]) -> None:
    """Refuse weights whose file is an archive that may not be opened; any other file passes.

    Raises
    ------
    ScanError
        MODEL_UNSAFE for TorchScript and exported programs, whose code would run when they are
        loaded, and for what is packed so that it grows; MODEL_DAMAGED where it can't be read.
    """
    size = stream.seek(0, io.SEEK_END)
    try:
        if not zipfile.is_zipfile(stream):
            return
        with zipfile.ZipFile(stream) as archive:
            members = archive.infolist()
    except Exception as exc:  # what a damaged directory raises is not one kind of error
        raise ScanError(Reason.MODEL_DAMAGED, "its weights are a damaged archive") from exc
    names = [member.filename.partition("/")[2] for member in members]
    if any(name == "constants.pkl" or name.startswith("code/") for name in names):
        raise ScanError(Reason.MODEL_UNSAFE, "its weights are a program, no state dict")
    check_growth(sum(member.file_size for member in members), size)


def check_growth(read: int, size: int) -> None:
    """Refuse weights of `read` bytes in a file of `size` bytes: MODEL_UNSAFE beyond `GROWTH`."""
    if read > GROWTH * size:
        detail = f"its weights are {byte_words(size)} and would grow to {byte_words(read)}"
        raise ScanError(Reason.MODEL_UNSAFE, detail)
