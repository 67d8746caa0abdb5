"""Read files of a bundle safely: regular files inside the bundle, of limited size."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, Final

from scanloom.core import Reason, ScanError, format_bytes, is_passing, printable, read_error

MAX_BYTES: Final = 1 << 20
"""Largest text file that is read; the largest in MONAI's model zoo has 60 kB."""
MAX_MEMBERS: Final = 20_000
"""Most files in an archive of weights: one for each tensor."""
GROWTH: Final = 4
"""Largest ratio of weights in memory to their file. torch does not compress them; in real files, at
most two tensors share memory."""
TASK_FILE: Final = "totalsegmentator.json"
"""File that names the task of a folder with TotalSegmentator's weights: `{"task": "total_fast"}`.
One that was downloaded has it; it is optional."""
NO_OPTIONS: Final[Mapping[str, str]] = MappingProxyType({})
"""Of a model that has no options."""

LICENCE_PLACES: Final = ("*", "docs/*", "Dataset*/*", "*__*__*/*", "Dataset*/*__*__*/*")
"""Where licence files are: in a bundle, and in the folders of nnU-Net's datasets and models.

One may be at several of these."""
_LFS: Final = b"version https://git-lfs.github.com/spec/"
"""Beginning of the text in the place of a file in a clone without Git LFS."""
_LICENSES: Final = (("Apache License", "Apache-2.0"), ("MIT License", "MIT"))
"""Phrases in texts of licences, and the licences' SPDX identifiers."""
TORCHSCRIPT: Final = (
    "TorchScript and exported programs would run. Save the weights of the network by "
    "`torch.save(torch.jit.load(FILE).state_dict(), 'model.pt')`, and let the bundle load these"
)
"""What to do with a network that is a program."""


def damaged(detail: str) -> ScanError:
    """Return the error for a file of a model that is missing, malformed or contradicts another."""
    return ScanError(Reason.MODEL_DAMAGED, detail)


def unsupported(detail: str) -> ScanError:
    """Return the error for a feature that a card can't express."""
    return ScanError(Reason.MODEL_UNSUPPORTED, detail)


def unsafe(detail: str) -> ScanError:
    """Return the error for a model that would run code, leave its folder or expand without end."""
    return ScanError(Reason.MODEL_UNSAFE, detail)


def truncate(text: str, limit: int = 120) -> str:
    """Return a bundle's text for quoting: one line of at most `limit` characters."""
    line = printable(text[: limit + 1])
    return line if len(line) <= limit else line[:limit] + "..."


def find_file(folder: Path, name: str) -> Path | None:
    """Return a bundle's file, None if it is missing or not a regular file.

    Raises
    ------
    ScanError
        MODEL_UNSAFE if the path or a link leads out of the folder: what is there is not part of the
        bundle.
    """
    if name.startswith("/") or ".." in name.split("/"):
        raise unsafe(f"{truncate(name)} is outside the bundle")
    file = folder / name
    try:
        if not file.is_file():
            return None
        inside = file.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError, ValueError) as exc:  # a loop of links; an invalid file name
        if is_passing(exc):
            raise read_error(exc, truncate(name), Reason.MODEL_DAMAGED) from exc
        return None
    if not inside:
        raise unsafe(f"{truncate(name)} is a link out of the bundle: replace it with the file")
    return file


def read_json(folder: Path, name: str) -> Any:
    """Return the parsed content of a bundle's JSON file.

    Raises
    ------
    ScanError
        MODEL_DAMAGED if it is missing, too large or not JSON; MODEL_UNSAFE as `find_file`.
    """
    text = read_text(folder, name)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise damaged(f"{name} is not valid JSON") from exc


def read_text(folder: Path, name: str) -> str:
    """Return the text of a bundle's file; errors as `read_json`."""
    file = find_file(folder, name)
    if file is None:
        raise damaged(f"{name} is missing")
    try:
        return read_bytes(file, name).decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        raise damaged(f"{name} is not UTF-8 text") from exc


def read_license(folder: Path) -> str:
    """Return the licence (SPDX) that a model's LICENSE file names, "see" it, or "unknown"."""
    for name in ("LICENSE", "docs/license.txt"):
        if find_file(folder, name) is not None:
            text = read_text(folder, name)
            named = (spdx for phrase, spdx in _LICENSES if phrase in text)
            return next(named, f"see {name.rpartition('/')[2]}")
    return "unknown"


def read_bytes(file: Path, name: str) -> bytes:
    """Return the content of a file of at most `MAX_BYTES`; MODEL_DAMAGED, with its name, else."""
    try:
        with file.open("rb") as stream:
            # not by the size of the file, which may change meanwhile
            data = stream.read(MAX_BYTES + 1)
    except OSError as exc:
        raise read_error(exc, name, Reason.MODEL_DAMAGED) from exc
    if len(data) > MAX_BYTES:
        raise damaged(f"{name} is larger than {format_bytes(MAX_BYTES)}")
    return data


def is_safetensors(stream: IO[bytes]) -> bool:
    """Return whether a seekable stream begins like a safetensors file, whatever its file name.

    A safetensors file begins with the length of its JSON header, in 8 bytes. The first bytes of
    PyTorch files, taken as such a length, exceed any file's size.
    """
    size = stream.seek(0, io.SEEK_END)
    stream.seek(0)
    start = stream.read(9)
    header_bytes = int.from_bytes(start[:8], "little")
    return len(start) == 9 and start[8:] == b"{" and header_bytes + 8 <= size


def check_archive(stream: IO[bytes]) -> None:
    """Refuse weights in an unsafe zip archive; files that are not archives pass.

    Raises
    ------
    ScanError
        MODEL_UNSAFE for TorchScript and exported programs, whose code would run when loaded, and
        for archives that expand excessively; MODEL_DAMAGED if the archive is unreadable, or the
        file is only the text that Git LFS has in its place.
    """
    size = stream.seek(0, io.SEEK_END)
    stream.seek(0)
    if stream.read(len(_LFS)) == _LFS:
        raise damaged("the weights are a pointer of Git LFS: get the file itself by `git lfs pull`")
    try:
        if not zipfile.is_zipfile(stream):
            return
        with zipfile.ZipFile(stream) as archive:
            members = archive.infolist()
    except Exception as exc:  # damaged archives raise errors of many types
        raise damaged("the weights are a damaged archive") from exc
    if len(members) > MAX_MEMBERS:
        raise unsafe(f"the weights have more than {MAX_MEMBERS} files")
    # torch puts all members into one folder, which has the name of the file
    names = [member.filename.partition("/")[2] for member in members]
    if any(name == "constants.pkl" or name.startswith("code/") for name in names):
        raise unsafe(f"the weights are a program, not a state dict: {TORCHSCRIPT}")
    check_growth(sum(member.file_size for member in members), size)


def check_growth(read: int, size: int) -> None:
    """Refuse weights that expand from `size` to `read` bytes: MODEL_UNSAFE beyond `GROWTH`."""
    if read > GROWTH * size:
        detail = f"the weights are {format_bytes(size)} and would expand to {format_bytes(read)}"
        raise unsafe(detail)
