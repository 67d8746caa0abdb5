"""Sources of models: folders, zip files, and files on the network."""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Final, Protocol
from urllib.parse import urlsplit

from scanloom.cards.download.digests import Digest
from scanloom.cards.download.transfer import MAX_FILE_BYTES, Remote, fetch
from scanloom.cards.download.unpack import copy_folder, safe_path, unpack_zip
from scanloom.core import Reason, ScanError, printable

Progress = Callable[[str, int, int | None], None]
"""Called with a file's name, the bytes received so far, and the total, None if unknown."""
_NNUNET_NAME: Final = re.compile(r"(.+__.+)__(\w+)")


@dataclass(frozen=True)
class Gathered:
    """Address that files came from, and whether all were compared with published checksums."""

    address: str
    published: bool


class Source(Protocol):
    """Place that a model comes from."""

    @property
    def name(self) -> str:
        """Name for the model, unless the user gives another."""

    @property
    def origin(self) -> str:
        """Text for the record: the address, or kind and name of a local source."""

    @property
    def remote(self) -> bool:
        """Whether the network is needed."""

    @property
    def licence(self) -> str:
        """Licence as the source states it, empty if the model's own files do."""

    def gather(self, work: Path, target: Path, progress: Progress) -> Gathered:
        """Write the model's files below `target`; downloads are kept in `work`."""


@dataclass(frozen=True)
class LocalFolder:
    """A folder on this machine.

    nnU-Net's names of folders (TRAINER__PLANS__CONFIGURATION) are kept, below that of the model,
    and a cascade is copied with its first stage, which is next to it.
    """

    path: Path
    remote: bool = field(default=False, init=False)
    licence: str = field(default="", init=False)

    @property
    def name(self) -> str:
        """Name of the folder; for nnU-Net's, the data set and the configuration."""
        path = self.path.resolve()
        if _NNUNET_NAME.fullmatch(path.name):
            return f"{path.parent.name}_{path.name.rpartition('__')[2]}"
        return path.name

    @property
    def origin(self) -> str:
        """Name of the folder; its path may name a person."""
        return f"folder {printable(self.name)}"

    def gather(self, work: Path, target: Path, progress: Progress) -> Gathered:
        """Copy the files."""
        path = self.path.resolve()
        match = _NNUNET_NAME.fullmatch(path.name)
        if match is None:
            copy_folder(path, target)
        else:
            first = path.with_name(f"{match[1]}__3d_lowres")
            stages = [first] if match[2] == "3d_cascade_fullres" and first.is_dir() else []
            for folder in (*stages, path):
                copy_folder(folder, target / folder.name)
        return Gathered(self.origin, published=False)


@dataclass(frozen=True)
class LocalZip:
    """A zip file on this machine."""

    path: Path
    remote: bool = field(default=False, init=False)
    licence: str = field(default="", init=False)

    @property
    def name(self) -> str:
        """Name of the file without its suffix."""
        return self.path.stem

    @property
    def origin(self) -> str:
        """Name of the file; its path may name a person."""
        return f"zip file {printable(self.path.name)}"

    def gather(self, work: Path, target: Path, progress: Progress) -> Gathered:
        """Unpack the file."""
        if not self.path.is_file():
            detail = f"{printable(self.path.name)} is neither a folder nor a zip file"
            raise ScanError(Reason.MODEL_UNKNOWN, detail)
        unpack_zip(self.path, target)
        return Gathered(self.origin, published=False)


@dataclass(frozen=True)
class RemoteZips:
    """Zip files on the network, unpacked into one folder.

    Parameters
    ----------
    name, origin, licence : str
        As in `Source`.
    zips : tuple of Remote
        The files.
    texts : mapping of str to str
        Further files: path and content.
    """

    name: str
    origin: str
    zips: tuple[Remote, ...]
    licence: str = ""
    texts: Mapping[str, str] = field(default_factory=dict)
    remote: bool = field(default=True, init=False)

    def gather(self, work: Path, target: Path, progress: Progress) -> Gathered:
        """Download and unpack the files."""
        files = [download(remote, work, progress) for remote in self.zips]
        for file in files:
            unpack_zip(file, target)
        for path, text in self.texts.items():
            (target / path).write_text(text, encoding="utf-8")
        published = all(remote.digest is not None for remote in self.zips)
        return Gathered(", ".join(remote.address for remote in self.zips), published)


@dataclass(frozen=True)
class RemoteFiles:
    """Single files on the network, by their paths in the model's folder."""

    name: str
    origin: str
    files: Mapping[str, Remote]
    licence: str = ""
    remote: bool = field(default=True, init=False)

    def gather(self, work: Path, target: Path, progress: Progress) -> Gathered:
        """Download the files."""
        for path, remote in self.files.items():
            put_file(download(remote, work, progress), target, path)
        published = all(remote.digest is not None for remote in self.files.values())
        return Gathered(self.origin, published)


def download(
    remote: Remote, work: Path, progress: Progress, limit_bytes: int = MAX_FILE_BYTES
) -> Path:
    """Return a downloaded file in the folder `work`; errors as `fetch`."""
    work.mkdir(parents=True, exist_ok=True)
    target = work / hashlib.sha256(remote.address.encode()).hexdigest()[:24]
    label = printable(PurePosixPath(urlsplit(remote.address).path).name)
    fetch(remote, target, limit_bytes, partial(progress, label))
    return target


def put_file(file: Path, target: Path, path: str) -> None:
    """Give a downloaded file its path in a model's folder; the download stays, too."""
    goal = target / safe_path(path)
    goal.parent.mkdir(parents=True, exist_ok=True)
    try:
        goal.hardlink_to(file)
    except FileExistsError as exc:
        raise ScanError(Reason.MODEL_DAMAGED, f"{printable(path)} is listed twice") from exc
    except OSError:  # a file system without hard links
        shutil.copyfile(file, goal)


def parse_digest(algorithm: str, value: str) -> Digest:
    """Return a published checksum; MODEL_HASH if it is malformed."""
    try:
        return Digest(algorithm, value.strip().lower())  # type: ignore[arg-type]  # is checked
    except ValueError as exc:
        raise ScanError(Reason.MODEL_HASH, f"a published checksum is {exc}") from exc
