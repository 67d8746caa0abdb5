"""Workers give the results of this process, also if they die, hang or send nonsense."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from scanloom.io.index import workers as module
from scanloom.io.index.inspection import inspect_chunk
from scanloom.io.index.workers import DescribeTask, HeaderWorkers, _describe_all
from support.archives import nifti, series

DIES_AT_ONCE = "raise SystemExit(3)"
DIES_LATER = module._START.replace(
    "serve(", "import os, threading; threading.Timer(0.3, os._exit, (9,)).start(); serve("
)
NONSENSE = (
    "import socket, sys; s = socket.socket(fileno=int(sys.argv[1])); "
    "s.sendall(b'nonsense' * 9); s.recv(1)"
)
NOISE = module._START.replace("serve(", "import os; os.write(1, b'x' * 100000); serve(")


def size_of(path: str) -> int:
    return Path(path).stat().st_size if Path(path).exists() else 0


@pytest.fixture
def chunks(tmp_path: Path) -> list[list[str]]:
    lists = []
    for n in range(6):
        folder = tmp_path / f"grüße {n}"
        folder.mkdir()
        lists.append([str(path) for path in series(folder, f"s{n}", count=4)])
    (tmp_path / "text").write_text("no image")
    return [*lists, [str(tmp_path / "text"), str(tmp_path / "absent")], []]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("start", ["", DIES_AT_ONCE, DIES_LATER, NONSENSE, NOISE])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_all_is_surveyed_and_described(
    chunks: list[list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    start: str,
    count: int,
) -> None:
    if count < 2 and start:
        pytest.skip("nothing is started")
    nifti(tmp_path / "scan.nii")
    files = [[(path, size_of(path)) for path in chunk] for chunk in chunks]
    here = [inspect_chunk(chunk) for chunk in files]
    tasks = [
        [DescribeTask("dicom", chunk, [look.packed for look in done.infos])]
        for chunk, done in zip(chunks[:6], here, strict=False)
    ]
    tasks += [[DescribeTask("nifti", [str(tmp_path / "scan.nii")], [])], []]
    monkeypatch.setattr(module, "_START", start or module._START)
    with closing(HeaderWorkers(count)) as helpers:
        helpers.start()
        assert helpers.survey(files) == here
        assert helpers.describe(tasks) == [_describe_all(task) for task in tasks]


def test_no_process_is_left_after_a_fault(chunks: list[list[str]]) -> None:
    def interrupted() -> None:
        with closing(helpers):
            helpers.start()
            helpers.survey([[(path, size_of(path)) for path in chunk] for chunk in chunks])
            raise KeyboardInterrupt

    helpers = HeaderWorkers(3)
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert len(helpers._workers) == 2
    assert all(worker._process.returncode is not None for worker in helpers._workers)


@pytest.mark.parametrize(
    ("length", "rounds"), [(20, 2), pytest.param(40, 3, marks=pytest.mark.thorough)]
)
def test_a_question_larger_than_the_buffer_is_not_asked_ahead(
    chunks: list[list[str]], length: int, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Questions and answers larger than the sockets' buffers: no process waits for ever."""
    monkeypatch.setattr(module, "BUFFER_BYTES", 4096)
    files = [[(path, size_of(path)) for path in chunk] * length for chunk in chunks[:6]] * rounds
    with closing(HeaderWorkers(3)) as helpers:
        helpers.start()
        assert max(map(len, map(module._survey_request, files))) > helpers._workers[0]._buffer_bytes
        assert helpers.survey(files) == [inspect_chunk(chunk) for chunk in files]
