"""Write `OUT/report/index.html`: all cases by review priority, in one page that opens from disk."""

from __future__ import annotations

import base64
import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scanloom.core import Flag
from scanloom.io.output.file_names import THUMBNAIL
from scanloom.io.output.private import check_links
from scanloom.io.system.atomic_write import atomic_write
from scanloom.review.outliers import (
    MIN_COHORT,
    REVIEW_THRESHOLD,
    Finding,
    find_outliers,
    risk_score,
)
from scanloom.review.report.charts import Chart, draw_charts
from scanloom.review.report.data import ReportCase, ReportData, advice, collect_report_data
from scanloom.review.report.runs import run_row, summed, valid_runs
from scanloom.review.report.thumbnails import draw_thumbs

REPORT = "report"
THUMBS = "thumbs"
WITHOUT_RESULT = {"failed": REVIEW_THRESHOLD - 0.005, "ambiguous": REVIEW_THRESHOLD - 0.006}
"""Risk by which series without a result are sorted: they follow the cases that need review, since
there is no result to look at."""
SKIPPED_RISK = -1.0
"""Risk of series that were skipped: they come last."""
MAX_NAMES = 4
"""Number of structures that are named in front of the text of a shared finding."""
MAX_RUNS = 50
"""Number of runs that are listed, the newest ones."""
_HERE = Path(__file__).parent


def write_report(out: Path, damaged: set[str] | None = None) -> Path:
    """Write the report of an output folder.

    Parameters
    ----------
    out : Path
        The output folder.
    damaged : set of str, optional
        Receives the names of published cases that can't be read, which are left out.

    Returns
    -------
    Path
        `OUT/report/index.html`.

    Raises
    ------
    ScanError
        OUTPUT_UNWRITABLE if the manifest can't be read, or a folder of the output is a link.
    OSError
        If the report can't be written.
    """
    damaged = set() if damaged is None else damaged
    check_links(out)
    data = collect_report_data(out, damaged)
    folder = out / REPORT
    folder.mkdir(parents=True, exist_ok=True)
    previews = [(case.id, _picture(case.preview)) for case in data.cases if case.preview]
    thumbs = draw_thumbs(previews, folder / THUMBS)
    damaged.update(case for case, _ in previews if case not in thumbs)
    structures = _structures(data.cases)
    charts = draw_charts(data.cases, structures, folder)
    html = _render(data, structures, thumbs, charts)
    page = folder / "index.html"
    atomic_write(page, lambda draft: draft.write_text(html, encoding="utf-8"))
    return page


def _picture(preview: Path) -> Path:
    """Return the picture from which a thumbnail is made: the preview of old cases."""
    own = preview.with_name(THUMBNAIL)
    return own if own.exists() else preview


def _render(
    data: ReportData,
    structures: dict[tuple[str, str], str],
    thumbs: dict[str, tuple[int, int]],
    charts: Sequence[Chart],
) -> str:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(_HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    script, style = (_HERE / "page.js").read_text(), (_HERE / "page.css").read_text()
    done = [case for case in data.cases if case.status == "done"]
    findings = find_outliers({c.id: c.measurements for c in done}, {c.id: c.axes for c in done})
    rows = [_row(c, findings.get(c.id, []), structures, thumbs.get(c.id)) for c in data.cases]
    rows.sort(key=lambda row: (-row["risk"], row["id"]))
    names, runs = list(structures.values()), valid_runs(data.runs)
    policy = (
        "default-src 'none'; img-src 'self' file:; base-uri 'none'; form-action 'none'; "
        f"script-src '{_digest(script)}'; style-src '{_digest(style)}'"
    )
    return environment.get_template("page.html.jinja").render(
        policy=policy,
        style=style,
        script=script,
        data=_embedded({"structures": names, "advice": _advice(rows), "cases": rows}),
        cases=len(rows),
        counts=Counter(row["status"] for row in rows),
        review=sum(row["review"] for row in rows),
        small=sum(row["status"] == "done" for row in rows) < MIN_COHORT,
        cohort=MIN_COHORT,
        structures=names,
        shown=_most_frequent(rows, len(names)),
        reasons=sorted({row["reason"] for row in rows} - {""}),
        flags=sorted({flag for row in rows for flag in row["flags"]}),
        names=sorted({model for row in rows for model in row["models"]}),
        left_out=data.left_out,
        advice=advice,
        files=data.files,
        charts=charts,
        models=data.models,
        versions=data.versions,
        workflow=json.dumps(data.workflow, indent=2) if data.workflow else "",
        runs=[run_row(run) for run in runs[:MAX_RUNS]],
        all_runs=summed(runs),
    )


def _structures(cases: Sequence[ReportCase]) -> dict[tuple[str, str], str]:
    """Return the display name of each (model, label), with the model if labels are ambiguous."""
    pairs = sorted({(m.label, m.model) for case in cases for m in case.measurements})
    count = Counter(label for label, _ in pairs)
    return {
        (model, label): label.replace("_", " ") + (f" ({model})" if count[label] > 1 else "")
        for label, model in pairs
    }


def _row(
    case: ReportCase,
    findings: Sequence[Finding],
    structures: dict[tuple[str, str], str],
    thumb: tuple[int, int] | None,
) -> dict[str, Any]:
    """Return a case as the data of the page's script."""
    has_result, outdated = case.status == "done", Flag.OUTDATED.code in case.flags
    risk = 1.0 if outdated else risk_score(findings)
    older = [f"an older result: the later attempt failed ({case.reason})"] if outdated else []
    ml = {(m.model, m.label): float(f"{m.volume_ml:.4g}") for m in case.measurements}
    return {
        "id": case.id,
        "status": case.status,
        "reason": case.reason,
        "detail": case.detail,
        "risk": round(risk, 2) if has_result else WITHOUT_RESULT.get(case.status, SKIPPED_RISK),
        "review": has_result and risk >= REVIEW_THRESHOLD,
        "findings": [*older, *_sentences(findings)],
        "models": list(case.models),
        "flags": list(case.flags),
        "seconds": round(sum(case.seconds.values()), 2),
        "volumes": [ml.get(key) for key in structures] if ml else [],
        "preview": thumb,
        "files": list(case.files),
    }


def _advice(rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Return the advice of each reason, and the text of each flag, that a row has."""
    codes = {row["reason"] for row in rows} | {flag for row in rows for flag in row["flags"]}
    return {code: advice(code) for code in sorted(codes - {""})}


def _sentences(findings: Sequence[Finding]) -> list[str]:
    """Return findings as text; structures with the same finding share a sentence."""
    by_text: dict[str, list[str]] = defaultdict(list)
    for finding in findings:
        by_text[finding.text].append(finding.structure)
    sentences = []
    for text, names in by_text.items():
        more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
        sentences.append(f"{', '.join(names[:MAX_NAMES])}{more}: {text}")
    return sentences


def _most_frequent(rows: Sequence[dict[str, Any]], structures: int) -> int:
    """Return the index of the structure that is present in most cases."""
    counts = [0] * structures
    for row in rows:
        for n, ml in enumerate(row["volumes"]):
            counts[n] += bool(ml)
    return counts.index(max(counts)) if counts else 0


def _embedded(data: dict[str, Any]) -> str:
    """Return data as JSON that can't close the HTML element around it."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _digest(text: str) -> str:
    """Return the hash source of an inline text for a content security policy (CSP 3, 2.3.1)."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
