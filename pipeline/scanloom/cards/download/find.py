"""Find the source that a request names: an address, a path, or a name from a table."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Final
from urllib.parse import quote, urldefrag, urlsplit

from scanloom.cards.download import addresses
from scanloom.cards.download.digests import Digest
from scanloom.cards.download.https import check_address
from scanloom.cards.download.sources import (
    LocalFolder,
    LocalZip,
    RemoteFiles,
    RemoteZips,
    Source,
    parse_digest,
)
from scanloom.cards.download.transfer import Remote
from scanloom.cards.download.zoo import HuggingFace, ZooBundle
from scanloom.core import Reason, ScanError, did_you_mean, printable

TASK_FILE: Final = "totalsegmentator.json"
"""Name of a file that states the task for which TotalSegmentator's datasets were downloaded."""
_MAX_PATH_CHARACTERS: Final = 4096


def find_source(request: str) -> Source:
    """Return the source that a request names.

    Parameters
    ----------
    request : str
        Address, path of a folder or zip file, `brainchop/NAME`, `totalsegmentator/TASK`,
        `monai/NAME` of a bundle in MONAI's model zoo, with `@VERSION` or without, or the bundle's
        name alone if it is one of `ZOO_BUNDLES`.

    Raises
    ------
    ScanError
        DOWNLOAD for an address that is not https; MODEL_UNKNOWN for a name that is not in a table.
    """
    if "://" in request:
        return HuggingFace.parse(request) or _address(request)
    if not request.strip():
        raise ScanError(Reason.MODEL_UNKNOWN, "the name of the model is empty")
    path = Path(request)
    if "\0" not in request and len(request) < _MAX_PATH_CHARACTERS and path.exists():
        return LocalFolder(path) if path.is_dir() else LocalZip(path)
    collection, _, name = request.rpartition("/")
    if collection.lower() == "brainchop":
        return _brainchop(name)
    if collection.lower() == "totalsegmentator":
        return _totalsegmentator(name.lower())
    if collection.lower() == "monai":
        return ZooBundle.parse(name)
    known = addresses.ZOO_BUNDLES
    bundle = name.partition("@")[0]
    if not collection and bundle.lower() in map(str.lower, known):
        return ZooBundle.parse(name)
    detail = f"there is no folder or zip file {printable(request[:200])!r}"
    if not collection and len(request) < _MAX_PATH_CHARACTERS:
        hint = did_you_mean(bundle, known)
        detail += f", and no model of that name is known; {hint}"
    raise ScanError(Reason.MODEL_UNKNOWN, detail)


def _address(address: str) -> RemoteZips:
    """Return the source for the address of a zip file, pinned by `#sha256=...` or not."""
    plain, fragment = urldefrag(address)
    check_address(plain)
    digest = None
    if fragment:
        algorithm, _, value = fragment.partition("=")
        if algorithm != "sha256":
            raise ScanError(Reason.DOWNLOAD, "the address may end in #sha256=HEX and nothing else")
        digest = parse_digest("sha256", value)
    name = PurePosixPath(urlsplit(plain).path).name.removesuffix(".zip")
    return RemoteZips(name, plain, (Remote(plain, digest),))


def _brainchop(name: str) -> RemoteFiles:
    digests = addresses.BRAINCHOP_MODELS.get(name)
    if digests is None:
        raise _unknown("brainchop", name, addresses.BRAINCHOP_MODELS)
    origin = f"{addresses.BRAINCHOP}/public/models/{name}"
    files = {
        file: Remote(f"{origin}/{file}", Digest("sha256", sha256))
        for file, sha256 in digests.items()
    }
    licence, sha256 = addresses.BRAINCHOP_LICENCE
    files[licence] = Remote(f"{addresses.BRAINCHOP}/{licence}", Digest("sha256", sha256))
    return RemoteFiles(name, origin, files, licence="MIT")


def _totalsegmentator(task: str) -> RemoteZips:
    if task in addresses.TOTALSEGMENTATOR_LICENSED:
        detail = f"the weights of {task} need a licence: get them with TotalSegmentator, and give "
        raise ScanError(Reason.LICENCE, f"{detail}their folder")
    numbers = addresses.TOTALSEGMENTATOR_TASKS.get(task)
    if numbers is None:
        raise _unknown("totalsegmentator", task, addresses.TOTALSEGMENTATOR_TASKS)
    by_number = {
        int(dataset[7:10]): f"{addresses.TOTALSEGMENTATOR}/{release}/{quote(dataset)}.zip"
        for release, datasets in addresses.TOTALSEGMENTATOR_DATASETS.items()
        for dataset in datasets
    }
    zips = tuple(Remote(by_number[number]) for number in numbers)
    text = json.dumps({"task": task, "datasets": numbers})
    origin = f"{addresses.TOTALSEGMENTATOR}#{task}"
    return RemoteZips(task, origin, zips, licence="Apache-2.0", texts={TASK_FILE: text})


def _unknown(collection: str, name: str, known: Mapping[str, object]) -> ScanError:
    hint = did_you_mean(name, sorted(known))
    return ScanError(Reason.MODEL_UNKNOWN, f"{collection} has no {printable(name[:200])!r}; {hint}")
