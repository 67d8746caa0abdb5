"""Messages about series that a workflow's selection excludes."""

from __future__ import annotations

import pytest

from scanloom.cli.workflows import explain_nothing_selected, explain_unstated
from scanloom.engine.workflow.schema import parse_workflow

WORKFLOW = parse_workflow("name: a\nmodels: [m]\nselect: {modality: CT}\n")


def test_series_without_a_modality_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    """They are counted if others were selected too; the same text explains an empty selection."""
    explain_unstated(2, "own.yaml", WORKFLOW)
    printed = capsys.readouterr().err
    assert "2 series state no modality" in printed
    assert "add `policy: {modality: CT}` to the workflow" in printed

    explain_nothing_selected({"NOT_SELECTED": 2}, 2, "own.yaml", WORKFLOW)
    assert capsys.readouterr().err.endswith(printed)

    explain_unstated(1, "ct_tissue", WORKFLOW)
    assert "to a copy of " in capsys.readouterr().err


def test_other_selections_point_to_the_workflow(capsys: pytest.CaptureFixture[str]) -> None:
    explain_nothing_selected({"NOT_SELECTED": 2}, 0, "own.yaml", WORKFLOW)
    printed = capsys.readouterr().err
    assert "Check `select` and `policy`" in printed
    assert "modality" not in printed
