"""`scanloom demo`: segment the shipped sample study with the shipped model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scanloom.cli.console import Exit, console, error_boundary, print_result, say
from scanloom.cli.options import Reporting, takes_panels

if TYPE_CHECKING:
    from scanloom.core import CaseRecord

MODEL = "ct_tissue"
WITHIN = 5.0
"""Largest deviation of a checked volume from the true one, per cent."""
JUDGED = ("lung", "fat", "soft_tissue", "bone")
"""Structures that are checked. Gas is only shown: its pockets are thin and blurred in the scan."""


@takes_panels
def demo(
    general: Reporting,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="Output folder.")] = Path(
        "scanloom-demo"
    ),
) -> None:
    """Segment the sample study and compare the volumes with the known ones.

    The study is a synthetic torso, without data of any patient.
    """
    with error_boundary(general.mode):
        from scanloom.cli.commands.segment import run
        from scanloom.core import ScanError
        from scanloom.core.paths import shipped
        from scanloom.options import SegmentOptions

        study = shipped("data") / "torso_ct"
        options = SegmentOptions(models=(MODEL,), out=out, replace=True)
        [(_, record)] = run([study], options, quiet=general.quiet)
        if record.reason is not None:
            raise ScanError(record.reason, record.detail)
        rows = compare(record, known_volumes(study.with_name("torso_truth.json")))
        plain = {"schema": 1, "folder": str(record.folder), "volumes": rows}
        print_result(general.mode, lambda: plain, lambda: _show(record, rows))
        deviating = [row["structure"] for row in rows if row["judged"] and not row["within"]]
        if deviating:
            names = ", ".join(deviating)
            message = f"scanloom: volumes differ by more than {WITHIN:g} %: {names}."
            say(f"{message} Run `scanloom doctor`, and report it.", err=True)
            raise typer.Exit(Exit.SOME_FAILED)


def known_volumes(file: Path) -> dict[str, float]:
    """Return the true volumes in ml, by structure.

    Raises
    ------
    ScanError
        NOT_FOUND or DAMAGED if the shipped file is missing or damaged.
    """
    from json import loads

    from scanloom.core import Reason, ScanError

    try:
        volumes = loads(file.read_text(encoding="utf-8"))["tissues_ml"]
        return {str(label): float(ml) for label, ml in volumes.items()}
    except OSError as exc:
        raise ScanError(Reason.NOT_FOUND, "the sample study's volumes are missing") from exc
    except (AttributeError, KeyError, TypeError, ValueError) as exc:
        raise ScanError(Reason.DAMAGED, "the sample study's volumes are damaged") from exc


def compare(record: CaseRecord, known: dict[str, float]) -> list[dict[str, Any]]:
    """Return a row for each structure: measured ml, true ml, difference in per cent, verdict."""
    measured = {m.label: m.volume_ml for m in record.measurements}
    rows = []
    for label, drawn in known.items():
        ml = measured.get(label, 0.0)
        difference = 100 * (ml - drawn) / drawn
        rows.append(
            {
                "structure": label,
                "ml": round(ml, 1),
                "drawn_ml": drawn,
                "difference_percent": round(difference, 2),
                "judged": label in JUDGED,
                "within": abs(difference) <= WITHIN,
            }
        )
    return rows


def _show(record: CaseRecord, rows: list[dict[str, Any]]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("structure", "ml", "true ml", "difference", ""):
        table.add_column(name, justify="left" if name in ("structure", "") else "right")
    for row in rows:
        verdict = ("ok" if row["within"] else "off") if row["judged"] else "not checked"
        difference = f"{row['difference_percent']:+.1f} %"
        table.add_row(
            row["structure"], f"{row['ml']:.1f}", f"{row['drawn_ml']:.1f}", difference, verdict
        )
    screen = console()
    screen.print("\nSample study, a synthetic torso: measured and true volumes")
    screen.print(table)
    for flag in record.flags:
        screen.print(f"! {flag.text} ({flag.code}).")
    if record.folder is not None:
        screen.print(f"Results: {record.folder}")
        screen.print(f"Preview: {record.folder / 'preview.png'}")
