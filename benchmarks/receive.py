"""300 CT slices of 512 x 512 sent to `scanloom listen`: its time beside one that syncs nothing.

    python benchmarks/receive.py [--slices 300] [--rounds 3]

Both receivers are the same program, in processes of their own; in the other one fsync does nothing,
so that an answer proves nothing. Senders are pynetdicom's and, where it is installed, DCMTK's
storescu. Rounds go through both in turn, and each round sends new instances; medians. The aim is
1.5 times as long and 10 ms a file more, in 150 MiB of memory however many come.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from meter import machine, median, parse, peak_memory, table, unavailable
from phantom import write_dicom

SITE = "port: 0\nreserve: 1 MB\npeers: [{title: PYNETDICOM}, {title: STORESCU}]\n"
RECEIVE = "from scanloom.cli.main import main; main()"
UNSYNCED = f"import os; os.fsync = lambda descriptor: None; {RECEIVE}"
RATIO, MORE_S, MEMORY = 1.5, 0.010, 150 << 20  # the aims


@contextmanager
def receiver(folder: Path, program: str) -> Iterator[tuple[int, int]]:
    """Start a receiver; yield its port and process."""
    folder.mkdir()
    (folder / "site.yaml").write_text(SITE)
    command = ["listen", folder / "site.yaml", "--out", folder / "out"]
    process = subprocess.Popen(
        [sys.executable, "-c", program, *map(str, command)], stdout=subprocess.PIPE, text=True
    )
    try:
        line = process.stdout.readline() if process.stdout else ""
        yield int(line.split(" port ")[1].split()[0]), process.pid
    finally:
        process.terminate()
        process.communicate()


def by_pynetdicom(files: list[Path], port: int) -> None:
    """Send by pynetdicom, the bytes of the files as they are."""
    from pynetdicom import AE, _config

    _config.STORE_SEND_CHUNKED_DATASET = True
    entity = AE("PYNETDICOM")
    entity.add_requested_context("1.2.840.10008.5.1.4.1.1.2", "1.2.840.10008.1.2.1")
    association = entity.associate("127.0.0.1", port, ae_title="SCANLOOM")
    for path in files:
        assert association.send_c_store(path).Status == 0
    association.release()


def by_storescu(files: list[Path], port: int) -> None:
    """Send by DCMTK."""
    command = ["storescu", "-aet", "STORESCU", "-aec", "SCANLOOM", "127.0.0.1", str(port)]
    subprocess.run([*command, "+sd", str(files[0].parent)], check=True, capture_output=True)


def write_series(folder: Path, slices: int, across: int, seed: int) -> list[Path]:
    """Write a series of noise, with UIDs of its own."""
    import pydicom

    noise = np.random.default_rng(seed).integers(-1000, 1000, (across, across, slices), np.int16)
    write_dicom(noise, (0.7, 0.7, 1.0), folder)
    files = sorted(folder.iterdir())
    for n, path in enumerate(files):
        header = pydicom.dcmread(path)
        header.StudyInstanceUID = header.SeriesInstanceUID = f"1.2.826.0.1.{seed}"
        header.SOPInstanceUID = header.file_meta.MediaStorageSOPInstanceUID = (
            f"1.2.826.0.1.{seed}.{n}"
        )
        header.save_as(path)
    return files


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--slices", type=int, default=300)
    parser.add_argument("--across", type=int, default=512, help="rows and columns of a slice")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parse(parser, slices=5, across=64, rounds=1)
    try:
        print(machine("pynetdicom", "pydicom"))
    except ModuleNotFoundError:
        unavailable("pynetdicom: pip install 'scanloom[hospital]'")
    senders: dict[str, Callable[[list[Path], int], None]] = {"pynetdicom": by_pynetdicom}
    if shutil.which("storescu"):
        senders["storescu"] = by_storescu
    times: dict[tuple[str, str], list[float]] = {}
    with tempfile.TemporaryDirectory(dir=os.environ.get("XDG_CACHE_HOME")) as name:
        scratch = Path(name)
        with (
            receiver(scratch / "synced", RECEIVE) as (synced, process),
            receiver(scratch / "unsynced", UNSYNCED) as (unsynced, _),
        ):
            for round_ in range(arguments.rounds):
                for n, (sender, send) in enumerate(senders.items()):
                    series = scratch / "series"
                    files = write_series(
                        series, arguments.slices, arguments.across, 1000 + 10 * round_ + n
                    )
                    for kind, port in (("synced", synced), ("unsynced", unsynced)):
                        os.sync()  # what was written before is not to be waited for
                        start = time.perf_counter()
                        send(files, port)
                        times.setdefault((sender, kind), []).append(time.perf_counter() - start)
                    shutil.rmtree(series)
            peak = peak_memory(process)
        stored = len(list(scratch.glob("synced/out/private/spool/studies/*/*/*.dcm")))
    assert stored == arguments.rounds * len(senders) * arguments.slices, stored
    rows = []
    for sender in senders:
        with_sync, without = (median(times[sender, kind]) for kind in ("synced", "unsynced"))
        aim = RATIO * without + MORE_S * arguments.slices
        a_file = 1000 * (with_sync - without) / arguments.slices
        rows.append((sender, with_sync, without, with_sync / without, a_file, with_sync / aim))
    head = ("sender", "s", "s, no sync", "ratio", "ms a file more", "of the aim")
    print(table(head, rows))
    print(f"memory {peak / 2**20:.0f} MiB, of {MEMORY / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
