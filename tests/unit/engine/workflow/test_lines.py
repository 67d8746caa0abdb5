"""Mistakes of a workflow that only its models show: each is named with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from scanloom.core import Reason, ScanError
from scanloom.engine.prepare import Request
from scanloom.engine.workflow.schema import parse_stored_workflow, parse_workflow, read_workflow
from scanloom.engine.workflow.selection import check_channels

MODELS = "name: small\nmodels:\n  - ct_tissue\n  - hippocampus_mr\n"
SIDES = """results:
  a: { model: hippocampus_mr, side: left }
  b: { model: hippocampus_mr, side: right }
"""


def check(path: Path) -> None:
    request = Request.of(read_workflow(path))
    check_channels(request.workflow, request.cards)


def refused(path: Path, text: str) -> ScanError:
    path.write_text(text)
    with pytest.raises(ScanError) as caught:
        check(path)
    return caught.value


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            "crop_by:\n  hippocampus_mr:\n    model: ct_tissu\n",
            "line 7: crop_by.hippocampus_mr.model: did you mean ct_tissue?",
        ),
        (
            "restrict_to:\n  hippo: { model: ct_tissue }\n",
            "line 6: restrict_to.hippo: did you mean hippocampus_mr?",
        ),
        (
            "crop_by:\n  hippocampus_mr:\n    model: ct_tissue\n    structures:\n      - fat\n"
            "      - lungs\n",
            "line 10: crop_by.hippocampus_mr.structures: ct_tissue has no lungs; did you mean lung",
        ),
        (
            "restrict_to:\n  ct_tissue: { model: ct_tissue }\n",
            "line 6: restrict_to.ct_tissue: ct_tissue needs itself",
        ),
        (
            "restrict_to:\n  ct_tissue: { model: hippocampus_mr }\n"
            "crop_by:\n  hippocampus_mr: { model: ct_tissue }\n",
            "line 6: restrict_to.ct_tissue: ct_tissue and hippocampus_mr need each other",
        ),
        (
            "unite:\n  u:\n    priority:\n      - model: ct_tissue\n      - model: hippocampus\n",
            "line 9: unite.u.priority.model: did you mean hippocampus_mr?",
        ),
        (
            "ensembles:\n  e:\n    - ct_tissue\n    - hippocampus_mr\n",
            "line 8: ensembles.e: ct_tissue and hippocampus_mr differ in their structures",
        ),
        ("ensembles:\n  e: [ct_tissue,\n    x]\n", "line 7: ensembles.e: expected one of"),
        (
            "shares:\n  - of: bone\n    structures: fat\n  - of: bone\n    structures:\n"
            "      - lung\n      - livers\n",
            "line 11: shares.structures: expected one of lung",
        ),
        (
            "shares:\n  - { of: bone, structures: fat }\n  - { of: lung, structures: fat }\n",
            "line 7: shares: ct_tissue/fat is measured as a share twice",
        ),
        (
            "shares:\n  - of: [bone, lung, ct_tissue/bone]\n",
            "line 6: shares.of: ct_tissue/bone is named twice",
        ),
        (
            "unite: { u: { priority: [{ model: ct_tissue, structures: bone }, "
            "{ model: hippocampus_mr, structures: hippocampus_anterior }] } }\n"
            "shares:\n  - { of: [bone, hippocampus_anterior] }\n",
            "line 7: shares: no structure is left whose share is measured",
        ),
        (
            "asymmetries:\n  - left: bone\n    right: lungs\n",
            "line 7: asymmetries.right: did you mean lung?",
        ),
        (
            SIDES + "asymmetries:\n  - left:\n      - hippocampus_anterior_left\n"
            "      - hippocampus_posterior_right\n    right: hippocampus_anterior_right\n",
            "line 11: asymmetries.left: not of the left side: hippocampus_posterior_right",
        ),
        (
            SIDES + "  c:\n    model: hippocampus_mr\n    side: left\n",
            "line 10: results.c.side: the result a is this side of hippocampus_mr already",
        ),
        ("results:\n  a:\n    model: x\n", "line 7: results.a.model: expected one of"),
        ("channels: { T1: { contrast: no } }\n", "line 5: channels: these models take a single"),
        ("outputs:\n  structures: [liver]\n", "line 6: ct_tissue has no liver"),
    ],
)
def test_a_mistake_that_the_models_show_is_named_with_its_line(
    tmp_path: Path, sections: str, message: str
) -> None:
    path = tmp_path / "own.yaml"
    error = refused(path, MODELS + sections)
    assert message in error.detail
    assert error.private == str(path)


@pytest.mark.parametrize(
    ("models", "message"),
    [
        ("  - ct_tissue\n  - ct_tissues\n", "line 4: there is no model or folder 'ct_tissues'"),
        ("  - ct_tissue\n  - ct_tissue\n", "line 2: two of the models have the name ct_tissue"),
    ],
)
def test_a_model_that_cannot_be_meant_is_named_with_its_line(
    tmp_path: Path, models: str, message: str
) -> None:
    error = refused(tmp_path / "own.yaml", f"name: small\nmodels:\n{models}")
    assert (error.reason, message in error.detail) == (Reason.MODEL_UNKNOWN, True)


def test_a_workflow_without_a_file_has_no_lines() -> None:
    stored = parse_workflow(MODELS + "outputs: { structures: liver }\n").model_dump_json()
    with pytest.raises(ScanError) as caught:
        Request.of(parse_stored_workflow(stored))
    assert caught.value.detail.startswith("ct_tissue has no liver")


def test_workflows_that_say_the_same_are_equal(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(f"# a comment\n{MODELS}")
    assert read_workflow(path) == parse_workflow(MODELS)
