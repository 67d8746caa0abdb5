"""Disks that are really full, or can't be written: small ones, in a namespace of their own."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from pyarrow import parquet

from support.archives import nifti
from support.commands import scanloom, write_tiny_bundle
from support.faults import QuickRun, on_small_disk
from support.write_dicom import Words, noise, write_series

FULL = """
mount -t tmpfs -o size=40k none "$1"; disk=$1; shift
scanloom "$@"; echo "code $?"
ls -A "$disk"
"""


@pytest.mark.thorough
def test_a_full_disk_is_74_and_nothing_stays(tmp_path: Path) -> None:
    write_series(tmp_path / "study", noise((64, 60, 20)))
    model = write_tiny_bundle(tmp_path / "models")
    disk = tmp_path / "disk"

    command = ["segment", tmp_path / "study", "--model", model, "--out", disk / "out"]
    output = on_small_disk(FULL, [disk, *command, "--also", "image", "--quiet"])

    assert output.endswith("code 74\n"), output
    assert "DISK_FULL" in output


LITTLE = """
mount -t tmpfs -o size=1m none "$1"; disk=$1; shift
for room in 0 8 16 24 32 48; do
  rm -rf "$disk"/*
  head -c $((1048576 - room * 1024)) /dev/zero > "$disk/filler"
  scanloom "$@"; echo "code $?"
  scanloom status "$disk/out"; echo "status $?"
done
rm "$disk/filler"
scanloom "$@"; echo "code $?"
scanloom status "$disk/out"; echo "status $?"
mount -o remount,ro "$disk"
scanloom "$@"; echo "code $?"
scanloom report "$disk/out"; echo "code $?"
"""


@pytest.mark.slow
def test_wherever_a_disk_is_full_or_read_only_the_run_is_74_and_status_says_so(
    tmp_path: Path,
) -> None:
    quick, disk = QuickRun(tmp_path / "quick"), tmp_path / "disk"

    output = on_small_disk(LITTLE, [disk, *quick.command(disk / "out")])

    codes = [line.split()[1] for line in output.splitlines() if line.startswith("code ")]
    assert codes == [*["74"] * 6, "65", "74", "74"], output
    assert output.count("DISK_FULL). Free space") == 6, output
    status = [line.split()[1] for line in output.splitlines() if line.startswith("status ")]
    assert status[-1] == "0"
    assert set(status[:-1]) <= {"1", "65"}, output  # 65: it had no room to say anything
    assert "failed (DISK_FULL)" in output


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("manifest.csv", True),
        ("measurements.parquet", True),
        ("report/index.html", True),
        ("report", False),
        ("private/runs", False),
    ],
)
def test_blocked_tables_and_report_are_74_and_status_says_failed(
    name: str, folder: bool, tmp_path: Path
) -> None:
    quick = QuickRun(tmp_path / "quick")
    assert scanloom("index", quick.scans, "--out", quick.out).code == 0  # it is ours then
    (quick.out / name).parent.mkdir(parents=True, exist_ok=True)
    if folder:
        (quick.out / name / "inside").mkdir(parents=True)
    else:
        (quick.out / name).write_text("a file")

    ended = scanloom(*quick.command())

    assert ended.code == 74, ended.err
    assert "(OUTPUT_UNWRITABLE)" in ended.err
    status = scanloom("status", quick.out, "--json")
    assert (status.code, status.document["status"]["state"]) == (1, "failed")
    assert status.document["status"]["reason"] == "OUTPUT_UNWRITABLE"


@pytest.mark.parametrize("name", ["missing/x.prom", "a file/x.prom", "a folder"])
def test_metrics_that_cannot_be_written_are_refused_before_anything_is_done(
    name: str, tmp_path: Path
) -> None:
    quick = QuickRun(tmp_path / "quick")
    (tmp_path / "a file").touch()
    (tmp_path / "a folder").mkdir()

    ended = scanloom(*quick.command(), "--metrics", tmp_path / name)

    assert ended.code == 74, ended.err
    assert "the file of --metrics" in ended.err
    assert not quick.out.exists()


LATER = """
mount -t tmpfs -o size=1m none "$1"; disk=$1; shift
mkdir "$disk/metrics"
python=$1; shift
"$python" -c '
import shutil, sys
from scanloom.engine import run
build = run.build_index
def removed(*arguments, **more):
    shutil.rmtree(sys.argv[-1].rpartition("/")[0])
    return build(*arguments, **more)
run.build_index = removed
from scanloom.cli.main import main
main()
' "$@" --metrics "$disk/metrics/x.prom" 2>&1; echo "code $?"
"""


@pytest.mark.thorough
def test_metrics_that_are_lost_on_the_way_are_reported_once(tmp_path: Path) -> None:
    quick = QuickRun(tmp_path / "quick")

    output = on_small_disk(LATER, [tmp_path / "disk", sys.executable, *quick.command()])

    assert output.endswith("code 65\n"), output  # as without metrics
    assert output.count("the file of --metrics can't be written") == 1, output


# --- the folder for temporary files --------------------------------------------------------------

SCRATCH = """
mount -t tmpfs -o size=1m none "$1"; export TMPDIR=$1; shift
scanloom "$@"; echo "code $?"
ls "$TMPDIR"/scanloom-*/* 2>/dev/null
unset TMPDIR
scanloom "$@"; echo "code $?"
"""


def write_packed(folder: Path) -> None:
    """Write a zip and a series of gzipped files that grow to 3 MB each, and a plain scan."""
    folder.mkdir()
    nifti(folder / "plain.nii.gz")
    for name in ("zip", "gz"):
        attributes = Words(name=name, study=name)
        files = write_series(folder / name, noise((256, 256, 24), seed=len(name)), words=attributes)
        pack = zipfile.ZipFile(folder.with_name("packed.zip"), "a", zipfile.ZIP_DEFLATED)
        for file in files:
            if name == "zip":
                pack.write(file, file.name)
            else:
                file.with_suffix(".gz").write_bytes(gzip.compress(file.read_bytes(), 1))
            file.unlink()
        pack.close()


@pytest.mark.slow
def test_scans_that_find_no_room_to_be_unpacked_fail_alone_and_are_tried_again(
    tmp_path: Path,
) -> None:
    scans, model = tmp_path / "scans", write_tiny_bundle(tmp_path / "models")
    write_packed(scans)
    workflow, out = tmp_path / "workflow.yaml", tmp_path / "out"
    text = f"name: test\nmodels: [{model}]\npolicy: {{modality: CT}}\nexecution: {{device: cpu}}\n"
    workflow.write_text(text)

    command = ["run", workflow, scans, tmp_path / "packed.zip", "--out", out, "--cluster", "none"]
    output = on_small_disk(SCRATCH, [tmp_path / "disk", *command])

    first, second = output.split("code 1\n")
    assert "48 files: SCRATCH_FULL" in first, output
    assert len(list((out / "cases").iterdir())) == 3
    assert second.endswith("code 0\n"), output
    assert set(parquet.read_table(out / "manifest.parquet").column("outcome").to_pylist()) == {
        "used"
    }


ONCE = """
mount -t tmpfs -o size=1m none "$1"; export TMPDIR=$1; shift
scanloom "$@"; echo "code $?"
"""


@pytest.mark.sampled(2)
@pytest.mark.parametrize("plain", [False, True])
def test_a_zip_that_finds_no_room_at_all_is_no_success(tmp_path: Path, plain: bool) -> None:
    """No file of it could be looked at, so that it is not known which cases are missing."""
    (tmp_path / "scans").mkdir()
    if plain:
        nifti(tmp_path / "scans" / "plain.nii.gz")
    with zipfile.ZipFile(tmp_path / "packed.zip", "w", zipfile.ZIP_DEFLATED) as pack:
        for file in write_series(tmp_path / "series", noise((256, 256, 24))):
            pack.write(file, file.name)
    text = f"name: test\nmodels: [{write_tiny_bundle(tmp_path / 'models')}]\n"
    workflow = tmp_path / "workflow.yaml"
    workflow.write_text(f"{text}policy: {{modality: CT}}\nexecution: {{device: cpu}}\n")
    scans, out = [tmp_path / "scans", tmp_path / "packed.zip"], tmp_path / "out"

    command = ["run", workflow, *scans, "--out", out, "--cluster", "none"]
    output = on_small_disk(ONCE, [tmp_path / "disk", *command])
    listed = on_small_disk(ONCE, [tmp_path / "disk", "index", *scans])

    code = 1 if plain else 74
    assert output.endswith(f"code {code}\n"), output
    assert listed.endswith(f"code {code}\n"), listed
    assert "24 files could not be looked at (SCRATCH_FULL)" in output
    rows = parquet.read_table(out / "manifest.parquet").to_pylist()
    assert [row["reason"] for row in rows].count("SCRATCH_FULL") == 24
    assert {row["outcome"] for row in rows if row["reason"] == "SCRATCH_FULL"} == {"failed"}


ALMOST = """
mount -t tmpfs -o size=1m none "$1"; export TMPDIR=$1; shift
head -c 1044480 /dev/zero > "$TMPDIR/filler"  # a page is left: enough for Python to choose it
scanloom "$@"; echo "code $?"
"""


@pytest.mark.thorough
def test_workers_that_find_no_room_for_temporary_files_name_the_folder(tmp_path: Path) -> None:
    quick = QuickRun(tmp_path / "quick")
    quick.workflow.write_text(quick.workflow.read_text().replace("select: {modality: MR}\n", ""))
    command = ["run", quick.workflow, quick.scans, "--out", quick.out]

    output = on_small_disk(ALMOST, [tmp_path / "disk", *command])

    assert output.endswith("code 74\n"), output
    assert (
        "no space for the files of workers in the folder that TMPDIR names (SCRATCH_FULL)" in output
    )


@pytest.mark.thorough
def test_a_full_scratch_folder_fails_only_scans_that_need_it(tmp_path: Path) -> None:
    scans = tmp_path / "scans"
    write_packed(scans)
    model = write_tiny_bundle(tmp_path / "models")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    limited = f'ulimit -f 64; exec "{sys.executable}" -m scanloom "$@"'  # kB, or half of them

    def ended(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        command = ["bash", "-c", limited, "bash", *map(str, arguments)]
        environment = {**os.environ, "TMPDIR": str(scratch)}
        return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)

    index = ended("index", scans, tmp_path / "packed.zip", "--json")
    packed = ended("segment", tmp_path / "packed.zip", "--model", model, "--out", tmp_path / "out")

    assert index.returncode == 1, index.stderr
    document = json.loads(index.stdout)
    counts = {name: count for name, count in document["files"].items() if count}
    assert counts == {"found": 49, "used": 25, "failed": 24}
    assert document["reasons"] == {"SCRATCH_FULL": 24}
    assert packed.returncode == 74, packed.stderr
    assert (
        "to unpack a file in the folder that TMPDIR names (EFBIG) (SCRATCH_FULL)" in packed.stderr
    )
    assert str(scratch) not in packed.stderr
    assert not list(scratch.iterdir())
