"""`OUT/report/index.html`: a run to look through, the doubtful cases first. Opens from disk."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scanloom.io.whole import write_whole
from scanloom.review.report.charts import draw_charts
from scanloom.review.report.gather import Gathered, Shown, advice, gather
from scanloom.review.report.thumbs import draw_thumbs
from scanloom.review.risk import Doubt, judge, score

REPORT = "report"
THUMBS = "thumbs"
_HERE = Path(__file__).parent


def write_report(out: Path) -> Path:
    """Write the report of an output folder, anew.

    Returns
    -------
    Path
        `OUT/report/index.html`.

    Raises
    ------
    OSError, ValueError
        If what was published can't be read, or the report can't be written.
    """
    found = gather(out)
    folder = out / REPORT
    folder.mkdir(parents=True, exist_ok=True)
    draw_thumbs([(c.id, c.preview) for c in found.cases if c.preview], folder / THUMBS)
    charts = draw_charts(found.cases, folder)
    page = folder / "index.html"
    html = _render(found, charts)
    write_whole(page, lambda draft: draft.write_text(html, encoding="utf-8"))
    return page


def _render(found: Gathered, charts: Sequence[tuple[str, str]]) -> str:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(_HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    script, style = (_HERE / "page.js").read_text(), (_HERE / "page.css").read_text()
    doubts = judge({c.id: c.measurements for c in found.cases if c.status == "done"})
    rows = [_row(case, doubts.get(case.id, [])) for case in found.cases]
    rows.sort(key=lambda row: (-row["risk"], row["id"]))
    policy = (
        "default-src 'none'; img-src 'self' file:; base-uri 'none'; form-action 'none'; "
        f"script-src '{_digest(script)}'; style-src '{_digest(style)}'"
    )
    return environment.get_template("page.html.jinja").render(
        policy=policy,
        style=style,
        script=script,
        data=_embedded(rows),
        cases=len(rows),
        done=sum(row["status"] == "done" for row in rows),
        failed=sum(row["status"] == "failed" for row in rows),
        doubtful=sum(row["risk"] > 0 for row in rows if row["status"] == "done"),
        reasons=sorted({row["reason"] for row in rows} - {""}),
        flags=sorted({flag for row in rows for flag in row["flags"]}),
        names=sorted({model for row in rows for model in row["models"]}),
        skipped=[(code, count, advice(code)) for code, count in found.skipped.items()],
        files=found.files,
        charts=charts,
        models=found.models,
        versions=found.versions,
        workflow=json.dumps(found.workflow, indent=2) if found.workflow else "",
        run=found.run,
    )


def _row(case: Shown, doubts: Sequence[Doubt]) -> dict[str, Any]:
    """Return a case as the page's script takes it."""
    failed = case.status == "failed"
    return {
        "id": case.id,
        "status": case.status,
        "reason": case.reason,
        "detail": case.detail,
        "advice": advice(case.reason) if failed else "",
        "risk": round(100.0 if failed else score(doubts), 2),
        "doubts": [f"{doubt.structure}: {doubt.text}" for doubt in doubts],
        "models": list(case.models),
        "flags": list(case.flags),
        "modality": case.modality,
        "seconds": round(sum(case.seconds.values()), 2),
        "volumes": [
            [m.label, float(f"{m.volume_ml:.4g}"), None if m.mean is None else round(m.mean, 1)]
            for m in case.measurements
        ],
        "preview": case.preview is not None,
    }


def _embedded(rows: Sequence[dict[str, Any]]) -> str:
    """Return rows as JSON that can't end the element it stands in."""
    text = json.dumps(rows, separators=(",", ":"), ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _digest(text: str) -> str:
    """Return what a content security policy calls an inline text by (CSP level 3, 2.3.1)."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
