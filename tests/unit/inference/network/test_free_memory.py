"""Pages of files that are mapped for reading leave memory; their content stays."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import pytest

from scanloom.inference.device import drop_file_pages, return_free_memory

SIZE = 1 << 24


def file_pages() -> int:
    """Return the bytes of this process's pages that belong to files."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssFile:"):
            return int(line.split()[1]) * 1024
    raise ValueError("no RssFile")


@pytest.mark.skipif(sys.platform != "linux", reason="only on Linux")
def test_pages_of_a_file_are_dropped(tmp_path: Path) -> None:
    content = bytes(range(256)) * (SIZE // 256)
    file, second_file = tmp_path / "weights 1.bin", tmp_path / "other.bin"
    file.write_bytes(content)
    second_file.write_bytes(content)
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as view:
        assert bytes(view) == content
        before = file_pages()

        drop_file_pages(second_file)
        assert file_pages() > before - SIZE // 2
        drop_file_pages(file)

        assert file_pages() < before - SIZE // 2
        assert bytes(view) == content


def test_a_missing_file_has_no_pages(tmp_path: Path) -> None:
    drop_file_pages(tmp_path / "none")
    return_free_memory()
