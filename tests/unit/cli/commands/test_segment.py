"""`scanloom segment` from a path to results, with a small network of random weights."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import SimpleITK as sitk

from scanloom.cli.commands.segment import show
from scanloom.core import CaseRecord, Reason
from support.bundles import spleen_config, spleen_metadata, write_bundle
from support.commands import scanloom
from support.write_dicom import Geometry, Words, noise, write_series

HEADER = Words(more={"PatientName": "Doe^Jane", "PatientID": "4711", "AccessionNumber": "A1"})


@pytest.fixture
def study(tmp_path: Path) -> Path:
    write_series(tmp_path / "study", noise(), words=HEADER)
    return tmp_path / "study"


def nifti(path: Path, code: int = 1) -> Path:
    """Write a NIfTI whose header says nothing but its geometry, and with code 0 not even that."""
    image = nib.Nifti1Image(noise() - 1024, np.diag([2.0, 2.0, 3.0, 1.0]))
    image.set_sform(image.affine, code)
    image.set_qform(image.affine, code)
    nib.save(image, path)
    return path


def test_a_study_becomes_a_case(study: Path, tiny_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    ended = scanloom("segment", study, "--model", tiny_model, "--out", out)

    assert ended.code == 0, ended.err
    [folder] = (out / "cases").iterdir()
    for text in ("spleen", "liver", "HU", folder.name, str(folder / "preview.png")):
        assert text in ended.out
    for step in ("reading\n", "running the network\n", "comparing\n"):
        assert ended.err.count(step) == 1
    labels = sitk.ReadImage(folder / "segmentation.nii.gz")
    scan = sitk.ReadImage(sitk.ImageSeriesReader.GetGDCMSeriesFileNames(str(study)))
    assert labels.GetSize() == scan.GetSize()
    assert (folder / "dicom" / "segmentation.dcm").exists()


def test_the_same_command_again_in_the_study_itself_finds_the_result(
    study: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(study)
    command = ["segment", ".", "--model", tiny_model, "--also", "image", "--json"]
    [first] = scanloom(*command).document["cases"]
    again = scanloom(*command)

    assert again.code == 0, again.out
    [case] = again.document["cases"]
    assert (case["case"], case["folder"]) == (first["case"], first["folder"])


def test_nan_outside_the_field_of_view_is_told_with_what_became_of_it(
    tiny_model: Path, tmp_path: Path
) -> None:
    array = noise().astype(np.float32) - 1024
    array[:3] = np.nan
    nib.save(nib.Nifti1Image(array, np.diag([2.0, 2.0, 3.0, 1.0])), tmp_path / "scan.nii.gz")
    command = ["segment", tmp_path / "scan.nii.gz", "--model", tiny_model, "--modality", "CT"]
    command += ["--out", tmp_path / "out"]
    refused = scanloom(*command)
    assert refused.code == 65
    assert "--nan padding" in refused.out + refused.err

    ended = scanloom(*command, "--nan", "padding")

    assert ended.code == 0, ended.err
    [folder] = (tmp_path / "out" / "cases").iterdir()
    case = json.loads((folder / "case.json").read_text())
    assert "NAN_PADDED" in {flag["code"] for flag in case["flags"]}
    assert case["source"]["nan_as"] == -1024


def test_verify_notices_that_a_case_is_gone(study: Path, tiny_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    scanloom("segment", study, "--model", tiny_model, "--out", out)
    [folder] = (out / "cases").iterdir()
    assert scanloom("verify", out).code == 0
    shutil.rmtree(folder)

    ended = scanloom("verify", out)

    assert (ended.code, ended.out) == (1, f"missing: cases/{folder.name}\n")


def test_json_is_one_document_without_identity(
    study: Path, tiny_model: Path, tmp_path: Path
) -> None:
    arguments = ["segment", study, "--model", tiny_model, "--out", tmp_path / "out", "--json"]
    ended = scanloom(*arguments)

    [case] = ended.document["cases"]
    folder = Path(case["folder"])
    written = json.loads((folder / "measurements.json").read_text())["measurements"]
    assert ended.code == 0
    assert case["outcome"] == "used"
    assert case["reason"] is None
    assert case["measurements"] == written
    assert "Doe" not in ended.out + ended.err
    assert "4711" not in ended.out + ended.err
    again = scanloom(*arguments)
    assert again.document["cases"][0]["measurements"] == written


def test_quiet_says_nothing(study: Path, tiny_model: Path, tmp_path: Path) -> None:
    ended = scanloom("segment", study, "--model", tiny_model, "--out", tmp_path / "o", "--quiet")

    assert (ended.code, ended.out, ended.err) == (0, "", "")


def test_options_reach_the_results(tiny_model: Path, tmp_path: Path) -> None:
    """A file that says neither orientation nor modality; image, masks and one structure wanted."""
    scan = nifti(tmp_path / "scan.nii.gz", code=0)
    options = ["--orientation", "lps", "--modality", "ct", "--also", "image,masks"]
    options += ["--structures", " liver ", "--device", "cpu"]
    ended = scanloom("segment", scan, "--model", tiny_model, "--out", tmp_path / "out", *options)

    assert ended.code == 0, ended.err
    [folder] = (tmp_path / "out" / "cases").iterdir()
    assert nib.aff2axcodes(nib.load(folder / "image.nii.gz").affine) == ("L", "P", "S")
    assert [mask.name for mask in (folder / "split").iterdir()] == ["liver.nii.gz"]
    reported = json.loads((folder / "case.json").read_text())
    assert reported["source"]["modality"] == "CT"
    assert "ORIENTATION_GIVEN" in ended.out
    assert "spleen" not in ended.out


def test_structures_may_be_repeated(tiny_model: Path, tmp_path: Path) -> None:
    scan = nifti(tmp_path / "scan.nii.gz")
    options = ["--structures", "spleen", "--structures", "liver", "--modality", "CT", "--json"]
    ended = scanloom("segment", scan, "-m", tiny_model, "-o", tmp_path / "out", *options)

    [case] = ended.document["cases"]
    assert {row["label"] for row in case["measurements"]} == {"spleen", "liver"}


@pytest.mark.parametrize("value", ["inf", "nan", "-1", "much"])
def test_volumes_that_cannot_be_are_wrong_usage(
    value: str, study: Path, tiny_model: Path, tmp_path: Path
) -> None:
    ended = scanloom(
        *("segment", study, "-m", tiny_model, "-o", tmp_path / "out"), f"--remove-small={value}"
    )
    assert (ended.code, "a volume in mm3" in ended.err) == (2, True)


def test_one_bad_path_does_not_stop_the_others(
    study: Path, tiny_model: Path, tmp_path: Path
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    out = tmp_path / "out"
    paths = [empty, study, tmp_path / "nowhere"]
    ended = scanloom("segment", *paths, "--model", tiny_model, "--out", out, "--json")

    cases = ended.document["cases"]
    assert ended.code == 1
    assert [case["path"] for case in cases] == list(map(str, paths))
    assert [case["outcome"] for case in cases] == ["skipped", "used", "failed"]
    assert [case["reason"] and case["reason"]["code"] for case in cases] == [
        "NO_IMAGES",
        None,
        "NOT_FOUND",
    ]


def test_of_several_results_one_table_is_offered(tiny_model: Path, tmp_path: Path) -> None:
    scans = [nifti(tmp_path / f"{name}.nii.gz", code=n + 1) for n, name in enumerate("ab")]
    options = ["-m", tiny_model, "-o", tmp_path / "out", "--modality", "CT"]
    assert "scanloom report" not in scanloom("segment", scans[0], *options).out
    ended = scanloom("segment", *scans, *options)

    assert ended.code == 0, ended.err
    assert f"scanloom report -o {tmp_path / 'out'}" in ended.out


def test_another_recipe_is_stale_until_replaced(
    study: Path, tiny_model: Path, tmp_path: Path
) -> None:
    command = ["segment", study, "--model", tiny_model, "--out", tmp_path / "out"]
    assert scanloom(*command).code == 0
    ended = scanloom(*command, "--seg", "labelmap")
    assert ended.code == 65
    assert "STALE" in ended.err
    assert "--replace" in ended.err
    assert scanloom(*command, "--seg", "labelmap", "--replace").code == 0


def no_images(folder: Path) -> Path:
    folder.mkdir()
    (folder / "notes.txt").write_text("nothing here")
    return folder


def truncated(folder: Path) -> Path:
    slices = write_series(folder, noise())
    data = slices[2].read_bytes()
    slices[2].write_bytes(data[: len(data) - 300])
    return folder


def gap(folder: Path) -> Path:
    write_series(folder, noise())[2].unlink()
    return folder


def text_as_dicom(folder: Path) -> Path:
    folder.mkdir()
    (folder / "scan.dcm").write_text("I am no DICOM file " * 50)
    return folder


def two_series(folder: Path) -> Path:
    write_series(folder / "a", noise())
    write_series(folder / "b", noise(), words=Words(name="other"))
    return folder


@pytest.mark.parametrize(
    ("make", "code"),
    [
        (no_images, "NO_IMAGES"),
        (truncated, "TRUNCATED"),
        (gap, "SLICE_GAP"),
        (text_as_dicom, "NO_IMAGES"),
        (two_series, "SERIES_AMBIGUOUS"),
        (lambda p: write_series(p, noise(), words=Words("MR")) and p, "MODALITY"),
        (lambda p: nifti(p.with_suffix(".nii"), code=0), "ORIENTATION_UNKNOWN"),
        (lambda p: p, "NOT_FOUND"),
    ],
)
def test_bad_scans_are_refused_by_name(
    make: Callable[[Path], Path], code: str, tiny_model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    ended = scanloom("segment", make(tmp_path / "scan"), "--model", tiny_model, "--out", out)

    assert ended.code == 65, ended.err
    assert f"({code})." in ended.err
    assert ended.out == ""
    assert not out.exists()


def test_the_list_of_series_can_be_answered(tiny_model: Path, tmp_path: Path) -> None:
    study = two_series(tmp_path / "study")
    ended = scanloom(
        "segment", study, "--model", tiny_model, "--out", tmp_path / "o", "--series", "2"
    )

    assert ended.code == 0, ended.err


def with_import(config: dict[str, Any]) -> None:
    config["network_def"]["channels"] = "$__import__('os').listdir('.')"


def with_foreign_network(config: dict[str, Any]) -> None:
    config["network_def"] = {"_target_": "monai.networks.nets.HighResNet"}


def test_the_best_series_or_all_of_them(tiny_model: Path, tmp_path: Path) -> None:
    study, out = tmp_path / "study", tmp_path / "out"
    thick = Geometry(step=5.0)
    write_series(study / "a", noise((24, 20, 6)), thick, words=Words(name="thick"))
    write_series(study / "b", noise((24, 20, 12)), words=Words(name="thin"))
    write_series(study / "c", noise((24, 20, 1)), words=Words(name="scout"))

    best = scanloom(
        "segment", study, "--model", tiny_model, "--out", out, "--series", "best", "--json"
    )
    every = scanloom(
        "segment", study, "--model", tiny_model, "--out", out, "--series", "all", "--json"
    )

    [case] = best.document["cases"]
    assert nib.load(Path(case["folder"]) / "segmentation.nii.gz").shape == (24, 20, 12)
    assert best.code == 0
    reported = [
        (entry["outcome"], (entry["reason"] or {}).get("code")) for entry in every.document["cases"]
    ]
    assert sorted(reported, key=str) == [
        ("failed", "TOO_FEW_SLICES"),
        ("used", None),
        ("used", None),
    ]
    assert every.code == 1


@pytest.mark.parametrize(
    ("change", "code"),
    [(with_import, "MODEL_UNSAFE"), (with_foreign_network, "MODEL_NETWORK")],
)
def test_bad_models_are_refused_by_name(
    change: Callable[[dict[str, Any]], None], code: str, study: Path, tmp_path: Path
) -> None:
    config = spleen_config()
    change(config)
    bundle = write_bundle(tmp_path / "bundle", config)
    ended = scanloom("segment", study, "--model", bundle, "--out", tmp_path / "out", "--json")

    assert ended.code == 65
    assert ended.document["error"]["code"] == code
    assert not (tmp_path / "out").exists()


def test_other_weights_than_the_pinned_ones_are_refused(study: Path, tmp_path: Path) -> None:
    metadata = spleen_metadata() | {"scanloom": {"weights_sha256": "0" * 64}}
    bundle = write_bundle(tmp_path / "bundle", metadata=metadata)
    ended = scanloom("segment", study, "--model", bundle, "--out", tmp_path / "out")

    assert ended.code == 65
    assert "MODEL_HASH" in ended.err
    assert not (tmp_path / "out").exists()


def test_an_unknown_model_is_refused(study: Path, tmp_path: Path) -> None:
    ended = scanloom("segment", study, "--model", "no_such_model", "--out", tmp_path / "out")

    assert ended.code == 65
    assert "MODEL_UNKNOWN" in ended.err
    assert "scanloom models list" in ended.err


def test_the_line_that_counts_failed_scans_is_the_first_on_stdout(
    capsys: pytest.CaptureFixture[str],
) -> None:
    failed = CaseRecord("", Reason.NO_IMAGES, "no scan here", (), None)
    show([(Path("a"), failed), (Path("b"), failed)], 1.0)

    assert capsys.readouterr().out == "2 scans: 0 done, 2 skipped, 0 failed; 1.0 s\n"


def test_another_key_is_refused(study: Path, tiny_model: Path, tmp_path: Path) -> None:
    command = ["segment", study, "--model", tiny_model, "--out", tmp_path / "out"]
    assert scanloom(*command).code == 0
    ended = scanloom(*command, "--key", tmp_path / "other")

    assert ended.code == 65
    assert "KEY_MISMATCH" in ended.err


def test_an_output_folder_that_cannot_be_written_is_74(
    study: Path, tiny_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    out = tmp_path / "file" / "out"
    ended = scanloom("segment", study, "--model", tiny_model, "--out", out)

    assert ended.code == 74, ended.err
    assert "OUTPUT_UNWRITABLE" in ended.err


def test_interrupted_is_130_and_leaves_nothing(tiny_model: Path, tmp_path: Path) -> None:
    """Ctrl-C while the network runs, over a scan of some thousand windows."""
    study = tmp_path / "study"
    write_series(study, noise((200, 200, 30)))
    out = tmp_path / "out"
    command = [sys.executable, "-m", "scanloom", "segment", study]
    process = subprocess.Popen(
        [*command, "--model", tiny_model, "--out", out],
        stderr=subprocess.PIPE,
        text=True,
        env=dict(os.environ),
        # as on a terminal: who runs the tests in the background has it ignored
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stderr is not None
    while "running the network" not in (line := process.stderr.readline()):
        assert line, "it ended by itself"
    process.send_signal(signal.SIGINT)
    _, rest = process.communicate(timeout=300)

    assert process.returncode == 130
    assert "Interrupted" in rest
    assert "Traceback" not in rest
    last = shlex.split(rest.splitlines()[-1])
    assert last == [*map(str, command), "--model", str(tiny_model), "--out", str(out)]
    assert [path.name for path in out.iterdir()] == ["engines"]  # decided for whatever follows


def test_impossible_options_are_refused_before_a_voxel_is_read(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An output folder that can't be made, a device that is not here; nothing is left behind."""
    write_series(tmp_path / "study", noise())
    (tmp_path / "file").touch()
    command = ["segment", tmp_path / "study", "--model", tiny_model, "--out"]
    nowhere = scanloom(*command, tmp_path / "file" / "out")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    no_gpu = scanloom(*command, tmp_path / "out", "--device", "cuda")

    assert (nowhere.code, no_gpu.code) == (74, 65)
    assert "(DEVICE_UNAVAILABLE)" in no_gpu.err
    assert ": reading" not in nowhere.err + no_gpu.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "study"]


@pytest.mark.parametrize(("limit", "size"), [("1kB", "1000 bytes"), ("2KiB", "2 KiB")])
def test_a_size_is_told_in_units_that_fit(
    limit: str, size: str, tmp_path: Path, tiny_model: Path
) -> None:
    write_series(tmp_path / "study", noise())
    command = ["segment", tmp_path / "study", "--model", tiny_model, "--out", tmp_path / "out"]

    assert f"the limit is {size} (TOO_LARGE)" in scanloom(*command, "--max-size", limit).err
