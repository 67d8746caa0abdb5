"""Write `OUT/report/index.html`: all cases by review priority, in one page that opens from disk."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scanloom.core import ScanError
from scanloom.io.output.file_names import THUMBNAIL
from scanloom.io.output.private import check_links, private_folder, write_private
from scanloom.io.system.atomic_write import atomic_write
from scanloom.review.cohort import MIN_COHORT
from scanloom.review.report.data import (
    ReportData,
    advice,
    collect_report_data,
    private_rows,
    run_row,
    summed_runs,
    valid_runs,
)
from scanloom.review.report.pictures import Chart, draw_charts, draw_thumbs
from scanloom.review.report.rows import WITH_RESULT, Structures, make_rows, structure_names
from scanloom.review.verdicts.results import STATES
from scanloom.review.verdicts.tables import review_states

if TYPE_CHECKING:
    from jinja2 import Template

REPORT = "report"
PRIVATE_REPORT = "report.html"
THUMBS = "thumbs"
SCRIPTS = ("elements.js", "figures.js", "case.js", "page.js")
"""Modules of the page, each after those that it imports."""
_MODULE_SYNTAX = re.compile(r"^import [^;]+;\n|^export ", re.MULTILINE)
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
    page = out / REPORT / "index.html"
    html = _render(_prepare(out, damaged))
    atomic_write(page, lambda draft: draft.write_text(html, encoding="utf-8"))
    return page


def write_private_report(out: Path, fingerprint: str, damaged: set[str] | None = None) -> Path:
    """Write the report with names and paths, readable by its owner only.

    Its pictures are those of `OUT/report/`, which are drawn if they are missing.

    Parameters
    ----------
    out : Path
        The output folder, with a crosswalk.
    fingerprint : str
        Fingerprint of the key, as `scanloom.io.identity.key_fingerprint` returns it.
    damaged : set of str, optional
        As of `write_report`.

    Returns
    -------
    Path
        `OUT/private/report.html`.

    Raises
    ------
    ScanError
        As of `write_report`; KEY_MISMATCH if OUT has another key.
    OSError
        If the report can't be written.
    """
    damaged = set() if damaged is None else damaged
    content = _prepare(out, damaged)
    sources = private_rows(out)
    html = _render(content, sources, f"../{REPORT}/")
    with private_folder(out, fingerprint) as folder:
        page = folder / PRIVATE_REPORT
        write_private(page, lambda draft: draft.write_text(html, encoding="utf-8"))
    return page


@dataclass(frozen=True)
class _Content:
    """Content of the page: data, sizes of thumbnails, charts, and states of reviewed cases."""

    data: ReportData
    structures: Structures
    thumbs: dict[str, tuple[int, int]]
    charts: Sequence[Chart]
    verdicts: dict[str, str]


def _prepare(out: Path, damaged: set[str]) -> _Content:
    """Collect the content of the page and draw its pictures."""
    check_links(out)
    data = collect_report_data(out, damaged)
    folder = out / REPORT
    folder.mkdir(parents=True, exist_ok=True)
    previews = [(case.id, _picture(case.preview)) for case in data.cases if case.preview]
    thumbs = draw_thumbs(previews, folder / THUMBS)
    damaged.update(case for case, _ in previews if case not in thumbs)
    structures = structure_names(data.cases)
    charts = draw_charts(data.cases, structures, folder)
    verdicts: dict[str, str] = {}
    with suppress(ScanError):  # a damaged log: `scanloom report` and `verify` say so
        verdicts = review_states(out)
    return _Content(data, structures, thumbs, charts, verdicts)


def _picture(preview: Path) -> Path:
    """Return the picture from which a thumbnail is made: the preview of old cases."""
    own = preview.with_name(THUMBNAIL)
    return own if own.exists() else preview


def _render(
    content: _Content, sources: Mapping[str, Sequence[str]] | None = None, pictures: str = ""
) -> str:
    """Return the page; with names and paths if there are sources by case id."""
    data, names = content.data, list(content.structures.values())
    rows, distributions = make_rows(data.cases, content.structures, content.thumbs)
    _add_verdicts(rows, content.verdicts)
    runs = valid_runs(data.runs)
    # one module without imports: a page on disk can't import modules from beside it
    script = "\n".join(_MODULE_SYNTAX.sub("", (_HERE / name).read_text()) for name in SCRIPTS)
    style = (_HERE / "page.css").read_text()
    embedded = {
        "structures": names,
        "distributions": distributions,
        "advice": _advice(rows),
        "cases": rows,
        "pictures": pictures,
        "sources": sources or {},
    }
    return _template().render(
        policy=_policy(script, style),
        style=style,
        script=script,
        data=_embedded(embedded),
        private=sources is not None,
        pictures=pictures,
        cases=len(rows),
        counts=Counter(row["status"] for row in rows),
        review=sum(row["review"] for row in rows),
        small=0 < sum(row["status"] in WITH_RESULT for row in rows) < MIN_COHORT,
        references=any("source" in each for each in distributions.values()),
        cohort=MIN_COHORT,
        structures=names,
        shown=_most_frequent(rows, len(names)),
        verdicts=sorted({row.get("verdict", "") for row in rows} - {""}),
        reasons=sorted({row["reason"] for row in rows} - {""}),
        flags=sorted({flag for row in rows for flag in row["flags"]}),
        names=sorted({model for row in rows for model in row["models"]}),
        left_out=data.left_out,
        advice=advice,
        files=data.files,
        charts=content.charts,
        models=data.models,
        versions=data.versions,
        workflow=json.dumps(data.workflow, indent=2) if data.workflow else "",
        runs=[run_row(run) for run in runs[:MAX_RUNS]],
        all_runs=summed_runs(runs),
    )


def _add_verdicts(rows: Sequence[dict[str, Any]], states: Mapping[str, str]) -> None:
    """Add the words for the state of each case, if any case was reviewed."""
    if not states:
        return
    for row in rows:
        if row["status"] in WITH_RESULT:
            state = states.get(row["id"])
            row["verdict"] = STATES[state] if state else "not reviewed"


def _template() -> Template:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(_HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html.jinja")


def _policy(script: str, style: str) -> str:
    """Return the content security policy: only this script and style, and pictures beside it."""
    return (
        "default-src 'none'; img-src 'self' file:; base-uri 'none'; form-action 'none'; "
        f"script-src '{_digest(script)}'; style-src '{_digest(style)}'"
    )


def _advice(rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Return the advice of each reason, and the text of each flag, that a row has."""
    codes = {row["reason"] for row in rows} | {flag for row in rows for flag in row["flags"]}
    return {code: advice(code) for code in sorted(codes - {""})}


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
