"""`private/audit.jsonl`: what was done with an output folder, by whom, in the order it was done.

A line is a JSON object; its last member is an HMAC-SHA256 of the line before and of its own text,
by a key that follows from the key of the ids. Whoever has no key can neither change a line, nor
leave one out, nor add one, unnoticed; an unkeyed chain could be computed anew. Lines that were cut
off at the end are noticed by what they told: a published result without a line, or with another.

A line comes before what it tells: after a kill there may be a line without its result, never the
reverse. A line of a result names the SHA-256 of its SHA256SUMS, and so the content of every file.
"""

from __future__ import annotations

import getpass
import hashlib
import hmac
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from scanloom.core import ScanError
from scanloom.io.identity import key_fingerprint, read_key
from scanloom.io.output.file_names import CASE, CHECKSUMS
from scanloom.io.output.json_file import MAX_DOCUMENT_BYTES, read_json
from scanloom.io.output.private import PRIVATE, locked_folder, read_fingerprint
from scanloom.io.system.atomic_write import append_synced, cut_half_line, fsync_path
from scanloom.io.system.regular_files import open_link_free, read_regular_file

AUDIT = "audit.jsonl"
Event = Literal[
    "segmented",
    "corrected",
    "judged",
    "viewed",
    "exported",
    "received",
    "sent",
    "asked",
    "fetched",
]

_TAIL_BYTES = 1 << 16
"""More than a line has."""
_MAC = b',"mac":"'
_MAC_BYTES = len(_MAC) + 64 + len(b'"}')


class AuditError(ValueError):
    """A line was changed, left out or added by somebody without the key; the text says which."""


class AuditTrail:
    """The trail of an output folder, to which several processes may append.

    Parameters
    ----------
    out : Path
        The output folder.
    key : bytes
        The key of its ids.
    """

    def __init__(self, out: Path, key: bytes) -> None:
        self.path = out / PRIVATE / AUDIT
        self._key = _chain_key(key)

    def append(self, event: Event, details: Mapping[str, Any]) -> None:
        """Append a line; it is on the disk when this returns.

        Parameters
        ----------
        event : Event
        details : mapping
            JSON values: ids, codes and hashes, none of a patient.

        Raises
        ------
        OSError
            If it can't be written: then the file is as before.
        """
        with locked_folder(self.path.parent):
            self.append_locked(event, details)

    def append_locked(self, event: Event, details: Mapping[str, Any]) -> None:
        """Append a line as `append` does, for one who holds the lock of the private folder."""
        moment = datetime.now(UTC).isoformat(timespec="milliseconds")
        plain = {"time": moment, "event": event, "user": _user(), **details}
        text = json.dumps(plain, ensure_ascii=False, separators=(",", ":"))
        body = text.encode("utf-8", "backslashreplace")  # bytes of a path that are not UTF-8
        descriptor = open_link_free(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            before, size = _last_line(descriptor)
            mac = _mac(self._key, before, body)
            line = body[:-1] + _MAC + mac + b'"}\n'
            append_synced(descriptor, line, size)
        finally:
            os.close(descriptor)
        if not size:
            fsync_path(self.path.parent)


def audit_trail(out: Path, key: Path | None) -> AuditTrail | None:
    """Return the trail of an output folder; None where it or its key is missing.

    Parameters
    ----------
    out : Path
    key : Path or None
        File with the key of the ids; None for SCANLOOM_KEY or the user's own key.
    """
    secret = audit_key(out, key)
    return None if secret is None else AuditTrail(out, secret)


def audit_key(out: Path, key: Path | None) -> bytes | None:
    """Return the key of an output folder's trail; None if the folder has none, or it is missing."""
    with suppress(ScanError, OSError):
        secret = read_key(key)
        if read_fingerprint(out) == key_fingerprint(secret):
            return secret
    return None


def read_trail(out: Path, key: bytes) -> Iterator[Mapping[str, Any]]:
    """Yield the lines of a trail, each once it was found to be in its place; none without the file.

    Raises
    ------
    AuditError
        With the number of the line.
    OSError
        If the file can't be read, or is a link.
    """
    chain_key, before = _chain_key(key), b""
    try:
        descriptor = open_link_free(out / PRIVATE / AUDIT, os.O_RDONLY)
    except FileNotFoundError:
        return
    with os.fdopen(descriptor, "rb") as file:
        for number, text in enumerate(file, 1):
            if not text.endswith(b"\n"):  # half a line of a process that died: the next cuts it off
                return
            line = text[:-1]
            body, mac = line[:-_MAC_BYTES] + b"}", line[-_MAC_BYTES + len(_MAC) : -2]
            if not hmac.compare_digest(mac, _mac(chain_key, before, body)):
                raise AuditError(f"line {number} was changed, or lines before it are missing")
            yield json.loads(line)
            before = line


def result_line(folder: Path) -> tuple[Event, dict[str, Any]]:
    """Return the line of a result that is about to be published, or of one that is.

    Parameters
    ----------
    folder : Path
        Its folder, with `case.json` and SHA256SUMS.

    Raises
    ------
    OSError, ValueError, LookupError
        If these can't be read.
    """
    case = read_json(folder / CASE)
    sums = read_regular_file(folder / CHECKSUMS, MAX_DOCUMENT_BYTES)
    details = {
        "case": case["case"],
        "sums": hashlib.sha256(sums).hexdigest(),
        "weights": {each["name"]: each["weights_sha256"] for each in case["models"]},
    }
    if revision := case.get("revision"):
        by = {"revision": revision["number"], "reviewer": revision["reviewer"]}
        return "corrected", details | by
    return "segmented", details


def _chain_key(key: bytes) -> bytes:
    return hmac.digest(key, b"scanloom audit", "sha256")


def _mac(key: bytes, before: bytes, body: bytes) -> bytes:
    """Return the code of a line, as hexadecimal digits; no line has a line feed inside."""
    return hmac.digest(key, before + b"\n" + body, "sha256").hex().encode()


def _last_line(descriptor: int) -> tuple[bytes, int]:
    """Return the last whole line and the size of the file up to it; half a line is cut off."""
    size = cut_half_line(descriptor)
    tail = os.pread(descriptor, _TAIL_BYTES, max(0, size - _TAIL_BYTES))[:-1]
    return tail[tail.rfind(b"\n") + 1 :], size


def _user() -> str:
    """Return the user's name, or number."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a user without a name, as in containers
        return f"uid{os.getuid()}"
