"""`OUT/report/index.html`: a run to look through, the doubtful cases first. Opens from disk."""

from __future__ import annotations

import base64
import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scanloom.core import Flag
from scanloom.io.private import check_links
from scanloom.io.whole import write_whole
from scanloom.review.report.charts import Chart, draw_charts
from scanloom.review.report.gather import Gathered, Shown, advice, gather
from scanloom.review.report.runs import our_runs, run_row, together
from scanloom.review.report.thumbs import draw_thumbs
from scanloom.review.risk import COHORT, DOUBTFUL, Doubt, judge, score

REPORT = "report"
THUMBS = "thumbs"
FAILED_RISK = DOUBTFUL - 0.005
"""Failed cases stand after doubtful ones, where there is a result to look at."""
MOST_NAMES = 4
"""Structures that are named of which the same is said."""
MOST_RUNS = 50
"""Of more, the newest are shown."""
_HERE = Path(__file__).parent


def write_report(out: Path, damaged: set[str] | None = None) -> Path:
    """Write the report of an output folder, anew.

    Parameters
    ----------
    out : Path
        The output folder.
    damaged : set of str, optional
        Gets the names of published cases that can't be read, and are left out.

    Returns
    -------
    Path
        `OUT/report/index.html`.

    Raises
    ------
    ScanError
        OUTPUT_UNWRITABLE if the manifest can't be read, or a part of the folder is a link.
    OSError
        If the report can't be written.
    """
    damaged = set() if damaged is None else damaged
    check_links(out)
    found = gather(out, damaged)
    folder = out / REPORT
    folder.mkdir(parents=True, exist_ok=True)
    previews = [(case.id, case.preview) for case in found.cases if case.preview]
    thumbs = draw_thumbs(previews, folder / THUMBS)
    damaged.update(case for case, _ in previews if case not in thumbs)
    structures = _structures(found.cases)
    charts = draw_charts(found.cases, structures, folder)
    html = _render(found, structures, thumbs, charts)
    page = folder / "index.html"
    write_whole(page, lambda draft: draft.write_text(html, encoding="utf-8"))
    return page


def _render(
    found: Gathered,
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
    done = [case for case in found.cases if case.status == "done"]
    doubts = judge({c.id: c.measurements for c in done}, {c.id: c.axes for c in done})
    rows = [_row(c, doubts.get(c.id, []), structures, thumbs.get(c.id)) for c in found.cases]
    rows.sort(key=lambda row: (-row["risk"], row["id"]))
    names, runs = list(structures.values()), our_runs(found.runs)
    policy = (
        "default-src 'none'; img-src 'self' file:; base-uri 'none'; form-action 'none'; "
        f"script-src '{_digest(script)}'; style-src '{_digest(style)}'"
    )
    return environment.get_template("page.html.jinja").render(
        policy=policy,
        style=style,
        script=script,
        data=_embedded({"structures": names, "cases": rows}),
        cases=len(rows),
        done=sum(row["status"] == "done" for row in rows),
        failed=sum(row["status"] == "failed" for row in rows),
        ambiguous=sum(row["status"] == "ambiguous" for row in rows),
        doubtful=sum(row["doubtful"] for row in rows),
        small=sum(row["status"] == "done" for row in rows) < COHORT,
        cohort=COHORT,
        structures=names,
        shown=_most_found(rows, len(names)),
        reasons=sorted({row["reason"] for row in rows} - {""}),
        flags=sorted({flag for row in rows for flag in row["flags"]}),
        names=sorted({model for row in rows for model in row["models"]}),
        left_out=found.left_out,
        advice=advice,
        files=found.files,
        charts=charts,
        models=found.models,
        versions=found.versions,
        workflow=json.dumps(found.workflow, indent=2) if found.workflow else "",
        runs=[run_row(run) for run in runs[:MOST_RUNS]],
        all_runs=together(runs),
    )


def _structures(cases: Sequence[Shown]) -> dict[tuple[str, str], str]:
    """Return the name of each model's structure; with the model's where two have one alike."""
    known = sorted({(m.label, m.model) for case in cases for m in case.measurements})
    often = Counter(label for label, _ in known)
    return {
        (model, label): label.replace("_", " ") + (f" ({model})" if often[label] > 1 else "")
        for label, model in known
    }


def _row(
    case: Shown,
    doubts: Sequence[Doubt],
    structures: dict[tuple[str, str], str],
    thumb: tuple[int, int] | None,
) -> dict[str, Any]:
    """Return a case as the page's script takes it."""
    failed, outdated = case.status != "done", Flag.OUTDATED.code in case.flags
    risk = 1.0 if outdated else score(doubts)
    older = [f"an older result: the later attempt failed ({case.reason})"] if outdated else []
    ml = {(m.model, m.label): float(f"{m.volume_ml:.4g}") for m in case.measurements}
    return {
        "id": case.id,
        "status": case.status,
        "reason": case.reason,
        "detail": case.detail,
        "advice": advice(case.reason) if failed else "",
        "risk": FAILED_RISK if failed else round(risk, 2),
        "doubtful": not failed and risk >= DOUBTFUL,
        "doubts": [*older, *_told(doubts)],
        "models": list(case.models),
        "flags": list(case.flags),
        "seconds": round(sum(case.seconds.values()), 2),
        "volumes": [ml.get(key) for key in structures] if ml else [],
        "preview": thumb,
    }


def _told(doubts: Sequence[Doubt]) -> list[str]:
    """Return doubts in words; what is said of several structures is said once."""
    same: dict[str, list[str]] = defaultdict(list)
    for doubt in doubts:
        same[doubt.text].append(doubt.structure)
    told = []
    for text, names in same.items():
        more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
        told.append(f"{', '.join(names[:MOST_NAMES])}{more}: {text}")
    return told


def _most_found(rows: Sequence[dict[str, Any]], structures: int) -> int:
    """Return the number of the structure that was found in most cases."""
    found = [0] * structures
    for row in rows:
        for n, ml in enumerate(row["volumes"]):
            found[n] += bool(ml)
    return found.index(max(found)) if found else 0


def _embedded(data: dict[str, Any]) -> str:
    """Return data as JSON that can't end the element it stands in."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _digest(text: str) -> str:
    """Return what a content security policy calls an inline text by (CSP level 3, 2.3.1)."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
