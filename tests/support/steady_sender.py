"""`python steady_sender.py PORT FOLDER SEED TOLD`: send each file until it is acknowledged.

The association is asked for anew whenever it ends. A line of TOLD names each acknowledged file, on
the disk before the next one is sent.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

from pynetdicom import AE, _config, evt

from scanloom.io.network.peer import ReactorCheckpoint

CT = "1.2.840.10008.5.1.4.1.1.2"
DEADLINE_S = 1800
"""Longer than any test: nobody is left who sends for ever."""
SYNTAXES = {"plain": "1.2.840.10008.1.2.1", "rle": "1.2.840.10008.1.2.5"}


def pause_surely(event: evt.Event) -> None:
    """Let the reactor of an association take no answer to a request of ours."""
    event.assoc._reactor_checkpoint = ReactorCheckpoint()


def main() -> None:
    """Send the files of FOLDER/plain and FOLDER/rle, shuffled, each second one twice."""
    port, folder, seed = int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    _config.STORE_SEND_CHUNKED_DATASET = True
    _config.LOG_HANDLER_LEVEL = "none"
    handlers = [(evt.EVT_CONN_OPEN, pause_surely)]
    entity = AE("PYNETDICOM")
    entity.acse_timeout = entity.dimse_timeout = entity.network_timeout = 20
    for syntax in SYNTAXES.values():
        entity.add_requested_context(CT, syntax)
    files = sorted(path for name in SYNTAXES for path in (folder / name).iterdir())
    waiting = files + files[seed % 2 :: 2]
    random.Random(seed).shuffle(waiting)
    with Path(sys.argv[4]).open("a", buffering=1) as told:
        deadline = time.monotonic() + DEADLINE_S
        while waiting and time.monotonic() < deadline:
            made = entity.associate(
                *("127.0.0.1", port), ae_title="SCANLOOM", evt_handlers=handlers
            )
            while waiting and made.is_established:
                try:
                    status = made.send_c_store(waiting[-1])
                except (RuntimeError, ValueError, AttributeError):  # it has just ended
                    break
                if status and status.Status == 0:
                    told.write(f"{waiting.pop()}\n")
            if made.is_established:
                made.release()
            else:
                time.sleep(0.1)
    if waiting:
        sys.exit(1)


if __name__ == "__main__":
    main()
