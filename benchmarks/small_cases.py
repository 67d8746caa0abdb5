"""Processor milliseconds of a tiny case by step, and of a whole run over tiny cases.

Half of the cases are DICOM series of 64 x 64 x 32 voxels, half NIfTI files of the same voxels. A
small network finds five structures in one window. Steps are those of `scanloom segment` in this
process, each counted in its own thread without the steps inside it. The runs are `scanloom run`
with one worker, without Dask and with it, all processes together, less what a run over a few cases
takes.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from meter import machine, median, parse, table

SHAPE, SPACING = (64, 64, 32), (2.0, 2.0, 4.0)
STRUCTURES = 5
FEW = 4
"""Cases of the run that is subtracted from the other one: its start and its end."""


class Steps:
    """Processor seconds of blocks by name, without those of blocks inside them."""

    def __init__(self) -> None:
        self.spent: defaultdict[str, float] = defaultdict(float)
        self._inner, self._lock = threading.local(), threading.Lock()

    @contextmanager
    def block(self, name: str) -> Iterator[None]:
        """Count this thread's time in the block."""
        inner: list[float] = self._inner.__dict__.setdefault("seconds", [0.0])
        inner.append(0.0)
        start = time.thread_time()
        try:
            yield
        finally:
            whole = time.thread_time() - start
            with self._lock:
                self.spent[name] += whole - inner.pop()
            inner[-1] += whole

    def timed(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        """Return `work` wrapped, so that its calls are blocks."""

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with self.block(name):
                return work(*args, **kwargs)

        return wrapped

    def watch(self) -> None:
        """Watch the parts of writing and publishing."""
        from scanloom.engine import steps
        from scanloom.engine.case import writers
        from scanloom.io.output import case_folder
        from scanloom.review.preview import content, page

        watched = tuple(
            replace(
                writer,
                write=self.timed(f"write: {writer.name}", writer.write),
                read_back=self.timed(f"readback: {writer.name}", writer.read_back),
            )
            for writer in writers.WRITERS
        )
        setattr(writers, "WRITERS", watched)  # noqa: B010  # a constant to mypy
        for owner, function, name in (
            (content, "choose_content", "write: preview, what to draw"),
            (page, "draw_page", "write: preview.png"),
            (page, "draw_thumbnail", "write: thumbnail.png"),
            (steps, "write_document", "write: case.json, timing.json"),
            (case_folder.CaseFolder, "publish", "publish: crosswalk, audit, rename"),
            (case_folder, "_write_checksums", "publish: checksums"),
            (case_folder, "_sync_tree", "publish: sync"),
        ):
            setattr(owner, function, self.timed(name, getattr(owner, function)))


def draw(folder: Path, count: int) -> list[Path]:
    """Write so many scans, and return their paths: in turn a series and a file."""
    from phantom import draw_labels, draw_scan, phantom, write_dicom, write_nifti
    from real_run import copy

    extent = tuple(n * mm for n, mm in zip(SHAPE, SPACING, strict=True))
    drawn = phantom((extent[0], extent[1], extent[2]), STRUCTURES)
    scan = draw_scan(drawn, draw_labels(drawn, SPACING, SHAPE))
    write_dicom(scan, SPACING, folder / "series")
    write_nifti(scan, SPACING, folder / "scan.nii.gz")
    paths = []
    for n in range(count):
        target = folder / "archive" / f"{n:04d}"
        copy(folder / ("scan.nii.gz" if n % 2 else "series"), target, n)
        paths.append(target)
    return paths


def save_model(folder: Path) -> Path:
    """Write the bundle of a network that finds the structures in one window."""
    from model import save_bundle

    bundle = save_bundle(folder, STRUCTURES, "scores")
    path = bundle / "configs" / "inference.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["inferer"]["roi_size"] = [64, 64, 32]
    for step in config["preprocessing"]["transforms"]:
        if "pixdim" in step:
            step["pixdim"] = list(SPACING)
    path.write_text(json.dumps(config), encoding="utf-8")
    return bundle


def by_step(scans: Sequence[Path], bundle: Path, out: Path, steps: Steps) -> dict[str, float]:
    """Return the milliseconds a case of each step, and of everything."""
    from scanloom.engine.segment import iter_segment
    from scanloom.options import ReadOptions, segment_options

    options = segment_options(
        models=(str(bundle),),
        out=out,
        device="cpu",
        precision="float32",
        read=ReadOptions(modality="CT"),
        key=out.parent / "key",
    )
    records = iter_segment(scans, options, mark=steps.block)
    for _ in range(FEW):  # networks, imports, fonts: once a process
        _checked(next(records)[1])
    steps.spent.clear()
    before = time.process_time()
    count = sum(_checked(record) for _, record in records)
    whole = time.process_time() - before
    spent = {name: 1000 * seconds / count for name, seconds in steps.spent.items()}
    return {**spent, "all other": 1000 * whole / count - sum(spent.values())}


def _checked(record: Any) -> int:
    if record.reason is not None:
        raise SystemExit(f"not segmented: {record.reason} {record.detail}")
    return 1


def run_seconds(archive: Sequence[Path], bundle: Path, root: Path, cluster: str) -> float:
    """Return the processor seconds of a run over scans, with those of its worker."""
    workflow = root / "workflow.yaml"
    lines = ("name: tiny", f"models: ['{bundle}']", "policy: {modality: CT}")
    workflow.write_text("\n".join((*lines, "execution: {device: cpu}", "")), encoding="utf-8")
    out = root / "run"
    shutil.rmtree(out, ignore_errors=True)
    command = ["run", workflow, *archive, "--out", out, "--cluster", cluster, "--quiet"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-m", "scanloom", *map(str, command)],
        env={**os.environ, "SCANLOOM_KEY": str(root / "key")},
        check=True,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if len([*out.glob("cases/*")]) != len(archive):
        raise SystemExit("the run did not segment all cases")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--steps-only", action="store_true", help="without `scanloom run`")
    options = parse(parser, cases=2, runs=1)
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch: a step's time is that of its thread
    print(machine("scanloom", "torch"), "\n")
    found: defaultdict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as name:
        root, steps = Path(name), Steps()
        scans, bundle = draw(root, options.cases + FEW), save_model(root / "bundle")
        steps.watch()
        for n in range(options.runs):
            spent = by_step(scans, bundle, root / f"out-{n}", steps)
            for step, milliseconds in {**spent, "all steps": sum(spent.values())}.items():
                found[step].append(milliseconds)
            if options.steps_only:
                continue
            for cluster in ("none", "local"):
                both = (scans, scans[:FEW])
                many, few = (run_seconds(some, bundle, root, cluster) for some in both)
                row = f"a case of `scanloom run --cluster {cluster}`"
                found[row].append(1000 * (many - few) / options.cases)
    rows = [[step, median(values)] for step, values in found.items() if median(values) >= 0.05]
    print(table(["step", "cpu ms a case"], rows))


if __name__ == "__main__":
    main()
