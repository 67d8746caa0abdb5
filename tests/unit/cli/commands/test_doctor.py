"""`scanloom doctor` finds faults and advises."""

from __future__ import annotations

import os
import tomllib
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import imagecodecs
import numpy as np
import pydicom
import pydicom.pixels
import pytest
import SimpleITK as sitk

from scanloom.cli.checks import (
    SYNTAXES,
    CheckResult,
    Driver,
    available_memory,
    check_decoders,
    check_devices,
    check_extras,
    check_key,
    check_out,
    check_software,
    judge_onnxruntime,
    judge_rocm,
    judge_space,
    judge_torch,
    requirements,
)
from scanloom.io.system import sandbox
from support.commands import scanloom

MACHINE = ("decoders", "devices", "output", "key", "models")


def test_this_machine_can_run_scanloom(tmp_path: Path) -> None:
    """All but the models, which other tests look at."""
    ended = scanloom("doctor", "--out", tmp_path / "out", "--json")

    findings = ended.document["findings"]
    topics = {finding["topic"] for finding in findings}
    assert topics == {"software", "optional parts", *MACHINE}
    wrong = [f for f in findings if f["level"] == "bad" and f["topic"] != "models"]
    assert wrong == []
    assert list(tmp_path.iterdir()) == []


def test_text_says_the_same(tmp_path: Path) -> None:
    ended = scanloom("doctor", "--out", tmp_path)

    assert ended.out.count("\n  ok ") > 30
    assert "JPEG 2000 lossless: exact" in ended.out
    assert ended.err == ""


def test_exit_code_is_1_if_a_check_is_bad(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    ended = scanloom("doctor", "--out", tmp_path / "file")

    assert ended.code == 1
    assert "-> choose another folder" in ended.out


def test_a_warning_says_what_to_do() -> None:
    with pytest.raises(ValueError, match="advice is required"):
        CheckResult("topic", "name", "warn", "seen")


def test_every_requirement_is_looked_at() -> None:
    names = {finding.name for finding in check_software()}

    assert {r.name for r in requirements()} <= names
    assert "pytest" not in names


def test_a_missing_and_an_old_library_are_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["numpy>=99", "torch!=2.*", "no-such-library>=1", "typer>=0.1", "pytest; extra == 'x'"]
    monkeypatch.setattr("importlib.metadata.requires", lambda _: lines)

    levels = {f.name: f.level for f in check_software()}
    expected = {"numpy": "bad", "torch": "bad", "no-such-library": "bad", "typer": "ok"}
    assert {name: levels.get(name) for name in expected} == expected
    assert "pytest" not in levels


def test_every_extra_for_users_is_listed_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of `pyproject.toml`, whether or not they are installed."""
    project = tomllib.loads((Path(__file__).parents[4] / "pyproject.toml").read_text())
    extras = set(project["project"]["optional-dependencies"]) - {"test", "fuzz", "docs"}
    known = metadata.version

    def version(name: str) -> str:
        if name in ("starlette", "uvicorn"):
            raise metadata.PackageNotFoundError(name)
        return known(name)

    monkeypatch.setattr(metadata, "version", version)

    findings = {finding.name: finding for finding in check_extras()}

    assert set(findings) == extras
    assert (findings["review"].level, findings["review"].advice) == (
        "ok",
        "pip install 'scanloom[review]'",
    )
    assert findings["review"].seen.startswith("not installed (starlette, uvicorn); for `review`")


def test_an_extra_with_an_old_library_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    known = metadata.version
    monkeypatch.setattr(
        metadata, "version", lambda name: "2.4.0" if name == "pynetdicom" else known(name)
    )

    [hospital] = [finding for finding in check_extras() if finding.name == "hospital"]

    assert (hospital.level, "2.4.0, not" in hospital.seen) == ("warn", True)
    assert hospital.advice == "pip install --upgrade 'scanloom[hospital]'"


def test_decoders_are_all_exact_but_the_lossy_ones() -> None:
    seen = {finding.name: finding for finding in check_decoders()}

    assert len(seen) == len(SYNTAXES)
    for syntax in SYNTAXES:
        assert seen[syntax.name].level == "ok", seen[syntax.name]
        assert (seen[syntax.name].seen == "exact") == (syntax.tolerance == 0)


@pytest.mark.parametrize("syntax", SYNTAXES, ids=lambda s: s.name)
def test_frames_decode_as_by_other_libraries(
    syntax: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others decode the same frame: pydicom, and GDCM where pydicom has no decoder for it."""
    from scanloom.cli import checks

    assert isinstance(syntax, checks.Syntax)
    file = tmp_path / "frame.dcm"
    frame = checks._frame(syntax.bits)
    checks._save(frame, syntax, file)

    dataset = pydicom.dcmread(file)
    assert dataset.file_meta.TransferSyntaxUID == syntax.uid
    if "JPEG lossless" in syntax.name:
        decoded = sitk.GetArrayFromImage(sitk.ReadImage(file))[0]
    else:
        decoded = pydicom.pixels.pixel_array(dataset, raw=True)
    assert np.abs(decoded.astype(int) - frame).max() <= syntax.tolerance
    assert frame.max() > 1 << (syntax.bits - 1)


def test_a_decoder_that_gives_wrong_values_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "AVAILABLE", False)  # decoders run in this process
    right = imagecodecs.jpegls_decode
    monkeypatch.setattr(imagecodecs, "jpegls_decode", lambda frame: right(frame)[::-1])

    levels = {f.name: f.level for f in check_decoders()}
    assert levels.pop("JPEG-LS") == levels.pop("JPEG-LS near-lossless") == "bad"
    assert set(levels.values()) == {"ok"}


def test_a_decoder_that_is_not_there_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(frame: bytes) -> None:
        raise imagecodecs.DelayedImportError("jpegsof3")

    monkeypatch.setattr(sandbox, "AVAILABLE", False)
    monkeypatch.setattr(imagecodecs, "jpegsof3_decode", missing)

    bad = [f for f in check_decoders() if f.level == "bad"]
    assert [f.name for f in bad] == ["JPEG lossless (57)", "JPEG lossless (70)"]
    assert all("DECODER" in f.seen and "imagecodecs" in f.advice for f in bad)


GPU = ("NVIDIA H200",)


@pytest.mark.parametrize(
    ("cuda", "driver", "usable", "level", "message"),
    [
        (None, None, 0, "ok", "the CPU is used"),
        ("12.8", None, 0, "warn", "no NVIDIA driver"),
        (None, Driver("570", (12, 8), GPU), 0, "warn", "without CUDA"),
        ("12.8", Driver("570", (12, 8), GPU), 1, "ok", "driver 570"),
        ("13.0", Driver("570", (12, 8), GPU), 0, "bad", "too old"),
        ("12.8", Driver("570", (12, 8), GPU), 0, "bad", "sees no GPU"),
        ("12.8", Driver("570", (12, 8), ()), 0, "ok", "0 GPUs"),
    ],
)
def test_torch_is_judged_against_the_driver(
    cuda: str | None, driver: Driver | None, usable: int, level: str, message: str
) -> None:
    finding = judge_torch("2.13.0", cuda, driver, usable)

    assert finding.level == level
    assert message in finding.seen


@pytest.mark.parametrize(
    ("hip", "gpus", "usable", "level", "message"),
    [
        ("6.4", 8, 8, "ok", "built for ROCm 6.4; 8 AMD GPUs"),
        ("6.4", 2, 0, "bad", "torch sees no GPU"),
        (None, 1, 0, "warn", "built without ROCm; 1 AMD GPU"),
    ],
)
def test_torch_is_judged_against_the_gpus_of_amd(
    hip: str | None, gpus: int, usable: int, level: str, message: str
) -> None:
    finding = judge_rocm("2.13.0", hip, gpus, usable)

    assert finding.level == level
    assert message in finding.seen


@pytest.mark.parametrize(
    ("cuda", "torchs", "level"),
    [("13.0", "13.0", "ok"), ("12.8", "13.0", "warn"), ("12.8", None, "warn")],
)
def test_the_cuda_of_onnxruntime_and_of_torch_are_named(
    cuda: str, torchs: str | None, level: str
) -> None:
    finding = judge_onnxruntime(cuda, torchs)

    assert finding.level == level
    assert f"built for CUDA {cuda}, torch" in finding.seen


def test_devices_of_this_machine() -> None:
    seen = {f.name: f for f in check_devices()}

    names = {"processor", "memory", "torch", "torch on the CPU", "energy", "never run on"}
    assert names <= set(seen)
    assert "ROCm" in seen["never run on"].seen
    assert seen["processor"].seen.split()[0].rstrip(",") == os.uname().machine


def test_a_containers_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=1 << 22))
    assert available_memory(tmp_path) == 1 << 22
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.current").write_text("1000\n")
    (group / "memory.max").write_text("max\n")
    assert available_memory(tmp_path) == 1 << 22
    (group / "memory.max").write_text("5000\n")
    assert available_memory(tmp_path) == 4000


@pytest.mark.parametrize(
    ("free", "level"), [(0, "bad"), (1 << 20, "bad"), (1 << 30, "warn"), (1 << 40, "ok")]
)
def test_space(free: int, level: str) -> None:
    assert judge_space("out", free).level == level


def test_a_new_folder_is_judged_by_the_one_above(tmp_path: Path) -> None:
    findings = list(check_out(tmp_path / "a" / "b"))

    assert [f.level for f in findings] == ["ok", "ok"]
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_looked_at_is_bad(tmp_path: Path) -> None:
    [finding] = check_out(tmp_path / ("x" * 300))

    assert (finding.level, finding.seen) == ("bad", "can't be checked (OSError)")


def test_a_folder_that_cannot_be_synced_is_bad(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(handle: int) -> None:
        raise OSError(22, "not here")

    monkeypatch.setattr(os, "fsync", refuse)
    [_, finding] = check_out(tmp_path)

    assert finding.level == "bad"
    assert list(tmp_path.iterdir()) == []


def test_a_key_that_cannot_be_made_is_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SCANLOOM_KEY", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/proc")  # root may not write there either
    [home] = check_key()
    monkeypatch.setenv("SCANLOOM_KEY", str(tmp_path / "nope" / "key"))
    [named] = check_key()

    assert (home.level, named.level) == ("bad", "bad")
    assert "can't be created" in home.seen
    assert list(tmp_path.iterdir()) == []


def test_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from scanloom.io.identity import load_key

    key = tmp_path / "key"
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "none" / "yet"))
    monkeypatch.setenv("SCANLOOM_KEY", "")  # as if it were not set
    assert [f.seen for f in check_key()] == ["missing: created on first use"]
    monkeypatch.setenv("SCANLOOM_KEY", str(key))
    assert [f.level for f in check_key()] == ["ok"]
    assert not key.exists()
    load_key()
    assert [f.level for f in check_key()] == ["ok"]
    key.chmod(0o640)
    [open_to_others] = check_key()
    assert open_to_others.level == "warn"
    assert "chmod 600" in open_to_others.advice
    key.write_bytes(b"short")
    assert [f.level for f in check_key()] == ["bad"]


def test_a_check_that_breaks_is_a_finding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken() -> None:
        raise RuntimeError("Doe^Jane")

    monkeypatch.setattr("scanloom.cli.checks.check_key", broken)
    ended = scanloom("doctor", "--out", tmp_path)

    assert ended.code == 1
    assert "raised RuntimeError" in ended.out
    assert "Doe" not in ended.out + ended.err
