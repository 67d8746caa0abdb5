"""Pseudonymous IDs: keyed hashes, the same for the same scan at any path."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from scanloom.core import Reason, ScanError, Series, user_config_folder
from scanloom.io.system.regular_files import open_regular_file, read_regular_file
from scanloom.own_python import is_ours, make_private_folder

KEY_BYTES = 32
ID_BYTES = 16
"""128 bits: no collision by chance among the scans of a million archives."""
ID_FORM = re.compile("[a-z2-7]{26}")
"""An ID as text."""
END_BYTES = 1 << 16
"""Bytes of a file's head, and of its tail, in its fingerprint."""
SAMPLE_COUNT = 16
SAMPLE_BYTES = 1 << 12
"""Bytes of each sample between head and tail in the fingerprint of a file."""

_NOT_OWNED = (
    "the key file belongs to another user, or other users may write to it or its folder: remove "
    "their permission if the key is yours, or name another file with --key or SCANLOOM_KEY"
)
_CLAIM_TIMEOUT_S = 1.0
"""Time for another process to put its key in the place of an empty file."""
_CHUNK_BYTES = 1 << 20
_THREADS = 4


def load_key(file: Path | None = None) -> bytes:
    """Return the secret key of all IDs; it is created on first use, readable by its owner only.

    Parameters
    ----------
    file : Path or None
        Path of the key; None for the path in SCANLOOM_KEY, or else `scanloom/key` in the user's
        configuration folder (XDG_CONFIG_HOME, or ~/.config), which is created with the key.

    Raises
    ------
    ScanError
        NOT_FOUND if the folder of a given path does not exist: it may be mistyped; UNREADABLE if
        the file cannot be read or created, or is at the default path and may be another user's;
        KEY_DAMAGED if it is not a key.
    """
    named = file or _named_by_environment()
    path = named or default_key_file()
    if named and not named.parent.is_dir():
        detail = "the folder of the key file does not exist: create it first if a new key is meant"
        raise ScanError(Reason.NOT_FOUND, detail, str(named))
    try:
        if not named:  # no other user may have written the key, or may write to its folder
            paths = {owned for each in (path, path.resolve()) for owned in (each, each.parent)}
            if not all(is_ours(owned) for owned in paths if owned.exists()):
                raise ScanError(Reason.UNREADABLE, _NOT_OWNED, str(path))
        key = _read_made(path) if path.exists() else _make_key(path)
    except OSError as exc:
        advice = "" if named else ": name another file with --key or SCANLOOM_KEY"
        detail = f"the key file can't be read or created ({type(exc).__name__}){advice}"
        raise ScanError(Reason.UNREADABLE, detail, str(path)) from exc
    if len(key) != KEY_BYTES:
        size = len(key) if len(key) < KEY_BYTES else f"more than {KEY_BYTES}"
        detail = f"the key file holds {size} bytes, not {KEY_BYTES}"
        raise ScanError(Reason.KEY_DAMAGED, detail, str(path))
    return key


def read_key(file: Path | None = None) -> bytes:
    """Return an existing key, for commands that look up IDs and create none.

    Parameters are those of `load_key`.

    Raises
    ------
    ScanError
        KEY_MISMATCH if the key does not exist; UNREADABLE or KEY_DAMAGED as in `load_key`.
    """
    path = file or default_key_file()
    if not path.exists():
        raise ScanError(Reason.KEY_MISMATCH, "there is no such key file", str(path))
    return load_key(file)


def key_fingerprint(key: bytes) -> str:
    """Return a fingerprint that distinguishes keys and does not reveal them."""
    return _text(_hash(key, b"key fingerprint", [b""]))


def case_id(series: Series, key: bytes, phase: int | None = None) -> str:
    """Return the ID of a scan: 26 characters, independent of path, machine and file order.

    It is a hash of study and series UID or, without a series UID, of the files' content. Each
    volume of a file or series with several (`phase`) has an ID of its own.

    Raises
    ------
    ScanError
        UNREADABLE if a file cannot be read.
    """
    if series.series_uid:
        uids = [series.study_uid.encode(), series.series_uid.encode()]
        digest = _hash(key, b"case by uid", uids)
    else:
        # A hash of hashes, sorted: neither names nor order of the files belong to a scan
        fingerprints = _hash_files(series.files, key, _fingerprint)
        digest = _hash(key, b"case by files", sorted(fingerprints))
    if phase is None:
        return _text(digest)
    return _text(_hash(key, b"phase", [digest, str(phase).encode()]))


def study_id(study_uid: str, key: bytes) -> str:
    """Return the ID of a study: 26 characters."""
    return _text(_hash(key, b"study by uid", [study_uid.encode("utf-8", "replace")]))


def file_id(path: Path | str, instance_uid: str, key: bytes) -> str:
    """Return the ID of a file: 26 characters, independent of its path.

    It is opened only if it has no SOPInstanceUID (`instance_uid`).

    Raises
    ------
    ScanError
        UNREADABLE if the file must be opened and cannot be read.
    """
    if instance_uid:
        return _text(_hash(key, b"file by uid", [instance_uid.encode("utf-8", "replace")]))
    return _text(_hash(key, b"file by content", _hash_files([Path(path)], key, _fingerprint)))


def source_hash(series: Series, key: bytes) -> str:
    """Return a keyed hash of the content of a series' files, to detect changes of a source.

    It depends neither on paths nor on order, nor on duplicates of the same content.

    Raises
    ------
    ScanError
        UNREADABLE if a file cannot be read.
    """
    return _text(_hash(key, b"source", sorted(set(_hash_files(series.files, key, _whole_file)))))


def channels_hash(series: Sequence[Series], key: bytes) -> str:
    """Return a keyed hash of the content of all input channels' files; their order counts.

    Raises
    ------
    ScanError
        UNREADABLE if a file cannot be read.
    """
    return join_channel_hashes([source_hash(channel, key) for channel in series], key)


def join_channel_hashes(hashes: Sequence[str], key: bytes) -> str:
    """Return the `channels_hash` of channels, by the `source_hash` of each."""
    if len(hashes) == 1:
        return hashes[0]
    return _text(_hash(key, b"channels", [text.encode() for text in hashes]))


def patient_share(patient: str, key: bytes) -> float:
    """Return a keyed number from 0 to below 1 for a patient, to split patients by; it names none.

    The patients below a share of 0.2 are about a fifth, and the same ones in any archive.
    """
    digest = _hash(key, b"patient", [patient.encode("utf-8", "surrogatepass")])
    return int.from_bytes(digest[:6]) / 2**48  # a float has 53 bits


def source_stamp(stamps: Sequence[str], key: bytes) -> str:
    """Return a keyed hash of each series' stamp, joined by spaces; empty if a stamp is missing."""
    if not all(stamps):
        return ""
    return " ".join(_text(_hash(key, b"stamp", [stamp.encode()])) for stamp in stamps)


def default_key_file() -> Path:
    """Return the path of the key if none is given; the file need not exist."""
    if named := _named_by_environment():
        return named
    return user_config_folder() / "key"


def _named_by_environment() -> Path | None:
    named = os.environ.get("SCANLOOM_KEY")
    return Path(named) if named else None


def _make_key(path: Path) -> bytes:
    """Write a new key and link it to its path atomically; a key already there is returned."""
    make_private_folder(path.parent)
    key = secrets.token_bytes(KEY_BYTES)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(key)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(temporary, path)  # fails if a key exists: it is never overwritten
        except FileExistsError:
            return _read_made(path)
        except OSError:  # a file system without hard links: who makes the empty file replaces it
            try:
                os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            except FileExistsError:
                return _read_made(path)
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return key


def _read_made(path: Path) -> bytes:
    """Return the content of a key file; one that is empty may be about to be replaced."""
    deadline = time.monotonic() + _CLAIM_TIMEOUT_S
    while not (key := read_regular_file(path, KEY_BYTES)) and time.monotonic() < deadline:
        time.sleep(_CLAIM_TIMEOUT_S / 100)
    return key


def _hash(key: bytes, purpose: bytes, chunks: Iterable[bytes]) -> bytes:
    """Return BLAKE2b of the chunks, each prefixed by its length, so that boundaries count."""
    digest = hashlib.blake2b(key=key, digest_size=ID_BYTES)
    for chunk in (purpose, *chunks):
        digest.update(len(chunk).to_bytes(8, "little"))
        digest.update(chunk)
    return digest.digest()


def _text(digest: bytes) -> str:
    return base64.b32encode(digest).decode().rstrip("=").lower()


def _hash_files(
    files: Sequence[Path], key: bytes, hash_file: Callable[[Path, bytes], bytes]
) -> list[bytes]:
    try:
        with ThreadPoolExecutor(_THREADS) as pool:
            return list(pool.map(lambda file: hash_file(file, key), files))
    except OSError as exc:
        raise ScanError(Reason.UNREADABLE, f"a file cannot be read ({type(exc).__name__})") from exc


def _whole_file(path: Path, key: bytes) -> bytes:
    digest = hashlib.blake2b(key=key, digest_size=ID_BYTES)
    buffer = bytearray(_CHUNK_BYTES)
    with open_regular_file(path) as file:
        while count := file.readinto(buffer):
            digest.update(memoryview(buffer)[:count])
    return digest.digest()


def _fingerprint(path: Path, key: bytes) -> bytes:
    """Return a hash of size, head, tail and samples between them, which distinguishes files."""
    with open_regular_file(path) as file:
        size = file.seek(0, os.SEEK_END)
        between = max(size - 2 * END_BYTES, 0)
        spans = [(0, END_BYTES), (max(size - END_BYTES, 0), END_BYTES)]
        spans += [
            (END_BYTES + between * n // SAMPLE_COUNT, SAMPLE_BYTES)
            for n in range(SAMPLE_COUNT if between else 0)
        ]
        chunks = [size.to_bytes(8, "little")]
        for offset, count in spans:
            file.seek(offset)
            chunks.append(file.read(count))
    return _hash(key, b"file", chunks)
