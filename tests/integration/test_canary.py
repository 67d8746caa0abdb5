"""A canary name in every text field and every file name: found nowhere but where it may stand."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from scanloom.engine.revisions import Correction, publish_revision
from scanloom.io.output.layout import CONTENTS, identity_of
from scanloom.review.revisions import read_label_maps
from scanloom.review.verdicts.log import VerdictLog, reviewer_codes
from scanloom.review.verdicts.readers import share_cases
from scanloom.review.verdicts.verdict import Verdict, seen_of
from support.canaries import CANARY, PATIENT_BIRDS, REFUSED, SHOWN, USED, birds, contents
from support.commands import Ended, scanloom_forked, write_tiny_bundle

SCANS = {maker.__name__: f"{n:02d}" for n, maker in enumerate((*USED, *REFUSED), 1)}
UID = re.compile(rb"\d\.(\d+\.){2,}\d{5,}")


@dataclass(frozen=True)
class Site:
    """The folders of scans, model, key and results."""

    folder: Path

    @property
    def out(self) -> Path:
        return self.folder / "out"

    def scan(self, name: str) -> Path:
        return self.folder / "scans" / SCANS[name]

    def run(self, command: str, *arguments: str | Path) -> Ended:
        key = {"SCANLOOM_KEY": str(self.folder / "key"), "COLUMNS": "200"}
        return scanloom_forked(command, *arguments, environment=key)

    def segment(self, *arguments: str | Path, out: Path | None = None) -> Ended:
        model = self.folder / "models" / "tiny"
        return self.run("segment", *arguments, "--model", model, "--out", out or self.out)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    site = Site(tmp_path_factory.mktemp("birds"))
    write_tiny_bundle(site.folder / "models")
    for maker in (*USED, *REFUSED):
        maker(site.scan(maker.__name__))
    return site


@pytest.fixture(scope="module")
def segmented(site: Site) -> Ended:
    """All scans in one run, with --json and each kind of file but those of an extra."""
    also = "image,masks,uncertainty,segnrrd,rtstruct,sr,surface"
    return site.segment(*map(site.scan, SCANS), "--json", "--also", also)


def output_of(ended: Ended) -> bytes:
    return (ended.out + ended.err).encode()


def results(out: Path) -> Iterator[Path]:
    """Give all files and folders of OUT but files that may name the patient, by the list."""
    for path in sorted(out.rglob("*")):
        if path.is_dir() or identity_of(path.relative_to(out)) not in ("dicom", "private"):
            yield path


def assert_clean(out: Path) -> None:
    seen = 0
    for path in results(out):
        assert not birds(os.fsencode(path.relative_to(out))), path
        for content in contents(path) if path.is_file() else ():
            assert not birds(content), path
            assert not UID.search(content), path
            seen += 1
    assert seen > 20


def test_canaries_are_found_where_identity_is_allowed(site: Site, segmented: Ended) -> None:
    """A control: the tests below can fail."""
    assert len(birds(CANARY.encode())) == len(birds(CANARY.encode("utf-16-be"))) + 0 > 0
    [seg] = {next(site.out.glob("cases/*/dicom/segmentation.dcm"))}
    assert birds(seg.read_bytes())
    assert UID.search(seg.read_bytes())
    crosswalk = list(contents(site.out / "private" / "crosswalk.parquet"))
    assert birds(crosswalk[1])


def test_each_scan_ends_as_it_should(segmented: Ended) -> None:
    """The codes are printed; which one each is, the readers' own tests know."""
    outcomes = [case["outcome"] for case in segmented.document["cases"]]
    reasons = [case["reason"] and case["reason"]["code"] for case in segmented.document["cases"]]

    print(dict(zip(SCANS, reasons, strict=True)))
    assert segmented.code == 1, segmented.err
    assert outcomes[: len(USED)] == ["used"] * len(USED), reasons
    assert len({reason for reason in reasons if reason}) > 8
    assert "INTERNAL" not in reasons


def test_json_has_no_identity(segmented: Ended) -> None:
    assert not birds(output_of(segmented)), segmented.err
    assert not UID.search(output_of(segmented))


def test_results_and_failures_have_no_identity(site: Site, segmented: Ended) -> None:
    assert len(list((site.out / "failed").iterdir())) > 5
    assert_clean(site.out)


@pytest.mark.parametrize("pictures", [False, True])
def test_a_copy_for_others_has_no_identity(
    site: Site, segmented: Ended, tmp_path: Path, pictures: bool
) -> None:
    ended = site.run(
        "export", site.out, "-o", tmp_path / "copy", *(["--pictures"] if pictures else [])
    )

    assert ended.code == 0, ended.err
    for path in (tmp_path / "copy").rglob("*"):
        assert not birds(os.fsencode(path.relative_to(tmp_path))), path
        for content in contents(path) if path.is_file() else ():
            assert not birds(content), path
            assert not UID.search(content), path
    held = {
        identity_of(p.relative_to(tmp_path / "copy"))
        for p in (tmp_path / "copy").rglob("*")
        if p.is_file()
    }
    assert held == ({"ids", "shapes", "pixels"} if pictures else {"ids", "shapes"})
    assert site.run("verify", tmp_path / "copy").code == 0


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:The value length:UserWarning")  # of the canary, by pydicom
def test_each_file_of_a_reviewed_folder_holds_what_the_list_says(
    site: Site, segmented: Ended, tmp_path: Path
) -> None:
    """Corrections have DICOM of their own, and the report has pictures."""
    out, key = tmp_path / "out", site.folder / "key"
    shutil.copytree(site.out, out, copy_function=shutil.copy2)
    name = next(out.glob("cases/*/dicom")).parent.name
    labels = read_label_maps(out / "cases" / name)
    for array in labels.values():
        array[2:5, 2:5, 1:3] = 1
    with closing(VerdictLog(out)) as log:
        codes = reviewer_codes(out, [CANARY])
        share_cases(out, list(codes.values()))
        log.append(Verdict(name, "r1", seen_of(out / "cases" / name), "edit"), CANARY)
        seen = seen_of(out / "cases" / name)
        publish_revision(out, name, Correction(labels, "r1", "brush", seen), key)
    for command in (["report", "--private"], ["index", site.scan("plain")]):
        assert site.run(*command, "--out", out).code == 0
    joined = site.run("join", out / "review/review.csv", "-o", out, "--to", out / "private/j.csv")
    assert joined.code == 0, joined.err

    files = [path for path in out.rglob("*") if path.is_file()]
    held = {path: identity_of(path.relative_to(out)) for path in files}  # one entry each
    assert set(held.values()) == {"ids", "shapes", "pixels", "dicom", "private"}
    assert [p for p in files if held[p] == "dicom" and "revisions" in p.parts]
    pictures = {p for p in files if p.suffix in (".png", ".webp", ".html", ".svg")}
    assert {held[p] for p in pictures} == {"pixels", "private"}
    naming = {held[p] for p in files if any(birds(content) for content in contents(p))}
    assert naming == {"dicom", "private"}
    modes = {p.name: p.stat().st_mode & 0o777 for p in files if held[p] == "private"}
    assert set(modes.values()) == {0o600}, modes
    assert_clean(out)


def test_the_docs_have_the_list() -> None:
    page = (Path(__file__).parents[2] / "docs" / "identity.md").read_text()
    for entry in CONTENTS:
        assert f"| `{entry.pattern}` | {entry.holds} |\n" in page


@pytest.mark.slow
def test_messages_on_a_terminal_have_no_identity(site: Site, segmented: Ended) -> None:
    ended = site.segment(*map(site.scan, SCANS), "--also", "image")

    assert ended.err.count("scans/") >= len(REFUSED) - 4  # each is told by the path that was typed
    assert SHOWN in ended.err
    assert not birds(output_of(ended), PATIENT_BIRDS), ended.err


@pytest.mark.slow
def test_debug_messages_have_no_identity(site: Site, segmented: Ended, tmp_path: Path) -> None:
    """Every library's warning and error is raised on the way."""
    ended = site.segment(*map(site.scan, SCANS), "--debug", out=tmp_path / "out")

    assert ended.err.count("Traceback") > 8
    assert not birds(output_of(ended), PATIENT_BIRDS), ended.err
    assert_clean(tmp_path / "out")


def test_messages_of_index_have_no_identity(site: Site, segmented: Ended, tmp_path: Path) -> None:
    """The index prints JSON, also from a stored index, which contains texts of headers."""
    scans = site.folder / "scans"
    for options in (["--json", "--debug"], ["--json"]):
        ended = site.run("index", scans, "--out", tmp_path / "out", *options)
        assert ended.code in (0, 1), ended.err
        assert not birds(output_of(ended)), output_of(ended)
        assert not UID.search(output_of(ended))
    assert ended.document["files"]["found"] > 100
    assert [path.name for path in results(tmp_path / "out")] == ["private", "index"]


@pytest.mark.slow
def test_messages_of_run_have_no_identity(site: Site, segmented: Ended, tmp_path: Path) -> None:
    """Plan, log, manifest and tables hold ids; `join` brings the bird back into them."""
    workflow = tmp_path / "workflow.yaml"
    workflow.write_text(f"name: birds\nmodels: [{site.folder / 'models' / 'tiny'}]\n")
    out = tmp_path / "out"
    arguments = ["--out", out, "--cluster", "none", "--debug", "--bids", "--price-per-hour", "2"]
    ended = site.run("run", workflow, site.folder / "scans", *arguments)

    assert ended.code == 1, ended.err  # some failed
    assert not birds(output_of(ended)), output_of(ended)
    assert_clean(out)
    joined = site.run("join", out / "measurements.csv", "--out", out)
    assert joined.code == 0, joined.err
    assert CANARY in joined.out


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), [("broken_lengths", ["--debug"]), ("several", [])])
def test_a_single_scan_that_is_refused(
    name: str, options: list[str], site: Site, tmp_path: Path
) -> None:
    ended = site.segment(site.scan(name), *options, out=tmp_path / "out")

    assert ended.code == 65
    assert SHOWN in ended.err
    assert not birds(output_of(ended), PATIENT_BIRDS), ended.err
    assert not (tmp_path / "out").exists()


TALKATIVE = """
import logging, sys, warnings
from scanloom.cli.main import main
from scanloom.engine import steps

def load(*arguments, **more):
    warnings.warn("of CANARY^Zo\u00ebGa\u00f1d\u00eda", UserWarning)
    logging.getLogger("a.library").warning("of %s", "CANARY")
    try:
        raise OSError(5, "CANARY", "/scans/CANARY")
    except OSError as exc:
        raise KeyError("CANARY") from exc

steps.load = load
main()
"""


@pytest.mark.thorough
def test_errors_of_libraries_are_reported_without_their_text(
    site: Site, segmented: Ended, tmp_path: Path
) -> None:
    """Its error, warning and log line are told by type and place, and recorded without a word."""
    shutil.copytree(site.out, tmp_path / "out", copy_function=shutil.copy2)
    command = [sys.executable, "-c", TALKATIVE, "segment", site.scan("plain")]
    command += ["--model", site.folder / "models" / "tiny", "--out", tmp_path / "out"]
    done = subprocess.run(
        [*command, "--replace", "--seg", "labelmap", "--debug"],
        env={**os.environ, "SCANLOOM_KEY": str(site.folder / "key")},
        capture_output=True,
        check=False,
    )

    assert done.returncode == 1
    for text in (b"OSError", b"KeyError", b"UserWarning", b"a.library", b"INTERNAL"):
        assert text in done.stderr
    assert not birds(done.stdout + done.stderr), done.stderr
    case_id = segmented.document["cases"][0]["case"]
    failed = json.loads((tmp_path / "out" / "failed" / f"{case_id}.json").read_text())
    assert (failed["reason"], failed["detail"]) == ("INTERNAL", "KeyError")
    assert_clean(tmp_path / "out")


@pytest.mark.thorough
def test_a_path_that_was_typed_stays_on_the_terminal(site: Site, tmp_path: Path) -> None:
    """It is echoed to whoever typed it, and written into no file."""
    [study] = site.scan("plain").iterdir()
    [series] = site.scan("several").glob("* a")
    [broken] = site.scan("nifti_cut").iterdir()
    ended = site.segment(study, broken, series, "--debug", "--json", out=tmp_path / "out")

    text = ended.out + ended.err
    for path in (study, broken, series):
        assert str(path) in text
        text = text.replace(str(path), "").replace(f"{path.name}:", "")
    assert not birds(text.encode()), text
    assert_clean(tmp_path / "out")


@pytest.mark.thorough
def test_folders_of_scans_are_no_models(site: Site, tmp_path: Path) -> None:
    """A folder of scans given as a model by mistake."""
    for wrong in ("plain", "nifti_image", "no_images"):
        ended = site.run(
            *("segment", site.scan("plain"), "--model", site.scan(wrong)),
            *("--out", tmp_path / "out", "--debug", "--json"),
        )
        assert ended.code == 65
        assert not birds(output_of(ended)), ended.err
        assert not (tmp_path / "out").exists()


def test_where_and_join_give_the_identity_with_the_key(
    site: Site, segmented: Ended, tmp_path: Path
) -> None:
    ids = [case["case"] for case in segmented.document["cases"] if case["case"]]
    ended = site.run("where", *ids, "--out", site.out, "--json")

    assert ended.code == 0, ended.err
    sources = {source["id"]: source for source in ended.document["sources"]}
    for case in segmented.document["cases"]:
        if case["case"]:
            assert Path(sources[case["case"]]["path"]).is_relative_to(case["path"])
    names = [source["patient_name"] for source in sources.values() if source["kind"] == "dicom"]
    assert names.count(CANARY) > 8

    table = tmp_path / "table.csv"
    table.write_text("case\n" + "\n".join(ids) + "\n")
    joined = site.run("join", table, "--out", site.out)
    assert joined.code == 0, joined.err
    assert joined.out.count(CANARY) >= len(ids)


def test_another_key_gives_no_identity(site: Site, segmented: Ended, tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(b"x" * 32)
    (tmp_path / "table.csv").write_text("case\nabc\n")
    case_id = json.loads(segmented.out)["cases"][0]["case"]
    for command in (("where", case_id), ("join", str(tmp_path / "table.csv"))):
        arguments = [*command, "--out", site.out, "--key", tmp_path / "key", "--debug"]
        ended = scanloom_forked(*arguments)
        assert ended.code == 65
        assert "KEY_MISMATCH" in ended.err
        assert not birds(output_of(ended))
