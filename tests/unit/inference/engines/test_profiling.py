"""A trace shows steps and torch's operations of all threads."""

from __future__ import annotations

import gzip
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from scanloom.core import Reason, ScanError, StepTimer
from scanloom.inference.engines.profiling import profiled


def events(text: str) -> dict[str, dict[str, Any]]:
    return {event["name"]: event for event in json.loads(text)["traceEvents"] if "dur" in event}


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_steps_and_operations_of_all_threads(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with profiled(path) as mark:
        clock = StepTimer(mark=mark)

        def read() -> None:
            with clock.step("load"):
                torch.ones(3).cumsum(0)

        thread = threading.Thread(target=read)
        thread.start()
        thread.join()
        with clock.step("network"):
            torch.ones(30, 30) @ torch.ones(30, 30)
    trace = events(
        gzip.decompress(path.read_bytes()).decode() if name[-1] == "z" else path.read_text()
    )
    network, product = trace["network"], trace["aten::mm"]
    assert network["ts"] <= product["ts"] <= network["ts"] + network["dur"]
    assert trace["load"]["tid"] == trace["aten::cumsum"]["tid"] != network["tid"]
    assert [each.name for each in tmp_path.iterdir()] == [name]


def test_a_trace_is_written_after_an_error(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"

    def fail() -> None:
        with profiled(path) as mark, mark("network"):
            raise ValueError("of the network")

    with pytest.raises(ValueError, match="of the network"):
        fail()
    assert "network" in events(path.read_text())


@pytest.mark.parametrize("name", ["", "missing/trace.json"])
def test_a_path_that_is_no_file_is_refused_first(tmp_path: Path, name: str) -> None:
    began = False
    with pytest.raises(ScanError) as caught, profiled(tmp_path / name):
        began = True
    assert caught.value.reason is Reason.OUTPUT_UNWRITABLE
    assert not began
