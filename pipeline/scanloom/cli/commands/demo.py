"""`scanloom demo`: segment the shipped sample studies with the shipped models."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from scanloom.cli.console import Exit, console, error_boundary, print_result, say
from scanloom.cli.options import Reporting, folder_option, takes_panels

if TYPE_CHECKING:
    from scanloom.core import CaseRecord


@dataclass(frozen=True)
class Sample:
    """A sample study whose volumes are known.

    Parameters
    ----------
    title : str
        What it shows.
    study, truth : str
        Names in the shipped data: folder or file of the scan, and JSON with the true volumes.
    volumes : str
        Key of the volumes in ml, by structure.
    model, modality : str
        The shipped model, and the modality of the study.
    judged : tuple of str
        Structures that are checked; others are only shown.
    within : float
        Largest deviation of a checked volume from the true one, per cent.
    """

    title: str
    study: str
    truth: str
    volumes: str
    model: str
    modality: Literal["CT", "MR"]
    judged: tuple[str, ...]
    within: float


TORSO = Sample(
    title="a synthetic torso in CT",
    study="torso_ct",
    truth="torso_truth.json",
    volumes="tissues_ml",
    model="ct_tissue",
    modality="CT",
    # not gas: its pockets are thin and blurred in the scan
    judged=("lung", "fat", "soft_tissue", "bone"),
    within=5.0,
)
HEAD = Sample(
    title="a drawn head in T1-weighted MR",
    study="head_mr.nii.gz",
    truth="head_truth.json",
    volumes="structures_ml",
    model="brain_anatomy",
    modality="MR",
    judged=(
        *("cerebral_white_matter_left", "cerebral_white_matter_right"),
        *("cerebral_cortex_left", "cerebral_cortex_right"),
        *("cerebellum_cortex_left", "cerebellum_cortex_right"),
        *("thalamus_left", "thalamus_right", "putamen_left", "putamen_right"),
        *("hippocampus_left", "hippocampus_right", "brain_stem"),
    ),
    within=12.0,
)


@takes_panels
def demo(
    general: Reporting,
    out: Annotated[Path, folder_option("Output folder.", envvar="SCANLOOM_DEMO_OUT")] = Path(
        "scanloom-demo"
    ),
) -> None:
    """Segment the sample studies and compare the volumes with the known ones.

    The studies are a synthetic torso, and a head drawn from a label map: no scan of a patient.
    """
    with error_boundary(general.mode):
        from scanloom.cli.commands.segment import run
        from scanloom.core import ReadOptions, ScanError
        from scanloom.core.paths import shipped
        from scanloom.options import SegmentOptions

        data = shipped("data")
        studies, records = [], []
        for sample in (TORSO, HEAD):
            read = ReadOptions(modality=sample.modality)
            options = SegmentOptions(models=(sample.model,), out=out, replace=True, read=read)
            [(_, record)] = run([data / sample.study], options, quiet=general.quiet)
            if record.reason is not None:
                raise ScanError(record.reason, record.detail)
            rows = compare(record, known_volumes(data / sample.truth, sample.volumes), sample)
            studies.append({"study": sample.study, "folder": str(record.folder), "volumes": rows})
            records.append((sample, record, rows))
        plain = {"schema": 2, "studies": studies}
        print_result(general.mode, lambda: plain, lambda: _show(records))
        judged = [row for _, _, rows in records for row in rows if row["judged"]]
        deviating = [row["structure"] for row in judged if not row["within"]]
        if deviating:
            names = ", ".join(deviating)
            message = f"scanloom: volumes differ by more than they may: {names}."
            say(f"{message} Run `scanloom doctor`, and report it.", err=True)
            raise typer.Exit(Exit.SOME_FAILED)


def known_volumes(file: Path, key: str) -> dict[str, float]:
    """Return the true volumes in ml, by structure, below a key of a sample's JSON, which ships."""
    volumes: dict[str, float] = json.loads(file.read_text(encoding="utf-8"))[key]
    return volumes


def compare(record: CaseRecord, known: dict[str, float], sample: Sample) -> list[dict[str, Any]]:
    """Return a row for each structure: measured ml, true ml, difference in per cent, verdict.

    What a model finds on request only is left out.
    """
    measured = {m.label: m.volume_ml for m in record.measurements}
    rows = []
    for label, drawn in known.items():
        if label not in measured and label not in sample.judged:
            continue
        ml = measured.get(label, 0.0)
        difference = 100 * (ml - drawn) / drawn
        rows.append(
            {
                "structure": label,
                "ml": round(ml, 1),
                "drawn_ml": drawn,
                "difference_percent": round(difference, 2),
                "judged": label in sample.judged,
                "within": abs(difference) <= sample.within,
            }
        )
    return rows


def _show(records: list[tuple[Sample, CaseRecord, list[dict[str, Any]]]]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    screen = console()
    for n, (sample, record, rows) in enumerate(records):
        table = Table(box=SIMPLE_HEAD, pad_edge=False)
        for name in ("structure", "ml", "true ml", "difference", ""):
            table.add_column(name, justify="left" if name in ("structure", "") else "right")
        for row in rows:
            verdict = ("ok" if row["within"] else "off") if row["judged"] else "not checked"
            difference = f"{row['difference_percent']:+.1f} %"
            table.add_row(
                row["structure"], f"{row['ml']:.1f}", f"{row['drawn_ml']:.1f}", difference, verdict
            )
        if n:
            screen.print()
        screen.print(f"Sample study, {sample.title}: measured and true volumes")
        screen.print(table)
        for flag in record.flags:
            screen.print(f"! {flag.text} ({flag.code}).")
        if record.folder is not None:
            screen.print(f"Results: {record.folder}")
            screen.print(f"Preview: {record.folder / 'preview.png'}")
