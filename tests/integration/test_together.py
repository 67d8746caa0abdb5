"""Several models in a workflow: crops, restrictions, ensembles, unions and shares, read back."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import highdicom
import nibabel as nib
import numpy as np
import pydicom
import pytest
import yaml
from pyarrow import parquet
from scipy import ndimage

import scanloom as product
from scanloom.cards.card import ScaleRange
from scanloom.convert.store import find_model
from scanloom.core import ComputeOptions, Grid, Volume
from scanloom.inference.intensity import apply_steps
from scanloom.inference.predictor import TorchPredictor
from support import model_cards
from support.bundles import spleen_config, spleen_metadata, write_bundle
from support.commands import Ended, scanloom
from support.write_dicom import write_series

SHAPE = (48, 40, 24)
LABELS = ("spleen", "liver")
MODELS = ("rough", "fine", "other")
STEPS = (ScaleRange(-57.0, 164.0, 0.0, 1.0, clip=True),)
Labels = np.ndarray[Any, Any]


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("archive")
    write_series(folder / "ct", model_cards.smooth_scan(SHAPE) + 1024)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Bundles of different weights, for one network grid."""
    import torch
    from monai.networks.nets.unet import UNet

    folder, bundles = tmp_path_factory.mktemp("models"), {}
    for seed, name in enumerate(MODELS):
        torch.manual_seed(seed)
        weights = folder / f"{name}.pt"
        scan = model_cards.smooth_scan(SHAPE)
        model_cards.balanced_weights(UNet(**model_cards.SMALL_UNET), STEPS, scan, weights)
        if name == "rough":
            make_rare(weights, scan)
        config, metadata = spleen_config(), spleen_metadata()
        config["network_def"] = {"_target_": "UNet", **model_cards.SMALL_UNET}
        config["inferer"]["roi_size"] = [32, 32, 16]
        outputs = metadata["network_data_format"]["outputs"]["pred"]
        outputs["num_channels"] = 3
        outputs["channel_def"] = {"0": "background", "1": "spleen", "2": "liver"}
        metadata["name"] = name
        bundles[name] = write_bundle(folder / name, config, metadata, weights.read_bytes())
    return bundles


def make_rare(weights: Path, scan: Labels) -> None:
    """Change a network's last bias such that few voxels are liver, and a crop is small."""
    import torch
    from monai.networks.nets.unet import UNet

    state = torch.load(weights, weights_only=True)
    network = UNet(**model_cards.SMALL_UNET).eval()
    network.load_state_dict(state)
    image = apply_steps(torch.from_numpy(scan.astype(np.float32)), STEPS)
    with torch.inference_mode():
        scores = network(image[None, None, :32, :32, :16])[0]
    ahead = scores[2] - scores[:2].amax(dim=0)
    bias = [name for name, value in state.items() if value.shape == (3,)][-1]
    state[bias][2] -= ahead.flatten().quantile(0.999)
    torch.save(state, weights)


@pytest.fixture(scope="module")
def scan(archive: Path) -> Volume:
    return product.load_volume(archive / "ct")


def labels_of(models: dict[str, Path], name: str, volume: Volume) -> Labels:
    """Return the labels of a model that runs alone."""
    compute = ComputeOptions(precision="float32")
    predictor = TorchPredictor(find_model(str(models[name])), compute, device="cpu")
    return predictor.predict(volume).layers[0].labels


@pytest.fixture(scope="module")
def alone(models: dict[str, Path], scan: Volume) -> dict[str, Labels]:
    labels_by_model = {name: labels_of(models, name, scan) for name in models}
    for labels in labels_by_model.values():
        assert np.bincount(labels.ravel(), minlength=3).min() > 0
    return labels_by_model


class Outcome:
    """A run of a workflow with relations over the archive."""

    def __init__(
        self, folder: Path, archive: Path, models: dict[str, Path], **sections: object
    ) -> None:
        self.out = folder / "out"
        workflow = {
            "name": "together",
            "models": [str(path) for path in models.values()],
            "execution": {"device": "cpu", "precision": "float32"},
            **sections,
        }
        path = folder / "together.yaml"
        path.write_text(yaml.safe_dump(workflow, sort_keys=False))
        where = ("--out", self.out, "--cluster", "none", "--key", folder / "key")
        self.ended: Ended = scanloom("run", path, archive, *where, "--json", "--bids")

    @property
    def case(self) -> Path:
        assert self.ended.code == 0, self.ended.err
        [folder] = (self.out / "cases").iterdir()
        return folder

    def labels(self, name: str = "") -> Labels:
        file = f"{name}-segmentation.nii.gz" if name else "segmentation.nii.gz"
        return np.asarray(nib.load(self.case / file).dataobj)

    @property
    def document(self) -> dict[str, Any]:
        return json.loads((self.case / "case.json").read_text())

    @property
    def rows(self) -> list[dict[str, str]]:
        with (self.out / "measurements.csv").open(newline="") as file:
            return list(csv.DictReader(file))


def test_models_share_a_scan_and_keep_their_labels(
    tmp_path: Path, archive: Path, models: dict[str, Path], alone: dict[str, Labels]
) -> None:
    done = Outcome(tmp_path, archive, models)
    for name, labels in alone.items():
        np.testing.assert_array_equal(done.labels(name), labels)
    assert "relations" not in done.document


@pytest.mark.thorough
def test_crop_and_restriction(
    tmp_path: Path,
    archive: Path,
    models: dict[str, Path],
    alone: dict[str, Labels],
    scan: Volume,
) -> None:
    """`fine` sees the box around `rough`'s liver, `other` is kept inside `rough`'s spleen.

    `fine` refuses the extent of the whole scan, which it does not see.
    """
    picky = tmp_path / "fine"
    shutil.copytree(models["fine"], picky)
    metadata = json.loads((picky / "configs" / "metadata.json").read_text())
    checks = {"extent": [1.0, 0.9 * min(scan.grid.extent)], "refuse": ["extent"]}
    metadata.setdefault("scanloom", {})["checks"] = checks
    (picky / "configs" / "metadata.json").write_text(json.dumps(metadata))
    refused = scanloom("segment", archive, "-m", picky, "-o", tmp_path / "alone")
    assert refused.code != 0
    assert "IMPLAUSIBLE" in refused.err + refused.out
    done = Outcome(
        tmp_path,
        archive,
        # `rough` is needed first, but comes last
        dict(sorted({**models, "fine": picky}.items())),
        crop_by={"fine": {"model": "rough", "structures": ["liver"], "margin_mm": 2.0}},
        restrict_to={"other": {"model": "rough", "structures": "spleen"}},
    )

    at = np.argwhere(alone["rough"] == 2)
    margin = np.ceil(2.0 / np.array(scan.grid.spacing)).astype(int)
    low, high = (
        np.maximum(at.min(0) - margin, 0),
        np.minimum(at.max(0) + margin, np.subtract(SHAPE, 1)),
    )
    box = tuple(slice(a, b + 1) for a, b in zip(low, high, strict=True))
    affine = np.array(scan.grid.affine)
    affine[:3, 3] = scan.grid.world(low)
    i, j, k = (int(n) for n in high - low + 1)
    assert (i, j, k) != SHAPE
    crop = Volume(scan.array[box], Grid((i, j, k), affine), "HU", "CT")
    expected = np.zeros(SHAPE, np.uint8)
    expected[box] = labels_of(models, "fine", crop)
    np.testing.assert_array_equal(done.labels("fine"), expected)
    inside = np.where(alone["rough"] == 1, alone["other"], 0)
    np.testing.assert_array_equal(done.labels("other"), inside)
    np.testing.assert_array_equal(done.labels("rough"), alone["rough"])
    assert done.document["relations"]["crop_by"][0]["name"] == "fine"


SIDES = {"near": ("left", "liver"), "far": ("right", "spleen")}
ON_SIDES: dict[str, Any] = {
    "results": {name: {"model": "fine", "side": side} for name, (side, _) in SIDES.items()},
    "crop_by": {
        name: {"model": "rough", "structures": organ, "margin_mm": 2.0, "largest": True}
        for name, (_, organ) in SIDES.items()
    },
}
"""`fine` sees a box inside the scan for one side, and all of the scan for the other."""


@pytest.mark.thorough
def test_united_sides_keep_their_own_flags(
    tmp_path: Path, archive: Path, models: dict[str, Path]
) -> None:
    both = {"both": {"priority": [{"model": name} for name in SIDES]}}
    used = {name: models[name] for name in ("fine", "rough")}
    done = Outcome(tmp_path, archive, used, **ON_SIDES, unite=both)
    cut = {row["label"] for row in done.rows if "CROP_CUT" in row["flags"].split()}
    assert cut == {"spleen_right", "liver_right"}


@pytest.mark.parametrize("united", [False, True])
def test_results_of_other_names_are_compared_with_the_ranges_of_their_model(
    united: bool, tmp_path: Path, archive: Path, models: dict[str, Path]
) -> None:
    fine = tmp_path / "models" / "fine"
    shutil.copytree(models["fine"], fine)
    file = fine / "configs" / "metadata.json"
    metadata = json.loads(file.read_text())
    usual = {
        "structure": "liver",
        "quantity": "volume_ml",
        "range": [1e6, 2e6],
        "source": "A test.",
    }
    metadata.setdefault("scanloom", {})["reference_ranges"] = [usual]
    file.write_text(json.dumps(metadata))
    both = {"both": {"priority": [{"model": name} for name in SIDES]}}

    done = Outcome(
        tmp_path,
        archive,
        {"fine": fine, "rough": models["rough"]},
        **ON_SIDES,
        unite=both if united else {},
    )

    unusual = {row["label"] for row in done.rows if "OUT_OF_RANGE" in row["flags"].split()}
    inside = {row["label"] for row in done.rows if "TOUCHES_BORDER" not in row["flags"].split()}
    assert unusual == {"liver_left", "liver_right"} & inside
    assert unusual


@pytest.mark.thorough
def test_one_model_runs_on_two_sides(
    tmp_path: Path,
    archive: Path,
    models: dict[str, Path],
    alone: dict[str, Labels],
    scan: Volume,
) -> None:
    done = Outcome(
        tmp_path,
        archive,
        {name: models[name] for name in ("fine", "rough")},
        **ON_SIDES,
        shares=[{"of": "rough/spleen", "structures": "liver_left"}],
        asymmetries=[{"left": "liver_left", "right": "liver_right"}],
    )
    pieces, _ = ndimage.label(alone["rough"] == 2, np.ones((3, 3, 3)))
    sizes = np.bincount(pieces.ravel())[1:]
    assert sizes.size > 1
    at = np.argwhere(np.isin(pieces, 1 + np.flatnonzero(sizes == sizes.max())))
    margin = np.ceil(2.0 / np.array(scan.grid.spacing)).astype(int)
    box = tuple(
        slice(a, b) for a, b in zip(at.min(0) - margin, at.max(0) + margin + 1, strict=True)
    )
    affine = np.array(scan.grid.affine)
    affine[:3, 3] = scan.grid.world([each.start for each in box])
    crop = Volume(scan.array[box], Grid(scan.array[box].shape, affine), "HU", "CT")
    expected = np.zeros(SHAPE, np.uint8)
    expected[box] = labels_of(models, "fine", crop)
    np.testing.assert_array_equal(done.labels("near"), expected)
    np.testing.assert_array_equal(done.labels("far"), alone["fine"])

    rows = {(row["model"], row["label"]): row for row in done.rows}
    assert {model for model, _ in rows} == {"near", "far", "rough"}
    cut = {name for name, row in rows.items() if "CROP_CUT" in row["flags"].split()}
    assert cut == {("far", "spleen_right"), ("far", "liver_right")}
    assert rows["near", "liver_left"]["share_of"] == "rough/spleen"
    left, right = (int((labels == 2).sum()) for labels in (expected, alone["fine"]))
    assert float(rows["near", "liver_left"]["asymmetry"]) == pytest.approx(
        100 * (left - right) / ((left + right) / 2), rel=1e-6
    )
    assert rows["far", "liver_right"]["asymmetry_of"] == "near/liver_left : far/liver_right"
    for name, (side, _) in SIDES.items():
        seg = highdicom.seg.segread(done.case / "dicom" / f"{name}-segmentation.dcm")
        for segment in seg.SegmentSequence:
            [anatomy] = segment.SegmentedPropertyTypeCodeSequence
            [code] = anatomy.SegmentedPropertyTypeModifierCodeSequence
            assert code.CodeMeaning == side.title()
    assert [model["name"] for model in done.document["models"]] == ["fine", "rough"]
    assert [(r["name"], r["models"]) for r in done.document["results"]] == [
        ("near", ["fine"]),
        ("far", ["fine"]),
    ]
    assert scanloom("verify", done.out).code == 0


@pytest.mark.thorough
def test_a_union_has_one_label_map_by_priority(
    tmp_path: Path, archive: Path, models: dict[str, Path], alone: dict[str, Labels]
) -> None:
    done = Outcome(
        tmp_path,
        archive,
        models,
        unite={
            "organs": {
                "priority": [
                    {"model": "fine", "structures": ["liver"]},
                    {"model": "rough"},
                ]
            }
        },
        outputs={"also": ["masks"]},
    )
    liver = (alone["fine"] == 2) | ((alone["fine"] != 2) & (alone["rough"] == 2))
    expected = np.where(liver, 1, np.where(alone["rough"] == 1, 2, 0))  # liver comes first
    expected[alone["fine"] == 2] = 1
    np.testing.assert_array_equal(done.labels("organs"), expected)
    assert sorted(p.name for p in done.case.glob("*.nii.gz")) == [
        "organs-segmentation.nii.gz",
        "other-segmentation.nii.gz",
    ]
    legend = json.loads((done.case / "segments.json").read_text())["files"]
    numbers = {f["model"]: {s["label"]: s["number"] for s in f["structures"]} for f in legend}
    assert numbers["organs"] == {"liver": 1, "spleen": 2}
    [result] = done.document["results"]
    assert (result["name"], result["models"]) == ("organs", ["fine", "rough"])
    assert [model["name"] for model in done.document["models"]] == list(models)
    seg = pydicom.dcmread(done.case / "dicom" / "organs-segmentation.dcm")
    [algorithm] = seg.SegmentSequence[0].SegmentationAlgorithmIdentificationSequence
    assert algorithm.AlgorithmVersion == "fine 1.2.3, rough 1.2.3"
    assert {row["model"] for row in done.rows} == {"organs", "other"}
    page = (done.out / "report" / "index.html").read_text()
    assert "Result <b>organs</b> of fine + rough" in page
    [sidecar] = (done.out / "bids").glob("sub-*/anat/*_seg-organs_dseg.json")
    assert len(json.loads(sidecar.read_text())["ModelWeightsSHA256"]) == 2
    assert scanloom("verify", done.out).code == 0


@pytest.mark.thorough
def test_an_ensemble_takes_the_place_of_its_models(
    tmp_path: Path, archive: Path, models: dict[str, Path], alone: dict[str, Labels]
) -> None:
    done = Outcome(tmp_path, archive, models, ensembles={"mean": ["fine", "other"]})
    assert sorted(p.name for p in done.case.glob("*.nii.gz")) == [
        "mean-segmentation.nii.gz",
        "rough-segmentation.nii.gz",
    ]
    mean = done.labels("mean")
    agree = alone["fine"] == alone["other"]
    assert (mean == alone["fine"])[agree].mean() > 0.99
    assert (mean != alone["fine"])[~agree].any()
    assert (mean != alone["other"])[~agree].any()
    assert done.document["results"][0]["models"] == ["fine", "other"]


@pytest.mark.thorough
def test_shares_are_measured_and_read_back(
    tmp_path: Path, archive: Path, models: dict[str, Path], alone: dict[str, Labels]
) -> None:
    whole = ["rough/spleen", "rough/liver"]
    done = Outcome(
        tmp_path,
        archive,
        models,
        shares=[{"of": whole, "structures": ["fine/liver", "fine/spleen"]}],
    )
    total = int((alone["rough"] > 0).sum())
    shares = {(r["model"], r["label"]): r for r in done.rows}
    for number, label in enumerate(LABELS, 1):
        row = shares["fine", label]
        expected = (alone["fine"] == number).sum() / total
        assert float(row["share"]) == pytest.approx(expected, rel=1e-6)
        assert row["share_of"] == "rough/spleen + rough/liver"
        assert shares["other", label]["share"] == shares["other", label]["share_of"] == ""
    table = parquet.read_table(done.out / "measurements.parquet").to_pylist()
    assert {r["share_of"] for r in table} == {None, "rough/spleen + rough/liver"}
    assert scanloom("verify", done.out).code == 0


@pytest.mark.thorough
def test_relations_are_part_of_the_recipe(
    tmp_path: Path, archive: Path, models: dict[str, Path]
) -> None:
    only = {name: models[name] for name in ("rough", "fine")}
    first = Outcome(tmp_path, archive, only)
    recipe = first.document["recipe"]
    again = Outcome(tmp_path, archive, only, restrict_to={"fine": {"model": "rough"}})
    assert again.ended.document["status"]["reasons"] == {"STALE": 1}
    assert first.document["recipe"] == recipe


MISTAKES = [
    ({"crop_by": {"fin": {"model": "rough"}}}, "crop_by.fin: did you mean fine?"),
    ({"crop_by": {"fine": {"model": "rogh"}}}, "fine.model: did you mean rough?"),
    (
        {"restrict_to": {"fine": {"model": "rough", "structures": "livr"}}},
        "fine.structures: rough has no livr; did you mean liver?",
    ),
    (
        {"crop_by": {"fine": {"model": "rough"}}, "restrict_to": {"rough": {"model": "fine"}}},
        "fine and rough need each other",
    ),
    ({"ensembles": {"mean": ["fine", "rogh"]}}, "ensembles.mean: did you mean rough?"),
    ({"ensembles": {"rough": ["fine", "other"]}}, "ensembles.rough: a model or another result"),
    (
        {"ensembles": {"mean": ["fine", "other"]}, "crop_by": {"fine": {"model": "rough"}}},
        "crop_by.fine: expected one of rough, mean",
    ),
    (
        {"unite": {"all": {"priority": [{"model": "fine", "structures": ["live"]}]}}},
        "unite.all.priority.structures: fine has no live; did you mean liver?",
    ),
    ({"shares": [{"of": "liver"}]}, "shares.of: several results have liver: rough/liver or"),
    ({"shares": [{"of": "brain"}]}, "shares.of: expected one of spleen, liver"),
    (
        {"shares": [{"of": "fine/liver"}, {"of": "fine/spleen", "structures": "rough/liver"}]},
        "shares: rough/liver is measured as a share twice",
    ),
]


@pytest.mark.parametrize(("sections", "message"), MISTAKES)
def test_mistakes_are_named_before_anything_is_written(
    tmp_path: Path,
    archive: Path,
    models: dict[str, Path],
    sections: dict[str, object],
    message: str,
) -> None:
    done = Outcome(tmp_path, archive, models, **sections)
    assert done.ended.code != 0
    assert message in done.ended.err + done.ended.out
    assert not (done.out / "cases").exists()


def test_an_ensemble_of_different_grids_is_refused(
    tmp_path: Path, archive: Path, models: dict[str, Path]
) -> None:
    folder = tmp_path / "coarse"
    config = json.loads((models["fine"] / "configs/inference.json").read_text())
    for step in config["preprocessing"]["transforms"]:
        if step["_target_"] == "Spacingd":
            step["pixdim"] = [3.0, 3.0, 3.0]
    metadata = json.loads((models["fine"] / "configs/metadata.json").read_text()) | {
        "name": "coarse"
    }
    weights = (models["fine"] / "models/model.pt").read_bytes()
    coarse = {"coarse": write_bundle(folder, config, metadata, weights)}
    sections = {"ensembles": {"mean": ["fine", "coarse"]}}
    done = Outcome(tmp_path, archive, {**models, **coarse}, **sections)
    assert "ensembles.mean: fine and coarse differ in their network grid" in done.ended.out
