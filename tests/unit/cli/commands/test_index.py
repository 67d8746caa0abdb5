"""`scanloom index`: a table or one document, and an exit code that says how it went."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.archives import Outcomes, series, write_archive
from support.commands import scanloom
from support.write_dicom import Edit, Words, noise, uid, write_series


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="module")
def messy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcomes]:
    root = tmp_path_factory.mktemp("archive")
    return root, write_archive(root)


def test_the_document_accounts_for_every_file(messy: tuple[Path, Outcomes]) -> None:
    root, expected = messy
    ended = scanloom("index", root, "--json")
    assert (ended.code, ended.err) == (1, "")  # a file could not be looked at
    assert scanloom("index", root, "--json", "--strict").code == 1
    reported = ended.document
    files = dict(reported["files"])
    assert files.pop("found") == sum(files.values()) == len(expected)
    reasons = [code for _, code in expected.values() if code]
    assert reported["reasons"] == {code: reasons.count(code) for code in sorted(set(reasons))}
    for entry in reported["series"]:
        assert (entry["status"] == "used") == (entry["reason"] is None)
        assert (entry["shape"] is not None) >= (entry["status"] == "used")
    numbers = [entry["number"] for entry in reported["series"] if entry["number"]]
    assert numbers == list(range(1, len(numbers) + 1))
    assert scanloom("index", root, "--json").document == reported | {"opened": 0}


def test_the_table_says_what_to_do(messy: tuple[Path, Outcomes]) -> None:
    root, expected = messy
    ended = scanloom("index", root)
    assert ended.code == 1  # a file could not be looked at
    assert "UNREADABLE: Check the permissions" in ended.out
    assert "SLICE_GAP: Export the series again" in ended.out
    assert f"{len(expected)} files" in ended.out


@pytest.mark.parametrize("count", [5, 2, 0])
def test_the_exit_code(tmp_path: Path, count: int) -> None:
    (tmp_path / "text").touch()
    if count:
        series(tmp_path, "a", count=count)
    ended = scanloom("index", tmp_path, "--json")
    assert ended.code == (0 if count == 5 else 65)
    assert ended.document["files"]["used"] == (5 if count == 5 else 0)


def phases(folder: Path) -> None:
    """Write two volumes that share a series."""
    for n in (1, 2):
        header = Words(name="phases", more={"AcquisitionNumber": n})
        write_series(folder / str(n), noise((8, 8, 5), n), words=header, edit=numbered(n))


def numbered(n: int) -> Edit:
    return lambda k, ds: setattr(ds, "SOPInstanceUID", uid("phases", n, k))


@pytest.mark.parametrize("beside", [True, False])
def test_ambiguous_series_are_no_failures(tmp_path: Path, beside: bool) -> None:
    phases(tmp_path / "phases")
    if beside:
        series(tmp_path, "a", count=5)
    ended = scanloom("index", tmp_path, "--json")
    assert ended.code == 0
    files = ended.document["files"]
    assert files == {
        "found": 15 if beside else 10,
        "used": 5 if beside else 0,
        "skipped": 0,
        "ambiguous": 10,
        "failed": 0,
    }
    assert "ambiguous" in {entry["status"] for entry in ended.document["series"]}
    assert "10 ambiguous, 0 failed" in scanloom("index", tmp_path).out


def test_a_missing_path_is_refused(tmp_path: Path) -> None:
    ended = scanloom("index", tmp_path / "absent")
    assert ended.code == 65
    assert "NOT_FOUND" in ended.err


def test_with_out_the_index_lies_in_its_private_folder(tmp_path: Path) -> None:
    (tmp_path / "scan").mkdir()
    series(tmp_path / "scan", "a")
    scanloom("index", tmp_path / "scan", "--out", tmp_path / "out", "--json")
    assert (tmp_path / "out" / "private" / "index.parquet").exists()
    second_key = tmp_path / "key"
    ended = scanloom("index", tmp_path / "scan", "--out", tmp_path / "out", "--key", second_key)
    assert ended.code != 0
    assert "KEY_MISMATCH" in ended.err


def test_segment_takes_the_numbers_of_the_table(tmp_path: Path) -> None:
    """The index and `--series NUMBER` count the same way."""
    from scanloom.io.index.ranking import select_series
    from scanloom.io.index.series import find_series

    series(tmp_path, "five", count=5)
    series(tmp_path, "few", count=2)
    series(tmp_path, "six", count=6)
    reported = scanloom("index", tmp_path, "--json").document["series"]
    for entry in reported:
        [chosen] = select_series(find_series(tmp_path), str(entry["number"]))
        assert len(chosen.files) == entry["n_files"]


def test_a_named_key_that_others_may_change_is_told(tmp_path: Path, own_key: Path) -> None:
    key = tmp_path / "key"
    key.write_bytes(own_key.read_bytes())
    (tmp_path / "scans").mkdir()
    (tmp_path / "scans" / "notes.txt").write_text("no scan")
    arguments = ("index", tmp_path / "scans", "--key", key)
    key.chmod(0o600)
    assert "others may write" not in scanloom(*arguments).err
    key.chmod(0o666)
    assert "belongs to another user or is writable by others" in scanloom(*arguments).err
