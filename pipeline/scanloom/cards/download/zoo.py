"""MONAI's model zoo, and repositories on Hugging Face, where its newer bundles are."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import yaml
from packaging.version import InvalidVersion, Version

from scanloom.cards.download import addresses
from scanloom.cards.download.https import ConnectionLostError
from scanloom.cards.download.sources import Gathered, Progress, download, parse_digest, put_file
from scanloom.cards.download.transfer import MAX_DOCUMENT_BYTES, Remote
from scanloom.cards.download.unpack import MAX_FILES, safe_path, unpack_zip
from scanloom.core import Reason, ScanError, did_you_mean, printable

_REPOSITORY: Final = re.compile(r"/([\w.-]+)/([\w.-]+)(?:/tree/([\w.-]+))?/?", re.ASCII)
_NAME: Final = re.compile(r"([\w-]{1,100})(?:@([\w.+-]{1,50}))?", re.ASCII)
_UNREAD_SUFFIXES: Final = (".ts", ".engine", ".trt")
"""Suffixes of files on Hugging Face that no reader takes: programs, and engines of one device."""
_LARGE_FILES: Final = ("large_files.yml", "large_files.yaml", "large_files.json")


@dataclass(frozen=True)
class HuggingFace:
    """A repository on Hugging Face at one revision.

    Its files are compared with the SHA-256, or the git blobs, that the list of files states.
    """

    owner: str
    repository: str
    revision: str = "main"
    licence: str = field(default="", init=False)
    remote: bool = field(default=True, init=False)

    @classmethod
    def parse(cls, address: str) -> HuggingFace | None:
        """Return the repository that an address names, None for other addresses."""
        match = _REPOSITORY.fullmatch(address.removeprefix(addresses.HUGGING_FACE))
        if match is None or not address.startswith(f"{addresses.HUGGING_FACE}/"):
            return None
        return cls(match[1], match[2], match[3] or "main")

    @property
    def name(self) -> str:
        """Name of the repository."""
        return self.repository

    @property
    def origin(self) -> str:
        """Address of the repository at its revision."""
        return f"{self._base}/tree/{self.revision}"

    @property
    def _base(self) -> str:
        return f"{addresses.HUGGING_FACE}/{self.owner}/{self.repository}"

    def gather(self, work: Path, target: Path, progress: Progress) -> Gathered:
        """Download the files."""
        listing = (
            f"{addresses.HUGGING_FACE}/api/models/{self.owner}/{self.repository}"
            f"/tree/{self.revision}?recursive=true"
        )
        for path, remote in self._files(_document(listing, work, progress)):
            put_file(download(remote, work, progress), target, path)
        return Gathered(self.origin, _complete(target, work, progress))

    def _files(self, entries: Any) -> Iterator[tuple[str, Remote]]:
        """Yield path and address of the files that a reader may need."""
        if not isinstance(entries, list) or len(entries) > MAX_FILES:
            raise _malformed("list of files")
        for entry in entries:
            try:
                path = str(entry["path"])
                if entry["type"] != "file":
                    continue
                large = entry.get("lfs")
                algorithm, value = ("sha256", large["oid"]) if large else ("git", entry["oid"])
                size = int(entry["size"])
            except (KeyError, TypeError, ValueError, AttributeError) as exc:
                raise _malformed("list of files") from exc
            safe_path(path)
            if path.startswith(".") or path.endswith(_UNREAD_SUFFIXES):
                continue
            address = f"{self._base}/resolve/{self.revision}/{quote(path)}"
            yield path, Remote(address, parse_digest(algorithm, str(value)), size)


@dataclass(frozen=True)
class ZooBundle:
    """A bundle of MONAI's model zoo; its newest version, unless another is named."""

    bundle: str
    version: str | None = None
    licence: str = field(default="", init=False)
    remote: bool = field(default=True, init=False)

    @classmethod
    def parse(cls, request: str) -> ZooBundle:
        """Return the bundle for `NAME` or `NAME@VERSION`; MODEL_UNKNOWN if it is malformed."""
        match = _NAME.fullmatch(request)
        if match is None:
            detail = f"{printable(request[:200])!r} is neither a file, a folder nor a model's name"
            raise ScanError(Reason.MODEL_UNKNOWN, detail)
        return cls(match[1], match[2])

    @property
    def name(self) -> str:
        """Name of the bundle."""
        return self.bundle

    @property
    def origin(self) -> str:
        """Name in the zoo, with the version if it is given."""
        return f"MONAI model zoo: {self.bundle}" + (f"@{self.version}" if self.version else "")

    def gather(self, work: Path, target: Path, progress: Progress) -> Gathered:
        """Download the bundle from where the zoo's list leads to, else from Hugging Face."""
        bundle, version, entry = self._find(_document(addresses.ZOO_LIST, work, progress))
        twin = HuggingFace(addresses.ZOO_OWNER, bundle, version)
        try:
            source, checksum = str(entry["source"]), str(entry["checksum"])
        except (KeyError, TypeError) as exc:
            raise _malformed("list of the model zoo") from exc
        repository = HuggingFace.parse(source)
        if repository is not None:
            return repository.gather(work, target, progress)
        try:
            archive = download(Remote(source, parse_digest("sha1", checksum)), work, progress)
        except ScanError as exc:
            if exc.reason is not Reason.DOWNLOAD or isinstance(exc, ConnectionLostError):
                raise
            return twin.gather(work, target, progress)
        unpack_zip(archive, target)
        folders = [folder for folder in target.iterdir() if folder.is_dir()]
        folder = folders[0] if len(folders) == 1 else target
        return Gathered(source, _complete(folder, work, progress))

    def _find(self, listing: Any) -> tuple[str, str, Any]:
        """Return name, version and entry of the bundle in the zoo's list."""
        if not isinstance(listing, dict):
            raise _malformed("list of the model zoo")
        versions: dict[str, dict[str, Any]] = {}
        for key, entry in listing.items():
            bundle, _, version = key.removesuffix(".zip").rpartition("_v")
            versions.setdefault(bundle, {})[version] = entry
        names = {bundle.lower(): bundle for bundle in versions if bundle}
        bundle = names.get(self.bundle.lower())
        if bundle is None:
            hint = did_you_mean(self.bundle, sorted(names.values()))
            detail = f"MONAI's model zoo has no {self.bundle!r}; {hint}"
            raise ScanError(Reason.MODEL_UNKNOWN, detail)
        version = self.version or max(versions[bundle], key=_order)
        if version not in versions[bundle]:
            hint = did_you_mean(version, sorted(versions[bundle], key=_order))
            detail = f"{bundle} has no version {version}; {hint}"
            raise ScanError(Reason.MODEL_UNKNOWN, detail)
        return bundle, version, versions[bundle][version]


def _order(version: str) -> tuple[bool, Version]:
    """Return a sort key for versions: malformed ones come first."""
    try:
        return True, Version(version)
    except InvalidVersion:
        return False, Version("0")


def _complete(folder: Path, work: Path, progress: Progress) -> bool:
    """Check the files that a bundle's `large_files` lists, and download those that are missing.

    Returns
    -------
    bool
        Whether all of them have published checksums.
    """
    name = next((name for name in _LARGE_FILES if (folder / name).is_file()), None)
    if name is None:
        return True
    published = True
    for path, remote in _large_files(folder / name):
        published &= remote.digest is not None
        if path.endswith(_UNREAD_SUFFIXES):
            continue
        file = folder / safe_path(path)
        if not file.is_file():
            put_file(download(remote, work, progress), folder, path)
        elif remote.digest is not None and not remote.digest.matches(file):
            detail = f"{printable(path)} differs from the checksum in {name}"
            raise ScanError(Reason.MODEL_HASH, detail)
    return published


def _large_files(file: Path) -> Iterator[tuple[str, Remote]]:
    """Yield path, address and checksum of the files that a bundle's `large_files` lists."""
    try:
        with file.open("rb") as stream:
            entries = yaml.safe_load(stream.read(MAX_DOCUMENT_BYTES))["large_files"]
        files = [
            (str(e["path"]), str(e["url"]), e.get("hash_type"), e.get("hash_val")) for e in entries
        ]
    except (yaml.YAMLError, KeyError, TypeError, AttributeError, ValueError, RecursionError) as exc:
        raise ScanError(Reason.MODEL_DAMAGED, f"{file.name} is malformed") from exc
    for path, address, algorithm, value in files:
        digest = parse_digest(str(algorithm), str(value)) if algorithm and value else None
        yield path, Remote(address, digest)


def _document(address: str, work: Path, progress: Progress) -> Any:
    """Return a JSON document from the network; it is downloaded anew each time."""
    file = download(Remote(address), work, progress, MAX_DOCUMENT_BYTES)
    try:
        return json.loads(file.read_bytes())
    except (ValueError, RecursionError) as exc:
        raise _malformed("reply") from exc
    finally:
        file.unlink(missing_ok=True)


def _malformed(document: str) -> ScanError:
    return ScanError(Reason.DOWNLOAD, f"the {document} is malformed")
