import errno
import os
from pathlib import Path

import pytest

from scanloom.core.process import lock_file

fcntl = pytest.importorskip("fcntl")


def test_a_held_lock_is_reported_and_released_by_closing(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    first, second = (os.open(path, os.O_RDWR | os.O_CREAT) for _ in range(2))
    try:
        assert lock_file(first)
        assert not lock_file(second, timeout_s=0)
        assert not lock_file(second, timeout_s=0.1)
    finally:
        os.close(first)
    assert lock_file(second, timeout_s=0)
    os.close(second)


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_not_an_error(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(code, "no locks")

    monkeypatch.setattr(fcntl, "flock", refuse)
    folder = os.open(tmp_path, os.O_RDONLY)
    assert not lock_file(folder)
    os.close(folder)


def test_other_errors_are_raised(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path, os.O_RDONLY)
    os.close(descriptor)
    with pytest.raises(OSError, match="Bad file descriptor"):
        lock_file(descriptor)
