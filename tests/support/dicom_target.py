"""`python dicom_target.py CONFIG`: a target of pynetdicom that keeps, commits, and misbehaves.

CONFIG is a JSON file; a line of `FOLDER/log` tells each thing that was asked. Keys:

folder      stored data sets, `<SOPInstanceUID>.dcm`, and the log
port        to listen at; 0 for a free one, which is printed
commit      "none", "own port", "same association" or "never" (accepted, but no report)
report_to   port of the receiver that reports go to
find        whether it answers C-FIND
callers     titles that it knows; any without
classes     SOP classes that it takes
refuse      status of C-STORE by SOP class; -1 aborts the association
fail        reason of a failed commitment by SOP class
tls         context, for `serve`
times       how often it refuses or fails each class; for ever without
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydicom import Dataset
from pydicom.uid import AllTransferSyntaxes
from pynetdicom import AE, _config, build_role, evt
from pynetdicom.sop_class import (
    StorageCommitmentPushModel,
    StorageCommitmentPushModelInstance,
    StudyRootQueryRetrieveInformationModelFind,
    Verification,
)

from scanloom.io.network.peer import ReactorCheckpoint

SEG, SR, RTSTRUCT = (f"1.2.840.10008.5.1.4.1.1.{end}" for end in ("66.4", "88.22", "481.3"))
LABELMAP = "1.2.840.10008.5.1.4.1.1.66.7"
DEFAULTS = {"port": 0, "commit": "none", "report_to": 0, "find": False, "times": 10**6}


def pause_surely(event: evt.Event) -> None:
    """Let the reactor of an association take no answer to a request of ours."""
    event.assoc._reactor_checkpoint = ReactorCheckpoint()


class Target:
    """What the target does; see the module."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = {**DEFAULTS, "refuse": {}, "fail": {}, **config}
        self.config.setdefault("classes", [SEG, SR, RTSTRUCT])
        self.folder = Path(self.config["folder"])
        self.folder.mkdir(exist_ok=True, parents=True)
        self.done: Counter[tuple[str, str]] = Counter()
        self.lock = threading.Lock()
        self.entity = AE("TARGET")
        self.entity.require_called_aet = True
        self.entity.require_calling_aet = self.config.get("callers", [])
        self.entity.add_supported_context(Verification)
        for each in self.config["classes"]:
            self.entity.add_supported_context(each, AllTransferSyntaxes)
        if self.config["commit"] != "none":
            self.entity.add_supported_context(StorageCommitmentPushModel)
        if self.config["find"]:
            self.entity.add_supported_context(StudyRootQueryRetrieveInformationModelFind)

    def tell(self, *words: str) -> None:
        """Add a line to the log."""
        with self.lock, (self.folder / "log").open("a") as log:
            log.write(" ".join(words) + "\n")

    def misbehaves(self, how: str, sop_class: str) -> int | None:
        """Return the status or reason for a class, as often as it is to be given."""
        value = self.config[how].get(sop_class)
        with self.lock:
            self.done[how, sop_class] += 1
            return value if self.done[how, sop_class] <= self.config["times"] else None

    def store(self, event: evt.Event) -> int:
        """Keep a data set, as it came."""
        uid, sop_class = event.request.AffectedSOPInstanceUID, event.request.AffectedSOPClassUID
        self.tell("store", uid)
        status = self.misbehaves("refuse", sop_class)
        if status == -1:
            event.assoc.abort()
            return 0xC000
        if status is None:
            path = self.folder / f"{uid}.dcm"
            draft = path.with_suffix(f".{threading.get_ident()}")
            draft.write_bytes(event.encoded_dataset(include_meta=False))
            draft.replace(path)
        return status or 0

    def find(self, event: evt.Event) -> Any:
        """Name an object if it is there."""
        uid = event.identifier.SOPInstanceUID
        self.tell("find", uid)
        if (self.folder / f"{uid}.dcm").exists():
            answer = Dataset()
            answer.SOPInstanceUID = uid
            yield 0xFF00, answer

    def commit(self, event: evt.Event) -> tuple[int, None]:
        """Take a request; the report comes on another association, or on this one."""
        request = event.action_information
        self.tell("commit", str(request.TransactionUID))
        if self.config["commit"] == "same association":
            self.begin(self.report, request, event.assoc)
        elif self.config["commit"] == "own port":
            self.begin(self.report_elsewhere, request)
        return 0, None

    def begin(self, what: Callable[..., None], *arguments: Any) -> None:
        """Do something in a thread, which keeps no process alive."""
        threading.Thread(target=what, args=arguments, daemon=True).start()

    def report_elsewhere(self, request: Dataset) -> None:
        """Report to the receiver's own port; again if it is away."""
        entity = AE("TARGET")
        entity.acse_timeout = entity.dimse_timeout = entity.network_timeout = 20
        entity.add_requested_context(StorageCommitmentPushModel)
        entity.connection_timeout = 5
        role = build_role(StorageCommitmentPushModel, scp_role=True)
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            made = entity.associate(
                *("127.0.0.1", self.config["report_to"]),
                ae_title="SCANLOOM",
                ext_neg=[role],
                evt_handlers=[(evt.EVT_CONN_OPEN, pause_surely)],
            )
            if made.is_established:
                self.report(request, made)
                made.release()
                return
            time.sleep(0.2)

    def report(self, request: Dataset, association: Any) -> None:
        """Send the report of what is there."""
        time.sleep(0.2)
        report = Dataset()
        report.TransactionUID = request.TransactionUID
        kept, failed = [], []
        for item in request.ReferencedSOPSequence:
            reason = self.misbehaves("fail", item.ReferencedSOPClassUID)
            if not (self.folder / f"{item.ReferencedSOPInstanceUID}.dcm").exists():
                reason = 0x0112
            if reason is not None:
                item.FailureReason = reason
            (kept if reason is None else failed).append(item)
        if kept:
            report.ReferencedSOPSequence = kept
        if failed:
            report.FailedSOPSequence = failed
        kind = 2 if failed else 1
        names = (StorageCommitmentPushModel, StorageCommitmentPushModelInstance)
        status, _ = association.send_n_event_report(report, kind, *names)
        self.tell("report", str(status.get("Status")))


def serve(config: dict[str, Any]) -> Any:
    """Begin to serve, in threads of this process; return the server."""
    _config.LOG_HANDLER_LEVEL = "none"
    # as a receiver in this process may have left them
    _config.UNRESTRICTED_STORAGE_SERVICE = _config.STORE_RECV_CHUNKED_DATASET = False
    target = Target(config)
    handlers = [
        (evt.EVT_CONN_OPEN, pause_surely),
        (evt.EVT_C_STORE, target.store),
        (evt.EVT_C_FIND, target.find),
        (evt.EVT_N_ACTION, target.commit),
    ]
    address = ("127.0.0.1", target.config["port"])
    return target.entity.start_server(
        address, block=False, evt_handlers=handlers, ssl_context=config.get("tls")
    )


def main() -> None:
    """Serve until the process is ended, and for half an hour at most."""
    server = serve(json.loads(Path(sys.argv[1]).read_text()))
    print(server.server_address[1], flush=True)
    threading.Event().wait(1800)


if __name__ == "__main__":
    main()
