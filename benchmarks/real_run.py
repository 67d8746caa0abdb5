"""A run over real studies end to end, beside the time that the device itself worked.

    python real_run.py SCAN... [--cases 20] [--device auto]

SCAN is a folder with one CT series, or a NIfTI file. Copies make the archive, each with UIDs or a
description of its own; `scanloom run ct_tissue` goes over it in a fresh process. The device's own
time is that for which cases held it: on a CPU, which has other work too, while they did.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from meter import SAMPLE, machine, parse, table

OWN = ("StudyInstanceUID", "SeriesInstanceUID", "SOPInstanceUID", "FrameOfReferenceUID")
AIM = 1.15


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("scans", type=Path, nargs="*", default=[SAMPLE], metavar="SCAN")
    parser.add_argument("--cases", type=int, default=20)
    parser.add_argument("--device", default="auto")
    options = parse(parser, cases=2, device="cpu")
    print(machine("scanloom", "torch"), "\n")
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        for n, scan in enumerate(islice(cycle(options.scans), options.cases)):
            copy(scan, root / "archive" / f"{n:03d}", n)
        seconds, totals = run(root, options.device)
    if totals["cases"]["done"] != options.cases:
        raise SystemExit(f"{totals['cases']['done']} of {options.cases} cases: {totals['reasons']}")
    device = totals["device"]
    rows = [
        ["all of the command, s", seconds, ""],
        ["the device's own time, s", device["busy_s"], ""],
        ["the command beside it", seconds / device["busy_s"], f"<= {AIM}"],
        ["the run beside it", totals["elapsed_s"] / device["busy_s"], f"<= {AIM}"],
        ["the device is busy, %", 100 * device["busy_share"], ""],
        ["joules a scan", totals["joules_a_scan"] or "not known", ""],
    ]
    print(table(["what", "measured", "aim"], rows))


def copy(scan: Path, target: Path, number: int) -> None:
    """Copy a scan; a series becomes one of another patient's studies."""
    target.mkdir(parents=True)
    if scan.is_file():  # equal files would be one case
        import nibabel as nib

        image = nib.load(scan)
        image.header["descrip"] = f"copy {number}"
        nib.save(image, target / scan.name)
        return
    from pydicom import dcmread
    from pydicom.uid import generate_uid

    for path in sorted(p for p in scan.iterdir() if p.is_file()):
        dataset = dcmread(path, force=True)
        for keyword in OWN:
            if keyword in dataset:
                uid = generate_uid(entropy_srcs=[str(number), dataset[keyword].value])
                setattr(dataset, keyword, uid)
        dataset.file_meta.MediaStorageSOPInstanceUID = dataset.SOPInstanceUID
        dataset.PatientID = f"BENCHMARK {number}"
        dataset.save_as(target / path.name)


def run(root: Path, device: str) -> tuple[float, Any]:
    """Run over the archive; return seconds of the whole command, and the run's totals."""
    workflow = root / "workflow.yaml"
    lines = ("name: measured", "models: [ct_tissue]", "policy: {modality: CT}")
    text = "\n".join((*lines, f"execution: {{device: {device}}}", ""))
    workflow.write_text(text, encoding="utf-8")
    out = root / "out"
    command = ["run", str(workflow), str(root / "archive"), "--out", str(out), "--json"]
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "scanloom", *command],
        env={**os.environ, "SCANLOOM_KEY": str(root / "key")},
        stdout=subprocess.DEVNULL,
        check=False,
    )
    seconds = time.perf_counter() - start
    if done.returncode not in (0, 1):  # 1: some failed, which is told by the totals
        raise SystemExit(f"scanloom run ended with {done.returncode}")
    [totals] = out.glob("runs/*/totals.json")
    return seconds, json.loads(totals.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
