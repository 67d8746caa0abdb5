"""`DataSets`: objects that arrive on an association, by C-STORE, and go to a store as they come.

The association is one of a receiver, or one on which we asked for objects by C-GET. pynetdicom
itself would write data sets to the system's temporary folder, and leave them there if the
association is aborted.

Nothing here is logged but counts: data sets and commands name patients.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, Protocol

from pydicom.dataset import FileMetaDataset
from pynetdicom import _config, dimse_messages
from pynetdicom.dsutils import create_file_meta
from pynetdicom.dul import DULServiceProvider

from scanloom.core import Reason, ScanError
from scanloom.io.dicom.instance import Instance, read_instance
from scanloom.io.dicom.uids import is_uid
from scanloom.io.network.commitment import NOT_AUTHORIZED

# Status of C-STORE (PS3.4 B.2.3, PS3.7 C)
SUCCESS, NO_RESOURCES, MISMATCH, NOT_UNDERSTOOD = 0x0000, 0xA700, 0xA900, 0xC000
INVALID_INSTANCE = 0x0117


class UnwantedError(Exception):
    """A store does not take an object, whatever it is: nobody asked for it."""


class Draft(Protocol):
    """A data set on its way: a file, whose writing never fails; it says so later."""

    name: str
    path: Path
    began: float
    size: int
    error: OSError | None

    def write(self, data: bytes) -> int:
        """Add bytes."""

    def discard(self) -> None:
        """Remove what was not kept."""


class Store(Protocol):
    """Keeper of what is received; it is called by several threads."""

    def has_room(self) -> bool:
        """Return whether something may be received."""

    def draft(self) -> Draft:
        """Begin a data set."""

    def keep(self, draft: Any, instance: Instance, sender: str) -> str:
        """Keep a complete object, and return a word for the count of the log.

        OSError if it can't be written, UnwantedError.
        """


class DataSets:
    """The objects that arrive on an association.

    Parameters
    ----------
    title : callable
        Returns the AE title of the peer, once it is known.
    may_store : bool
        Whether the peer may store anything.
    """

    def __init__(
        self, store: Store, title: Callable[[], str], own_title: str, *, may_store: bool
    ) -> None:
        self.store, self.title, self.own_title = store, title, own_title
        self.may_store = may_store
        self.drafts: dict[str, Draft] = {}
        self.counts: Counter[str] = Counter()

    def begin(self) -> Draft:
        """Begin a data set, in the thread that reads the connection."""
        draft = self.store.draft() if self.may_store else _NoDraft()
        self.drafts[draft.name] = draft
        return draft

    def take(self, event: Any) -> int:
        """Keep an object, and return the status of the answer; in the association's thread."""
        path = event.request._dataset_path  # `dataset_path` opens the file
        draft = self.drafts.get(str(path))
        if draft is None:
            self.counts["without a data set"] += 1
            return MISMATCH
        try:
            status, outcome = self._judge(event, draft)
        finally:
            draft.discard()
            del self.drafts[draft.name]
        self.counts[outcome] += 1
        return status

    def discard(self) -> None:
        """Remove what has not come to its end, with the association."""
        for draft in list(self.drafts.values()):
            self.counts["incomplete"] += 1
            draft.discard()
        self.drafts.clear()

    def _judge(self, event: Any, draft: Draft) -> tuple[int, str]:
        """Keep an object if it can be; return the status, and a word for the log."""
        request: Any = event.request
        if not self.may_store:
            return NOT_AUTHORIZED, "refused: it may only report"
        command_uid = str(request.AffectedSOPInstanceUID or "")
        if not is_uid(command_uid):
            return INVALID_INSTANCE, "refused: no UID"
        if draft.error is not None:
            return _no_room(draft.error)
        try:
            instance = read_instance(draft.path)
        except ScanError as exc:
            ours = exc.reason is Reason.UNREADABLE  # our disk's fault, not the object's
            return NO_RESOURCES if ours else NOT_UNDERSTOOD, f"refused: {exc.code}"
        except OSError as exc:
            return _no_room(exc)
        promised = {str(request.AffectedSOPClassUID), str(event.context.abstract_syntax)}
        if instance.uid != command_uid or promised != {instance.sop_class}:
            return MISMATCH, "refused: UIDs of data set and command differ"
        try:
            return SUCCESS, self.store.keep(draft, instance, self.title())
        except UnwantedError:
            return NOT_AUTHORIZED, "refused: it was not asked for"
        except OSError as exc:
            return _no_room(exc)


def _no_room(exc: OSError) -> tuple[int, str]:
    name = errno.errorcode.get(exc.errno or 0, type(exc).__name__)
    return NO_RESOURCES, f"refused: can't be written ({name})"


class _NoDraft:
    """Stands for the draft of a peer that may not store: it forgets what comes."""

    def __init__(self) -> None:
        self.path = Path(os.devnull)
        self.name = f"{os.devnull} {id(self)}"
        self.began, self.size = time.monotonic(), 0
        self.error: OSError | None = OSError(errno.EPERM, "no peer")

    def write(self, data: bytes) -> int:
        """Forget bytes."""
        self.size += len(data)
        return len(data)

    def discard(self) -> None:
        """Do nothing."""


# --- what pynetdicom has no setting for -----------------------------------------------------------


def configure_pynetdicom() -> None:
    """Let associations with `DataSets` write to their drafts; other ones are as before."""
    _config.LOG_HANDLER_LEVEL = "none"  # it would format each PDU, and name patients
    _config.STORE_RECV_CHUNKED_DATASET = True
    # all classes, each in the first syntax that is offered for it
    _config.UNRESTRICTED_STORAGE_SERVICE = True
    dimse_messages.NamedTemporaryFile = _DraftFile  # type: ignore[attr-defined,assignment]  # ours
    dimse_messages.create_file_meta = _file_meta  # type: ignore[attr-defined]  # ours


def _arriving() -> DataSets | None:
    """Return what arrives on the association of which this thread reads the connection."""
    thread = threading.current_thread()
    association = thread.assoc if isinstance(thread, DULServiceProvider) else None
    data_sets = getattr(association, "data_sets", None)
    return data_sets if isinstance(data_sets, DataSets) else None


class _DraftFile:
    """Stands for the temporary file that pynetdicom writes a data set to, closes and removes."""

    def __new__(cls, **options: Any) -> Any:
        """Return a draft of a store; else a temporary file."""
        data_sets = _arriving()
        if data_sets is None:
            return NamedTemporaryFile(**options)
        file = super().__new__(cls)
        file._draft = data_sets.begin()
        file.name, file.write = file._draft.name, file._draft.write
        return file

    _draft: Draft
    name: str
    write: Callable[[bytes], int]

    @property
    def file(self) -> _DraftFile:
        """The file inside, which pynetdicom flushes after each part."""
        return self

    def flush(self) -> None:
        """Do nothing: what is written is handed to the system at once."""

    def close(self) -> None:
        """Do nothing: a draft that was not kept is gone by now."""


def _file_meta(**uids: Any) -> FileMetaDataset:
    """Return pynetdicom's meta header, with the titles of sender and receiver (PS3.10 7.1)."""
    meta = create_file_meta(**uids)
    data_sets = _arriving()
    if data_sets is not None:
        meta.SendingApplicationEntityTitle = data_sets.title()
        meta.ReceivingApplicationEntityTitle = data_sets.own_title
    return meta
