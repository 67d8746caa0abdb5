"""`segment --dry-run`, and the model of a command that names none."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from support.archives import nifti
from support.commands import scanloom, write_tiny_bundle
from support.write_dicom import Words, noise, write_series


@pytest.fixture
def study(tmp_path: Path) -> Path:
    write_series(tmp_path / "study", noise())
    return tmp_path / "study"


@pytest.fixture
def mr(tmp_path: Path) -> Path:
    write_series(tmp_path / "mr", noise(), words=Words(modality="MR", name="mr"))
    return tmp_path / "mr"


def test_a_dry_run_writes_nothing(
    study: Path, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCANLOOM_KEY", str(tmp_path / "no-key-yet"))
    out = tmp_path / "out"
    ended = scanloom("segment", study, "-m", tiny_model, "-o", out, "-n")

    assert ended.code == 0, ended.err
    for text in (
        "Series: CT, 6 slices of 2.5 mm, folder ",
        "24 x 20 x 6 at 0.7 x 0.8 x 2.5 mm",
        str(out / "cases"),
    ):
        assert text in ended.out
    assert scanloom("segment", study, "-m", tiny_model, "-n", "--profile", out).code == 2
    monkeypatch.setenv("SCANLOOM_PROFILE", str(out))  # a default is of runs
    assert scanloom("segment", study, "-m", tiny_model, "-n").code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["study"]


def test_what_is_in_an_archive_is_named_by_it(study: Path, tiny_model: Path) -> None:
    """Never by the folder into which it is unpacked; volume files by their own names, too."""
    packed = Path(shutil.make_archive(str(study / "dicom"), "zip", study))
    ended = scanloom("segment", packed, "-m", tiny_model, "-n")
    assert re.search(r"6 slices of 2.5 mm, folder \S*dicom\.zip\n", ended.out), ended.out

    (study / "more").mkdir()
    for name in ("t1.nii.gz", "t2.nii.gz"):
        nifti(study / "more" / name, seed=int(name[1]))
    packed = Path(shutil.make_archive(str(study / "volumes"), "zip", study / "more"))
    listed = scanloom("segment", packed, "-m", tiny_model, "-n").err
    index = scanloom("index", packed).out
    for text in (listed, index):
        assert {"t1.nii.gz", "t2.nii.gz"} <= {
            row.split()[1] for row in text.splitlines() if len(row.split()) > 1
        }
    chosen = scanloom("segment", packed, "-m", tiny_model, "-n", "--series", "t2")
    assert 'Series 2 of 2: "t2.nii.gz"' in chosen.out, chosen.err

    for folder in ("anna", "ben"):
        (study / "same" / folder).mkdir(parents=True)
        nifti(study / "same" / folder / "t1.nii.gz", seed=len(folder))
    packed = Path(shutil.make_archive(str(study / "equal"), "zip", study / "same"))
    listed = scanloom("segment", packed, "-m", tiny_model, "-n").err
    assert {"anna", "ben"} <= {row.split()[-1] for row in listed.splitlines() if row}, listed


def test_a_dry_run_estimates_memory_only_with_a_limit(study: Path, tiny_model: Path) -> None:
    command = ["segment", study, "-m", tiny_model, "-n"]
    assert "memory" not in scanloom(*command).out
    assert "iB, estimated" in scanloom(*command, "--memory-limit", "64GB").out
    refused = scanloom(*command, "--memory-limit", "1MB")
    assert refused.code == 65
    assert "(OUT_OF_MEMORY)" in refused.err


def test_a_dry_run_names_what_is_left_out(study: Path, tiny_model: Path) -> None:
    command = ["segment", study, "-m", tiny_model, "-n"]
    assert "overlap" not in scanloom(*command).out
    assert "overlap 0.1 instead of 0.5" in scanloom(*command, "--overlap", "0.1").out
    [planned] = scanloom(*command, "--overlap", "0.1", "--json").document["planned"]
    assert planned["changes"] == "overlap 0.1 instead of 0.5"


def test_a_dry_run_names_the_folder_that_the_run_writes(
    study: Path, tiny_model: Path, tmp_path: Path
) -> None:
    command = ["segment", study, "-m", tiny_model, "-o", tmp_path / "out"]
    [before] = scanloom(*command, "-n", "--json").document["planned"]
    [case] = scanloom(*command, "--json").document["cases"]

    assert before["result"] == case["folder"]
    again = scanloom(*command, "--dry-run").out
    assert "1 scan: 0 would be segmented, 1 from before." in again
    stale = scanloom(*command, "--dry-run", "--seg", "labelmap")
    assert (stale.code, "seg was binary, and is labelmap now" in stale.err) == (65, True)


def test_a_dry_run_names_folders_by_source(study: Path, tiny_model: Path, tmp_path: Path) -> None:
    command = ["segment", study, "-m", tiny_model, "-o", tmp_path / "out", "--names", "source"]
    [before] = scanloom(*command, "-n", "--json").document["planned"]
    assert not (tmp_path / "out").exists()
    [case] = scanloom(*command, "--json").document["cases"]

    assert before["result"] == case["folder"]
    assert "0 would be segmented, 1 from before" in scanloom(*command, "--dry-run").out


def test_the_series_that_is_taken_is_named(
    study: Path, mr: Path, tiny_model: Path, tmp_path: Path
) -> None:
    """Dry run and result name it in a line of 80 columns; the JSON does not contain its name."""
    command = ["segment", tmp_path, "-m", tiny_model, "-o", tmp_path / "out", "--series", "best"]
    for more in (["-n"], []):
        lines = scanloom(*command, *more).out.splitlines()
        [line] = [line for line in lines if line.startswith("Series ")]
        assert re.match(r"Series [12] of 2: CT, 6 slices of 2.5 mm, folder ", line)
        assert line.endswith("/study")
        assert len(line) <= 80
    unchosen = {"1": "2", "2": "1"}[line.split()[1]]
    refused = scanloom(*command[:-1], unchosen)
    assert f"  Series {unchosen} of 2: MR, 6 files, folder " in refused.err
    for more, key in ((["-n"], "planned"), ([], "cases")):
        [entry] = scanloom(*command, "--json", *more).document[key]
        assert entry["series"]["number"] == int(line.split()[1])
        assert entry["series"]["of"] == 2


@pytest.mark.parametrize("names", ["", " , "])
def test_no_structure_does_not_mean_all(study: Path, tiny_model: Path, names: str) -> None:
    refused = scanloom("segment", study, "-m", tiny_model, "--structures", names, "-n")
    assert refused.code == 2
    assert "at least one name" in refused.err


def test_options_that_headers_override_are_named(
    study: Path, tiny_model: Path, tmp_path: Path
) -> None:
    command = ["segment", study, "-m", tiny_model, "-o", tmp_path / "out"]
    assert scanloom(*command).code == 0
    assert "1 from before" in scanloom(*command, "--phase", "0", "-n").out  # has the same id
    options = ["--replace", "--phase", "0", "--modality", "MR", "--orientation", "RAS"]
    for more in (["-n"], []):
        shown = scanloom(*command, *options, *more).out
        assert "! `--phase 0` was not needed: the scan has a single volume." in shown
        assert "! `--modality MR` was not used: the headers state CT." in shown
        assert "! `--orientation RAS` was not used: the scan states LPS." in shown
    fitting = scanloom(*command, "--modality", "CT", "--orientation", "LPS", "-n").out
    assert "!" not in fitting
    absent = scanloom(*command, "--phase", "1", "-n")
    assert absent.code == 65
    assert "there is one volume, but number 1 was requested (FOUR_D)" in absent.err


def test_a_dry_run_refuses_as_the_run_does(study: Path, mr: Path, tiny_model: Path) -> None:
    refused = scanloom("segment", mr, "-m", tiny_model, "--dry-run")
    assert refused.code == 65
    assert "(MODALITY)" in refused.err
    several = scanloom("segment", study, mr, "-m", tiny_model, "--dry-run")
    assert several.code == 0  # as of the run: a scan of another modality is skipped
    assert "2 scans: 1 would be segmented" in several.out
    assert scanloom("segment", study, mr, "-m", tiny_model, "-n", "--strict").code == 1


def test_a_dry_run_refuses_a_device_that_is_not_there(
    study: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCANLOOM_DEVICE", "cuda:99")
    refused = scanloom("segment", study, "-m", tiny_model, "--dry-run")
    assert (refused.code, refused.out) == (65, "")
    assert "(DEVICE_UNAVAILABLE)" in refused.err
    assert scanloom("segment", study, "-m", tiny_model, "--dry-run", "--no-device").code == 0


def test_the_only_model_that_fits_is_the_default(
    study: Path, mr: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    only = scanloom("segment", study, "--dry-run")
    assert "Model: ct_tissue, the only one" in only.err
    shared = tmp_path / "shared"
    write_tiny_bundle(shared, "other")
    monkeypatch.setenv("SCANLOOM_MODELS", str(shared))
    two = scanloom("segment", study, "--dry-run")
    assert two.code == 65
    assert "2 models fit CT: ct_tissue, other; name one with --model" in two.err
    assert "Model: brain_anatomy" in scanloom("segment", mr, "--dry-run").err
    assert scanloom("segment", study, "-m", "other", "-n").code == 0


def test_input_and_paths_are_the_same(study: Path, tiny_model: Path, tmp_path: Path) -> None:
    out = ["-m", tiny_model, "-o", tmp_path / "out", "-n", "--json"]
    typed = scanloom("segment", "-i", study, *out)
    assert typed.document == scanloom("segment", study, *out).document


def test_the_line_at_the_end_adds_up(
    study: Path, mr: Path, tiny_model: Path, tmp_path: Path
) -> None:
    command = ["segment", study, mr, tmp_path / "none", "-m", tiny_model, "-o", tmp_path / "out"]
    ended = scanloom(*command, "--device", "cpu", "--precision", "float32")
    last = ended.out.splitlines()[-1]
    assert last.startswith("3 scans: 1 done, 1 skipped, 1 failed; ")
    assert last.endswith("s on cpu (float32, torch)")
    again = scanloom(*command, "--device", "cpu", "--precision", "float32")
    assert "0 done, 1 from before, 1 skipped, 1 failed" in again.out.splitlines()[-1]
    assert scanloom("segment", study, mr, *command[4:], "--strict").code == 1
