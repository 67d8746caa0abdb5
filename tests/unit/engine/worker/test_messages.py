"""Messages between a worker and its child process arrive as they were sent."""

from __future__ import annotations

import socket
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from scanloom.core import Case, CaseRecord, Outputs, Reason, ScanError, Series
from scanloom.engine.case.models import load_models
from scanloom.engine.prepare import OutputTarget
from scanloom.engine.worker.messages import (
    CaseFile,
    CaseReply,
    CaseRequest,
    ChildSetup,
    FunctionCall,
    Ready,
    Step,
)
from scanloom.engine.workflow.schema import Cluster, Execution
from scanloom.io.system.messages import receive, send
from support import engine_models as em

CASE = Case("a" * 26, Series("dicom", (Path("/a"), Path("/b"))), Outputs(), "hash", "recipe")


def there_and_back(value: Any) -> Any:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        send(ours, value)
        return receive(theirs)


@pytest.mark.parametrize(
    "message",
    [
        CaseRequest(1, CASE),
        Ready(),
        Step(1, "load"),
        CaseReply(1, CaseRecord("a", None, "", (), Path("/out")), ((1.5, 2.5), (3.5, 4.0))),
        CaseReply(
            2, CaseRecord("a", Reason.OUT_OF_MEMORY, "too large", (), None), (), refused=True
        ),
    ],
)
def test_messages_arrive_as_sent(message: object) -> None:
    assert there_and_back(message) == message


def test_the_reason_of_a_child_that_cannot_work_arrives() -> None:
    fault = there_and_back(Ready(ScanError(Reason.MODEL_DAMAGED, "its weights"))).fault
    assert (fault.reason, fault.detail) == (Reason.MODEL_DAMAGED, "its weights")


def test_the_setup_of_a_run_arrives() -> None:
    execution = Execution(
        workers=2, time_limit=90.0, memory_limit=8 << 30, cluster=Cluster(hosts=("a", "b"))
    )
    models = partial(load_models, ("one", "two"), ["d1", "d2"], execution)
    setup = ChildSetup(OutputTarget(Path("/out"), b"\xff" * 32), FunctionCall.of(models), 3)
    assert there_and_back(setup) == setup


def test_a_function_is_called_in_the_other_process(tmp_path: Path) -> None:
    call = there_and_back(FunctionCall.of(partial(em.threshold_models, tmp_path / "w", seconds=2)))
    assert call == FunctionCall(
        "support.engine_models:threshold_models", (tmp_path / "w",), {"seconds": 2}
    )
    (tmp_path / "w").touch()
    assert [model.card.name for model in call()] == ["threshold"]


def test_a_file_of_cases_tells_how_many_come_for_sure(tmp_path: Path) -> None:
    file = CaseFile(tmp_path / "cases.jsonl", at_least=2)
    lengths = []
    for name in ("one", "two", "three"):
        lengths.append(len(file))
        file.append(replace(CASE, id=name))

    assert [*lengths, len(file)] == [2, 2, 2, 3]


@pytest.mark.parametrize("function", [lambda: (), em.Threshold.predict, partial(lambda: ())])
def test_a_function_that_is_not_at_the_top_of_a_module_is_refused(function: Any) -> None:
    with pytest.raises(TypeError, match="top level"):
        FunctionCall.of(function)


def test_cases_that_come_one_by_one_are_read_at_their_offsets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that got long is emptied once none of its cases is in work."""
    monkeypatch.setattr(CaseFile, "LONGEST_BYTES", 1)
    file = CaseFile(tmp_path / "cases.jsonl", expected=9)
    first, second, third = (replace(CASE, id=name) for name in ("one", "two", "three"))
    for case in (first, second):
        file.append(case)
    assert list(file) == list(file.cases()) == [first, second]
    assert list(file.cases(file.offset("two"))) == [second]
    assert list(file.cases(file.end)) == []
    assert not file.wait(0.0)
    assert [CaseFile.read(file.path, file.offset(c.id)) for c in (first, second)] == [first, second]

    file.remove("one")
    file.remove("two")
    file.append(third)
    assert file.wait(0.0)
    assert next(file) == third
    assert (file.offset("three"), CaseFile.read(file.path, 0)) == (0, third)
    assert (len(file), file.path.stat().st_mode & 0o777) == (9, 0o600)
