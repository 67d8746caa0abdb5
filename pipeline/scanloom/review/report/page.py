"""Write `OUT/report/index.html`: all cases by review priority, in a page that opens from disk."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

from scanloom.core import OUTCOMES, Flag, Measurement, Reason, ScanError
from scanloom.io.output.failures import FAILED
from scanloom.io.output.json_file import read_json
from scanloom.io.output.private import PRIVATE, check_links, private_folder, write_private
from scanloom.io.system.atomic_write import atomic_write
from scanloom.io.system.regular_files import open_regular_file
from scanloom.review import outliers
from scanloom.review.outliers import Finding, Kind
from scanloom.review.preview.page import (
    THUMBNAIL_SIZE,
    MosaicSlice,
    Pixels,
    TileMap,
    read_tile_map,
)
from scanloom.review.report.data import (
    ReportCase,
    StoredCases,
    advice,
    collect_report_data,
    collect_runs,
    private_rows,
    run_row,
    summed_runs,
)
from scanloom.review.report.parts import (
    ROWS,
    TEXTS,
    WHOLE,
    RowTable,
    embedded,
    remove_others,
    write_parts,
)
from scanloom.review.report.pictures import draw_charts
from scanloom.review.revisions import REVISIONS
from scanloom.review.verdicts.log import REVIEW, VERDICTS
from scanloom.review.verdicts.tables import review_states
from scanloom.review.verdicts.verdict import STATES

if TYPE_CHECKING:
    from jinja2 import Template

REPORT = "report"
PRIVATE_REPORT = "report.html"
DATA = "data"
SUMMARY = "summary.json"
"""What the page says of all its rows, and of what it was made."""
SCRIPTS = ("elements.js", "figures.js", "parts.js", "case.js", "page.js")
"""Modules of the page, each after those that it imports."""
STYLES = ("base.css", "page.css")
_MODULE_SYNTAX = re.compile(r"^import [^;]+;\n|^export ", re.MULTILINE)
MAX_RUNS = 50
"""Number of runs that are listed, the newest ones."""
_HERE = Path(__file__).parent
_POLICY = (
    "default-src 'none'; img-src 'self' file:; base-uri 'none'; form-action 'none'; "
    "script-src {script}; style-src {style}"
)
"""Content security policy: only this script and style, and pictures beside the page."""
LOADS = "'strict-dynamic'"
"""Source of scripts that a page's own script adds, and nothing else in the page."""


def write_report(out: Path, damaged: set[str] | None = None, *, changed: bool = True) -> Path:
    """Write the report of an output folder.

    Parameters
    ----------
    damaged : set of str, optional
        Receives the names of published cases that can't be read, which are left out.
    changed : bool
        Whether a case, a failure or the manifest may have changed since the last report. If not,
        and if the page was made of the tables, records and verdicts that there are now, only what
        it says about runs is made anew.

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
    check_links(out)
    folder = out / REPORT
    page, data, summary = folder / "index.html", folder / DATA, folder / SUMMARY
    # before anything is read: what changes meanwhile is in the next report
    made_of = _stamps(out)
    kept = None if changed else _kept(summary, made_of)
    if kept is None:
        table, content = _content(out, set() if damaged is None else damaged)
        kept = _with_parts(table, content, data, f"{DATA}/", 0o666)
    atomic_write(page, lambda draft: draft.write_text(_html(out, kept), encoding="utf-8"))
    if kept["name"]:
        plain = json.dumps({"made_of": made_of, "page": kept})
        atomic_write(summary, lambda draft: draft.write_text(plain, encoding="utf-8"))
    else:
        summary.unlink(missing_ok=True)
    remove_others(data, kept["name"])
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
    check_links(out)
    damaged = set() if damaged is None else damaged
    table, content = _content(out, damaged, private_rows(out))
    with private_folder(out, fingerprint) as folder:
        page, data = folder / PRIVATE_REPORT, folder / REPORT
        kept = _with_parts(table, content, data, f"{REPORT}/", 0o600)
        write_private(page, lambda draft: draft.write_text(_html(out, kept), encoding="utf-8"))
        remove_others(data, kept["name"])
    return page


def _stamps(out: Path) -> list[Any]:
    """Return what changes when the rows of a report may."""
    package = [path for path in _HERE.iterdir() if path.is_file()]
    made_of = ("cases", FAILED, "manifest.csv", "measurements.parquet", f"{REVIEW}/{VERDICTS}")
    revisions = sorted(out.joinpath(*REVISIONS).glob("*"))
    paths = (*sorted(package), *map(out.joinpath, made_of), *revisions)
    states = ((path.name, path.stat()) for path in paths if path.exists())
    return [[name, state.st_mtime_ns, state.st_size] for name, state in states]


def _kept(summary: Path, made_of: Sequence[Any]) -> dict[str, Any] | None:
    """Return the page that was written last, without its runs; None if it is of other data."""
    try:
        plain = read_json(summary)
        kept: dict[str, Any] = plain["page"]
        charts = [summary.with_name(chart["file"]) for chart in kept["content"]["charts"]]
        files = [summary.parent / DATA / kept["name"] / "rows-0.js", *charts]
        is_same = plain["made_of"] == made_of and all(file.is_file() for file in files)
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return kept if is_same else None


def _with_parts(
    table: RowTable, content: dict[str, Any], folder: Path, address: str, mode: int
) -> dict[str, Any]:
    """Return a page without its runs, whose parts are in it or written to a folder.

    Parameters
    ----------
    content : dict
        As of `_content`.
    folder : Path
        Where the folder with the parts is.
    address : str
        Address of `folder` from the page.

    Returns
    -------
    dict
        "content", the "data" of the page's script as JSON text, and "name", that of the folder;
        it is empty if the parts are in the page.
    """
    name, parts = "", "null"
    if len(table) <= WHOLE:
        known = (f"{json.dumps(part)}:{text}" for part, text in table.parts())
        parts = f"{{{','.join(known)}}}"
    else:
        name = write_parts(folder, table.parts(), mode)
    plain = embedded({**content.pop("data"), "folder": f"{address}{name}/"})
    return {"content": content, "data": f'{plain[:-1]},"parts":{parts}}}', "name": name}


def _html(out: Path, kept: dict[str, Any]) -> str:
    """Return a page with what there is to say about runs."""
    runs, workflow = collect_runs(out)
    # one module without imports: a page on disk can't import modules from beside it
    script = "\n".join(_MODULE_SYNTAX.sub("", (_HERE / name).read_text()) for name in SCRIPTS)
    style = page_style()
    return page_template(_HERE).render(
        **kept["content"],
        data=kept["data"],
        policy=content_policy(script, style, LOADS),
        style=style,
        script=script,
        advice=advice,
        workflow=json.dumps(workflow, indent=2) if workflow else "",
        runs=[run_row(run) for run in runs[:MAX_RUNS]],
        all_runs=summed_runs(runs),
    )


def _content(
    out: Path, damaged: set[str], sources: Mapping[str, list[str]] | None = None
) -> tuple[RowTable, dict[str, Any]]:
    """Return the rows and what else is in the page but its runs, and draw its pictures.

    A private page has the `sources` of cases: names and paths.
    """
    is_private = sources is not None
    data = collect_report_data(out, damaged)
    folder = out / REPORT
    folder.mkdir(parents=True, exist_ok=True)
    stored = StoredCases(folder)
    cohort = outliers.Cohort(stored.take(data.cases), stored.references, folder)
    structures = structure_names(stored.structures)
    names = list(structures.values())
    charts = draw_charts(stored.volumes, stored.seconds, structures, folder)
    verdicts: dict[str, str] = {}
    with suppress(ScanError):  # a damaged log: `scanloom report` and `verify` say so
        verdicts = review_states(out)
    pictures = f"../{REPORT}/" if is_private else ""
    table = RowTable(len(structures), out / PRIVATE if is_private else folder)
    for case in stored:
        row = _row(case, cohort, structures)
        source = (sources or {}).get(case.case_id)
        if source:
            row["source"] = source
        if verdicts and row["status"] in WITH_RESULT:
            verdict = verdicts.get(row["id"])
            row["verdict"] = STATES[verdict] if verdict else "not reviewed"
        table.add(row)
    distributions = _plain_distributions(cohort, structures)
    values, counts = table.values(), table.count("status")
    flags = sorted({flag for combination in values["flags"] for flag in combination})
    codes = {*values["reason"], *flags}
    page_data = {
        "structures": names,
        "distributions": distributions,
        "advice": {code: advice(code) for code in sorted(codes - {""})},
        "count": len(table),
        "values": values,
        "sizes": {"rows": ROWS, "words": TEXTS},
    }
    return table, {
        "data": page_data,
        "private": is_private,
        "pictures": pictures,
        "cases": len(table),
        "counts": {status: counts[status] for status in (*WITH_RESULT, *OUTCOMES)},
        "review": table.count("review")[True],
        "small": 0 < sum(counts[status] for status in WITH_RESULT) < outliers.MIN_COHORT,
        "references": any("source" in each for each in distributions.values()),
        "cohort": outliers.MIN_COHORT,
        "structures": names,
        "shown": table.most_frequent(),
        "verdicts": [value for value in values["verdict"] if value],
        "reasons": [value for value in values["reason"] if value],
        "flags": flags,
        "names": sorted({model for models in values["models"] for model in models}),
        "left_out": [asdict(each) for each in data.left_out],
        "files": data.files,
        "charts": [asdict(chart) for chart in charts],
        "models": list(data.models.values()),
        "versions": data.versions,
    }


def page_style() -> str:
    """Return the style of all pages that are written to an output folder."""
    return "".join((_HERE / name).read_text() for name in STYLES)


def content_policy(script: str, style: str, *more: str) -> str:
    """Return the content security policy of a page with an inline script and style.

    Parameters
    ----------
    more : str
        Further sources of scripts.
    """
    sources = " ".join((hash_source(script), *more))
    return _POLICY.format(script=sources, style=hash_source(style))


@functools.cache  # compiling it takes longer than the rest of a small report
def page_template(folder: Path, name: str = "page.html.jinja") -> Template:
    """Return a template of a folder, which escapes what it is given."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(folder),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(name)


def hash_source(text: str) -> str:
    """Return the hash source of an inline text for a content security policy (CSP 3, 2.3.1)."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


WITH_RESULT = ("done", "outdated")
"""States of cases that have a result; a later run did not replace one that is outdated."""
WITHOUT_RESULT = {
    "failed": outliers.REVIEW_THRESHOLD - 0.005,
    "ambiguous": outliers.REVIEW_THRESHOLD - 0.006,
}
"""Risk by which series without a result are sorted: they follow the cases that need review, since
there is no result to look at."""
SKIPPED_RISK = -1.0
"""Risk of series that were skipped: they come last."""
MAX_NAMES = 4
"""Number of structures that are named in front of the text of a shared finding."""

Structures = dict[tuple[str, str], str]
"""Display name of each (model, label)."""


def structure_names(labels: Iterable[tuple[str, str]]) -> Structures:
    """Return the display name of each (label, model), with the model if labels are ambiguous."""
    pairs = sorted(labels)
    count = Counter(label for label, _ in pairs)
    return {
        (model, label): label.replace("_", " ") + (f" ({model})" if count[label] > 1 else "")
        for label, model in pairs
    }


def _plain_distributions(cohort: outliers.Cohort, structures: Structures) -> dict[str, Any]:
    """Return the distributions, or reference ranges, by "<index of the structure>:<quantity>"."""
    index = {key: n for n, key in enumerate(structures)}
    return {
        f"{index[model, label]}:{quantity}": _plain(distribution)
        for (model, label, quantity), distribution in sorted(cohort.distributions.items())
        if (model, label) in index
    }


def _row(
    case: ReportCase,
    cohort: outliers.Cohort,
    structures: Structures,
) -> dict[str, Any]:
    """Return a case as the page shows it."""
    has_result, outdated = case.status == "done", Flag.OUTDATED.code in case.flags
    findings = outliers.find_outliers(case.measurements, cohort, case.axes) if has_result else []
    risk = outliers.risk_score(findings)
    if outdated:  # it calls for a look without any finding too
        risk = max(risk, outliers.REVIEW_THRESHOLD)
    mosaic = read_mosaic(case.preview) if case.preview and findings else None
    tiles, page_size = mosaic or (None, None)
    shown = _shown_findings(findings, case, list(structures), tiles)
    if outdated:
        is_stale = case.reason == Reason.STALE.code
        why = "another recipe made it" if is_stale else "the later attempt failed"
        shown.insert(0, {"text": f"an older result: {why} ({case.reason})"})
    by_key = {(m.model, m.label): m for m in case.measurements}
    measured = [by_key.get(key) for key in structures] if by_key else []
    return {
        "id": case.id,
        **({"case": case.case_id} if case.case_id != case.id else {}),
        **({"subfolder": case.subfolder} if case.subfolder else {}),
        "status": "outdated" if has_result and outdated else case.status,
        "reason": case.reason,
        "detail": case.detail,
        "risk": round(risk, 2) if has_result else WITHOUT_RESULT.get(case.status, SKIPPED_RISK),
        "review": has_result and risk >= outliers.REVIEW_THRESHOLD,
        "findings": shown,
        "models": list(case.models),
        "flags": list(case.flags),
        "seconds": round(sum(case.seconds.values()), 2),
        "volumes": [_rounded(m.volume_ml) if m else None for m in measured],
        "means": [_rounded(m.mean) if m else None for m in measured],
        "parts": [m.components if m else None for m in measured],
        "units": next((m.unit for m in measured if m is not None), ""),  # a scan has one
        "preview": THUMBNAIL_SIZE if case.preview else None,
        **({"page": page_size} if page_size else {}),
        "files": list(case.files),
    }


def _shown_findings(
    findings: Sequence[Finding],
    case: ReportCase,
    structures: Sequence[tuple[str, str]],
    tiles: TileMap | None,
) -> list[dict[str, Any]]:
    """Return findings as text, with their place and slices; structures may share a finding."""
    by_text: dict[str, list[Finding]] = defaultdict(list)
    for finding in findings:
        by_text[finding.text].append(finding)
    shown = []
    for text, alike in by_text.items():
        # many structures share a finding, such as the end of the scan
        names = [finding.structure for finding in alike]
        more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
        entry: dict[str, Any] = {"text": f"{', '.join(names[:MAX_NAMES])}{more}: {text}"}
        if alike[0].value is not None:
            (model, label, quantity), value = alike[0].value
            entry["value"] = [structures.index((model, label)), quantity, _rounded(value)]
        subjects = tuple(m for finding in alike for m in finding.subjects)
        if tiles is not None and subjects:
            entry["slices"] = slices_of(alike[0].kind, subjects, tiles, case.shape)
        shown.append(entry)
    return shown


def _plain(distribution: outliers.Distribution) -> dict[str, Any]:
    """Return a distribution as data of the page's script."""
    median = {} if distribution.median is None else {"median": _rounded(distribution.median)}
    return {
        "unit": distribution.unit,
        "log": distribution.logarithmic,
        "first": _rounded(distribution.first),
        "last": _rounded(distribution.last),
        "usual": [_rounded(value) for value in distribution.usual],
        "counts": list(distribution.counts),
        **median,
        **({"source": distribution.source} if distribution.source else {}),
    }


def _rounded(value: float | None) -> float | None:
    """Return a number with four significant digits; None if it is unknown or not finite."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.4g}")


MAX_SLICES = 3
"""Number of slices that are shown for a finding."""
MAX_OUTLINED_SHARE = 0.6
"""Share of a slice above which a structure is not outlined: the outline would be the edge."""


def read_mosaic(preview: Path) -> tuple[TileMap, tuple[int, int]] | None:
    """Return the map of a preview's mosaic, and the size (width, height) of the page in pixels.

    None of a preview without a map, or one that can't be read.
    """
    try:
        with open_regular_file(preview) as file, Image.open(file) as page:
            tiles, size = read_tile_map(page.info), page.size
    except (OSError, ValueError, SyntaxError):  # Pillow raises the last two for damaged chunks
        return None
    return None if tiles is None else (tiles, size)


def slices_of(
    kind: Kind, subjects: Sequence[Measurement], tiles: TileMap, shape: Sequence[int]
) -> list[dict[str, Any]]:
    """Return number, area and outlines (x, y, width, height) of the slices that a finding is about.

    A structure at the border is shown in the end slices that it reaches, any other in the slice
    nearest to its middle, with its outline. Findings of a scan, and of structures that were not
    found, have none.

    Parameters
    ----------
    subjects : sequence of Measurement
        The structures of the finding.
    shape : (I, J, K)
        Shape of the case's grid.
    """
    outlines: dict[MosaicSlice, list[Pixels]] = {}
    for m in subjects:
        for tile in _tiles(kind, m, tiles, shape):
            outline = outlines.setdefault(tile, [])
            if m.box is not None and kind != "border":
                outline.append(tiles.outline(m.box, tile))
    width, height = tiles.size
    largest = MAX_OUTLINED_SHARE * width * height
    return [
        {
            "number": tile.number,
            "area": (tile.x, tile.y, width, height),
            "outlines": list(dict.fromkeys(o for o in outlines[tile] if o[2] * o[3] <= largest)),
        }
        for tile in sorted(outlines, key=lambda tile: tile.number)[:MAX_SLICES]
    ]


def _tiles(
    kind: Kind, m: Measurement, tiles: TileMap, shape: Sequence[int]
) -> Iterator[MosaicSlice]:
    """Yield the slices of the mosaic in which a structure is shown."""
    if m.box is None:
        return
    ends: list[MosaicSlice] = []
    if kind == "border" and len(shape) > tiles.axis:
        first, last = (corner[tiles.axis] for corner in m.box)
        reached = {n for n in (first, last) if n in (0, shape[tiles.axis] - 1)}
        ends = [tile for tile in tiles.tiles if tile.slice in reached]
    yield from ends or [tiles.nearest(m.box)]
