"""A case is judged in one order: earlier result, modality, headers, memory."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scanloom.cards.card import Argmax, Checks, Decision, ModelCard, Threshold
from scanloom.cards.card_file import weights_file, write_card
from scanloom.convert.store import find_model
from scanloom.core import Outputs, ReadOptions, Reason, Relations, ScanError, format_bytes
from scanloom.core.measurement import Range
from scanloom.core.relations import CropBy, ResultOf
from scanloom.engine.prepare import (
    MEASUREMENT_BYTES,
    OutputTarget,
    Request,
    check_memory,
    estimate_case,
    prepare,
)
from scanloom.engine.run import RunOptions, run
from scanloom.engine.workflow.schema import make_workflow
from scanloom.inference.geometry import plan_grid
from scanloom.inference.memory import CaseEstimate
from scanloom.inference.restore.restorers import ScoreRestorer
from scanloom.io.output.published import ResultState
from scanloom.options import Modality
from support import engine_models, model_cards
from support.archives import nifti


def test_more_slices_take_the_scan_the_copy_and_the_labels_more(tmp_path: Path) -> None:
    """Nothing that grows with the scan is held beside them while the network runs."""
    card = model_cards.card(model_cards.small_weights(tmp_path))
    few, many = (
        estimate_case(model_cards.grid((512, 512, n), (0.7, 0.7, 1.0)), np.int16, [card])
        for n in (300, 1000)
    )
    voxels = 512 * 512 * 700
    copy = 4 * 179 * 179 * 350
    added = many.host["network"] - few.host["network"]
    assert voxels * 3 + copy <= added <= 1.2 * (voxels * 3 + copy)


@pytest.mark.parametrize("decision", [Argmax(), Threshold()])
@pytest.mark.parametrize(("count", "label_bytes"), [(255, 1), (256, 2)])
def test_label_maps_are_counted_with_their_own_type(
    decision: Decision, count: int, label_bytes: int, tmp_path: Path
) -> None:
    card = model_cards.card(
        model_cards.small_weights(tmp_path),
        structures=model_cards.structures(count),
        decision=decision,
    )
    grid = model_cards.grid((6, 5, 4))
    maps = ScoreRestorer(plan_grid(grid, card.grid), decision, card.n_outputs).labels
    need = estimate_case(grid, np.int16, [card])

    assert (len(maps), maps[0].itemsize) == (card.n_maps, label_bytes)
    assert need.host["measure"] - MEASUREMENT_BYTES == 6 * 5 * 4 * 2 + sum(m.nbytes for m in maps)


def test_what_can_not_fit_is_refused_with_both_figures(tmp_path: Path) -> None:
    card = model_cards.card(model_cards.small_weights(tmp_path))
    need = estimate_case(model_cards.grid((512, 512, 1000)), np.int16, [card], Outputs())
    check_memory(need, need.peak)
    with pytest.raises(ScanError) as caught:
        check_memory(need, 10**9)
    assert caught.value.reason is Reason.OUT_OF_MEMORY
    assert f"needs {format_bytes(need.peak)} in the step" in caught.value.detail
    assert "limit 953.7 MiB" in caught.value.detail


def test_maps_of_uncertainty_are_counted(tmp_path: Path) -> None:
    card = model_cards.card(model_cards.small_weights(tmp_path))
    grid = model_cards.grid((100, 80, 60))
    usual = estimate_case(grid, np.int16, [card])
    with_maps = estimate_case(grid, np.int16, [card], Outputs(also=("uncertainty",)))
    voxels = 100 * 80 * 60
    assert with_maps.host["write"] >= usual.host["write"] + voxels
    assert with_maps.host["restore"] >= usual.host["restore"] + voxels
    folds = replace(card, folds=(card.weights, card.weights))
    several = estimate_case(grid, np.int16, [folds], Outputs(also=("uncertainty",)))
    assert several.host["restore"] >= with_maps.host["restore"] + voxels
    assert (
        estimate_case(grid, np.int16, [folds], Outputs(also=("masks",))).host["restore"]
        < (several.host["restore"])
    )


def test_a_crop_counts_as_the_largest_that_its_model_does_not_refuse(tmp_path: Path) -> None:
    weights = model_cards.small_weights(tmp_path)
    finder, flagging = (model_cards.card(weights, name=name) for name in ("finder", "fine"))
    flagging = replace(flagging, checks=Checks(extent=Range(5, 40)))
    fine = replace(flagging, checks=replace(flagging.checks, refuse=("extent",)))
    sides = {"l": ResultOf("fine", "left"), "r": ResultOf("fine", "right")}
    once = Relations(crop_by={"fine": CropBy("finder", margin_mm=10)})
    twice = Relations(results=sides, crop_by={name: CropBy("finder") for name in sides})
    grid, box = model_cards.grid((100, 80, 60)), model_cards.grid((40, 40, 40))
    of_scan, of_box = (estimate_case(each, np.int16, [finder]) for each in (grid, box))

    def need(card: ModelCard, relations: Relations) -> CaseEstimate:
        return estimate_case(grid, np.int16, [finder, card], None, None, relations)

    assert of_box.values < of_scan.values
    assert need(fine, once).values == of_scan.values + of_box.values
    assert need(fine, twice).values == of_scan.values + 2 * of_box.values
    assert need(flagging, once).values == 2 * of_scan.values
    assert need(fine, once).host["network"] < need(flagging, once).host["network"]


def test_a_crop_is_no_larger_than_the_scan(tmp_path: Path) -> None:
    weights = model_cards.small_weights(tmp_path)
    card = replace(
        model_cards.card(weights, name="fine"),
        checks=Checks(extent=Range(5, 400), refuse=("extent",)),
    )
    cards = [model_cards.card(weights, name="finder"), card]
    cropped, whole = (
        estimate_case(model_cards.grid((40, 30, 20)), np.int16, cards, relations=relations)
        for relations in (Relations(crop_by={"fine": CropBy("finder")}), Relations())
    )
    assert cropped.values == whole.values


def test_an_earlier_result_answers_although_the_scan_would_be_refused_today(
    tmp_path: Path,
) -> None:
    case = engine_models.make_case(tmp_path, "a")
    target = OutputTarget(tmp_path / "out", bytes(32))
    folder = target.out / "cases" / case.id
    folder.mkdir(parents=True)
    document = {"recipe": case.recipe, "source": {"hash": case.source_hash}}
    (folder / "case.json").write_text(json.dumps(document))
    (folder / "timing.json").write_text("{}")
    case.series.files[0].unlink()

    prepared = prepare(case, [model_cards.card(model_cards.small_weights(tmp_path))], target)

    assert (prepared.state, prepared.refusal) == (ResultState.CURRENT, None)
    record = prepared.ended()
    assert record is not None
    assert record.reused


@pytest.mark.parametrize(
    ("modality", "reason"), [("MR", Reason.MODALITY), ("CT", Reason.UNREADABLE)]
)
def test_the_modality_is_judged_before_headers_are_read_and_headers_before_memory(
    modality: Modality, reason: Reason, tmp_path: Path
) -> None:
    case = engine_models.make_case(tmp_path, "a")
    case = replace(case, read=ReadOptions(modality=modality))
    case.series.files[0].unlink()
    card = model_cards.card(model_cards.small_weights(tmp_path))

    prepared = prepare(case, [card], None, memory_limit=1)

    assert prepared.refusal is not None
    assert prepared.refusal.reason is reason
    assert not prepared.is_too_large


def test_a_fault_of_the_program_is_a_refusal_too(tmp_path: Path) -> None:
    case = engine_models.make_case(tmp_path, "a")
    case = replace(case, series=replace(case.series, kind="no format"))

    record = prepare(case, [], None).ended()

    assert record is not None
    assert record.reason is Reason.INTERNAL


@pytest.fixture
def model_with_one_on_request(tmp_path: Path) -> Path:
    """A model of part-1, part-2 and part-3, of which part-2 is on request."""
    card = model_cards.card(
        model_cards.small_weights(tmp_path),
        structures=model_cards.structures(3),
        on_request=("part-2",),
    )
    model = tmp_path / "model"
    file = weights_file(model, card.weights.sha256)
    file.parent.mkdir(parents=True)
    card.weights.file.rename(file)
    write_card(card, model)
    return model


@pytest.mark.parametrize(
    ("requested", "written"),
    [([], ("part-1", "part-3")), (["part-2"], ("part-2",)), (["part-1", "part-2"],) * 2],
)
def test_structures_on_request_are_written_if_they_are_named(
    requested: list[str], written: tuple[str, ...], model_with_one_on_request: Path
) -> None:
    request = Request.of(
        make_workflow(
            name="t",
            models=[str(model_with_one_on_request)],
            outputs={"structures": requested},
        )
    )

    assert request.workflow.output_options.structures == tuple(written)


def test_a_folder_of_a_model_is_the_same_in_all_working_folders(
    model_with_one_on_request: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a worker that was started elsewhere, and of `report` on the workflow of a run."""
    folder = model_with_one_on_request
    monkeypatch.chdir(folder.parent)
    request = Request.of(make_workflow(name="t", models=[f"./{folder.name}"]))
    monkeypatch.chdir("/")

    assert request.workflow.models == (str(folder),)
    assert Request.of(request.workflow).digests == request.digests


def test_the_published_workflow_of_a_run_names_the_structures_that_are_written(
    model_with_one_on_request: Path, tmp_path: Path
) -> None:
    scans = tmp_path / "scans"
    scans.mkdir()
    nifti(scans / "scan.nii.gz")  # of no modality: it is not selected
    workflow = make_workflow(
        name="t", models=[str(model_with_one_on_request)], select={"modality": "CT"}
    )

    run(workflow, [scans], RunOptions(tmp_path / "out", tmp_path / "key", cluster="none"))

    [file] = tmp_path.glob("out/runs/*/workflow.json")
    assert json.loads(file.read_text())["outputs"]["structures"] == ["part-1", "part-3"]


ALL_PARTS = ("part-1", "part-2", "part-3")


@pytest.mark.parametrize(
    ("relations", "written"),
    [
        ({"shares": [{"of": ["part-3", "part-2"], "structures": ["part-1"]}]}, ALL_PARTS),
        ({"shares": [{"of": "part-3", "structures": "MODEL/part-2"}]}, ALL_PARTS),
        ({"shares": [{"of": "part-3"}]}, ("part-1", "part-3")),
        ({"asymmetries": [{"left": "part-2", "right": "part-3"}]}, ALL_PARTS),
        (
            {"unite": {"u": {"priority": [{"model": "MODEL", "structures": "part-2"}]}}},
            ("part-2",),
        ),
        ({"unite": {"u": {"priority": [{"model": "MODEL"}]}}}, ("part-1", "part-3")),
        (
            {"results": {"l": {"model": "MODEL", "side": "left"}}},
            ("part-1_left", "part-3_left"),
        ),
    ],
)
def test_structures_on_request_are_written_if_a_relation_names_them(
    relations: dict[str, Any], written: tuple[str, ...], model_with_one_on_request: Path
) -> None:
    name = find_model(str(model_with_one_on_request)).name
    stated = json.loads(json.dumps(relations).replace("MODEL", name))

    request = Request.of(make_workflow(name="t", models=[str(model_with_one_on_request)], **stated))

    assert request.workflow.output_options.structures == written


def test_a_relation_of_an_unknown_model_is_refused_by_its_place(
    model_with_one_on_request: Path,
) -> None:
    unite = {"u": {"priority": [{"model": "other"}]}}
    workflow = make_workflow(name="t", models=[str(model_with_one_on_request)], unite=unite)

    with pytest.raises(ScanError, match=r"unite.u.priority.model") as refused:
        Request.of(workflow)

    assert refused.value.reason is Reason.WORKFLOW
