"""Order of models that need each other, crops of nothing, unions, memory of shared scans."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scanloom.cards.card import Checks, ModelCard, NetworkGrid, Threshold
from scanloom.cards.codes import sided
from scanloom.cards.graph import (
    check_relations,
    graph_of,
    running_order,
    structures_of_results,
)
from scanloom.core import (
    Case,
    Flag,
    Layer,
    Outputs,
    Relations,
    ScanError,
    Segmentation,
    Series,
    StepTimer,
    Volume,
)
from scanloom.core.measurement import Range
from scanloom.core.relations import Asymmetry, CropBy, ResultOf, Share, StructuresOf, Unite
from scanloom.engine.case.models import check_structures
from scanloom.engine.prepare import estimate_case
from scanloom.engine.worker.messages import CaseFile
from scanloom.inference.graph import NO_ENGINE, GraphRun, unite
from scanloom.inference.memory import Placement
from scanloom.io.system.messages import receive, send
from support import model_cards

SHAPE = (8, 7, 6)
Labels = np.ndarray[Any, Any]


class Drawn:
    """A model with given labels of the whole scan; notes the shapes that it sees."""

    device_name, precision_name, changes = "cpu", "float32", ""

    def __init__(self, card: ModelCard, labels: Labels) -> None:
        self.card, self._labels, self.seen = card, labels, list[tuple[int, ...]]()

    def predict(self, volume: Volume, clock: StepTimer | None = None, **_: object) -> Segmentation:
        self.seen.append(volume.grid.shape)
        first = tuple(int(n) for n in np.round(GRID.index(volume.grid.world((0, 0, 0)))))
        crop = tuple(slice(a, a + n) for a, n in zip(first, volume.grid.shape, strict=True))
        layer = Layer(self._labels[crop], self.card.structures)
        return Segmentation(self.card.name, (layer,), volume.grid, "1")


GRID = model_cards.grid(SHAPE, (1.0, 1.0, 2.0), "LPS", turn=5.0)


@pytest.fixture
def cards(tmp_path: Path) -> list[ModelCard]:
    weights = tmp_path / "weights"
    weights.write_bytes(b"weights")
    return [model_cards.card(weights, name=name) for name in ("a", "b", "c")]


def drawn(seed: int) -> Labels:
    return np.asfortranarray(np.random.default_rng(seed).integers(0, 3, SHAPE, np.uint8))


def results_of(relations: Relations, models: Sequence[Drawn]) -> dict[str, Segmentation]:
    nodes = graph_of([model.card.name for model in models], relations)
    volume = Volume(np.zeros(SHAPE, np.int16, order="F"), GRID, "HU", "CT")
    return GraphRun(nodes, models, (volume,), StepTimer()).run()


def crop(model: str, *structures: str, margin: float = 0.0) -> CropBy:
    return CropBy(model, structures, margin)


def test_models_run_after_those_that_they_need() -> None:
    relations = Relations(crop_by={"a": crop("c")}, restrict_to={"b": StructuresOf("a")})
    nodes = graph_of(["a", "b", "c"], relations)
    groups = {node.name: node.name for node in nodes}
    assert [node.name for node in running_order(nodes, groups)] == ["c", "a", "b"]


def test_models_of_a_group_run_one_after_another() -> None:
    nodes = graph_of(["a", "b", "c", "d"])
    groups = {"a": 1, "b": 2, "c": 1, "d": 2}
    assert [node.name for node in running_order(nodes, groups)] == ["a", "c", "b", "d"]


def test_a_crop_without_a_voxel_is_not_predicted(cards: list[ModelCard]) -> None:
    rough, fine = Drawn(cards[0], np.zeros(SHAPE, np.uint8, order="F")), Drawn(cards[1], drawn(1))
    relations = Relations(crop_by={"b": crop("a")})
    empty = results_of(relations, [rough, fine])["b"]
    assert fine.seen == []
    assert empty.flags == (Flag.CROP_EMPTY,)
    assert empty.engine == NO_ENGINE  # not that of an earlier case
    assert not empty.layers[0].labels.any()
    assert empty.structures == cards[1].structures

    overlapping = Drawn(replace(cards[1], decision=Threshold()), drawn(1))
    assert len(results_of(relations, [rough, overlapping])["b"].layers) == 2


def test_equal_crops_are_made_once(cards: list[ModelCard]) -> None:
    labels = np.zeros(SHAPE, np.uint8, order="F")
    labels[3:5, 2:4, 1:3] = 2
    models = [Drawn(cards[0], labels), Drawn(cards[1], drawn(1)), Drawn(cards[2], drawn(2))]
    around = dict.fromkeys(("b", "c"), crop("a", "part-2", margin=1.5))
    results = results_of(Relations(crop_by=around), models)
    assert models[1].seen == models[2].seen == [(6, 6, 4)]
    expected = np.zeros_like(labels)
    expected[1:7, 0:6, 0:4] = drawn(1)[1:7, 0:6, 0:4]
    np.testing.assert_array_equal(results["b"].layers[0].labels, expected)


SIDES = {"l": ResultOf("b", "left"), "r": ResultOf("b", "right")}


def two_sides() -> Labels:
    """Return a map with 1 on one side and 2 on the other."""
    labels = np.zeros(SHAPE, np.uint8, order="F")
    labels[1:3, 2:4, 1:3] = 1
    labels[5:7, 2:5, 2:4] = 2
    return labels


def test_a_model_runs_for_each_of_its_results(cards: list[ModelCard]) -> None:
    relations = Relations(
        results=SIDES, crop_by={"l": crop("a", "part-1"), "r": crop("a", "part-2")}
    )
    models = [Drawn(cards[0], two_sides()), Drawn(cards[1], drawn(1))]
    results = results_of(relations, models)
    assert models[1].seen == [(2, 2, 2), (2, 3, 2)]
    assert list(results) == ["a", "l", "r"]  # and none of the model's own name
    for name, side, number in (("l", "left", 1), ("r", "right", 2)):
        expected = np.where(two_sides() == number, drawn(1), 0)
        np.testing.assert_array_equal(results[name].layers[0].labels, expected)
        assert (results[name].model, results[name].sources) == (name, ("b",))
        assert results[name].version == "b 1"
        found = [(s.label, s.laterality and s.laterality.meaning) for s in results[name].structures]
        assert found == [(f"part-{n}_{side}", side.title()) for n in (1, 2)]
    structures = structures_of_results([model.card for model in models], relations)
    assert structures["l"] == results["l"].structures


def test_a_side_that_is_not_found_leaves_the_other(cards: list[ModelCard]) -> None:
    one = np.where(two_sides() == 1, two_sides(), 0).astype(np.uint8)
    relations = Relations(
        results=SIDES, crop_by={"l": crop("a", "part-1"), "r": crop("a", "part-2")}
    )
    results = results_of(relations, [Drawn(cards[0], one), Drawn(cards[1], drawn(1))])
    assert results["l"].flags == ()
    assert results["l"].layers[0].labels.any()
    assert results["r"].flags == (Flag.CROP_EMPTY,)
    assert [s.label for s in results["r"].structures] == ["part-1_right", "part-2_right"]


def test_a_crop_around_the_largest_component(cards: list[ModelCard]) -> None:
    labels = np.zeros(SHAPE, np.uint8, order="F")
    labels[1:3, 2, 1:3] = 1
    labels[3, 3, 2] = 2  # touches it at a corner, so that it is the same component
    labels[7, 6, 5] = 2
    for largest, shape in ((True, (3, 2, 2)), (False, (7, 5, 5))):
        models = [Drawn(cards[0], labels), Drawn(cards[1], drawn(1))]
        results_of(Relations(crop_by={"b": CropBy("a", largest=largest)}), models)
        assert models[1].seen == [shape]


@pytest.mark.parametrize(("margin", "flags"), [(1.0, ()), (2.0, (Flag.CROP_CUT,))])
def test_a_crop_that_the_scan_cuts(
    cards: list[ModelCard], margin: float, flags: tuple[Flag, ...]
) -> None:
    models = [Drawn(cards[0], two_sides()), Drawn(cards[1], drawn(1))]
    around = Relations(crop_by={"b": crop("a", "part-1", margin=margin)})
    assert results_of(around, models)["b"].flags == flags


def test_a_model_judges_the_extent_of_its_crop(cards: list[ModelCard]) -> None:
    """The crop of `l` is 2 x 2 x 4 mm, that of `r` 2 x 3 x 4 mm."""
    relations = Relations(
        results=SIDES, crop_by={"l": crop("a", "part-1"), "r": crop("a", "part-2")}
    )
    flagging = replace(cards[1], checks=Checks(extent=Range(2.5, 90)))
    results = results_of(relations, [Drawn(cards[0], two_sides()), Drawn(flagging, drawn(1))])
    assert results["l"].flags == results["r"].flags == (Flag.FOV_IMPLAUSIBLE,)
    for lowest, refused in ((1.5, ""), (2.5, "l, the crop around part-1: extent: ")):
        checks = Checks(extent=Range(lowest, 90), refuse=("extent",))
        models = [Drawn(cards[0], two_sides()), Drawn(replace(cards[1], checks=checks), drawn(1))]
        if not refused:
            results_of(relations, models)
            continue
        with pytest.raises(ScanError, match=refused) as error:
            results_of(relations, models)
        assert error.value.code == "IMPLAUSIBLE"


@pytest.mark.parametrize(
    ("relations", "message"),
    [
        (Relations(results={"l": ResultOf("bb")}), "results.l.model: did you mean b?"),
        (Relations(results={"a": ResultOf("b")}), "results.a: a model or another result has"),
        (
            Relations(results=SIDES, crop_by={"b": crop("a")}),
            "crop_by.b: expected one of a, l, r, c",
        ),
        (
            Relations(results=SIDES, ensembles={"mean": ("a", "b")}),
            "ensembles.mean: b has another result already",
        ),
        (
            Relations(results={"l": ResultOf("c", "left")}),
            "results.l: part-1_left has a side already",
        ),
        (
            Relations(results=SIDES, crop_by={"l": crop("c"), "r": crop("c", "part-1_left")}),
            "crop_by.r: not of the right side: part-1_left",
        ),
        (
            Relations(results=SIDES, restrict_to={"r": StructuresOf("c")}),
            "restrict_to.r: not of the right side: part-1_left",
        ),
        (
            Relations(SIDES, asymmetries=(Asymmetry(("part-2_right",), ("l/part-2_left",)),)),
            "asymmetries.left: not of the left side: part-2_right",
        ),
    ],
)
def test_mistakes_in_named_results(
    cards: list[ModelCard], relations: Relations, message: str
) -> None:
    sided_already = tuple(sided(each, "left") for each in cards[2].structures)
    with pytest.raises(ScanError) as error:
        check_structures(
            [*cards[:2], replace(cards[2], structures=sided_already)], Outputs(), relations
        )
    assert error.value.detail.startswith(message)


def test_a_union_of_layers_numbers_its_structures_anew(cards: list[ModelCard]) -> None:
    union = Unite((StructuresOf("b", ("part-2",)), StructuresOf("a")))
    relations = Relations(unite={"all": union})
    models = [Drawn(card, drawn(n)) for n, card in enumerate(cards)]
    united = unite("all", union, results_of(relations, models))
    assert (united.model, united.sources) == ("all", ("b", "a"))
    assert [(s.label, s.number) for s in united.structures] == [("part-2", 1), ("part-1", 2)]
    assert structures_of_results(cards, relations)["all"] == united.structures
    a, b = drawn(0), drawn(1)
    expected = np.where((b == 2) | (a == 2), 1, np.where(a == 1, 2, 0))
    np.testing.assert_array_equal(united.layers[0].labels, expected)


def test_united_structures_keep_the_flags_of_their_own_result(cards: list[ModelCard]) -> None:
    """A side that was not found says nothing of the other one."""
    union = Unite((StructuresOf("l"), StructuresOf("r")))
    relations = Relations(SIDES, {"l": crop("a", "part-1"), "r": crop("a", "part-2")})
    models = [Drawn(cards[0], np.minimum(drawn(0), 1)), Drawn(cards[1], drawn(1))]
    united = unite("both", union, results_of(relations, models))
    assert Flag.CROP_EMPTY in united.flags
    flagged = [label for label in united.labels if Flag.CROP_EMPTY in united.flags_of(label)]
    assert flagged == ["part-1_right", "part-2_right"]


def test_ensembles_must_agree(cards: list[ModelCard]) -> None:
    relations = Relations(ensembles={"mean": ("a", "b")})
    check_relations(cards, relations)
    changes: dict[str, dict[str, object]] = {
        "structures": {"structures": model_cards.structures(3)},
        "network grid": {"grid": NetworkGrid("RAS", (1.0, 1.0, 1.0))},
        "scores": {"activation": None},
        "way back": {"restore": "labels"},
    }
    for subject, change in changes.items():
        changed = [cards[0], replace(cards[1], **change), cards[2]]
        with pytest.raises(ScanError) as error:
            check_relations(changed, relations)
        assert error.value.detail == f"ensembles.mean: a and b differ in their {subject}"


def test_memory_counts_a_shared_scan_once(cards: list[ModelCard]) -> None:
    """All but the last of the models hold the scan on the network grid a second time."""
    grid = model_cards.grid((120, 110, 100), (2.0, 2.0, 2.0))
    image, here = 4 * 120 * 110 * 100, Placement()

    def need(*models: ModelCard, placement: Placement | None = here) -> int:
        estimate = estimate_case(grid, np.int16, models, placement=placement)
        return estimate.host["network"]

    labels = 120 * 110 * 100
    coarser = [replace(card, grid=NetworkGrid("RAS", (2.0, 2.0, 2.5))) for card in cards]
    assert need(cards[0], cards[1]) - need(cards[0]) == image
    assert need(*cards) - need(cards[0]) == labels + image
    assert need(cards[0], coarser[1]) - need(cards[0]) <= labels
    assert need(*cards, placement=None) - need(cards[0]) == 2 * labels  # nothing is shared then


def test_relations_reach_a_worker_unchanged(tmp_path: Path) -> None:
    relations = Relations(
        results={"left": ResultOf("b", "left")},
        crop_by={"left": CropBy("a", ("part-1",), margin_mm=2.5, largest=True)},
        restrict_to={"b": StructuresOf("a")},
        ensembles={"mean": ("c", "d")},
        unite={"all": Unite((StructuresOf("mean", ("part-2",)), StructuresOf("a")))},
        shares=(Share(("a/part-1",), ("b/part-2",)),),
        asymmetries=(Asymmetry(("a/part-1",), ("a/part-2",)),),
    )
    case = Case("a" * 26, Series("nifti", ()), Outputs(), "", "", relations=relations)
    case_file = CaseFile(tmp_path / "cases")
    case_file.append(case)
    assert CaseFile.read(case_file.path, 0) == case
    ours, theirs = socket.socketpair()
    with ours, theirs:
        send(ours, case)
        assert receive(theirs) == case
