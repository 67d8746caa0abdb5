"""`python full_spool.py FOLDER RESERVE`: send to a receiver whose small disk gets full.

Prints the answers as JSON, in order: the status, or the result of a rejected association; then what
is in the spool. Every acknowledged instance is compared here, since the disk may be one of a
namespace of its own.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from pydicom import dcmread

from support.receivers import association, data_set, listening, send
from support.write_dicom import Words, noise, write_series


def main() -> None:
    """Fill the disk, make room, and send the rest."""
    disk, reserve = Path(sys.argv[1]), sys.argv[2]
    scans = Path(sys.argv[3])
    files = [
        file
        for n in range(24)  # a study each: the reserve is also twice the largest one
        for file in write_series(
            scans / f"{n}", noise((256, 256, 1)), words=Words(name=f"{n}", study=f"{n}")
        )
    ]
    [large] = write_series(scans / "large", noise((1024, 1600, 1)), words=Words(name="large"))
    with listening(disk / "site", reserve=reserve) as receiver:
        larger = send(receiver.port, [large])
        first = send(receiver.port, files)
        with association(receiver.port) as made:
            echoed = made.is_established and made.send_c_echo().Status == 0
            rejected = made.is_rejected and made.acceptor.primitive.result
        stored = receiver.stored()
        whole = all(
            data_set(stored[dcmread(path).SOPInstanceUID]) == data_set(path)
            for path, status in first.items()
            if status == 0
        )
        incoming = len(list((receiver.spool / "incoming").iterdir()))
        (disk / "filler").unlink()
        again = send(receiver.port, files)
        code = receiver.stop()
        told = {
            "larger": list(larger.values()),
            "first": list(first.values()),
            "echoed": echoed,
            "rejected": rejected,
            "stored": len(stored),
            "whole": whole,
            "incoming": incoming,
            "again": list(again.values()),
            "code": code,
            "log": "Traceback" in receiver.log + (receiver.folder / "errors").read_text(),
        }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
