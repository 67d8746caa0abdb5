"""What the worker of `listen` waits for has an end."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

from scanloom.engine.listen import work
from scanloom.engine.listen.site import read_site
from scanloom.engine.listen.studies import Images

pytest.importorskip("pynetdicom")
pytestmark = pytest.mark.filterwarnings("ignore:.*unclosed")


def test_a_sender_that_does_not_answer_holds_up_no_study_that_is_overdue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scanloom.io.network.query.TIMEOUT_S", 1.0)
    monkeypatch.setattr(work, "ASK_AGAIN_S", 0.2)
    images = Images("digest", {"1.2": 3}, ("PACS",))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        ask = {"title": "ARCHIVE", "address": "127.0.0.1", "port": silent.getsockname()[1]}
        page = {"peers": [{"title": "PACS", "ask": ask}], "rules": [{"workflow": "ct_tissue"}]}
        (tmp_path / "site.yaml").write_text(yaml.safe_dump(page))
        site = read_site(tmp_path / "site.yaml")
        worker = work.Worker(
            site, tmp_path / "spool", tmp_path / "out", None, pytest.fail, pytest.fail
        )
        worker._askers = ThreadPoolExecutor(1)
        try:
            assert worker._answer("1.1", images, is_overdue=True) is None  # it is asked just now
            time.sleep(0.3)
            assert worker._answer("1.1", images, is_overdue=False) is None
            answer = worker._answer("1.1", images, is_overdue=True)
            assert answer is not None
            assert answer.result(0) is None
        finally:
            worker._askers.shutdown(wait=True, cancel_futures=True)
