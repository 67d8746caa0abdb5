"""Labels equal those of MONAI's own bundle runner, with the same weights, in float32."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
from numpy.typing import NDArray

from scanloom.cards.card import (
    ModelCard,
    NetworkGrid,
    NetworkSpec,
    Normalize,
    ScaleMinMax,
    ScaleRange,
    Threshold,
    Window,
)
from scanloom.core import ComputeOptions, Volume
from scanloom.inference.predictor import TorchPredictor
from support import model_cards
from support.monai_runs import (
    ARGMAX,
    CT_RANGE,
    GRIDS,
    NORMALIZE,
    SOFTMAX,
    assert_equal,
    config,
    invert,
    orient,
    run_monai,
    sliding,
    space,
    write_scans,
)

pytest.importorskip("ignite", reason="MONAI's runner needs pytorch-ignite")
pytest.importorskip("fire", reason="MONAI's runner needs fire")

SPLEEN_NET: Mapping[str, Any] = {
    "spatial_dims": 3,
    "in_channels": 1,
    "out_channels": 2,
    "channels": [16, 32, 64, 128, 256],
    "strides": [2, 2, 2, 2],
    "num_res_units": 2,
    "norm": "batch",
}
SEGRESNET: Mapping[str, Any] = {
    "spatial_dims": 3,
    "in_channels": 1,
    "out_channels": 4,
    "init_filters": 8,
    "blocks_down": [1, 1, 1],
    "blocks_up": [1, 1],
}

LABELS_BACK = [SOFTMAX, ARGMAX, invert(nearest=True)]
SCORES_BACK = [SOFTMAX, invert(nearest=False), ARGMAX]

MODELS: dict[str, tuple[str, Mapping[str, Any], dict[str, Any], dict[str, Any]]] = {
    "spleen twin": (
        "UNet",
        SPLEEN_NET,
        {
            "before": [orient("RAS"), space(1.5, 1.5, 2.0), CT_RANGE],
            "inferer": sliding(32, 0.5),
            "after": SCORES_BACK,
        },
        {
            "grid": NetworkGrid("RAS", (1.5, 1.5, 2.0)),
            "after": (ScaleRange(-57, 164, 0, 1, clip=True),),
            "window": Window((32, 32, 32), 0.5),
        },
    ),
    "gaussian windows, nonzero normalising, labels back": (
        "SegResNet",
        SEGRESNET,
        {
            "before": [NORMALIZE, orient("LPS"), space(1.5, 1.5, 1.5)],
            "inferer": sliding(40, 0.25, mode="gaussian", padding_mode="replicate"),
            "after": LABELS_BACK,
        },
        {
            "grid": NetworkGrid("LPS", (1.5, 1.5, 1.5)),
            "before": (Normalize(nonzero=True),),
            "after": (),
            "window": Window((40, 40, 40), 0.25, "gaussian", padding="replicate"),
            "restore": "labels",
        },
    ),
    "ratio of exactly 2, labels back": (
        "SegResNet",
        SEGRESNET,
        {
            "before": [orient("RAS"), space(2.4, 2.0, 4.4), NORMALIZE],
            "inferer": sliding(24, 0.5),
            "after": LABELS_BACK,
        },
        {
            "grid": NetworkGrid("RAS", (2.4, 2.0, 4.4)),
            "after": (Normalize(nonzero=True),),
            "window": Window((24, 24, 24), 0.5),
            "restore": "labels",
        },
    ),
    "whole grid at once, own spacing, thresholds": (
        "SegResNet",
        SEGRESNET,
        {
            "before": [orient("RAS"), {"_target_": "ScaleIntensityd"}],
            "inferer": {"_target_": "SimpleInferer"},
            "after": [
                {"_target_": "Activationsd", "sigmoid": True},
                invert(nearest=False),
                {"_target_": "AsDiscreted", "threshold": 0.5},
            ],
        },
        {
            "grid": NetworkGrid("RAS", None),
            "after": (ScaleMinMax(),),
            "window": Window(None),
            "activation": "sigmoid",
            "decision": Threshold(0.5),
        },
    ),
}


LARGE = "gaussian windows, nonzero normalising, labels back"
SMALL = [model for model in MODELS if model != LARGE]
IN_BRIEF = ("permuted", "tilted")
"""Scans with turned, swapped and sheared axes: `make test` compares these alone."""

GROUPS = {
    "brief": (SMALL, IN_BRIEF),
    "others": (SMALL, [name for name in GRIDS if name not in IN_BRIEF]),
    "large": ([LARGE], list(GRIDS)),
}
"""Models and scans that one process of MONAI's runner takes."""


@dataclass(frozen=True)
class Results:
    """Models, and MONAI's labels of each scan."""

    scans: Mapping[str, Volume]
    folder: Path

    def card(self, model: str) -> ModelCard:
        name, args, _, changes = MODELS[model]
        overlapping = "decision" in changes
        return model_cards.card(
            model_cards.converted(self.bundle(model) / "models" / "model.pt").file,
            network=NetworkSpec(name, args),
            structures=model_cards.structures(args["out_channels"] - (not overlapping)),
            **changes,
        )

    def bundle(self, model: str) -> Path:
        return self.folder / f"bundle{list(MODELS).index(model)}"

    def labels(self, model: str, scan: str) -> NDArray[Any]:
        return np.asarray(nib.load(self.bundle(model) / "eval" / f"{scan}_trans.nii.gz").dataobj)


@pytest.fixture(scope="module")
def results_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Results]:
    """Run all models of a group by MONAI, once a group."""
    return cache(lambda group: run_group(group, tmp_path_factory.mktemp("monai")))


def run_group(group: str, folder: Path) -> Results:
    models, names = GROUPS[group]
    results = Results(write_scans(folder / "imagesTs", names=names), folder)
    for model in models:
        write_model(results.bundle(model), model)
    run_monai(folder, *map(results.bundle, models))
    return results


def write_model(bundle: Path, model: str) -> None:
    """Write the bundle of a model, with weights that make all classes appear."""
    import monai.networks.nets as nets
    import torch

    name, args, options, changes = MODELS[model]
    torch.manual_seed(3)
    steps = (*changes.get("before", ()), *changes["after"])
    scan = model_cards.smooth_scan(GRIDS["axial"].shape, 0)
    model_cards.balanced_weights(
        getattr(nets, name)(**args), steps, scan, bundle / "models" / "model.pt"
    )
    (bundle / "configs").mkdir()
    text = json.dumps(config({"_target_": name, **args}, **options))
    (bundle / "configs" / "inference.json").write_text(text)


@pytest.mark.parametrize(
    ("group", "model"),
    [
        *(("brief", model) for model in SMALL),
        *(pytest.param("others", model, marks=pytest.mark.thorough) for model in SMALL),
        pytest.param("large", LARGE, marks=pytest.mark.slow),
    ],
)
def test_labels_equal_those_of_monais_runner(
    results_of: Callable[[str], Results], group: str, model: str
) -> None:
    """99.95 % of voxels and Dice 0.999 agree, with 5 % in each class, for any orientation."""
    results = results_of(group)
    card = results.card(model)
    classes = MODELS[model][1]["out_channels"]
    predictor = TorchPredictor(card, device="cpu", compute=ComputeOptions(precision="float32"))
    for scan, volume in results.scans.items():
        if volume.grid.sheared and card.grid.spacing is None:
            continue  # MONAI shows such a stack as if it did not lean; scanloom sets it upright
        theirs = results.labels(model, scan)
        layers = predictor.predict(volume).layers
        if "decision" not in MODELS[model][3]:
            assert_equal(layers[0].labels, theirs, classes, f"{model}, {scan}")
            continue
        for number, layer in enumerate(layers):
            assert_equal(layer.labels > 0, theirs[..., number], 2, f"{model}, {scan}, {number}")


LARGER_GRIDS = {
    "axial": model_cards.grid((110, 100, 60), (1.6, 1.6, 3.5), "LPS"),
    "oblique": model_cards.grid((100, 110, 66), (1.7, 1.6, 3.0), "LAS", turn=9),
    "permuted": model_cards.grid((60, 100, 110), (3.5, 1.7, 1.5), "SPL", turn=2),
}
"""Scans that take several windows of 96 voxels."""


@pytest.mark.reference
def test_labels_equal_those_of_the_zoos_spleen_bundle(tmp_path: Path) -> None:
    """The real config, read as data here, run by MONAI there."""
    import monai.networks.nets as nets
    import torch

    zoo = Path(os.environ.get("SCANLOOM_ZOO", os.devnull)) / "models" / "spleen_ct_segmentation"
    if not zoo.is_dir():
        pytest.skip("a checkout of MONAI's model-zoo is not here (SCANLOOM_ZOO)")
    from scanloom.convert.conversion import load_card

    bundle = tmp_path / "spleen_ct_segmentation"
    shutil.copytree(zoo, bundle)
    scans = write_scans(tmp_path / "imagesTs", LARGER_GRIDS)
    torch.manual_seed(3)
    steps = (ScaleRange(-57, 164, 0, 1, clip=True),)
    weights = bundle / "models" / "model.pt"
    network = nets.UNet(**SPLEEN_NET)
    model_cards.balanced_weights(network, steps, scans["axial"].array, weights)

    run_monai(
        tmp_path,
        bundle,
        **{
            "device": "$torch.device('cpu')",
            "dataloader#num_workers": 0,
            "inferer#sw_batch_size": 1,
        },
    )

    predictor = TorchPredictor(
        load_card(bundle), device="cpu", compute=ComputeOptions(precision="float32")
    )
    for scan, volume in scans.items():
        theirs = np.asarray(nib.load(bundle / "eval" / scan / f"{scan}_trans.nii.gz").dataobj)
        ours = predictor.predict(volume).layers[0].labels
        assert_equal(ours, np.squeeze(theirs), 2, f"spleen_ct_segmentation, {scan}")
