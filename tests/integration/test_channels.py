"""Models of several inputs: the series of a study that belong together, labelled as MONAI does."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import SimpleITK as sitk
import torch
import yaml
from monai.inferers import sliding_window_inference
from monai.networks.nets.unet import UNet
from monai.transforms import NormalizeIntensity

import scanloom as product
from scanloom.training.dataset import DatasetOptions, write_dataset
from support.bundles import CONFIG, METADATA, write_bundle
from support.commands import Ended, scanloom
from support.model_cards import SMALL_UNET, smooth_scan
from support.write_dicom import Geometry, Words, write_series

SHAPE = (40, 36, 24)
INPUTS = ("T1", "FLAIR")
NETWORK = {**SMALL_UNET, "in_channels": 2}


def stored(seed: int) -> np.ndarray:
    """Return a scan of blobs: another one for each input."""
    return (np.roll(smooth_scan(SHAPE), 5 * seed, axis=seed % 3) + 1024).astype(np.int16)


def input_of(name: str, study: str) -> Words:
    return Words(
        modality="MR", name=f"{study}{name}", study=study, more={"SeriesDescription": f"ax {name}"}
    )


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One study with both inputs and a third series, one that lacks one, one on another grid."""
    folder = tmp_path_factory.mktemp("studies")
    for n, name in enumerate((*INPUTS, "T2")):
        write_series(folder / "whole" / name, stored(n), words=input_of(name, "whole"))
    write_series(folder / "lacking" / "T1", stored(0), words=input_of("T1", "lacking"))
    write_series(folder / "apart" / "T1", stored(0), words=input_of("T1", "apart"))
    moved = Geometry(origin=(-40.0, 0.0, 3.0))
    write_series(folder / "apart" / "FLAIR", stored(1), moved, words=input_of("FLAIR", "apart"))
    return folder


@pytest.fixture(scope="module")
def expected(archive: Path) -> tuple[dict[str, torch.Tensor], np.ndarray]:
    """Weights, and the labels that MONAI gives with them; each class wins somewhere."""
    volumes = [product.load_volume(archive / "whole" / name).array for name in INPUTS]
    image = torch.from_numpy(np.stack(volumes).astype(np.float32))
    image = torch.as_tensor(NormalizeIntensity(channel_wise=True)(image))
    torch.manual_seed(3)
    network = UNet(**NETWORK).eval()
    with torch.inference_mode():
        scores = sliding_window_inference(image[None], (16, 16, 16), 1, network, 0.5)[0]
        state = network.state_dict()
        bias = [name for name, value in state.items() if value.shape == (3,)][-1]
        state[bias] -= scores.flatten(1).median(dim=1).values
        network.load_state_dict(state)
        scores = sliding_window_inference(image[None], (16, 16, 16), 1, network, 0.5)[0]
    labels = scores.argmax(0).numpy()
    assert min(np.bincount(labels.ravel(), minlength=3)) > labels.size / 20
    return state, labels


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, expected) -> Path:
    config = json.loads(json.dumps(CONFIG))
    config["network_def"] = {"_target_": "UNet", **NETWORK}
    config["inferer"] |= {"roi_size": [16, 16, 16], "overlap": 0.5}
    config["preprocessing"]["transforms"] = [
        {"_target_": "LoadImaged", "keys": "@image_key"},
        {"_target_": "EnsureChannelFirstd", "keys": "@image_key"},
        {"_target_": "NormalizeIntensityd", "keys": "@image_key", "channel_wise": True},
        {"_target_": "EnsureTyped", "keys": "@image_key"},
    ]
    metadata = json.loads(json.dumps(METADATA))
    formats = metadata["network_data_format"]
    formats["inputs"]["image"] |= {
        "modality": "MR",
        "num_channels": 2,
        "channel_def": dict(enumerate(INPUTS)),
    }
    formats["outputs"]["pred"] |= {
        "num_channels": 3,
        "channel_def": {"0": "background", "1": "spleen", "2": "liver"},
    }
    folder = tmp_path_factory.mktemp("model")
    torch.save(expected[0], folder / "weights.pt")
    return write_bundle(folder / "two", config, metadata, (folder / "weights.pt").read_bytes())


def run(folder: Path, archive: Path, model: Path, **channels: object) -> Ended:
    workflow = {
        "name": "two",
        "models": [str(model)],
        "select": {"modality": "MR"},
        "channels": channels,
        "execution": {"device": "cpu", "precision": "float32"},
    }
    path = folder / "two.yaml"
    path.write_text(yaml.safe_dump(workflow, sort_keys=False))
    key = ("--key", folder / "key")
    return scanloom("run", path, archive, "--out", folder / "out", "--cluster", "none", *key)


@pytest.mark.thorough
def test_inputs_of_a_study_are_labelled_together(tmp_path, archive, model, expected):
    selections = {name: {"description": f"{name}$"} for name in INPUTS}
    ended = run(tmp_path, archive, model, **selections)
    assert ended.code == 1, ended.err  # the study whose inputs lie apart failed

    [folder] = (tmp_path / "out" / "cases").iterdir()
    labels = np.asarray(nib.load(folder / "segmentation.nii.gz").dataobj)
    ours = product.load_volume(archive / "whole" / "T1").grid
    theirs = nib.load(folder / "segmentation.nii.gz").affine
    np.testing.assert_allclose(ours.affine, theirs, atol=1e-3)
    assert (labels == expected[1]).mean() >= 0.9999

    text = (tmp_path / "out" / "manifest.csv").read_text(encoding="utf-8")
    rows = list(csv.DictReader(text.splitlines()))
    became = {(row["outcome"], row["reason"], row["detail"]) for row in rows}
    assert became == {
        ("used", "", ""),
        ("skipped", "NOT_SELECTED", "by channels"),
        ("skipped", "CHANNEL_MISSING", "FLAIR"),
        ("failed", "CHANNELS", "FLAIR and the first channel have different grids"),
    }
    assert sum(row["outcome"] == "used" for row in rows) == 2 * SHAPE[2]


@pytest.mark.thorough
def test_a_dataset_has_all_inputs_in_the_order_of_the_model(tmp_path, archive, model):
    """The crosswalk knows the first one: the others are found by the content of the study."""
    run(tmp_path, archive, model, **{name: {"description": f"{name}$"} for name in INPUTS})
    out, key, data = tmp_path / "out", tmp_path / "key", tmp_path / "Dataset007_Two"

    dataset = write_dataset(out, data, DatasetOptions("nnunet", ("unreviewed",)), key)
    write_dataset(out, tmp_path / "msd", DatasetOptions("msd", ("unreviewed",)), key)

    [case] = dataset.cases
    document = json.loads((data / "dataset.json").read_text())
    assert document["channel_names"] == {"0": "T1", "1": "FLAIR"}
    joint = nib.load(tmp_path / "msd" / "imagesTr" / f"{case.case}.nii.gz")
    assert joint.shape == (*SHAPE, 2)
    labels = sitk.ReadImage(str(data / "labelsTr" / f"{case.case}.nii.gz"))
    for n, name in enumerate(INPUTS):
        image = sitk.ReadImage(str(data / "imagesTr" / f"{case.case}_{n:04d}.nii.gz"))
        slices = sitk.ImageSeriesReader.GetGDCMSeriesFileNames(str(archive / "whole" / name))
        source = sitk.GetArrayFromImage(sitk.ReadImage(slices))
        np.testing.assert_array_equal(sitk.GetArrayFromImage(image), source)
        np.testing.assert_array_equal(np.asarray(joint.dataobj)[..., n], source.T)
        for other in (labels, sitk.ReadImage(slices)):
            assert image.GetSize() == other.GetSize()
            np.testing.assert_allclose(image.GetOrigin(), other.GetOrigin(), atol=1e-3)
            np.testing.assert_allclose(image.GetDirection(), other.GetDirection(), atol=1e-5)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("channels", "message"),
    [
        ({}, "a selection each for T1, FLAIR"),
        ({"T1": {}, "T2": {}}, "a selection each for T1, FLAIR"),
        ({"T1": {}, "FLAIR": {"modalty": "MR"}}, "did you mean modality"),
    ],
)
def test_a_workflow_that_does_not_say_the_inputs_is_a_mistake(
    channels, message, tmp_path, archive, model
):
    ended = run(tmp_path, archive, model, **channels)
    assert ended.code != 0
    assert message in " ".join(ended.err.split())


def test_one_scan_alone_is_not_enough(tmp_path, archive, model):
    scan, out = archive / "whole" / "T1", tmp_path / "out"
    ended = scanloom("segment", scan, "--model", model, "--out", out, "--key", tmp_path / "key")
    assert ended.code == 65
    assert "CHANNELS" in ended.err
