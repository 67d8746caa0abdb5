"""Nodes of a model with a previous stage, and cards that no graph can run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from scanloom.cards.card import UNCROPPED, Limitation, ModelCard, Stage, Truncate
from scanloom.cards.graph import graph_of, known_errors, networks, stage_graph
from scanloom.convert.store import find_model
from scanloom.core import Relations
from scanloom.core.relations import CropBy, ResultOf, StructuresOf
from support import model_cards


@pytest.fixture
def cards(tmp_path: Path) -> list[ModelCard]:
    weights = model_cards.small_weights(tmp_path)
    return [model_cards.card(weights, name=name) for name in ("rough", "fine")]


def test_a_stage_that_crops_is_a_node_of_its_own(cards: list[ModelCard]) -> None:
    rough, fine = cards
    stage = Stage(rough, "crop", ("part-1",), 20.0, steps=(Truncate(),))

    (first, own), (_, cropped) = stage_graph(replace(fine, stage=stage))

    assert own.needs == {first.name}
    assert own.crop == CropBy(first.name, ("part-1",), 20.0)
    assert not first.has_result
    assert cropped == replace(fine, before=(Truncate(), *fine.before))


def test_a_cascade_keeps_the_number_of_its_inputs(cards: list[ModelCard]) -> None:
    rough, fine = cards
    cascade = replace(fine, stage=Stage(rough, "channels"))

    (first, own), models = stage_graph(cascade)

    assert (own.channels_of, own.crop) == (first.name, None)
    assert models == (rough, cascade)
    assert [network.name for network in networks(cascade)] == ["rough", "fine"]
    assert cascade.n_inputs == len(fine.channels) + len(rough.structures)


def test_relations_are_edges_between_nodes() -> None:
    relations = Relations(
        crop_by={"mean": CropBy("a", margin_mm=2.0)},
        restrict_to={"a": StructuresOf("d")},
        ensembles={"mean": ("c", "b")},
    )

    nodes = {node.name: node for node in graph_of(["a", "b", "c", "d"], relations)}

    assert list(nodes) == ["a", "mean", "d"]
    assert nodes["mean"].members == (2, 1)
    assert {name: set(node.needs) for name, node in nodes.items()} == {
        "a": {"d"},
        "mean": {"a"},
        "d": set(),
    }


def test_parts_are_single_networks(cards: list[ModelCard]) -> None:
    rough, fine = cards
    with pytest.raises(ValueError, match="single networks"):
        replace(fine, parts=(replace(rough, parts=(fine,)),))
    with pytest.raises(ValueError, match="single network has"):
        replace(fine, parts=(rough,), stage=Stage(rough, "channels"))


def test_errors_of_whole_scans_are_not_those_of_a_crop(cards: list[ModelCard]) -> None:
    texts = (Limitation("Children."), Limitation("Not for a whole head.", UNCROPPED))
    rough, fine = cards[0], replace(cards[1], limitations=texts)
    sides = {"l": ResultOf("fine", "left"), "r": ResultOf("fine", "right")}
    one = Relations(results=sides, crop_by={"l": CropBy("rough")})
    both = replace(one, crop_by={"l": CropBy("rough"), "r": CropBy("rough")})

    for relations, texts_of_fine in (
        (Relations(), ("Not for a whole head.", "Children.")),
        (one, ("Not for a whole head.", "Children.")),
        (both, ("Children.",)),
    ):
        assert known_errors([rough, fine], relations, ()) == {"rough": (), "fine": texts_of_fine}


def test_the_hippocampus_is_for_boxes() -> None:
    stated = find_model("hippocampus_mr").limitations_in(())
    assert len(stated) == len(find_model("hippocampus_mr").limitations_in({UNCROPPED})) - 1
