"""`python prompt_sender.py PORT`: send each file that stdin names, and name it once it is there.

A line of stdout is written after the answer 0000, and only then. The association is asked for anew
whenever it ends; the process ends with its stdin.
"""

from __future__ import annotations

import sys
import time

from pydicom import dcmread
from pynetdicom import AE, _config, evt

from scanloom.io.network.peer import ReactorCheckpoint

PATIENCE_S = 20
DEADLINE_S = 7200
"""Longer than any proof: nobody is left who sends for ever."""
CLASSES = ("1.2.840.10008.5.1.4.1.1.2", "1.2.840.10008.5.1.4.1.1.4")  # CT, MR
SYNTAXES = (
    "1.2.840.10008.1.2",
    "1.2.840.10008.1.2.1",
    "1.2.840.10008.1.2.5",
    "1.2.840.10008.1.2.4.80",
    "1.2.840.10008.1.2.4.90",
)


def pause_surely(event: evt.Event) -> None:
    """Let the reactor of an association take no answer to a request of ours."""
    event.assoc._reactor_checkpoint = ReactorCheckpoint()


def main() -> None:
    """Send until stdin ends."""
    _config.STORE_SEND_CHUNKED_DATASET = True  # the bytes of the file
    _config.LOG_HANDLER_LEVEL = "none"
    handlers = [(evt.EVT_CONN_OPEN, pause_surely)]
    entity = AE("PYNETDICOM")
    entity.acse_timeout = entity.dimse_timeout = entity.network_timeout = PATIENCE_S
    for sop_class in CLASSES:
        for syntax in SYNTAXES:
            entity.add_requested_context(sop_class, syntax)
    made, deadline = None, time.monotonic() + DEADLINE_S
    for line in sys.stdin:
        path = line.rstrip("\n")
        dcmread(path, specific_tags=[])  # a mistake of the caller ends the process
        while time.monotonic() < deadline:
            if made is None or not made.is_established:
                made = entity.associate(
                    *("127.0.0.1", int(sys.argv[1])), ae_title="SCANLOOM", evt_handlers=handlers
                )
            if not made.is_established:
                time.sleep(0.2)
                continue
            try:
                status = made.send_c_store(path)
            except (RuntimeError, ValueError, AttributeError):  # it has just ended
                continue
            if status and status.Status == 0:
                print(path, flush=True)
                break
            time.sleep(0.1)


if __name__ == "__main__":
    main()
