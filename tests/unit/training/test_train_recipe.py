"""Recipes: keys, defaults, mistakes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scanloom.core import ScanError
from scanloom.training.bundle import metadata
from scanloom.training.recipe import TrainingRecipe, read_recipe
from support.real_scans import ROOT

PAGE = """
name: boxes
modality: MR
data: {images: images, labels: labels}
structures: [{label: near, values: 1}, {label: far, values: [2, 3]}]
spacing: [1, 1, 1]
patch: [32, 32, 16]
network: {filters: [4, 8, 16]}
augmentation: {mirror: [left-right]}
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(text)
    return path


def test_a_page_is_read_and_a_single_value_is_a_list(tmp_path: Path) -> None:
    recipe = read_recipe(write(tmp_path, PAGE))
    assert [structure.values for structure in recipe.structures] == [(1,), (2, 3)]
    assert recipe.strides == ((1, 1, 1), (2, 2, 2), (2, 2, 2))


@pytest.mark.parametrize(
    ("structure", "axis", "valid"),
    [
        ({"label": "kidney_left"}, "left-right", False),
        ({"label": "kidney_left"}, "anterior-posterior", True),
        ({"label": "kidney"}, "left-right", True),
        ({"label": "lung_l"}, "left-right", False),
        ({"label": "vertebrae_l1"}, "left-right", True),
        # the code decides, as in the card
        (
            {"label": "kidney", "laterality": {"value": "24028007", "meaning": "Right"}},
            "left-right",
            False,
        ),
        (
            {"label": "left_over", "type": {"value": "64033007", "meaning": "Kidney"}},
            "left-right",
            True,
        ),
    ],
)
def test_a_structure_of_one_side_is_not_mirrored_alone(
    structure: dict[str, Any], axis: str, *, valid: bool
) -> None:
    import yaml

    for name in {"laterality", "type"} & structure.keys():
        structure = {**structure, name: {**structure[name], "scheme": "SCT"}}
    page = {
        **yaml.safe_load(PAGE),
        "structures": [{**structure, "values": 1}],
        "augmentation": {"mirror": [axis]},
    }
    if valid:
        TrainingRecipe.model_validate(page)
        return
    with pytest.raises(ValueError, match="sides of all left and right structures"):
        TrainingRecipe.model_validate(page)


def test_thick_slices_are_halved_later() -> None:
    import yaml

    page = {**yaml.safe_load(PAGE), "spacing": [1, 1, 4], "network": {"filters": [4, 8, 16, 32]}}
    recipe = TrainingRecipe.model_validate(page)
    assert recipe.strides == ((1, 1, 1), (2, 2, 1), (2, 2, 1), (2, 2, 2))


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("modality: MR", "modality: XX", "line 3: modality"),
        ("spacing: [1, 1, 1]", "spacing: [1, 1, 0]", "line 6: spacing"),
        ("images: images, ", "", "one of msd, datalist, label_maps, or images with labels"),
        ("patch: [32, 32, 16]", "patch: [32, 30, 16]", "patch lengths .* that 4 divides, not 30"),
        ("[2, 3]", "[1, 3]", "different labels and values"),
        ("network:", "networks:", "line 8: networks is not a key here; did you mean"),
        ("patch:", "sides: [[near, middle]]\npatch:", "middle is not"),
        ("patch:", "sides: [[near, far], [far, near]]\npatch:", "sides with each structure once"),
        ("patch:", "sides: [[near, near]]\npatch:", "sides with each structure once"),
        ("near,", "near-by,", "line 5: structures.label: expected a slug, such as lung_left"),
        ("near,", "near_left,", "sides of all left and right structures to mirror, near_left too"),
        (
            "augmentation: {mirror: [left-right]}",
            "mirrored_mean: true",
            "left-right in mirror of the augmentation for a mirrored_mean",
        ),
        ("patch:", "intensity: [-.inf, 1]\npatch:", "line 7: intensity.*finite"),
        ("[left-right]}", "[left-right], elastic: .inf}", "line 9: augmentation.elastic.*finite"),
        ("patch:", "intensity: [3, 1]\npatch:", "lower value first"),
        (
            "patch:",
            "intensity: [0, 1]\nforeground: true\npatch:",
            "an intensity of z-score for a foreground",
        ),
        ("patch:", "checks: {extent: [90, 20]}\npatch:", "extent of checks with the lower"),
        ("filters: [4, 8, 16]", "filters: [4, 8]", "line 8: network.filters"),
        ("filters: [4, 8, 16]", "filters: [4, 0, 16]", "filters of the network of at least 1"),
        ("patch: [32, 32, 16]", "patch: [32, 32]", "line 7: patch: expected a list of 3[.]"),
        ("patch: [32, 32, 16]", "patch: [32, 32, 16, 1]", "line 7: patch: expected a list of 3[.]"),
        ("spacing: [1, 1, 1]", "spacing: 1", "line 6: spacing: expected a list of 3[.]"),
        ("values: 1}", "values: 1.5}", "line 5: structures.values: expected a whole number"),
        ("patch:", "drawing: {others: [3, 9]}\npatch:", "others of the drawing from 1, no struct"),
        ("patch:", "drawing: {alike: [[1, 2], [2]]}\npatch:", "alike of the drawing: its values"),
        ("patch:", "drawing: {tissues: [[1, 9]]}\npatch:", "tissues of the drawing: its values"),
    ],
)
def test_a_mistake_is_told_with_its_line(
    tmp_path: Path, before: str, after: str, message: str
) -> None:
    assert before in PAGE
    with pytest.raises(ScanError, match=message) as caught:
        read_recipe(write(tmp_path, PAGE.replace(before, after)))
    assert caught.value.reason.code == "RECIPE"


def test_the_published_schema_is_that_of_the_code() -> None:
    published = json.loads((ROOT / "docs" / "training.schema.json").read_text())
    assert published == TrainingRecipe.model_json_schema(), "run docs/write_schema.py"


def test_what_results_say_of_a_model_is_in_its_metadata() -> None:
    import yaml

    from scanloom.convert.monai.metadata import DirectionFields, LimitationFields, Metadata
    from scanloom.training.bundle import metadata

    stated = yaml.safe_load(PAGE)
    stated["structures"][0] |= {"experimental": True, "on_request": True}
    known = {"text": "Far is often near.", "where": "far"}
    usual = {"structure": "near", "quantity": "volume_ml", "range": [1.0, 2.5], "source": "T."}
    stated |= {"limitations": ["No heads.", known], "reference_ranges": [usual]}
    lies = {"start": ["near"], "end": ["far"], "direction": [0, 0, 1], "within": 30, "source": "T."}
    stated["reference_directions"] = [lies]
    document = json.loads(json.dumps(metadata(TrainingRecipe.model_validate(stated))))
    said = Metadata.model_validate(document).scanloom
    stated = {name: (s.experimental, s.on_request) for name, s in said.structures.items()}
    assert stated == {"near": (True, True), "far": (False, False)}
    assert said.limitations == ("No heads.", LimitationFields(**known))
    assert said.reference_ranges[0].range == (1.0, 2.5)
    assert said.reference_directions == (DirectionFields.model_validate(lies),)


@pytest.mark.parametrize("path", sorted(ROOT.glob("models/*/training/recipe.yaml")), ids=str)
def test_shipped_recipes_are_valid(path: Path) -> None:
    assert read_recipe(path).name == path.parent.parent.name


@pytest.mark.parametrize("name", ["brain_anatomy", "hippocampus_mr"])
def test_a_bundle_states_the_known_errors_of_its_recipe(name: str) -> None:
    """With the scans in which to expect them: those of the models that ship are packaged so."""
    model = ROOT / "models" / name
    stated = json.loads((model / "configs" / "metadata.json").read_text())["scanloom"]
    recipe = read_recipe(model / "training" / "recipe.yaml")
    for key in ("limitations", "reference_ranges", "reference_directions"):
        assert metadata(recipe)["scanloom"][key] == stated.get(key, [])


def test_the_weights_that_brain_anatomy_starts_from_fit_its_network() -> None:
    from monai.networks.nets import DynUNet

    from scanloom.training.bundle import network_def
    from scanloom.training.network import load_start

    folder = ROOT / "models" / "brain_anatomy" / "training"
    page = read_recipe(folder / "recipe.yaml")
    assert page.network.start is not None
    arguments = {name: value for name, value in network_def(page).items() if name != "_target_"}
    load_start(DynUNet(**arguments), folder / page.network.start)
