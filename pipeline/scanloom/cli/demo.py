"""`scanloom demo`: the sample study that ships, segmented by the model that ships."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scanloom.cli.console import (
    DebugOption,
    JsonOption,
    Manner,
    console,
    print_json,
    say,
    speaking,
)
from scanloom.cli.exits import Exit

if TYPE_CHECKING:
    from scanloom.core import CaseRecord

MODEL = "ct_tissue"
WITHIN = 5.0
"""Per cent by which a judged volume may differ from the drawing's."""
JUDGED = ("lung", "fat", "soft_tissue", "bone")
"""Gas is shown, not judged: its few pockets are thin, and the scan blurs their edges."""


def demo(
    out: Annotated[Path, typer.Option(help="Where results go.")] = Path("scanloom-demo"),
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Segment the sample study and compare with what was drawn.

    The study is a synthetic torso: its volumes are known, and no patient's data is in it.
    """
    with speaking(Manner(json, debug)):
        from scanloom.cards.shipped import shipped
        from scanloom.cli.segment import run
        from scanloom.core import ScanError
        from scanloom.engine.segment import SegmentOptions

        study = shipped("data") / "torso_ct"
        options = SegmentOptions(models=(MODEL,), out=out, replace=True)
        [(_, record)] = run([study], options)
        if record.reason is not None:
            raise ScanError(record.reason, record.detail)
        rows = compare(record, known_volumes(study.with_name("torso_truth.json")))
        if json:
            print_json({"schema": 1, "folder": str(record.folder), "volumes": rows})
        else:
            _show(record, rows)
        wrong = [row["structure"] for row in rows if row["judged"] and not row["within"]]
        if wrong:
            text = f"scanloom: more than {WITHIN:g} % off the drawing: {', '.join(wrong)}."
            say(f"{text} Run `scanloom doctor`, and report it.", err=True)
            raise typer.Exit(Exit.SOME_FAILED)


def known_volumes(file: Path) -> dict[str, float]:
    """Return the volumes in ml that were drawn, by structure.

    Raises
    ------
    ScanError
        NOT_FOUND or DAMAGED if the file that ships with the study is not whole.
    """
    from json import loads

    from scanloom.core import Reason, ScanError

    try:
        volumes = loads(file.read_text(encoding="utf-8"))["tissues_ml"]
        return {str(label): float(ml) for label, ml in volumes.items()}
    except OSError as exc:
        raise ScanError(Reason.NOT_FOUND, "the sample study's volumes are not there") from exc
    except (AttributeError, KeyError, TypeError, ValueError) as exc:
        raise ScanError(Reason.DAMAGED, "the sample study's volumes can't be read") from exc


def compare(record: CaseRecord, known: dict[str, float]) -> list[dict[str, Any]]:
    """Return a row a structure: ml found, ml drawn, difference in per cent, and the judgement."""
    found = {m.label: m.volume_ml for m in record.measurements}
    rows = []
    for label, drawn in known.items():
        ml = found.get(label, 0.0)
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
    for name in ("structure", "ml", "drawn ml", "difference", ""):
        table.add_column(name, justify="left" if name in ("structure", "") else "right")
    for row in rows:
        word = ("ok" if row["within"] else "off") if row["judged"] else "not judged"
        difference = f"{row['difference_percent']:+.1f} %"
        table.add_row(
            row["structure"], f"{row['ml']:.1f}", f"{row['drawn_ml']:.1f}", difference, word
        )
    screen = console()
    screen.print("\nThe sample study, a drawn torso: volumes found and volumes drawn")
    screen.print(table)
    for flag in record.flags:
        screen.print(f"! {flag.text} ({flag.code}).", soft_wrap=True)
    if record.folder is not None:
        screen.print(f"Results: {record.folder}", soft_wrap=True)
        screen.print(f"Look at: {record.folder / 'preview.png'}", soft_wrap=True)
