"""This program's processes import modules only from folders that no other user can write to."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import scanloom
from scanloom.io.system.scratch_folders import FOLDER_PREFIX, LOCK_NAME, private_temporary_folder
from scanloom.own_python import (
    is_closed,
    let_idle_threads_sleep,
    own_environment,
    own_python,
    safe_path,
)

ROOT_ALONE = pytest.mark.skipif(os.getuid() != 0, reason="only root can give folders away")
NOBODY = 65534


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """Return a folder like /tmp."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


def test_a_folder_to_which_others_can_add_is_left_out(shared: Path) -> None:
    mine, writable = shared / "mine", shared / "writable"
    mine.mkdir(mode=0o700)
    writable.mkdir()
    writable.chmod(0o777)
    missing = shared / "missing"  # whoever makes it can put anything there

    kept = safe_path([str(shared), str(writable), str(missing), str(mine)])

    assert kept == [str(mine)]


def test_a_folder_that_others_can_move_away_is_left_out(tmp_path: Path) -> None:
    above = tmp_path / "above"
    (above / "mine").mkdir(parents=True, mode=0o700)
    link = tmp_path / "link"
    link.symlink_to(above / "mine")
    assert safe_path([str(link)]) == [str(link)]

    above.chmod(0o777)

    assert safe_path([str(above / "mine"), str(link)]) == []


@ROOT_ALONE
def test_a_folder_of_another_user_is_left_out(shared: Path) -> None:
    theirs = shared / "theirs"
    theirs.mkdir(mode=0o755)
    os.chown(theirs, NOBODY, NOBODY)

    assert safe_path([str(theirs)]) == []
    assert not is_closed(theirs, sticky=True)


def test_the_working_folder_is_judged_like_others(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(shared)
    assert safe_path(["", ".", "relative"]) == []


def test_what_python_itself_lies_in_stays() -> None:
    own = [p for p in sys.path if Path(p).is_relative_to(sys.prefix)]
    assert safe_path(own) == own


def test_a_process_imports_nothing_from_its_working_folder(shared: Path) -> None:
    (shared / "json.py").write_text("raise SystemExit('imported')")
    environment = {**own_environment(), "PYTHONPATH": own_environment()["PYTHONPATH"]}

    done = subprocess.run(
        own_python("-c", "import json; print(json.__file__)"),
        cwd=shared,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert not Path(done.stdout).is_relative_to(shared)


def test_entries_of_pythonpath_that_others_can_write_are_not_handed_on(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = shared / "mine"
    mine.mkdir(mode=0o700)
    monkeypatch.chdir(shared)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(shared), "", str(mine))))

    assert own_environment()["PYTHONPATH"] == str(mine)


def test_a_private_folder_goes_away_and_takes_what_died_with_it(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(shared))
    dead = shared / f"{FOLDER_PREFIX}dead"
    dead.mkdir()
    (dead / LOCK_NAME).touch()

    with private_temporary_folder(shared / "otherwise") as folder:
        assert folder.parent == shared
        assert folder.stat().st_mode & 0o777 == 0o700
        assert [p.name for p in shared.iterdir()] == [folder.name]
        with private_temporary_folder(shared / "otherwise"):
            assert folder.exists()
    assert not list(shared.iterdir())


def test_a_folder_for_temporary_files_in_which_others_can_move_things_is_not_used(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(shared))
    shared.chmod(0o777)

    with private_temporary_folder(tmp_path) as folder:
        assert folder.parent == tmp_path


@pytest.mark.parametrize("module", ["json", "typing", "typer", "inspect"])
def test_no_module_of_the_working_folder_is_imported(module: str, tmp_path: Path) -> None:
    (tmp_path / f"{module}.py").write_text("raise SystemExit('planted')")
    program = Path(scanloom.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": str(program)}
    environment.pop("PYTHONSAFEPATH", None)

    ended = subprocess.run(
        [sys.executable, "-m", "scanloom", "--version"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )

    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith("scanloom ")


@pytest.mark.parametrize("own", ["", "20"])
def test_idle_threads_sleep_at_once_unless_the_user_chose_a_time(
    own: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENBLAS_THREAD_TIMEOUT", own)
    if not own:
        monkeypatch.delenv("OPENBLAS_THREAD_TIMEOUT")
    let_idle_threads_sleep()
    assert os.environ["OPENBLAS_THREAD_TIMEOUT"] == (own or "4")
