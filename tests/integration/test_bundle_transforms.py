"""Transforms of bundles give the labels of MONAI's own runner, on scans of any orientation."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest

from scanloom.cards.card import ScaleRange
from scanloom.convert.conversion import load_card
from scanloom.core import ComputeOptions, Volume
from scanloom.inference.predictor import TorchPredictor
from support import model_cards
from support.bundles import spleen_metadata
from support.monai_runs import (
    ARGMAX,
    SOFTMAX,
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

Steps = Sequence[Mapping[str, Any]]

GRIDS = {
    "turned": model_cards.grid((33, 30, 21), (1.4, 1.3, 2.4), "LAS", turn=7),
    "permuted": model_cards.grid((18, 34, 29), (2.5, 1.2, 1.3), "SPL", turn=2),
    "anisotropic": model_cards.grid((31, 36, 13), (1.1, 1.0, 4.0), "PIR"),
}
NETWORK = {"_target_": "UNet", **model_cards.SMALL_UNET}
LABELS_BACK: Steps = [SOFTMAX, ARGMAX, invert(nearest=True)]
SCORES_BACK: Steps = [SOFTMAX, invert(nearest=False), ARGMAX]
RANGE = {
    "_target_": "ScaleIntensityRanged",
    "a_min": -400,
    "a_max": 400,
    "b_min": 0,
    "b_max": 1,
    "clip": True,
}


def step(name: str, **args: Any) -> dict[str, Any]:
    return {"_target_": name, **args}


def percentiles(lower: float, upper: float, **args: Any) -> dict[str, Any]:
    return step("ScaleIntensityRangePercentilesd", lower=lower, upper=upper, **args)


@dataclass(frozen=True)
class Chain:
    """Transforms of a bundle before and after its network, and how the network is applied."""

    before: Steps
    after: Steps = tuple(SCORES_BACK)
    inferer: Mapping[str, Any] = field(default_factory=lambda: sliding(16, 0.5))


RAS = [orient("RAS"), space(1.5, 1.5, 2.0)]
CHAINS = {
    "percentiles of the scan": Chain(
        [percentiles(0.5, 99.5, b_min=0, b_max=1, clip=True), *RAS],
    ),
    "percentiles of the resampled scan, relative, labels back": Chain(
        [*RAS, percentiles(5, 90, b_min=-1, b_max=1, relative=True, channel_wise=True)],
        LABELS_BACK,
    ),
}

CHAINS |= {
    "holes filled on the network grid, small objects removed after": Chain(
        [*RAS, RANGE],
        [
            *(SOFTMAX, ARGMAX, step("FillHolesd", applied_labels=[2, 1], connectivity=1)),
            *(invert(nearest=True), step("RemoveSmallObjectsd", min_size=900)),
        ],
    ),
    "small objects of all structures removed on the network grid, by volume; holes filled": Chain(
        [*RAS, RANGE],
        [
            *(SOFTMAX, ARGMAX),
            step(
                "RemoveSmallObjectsd",
                min_size=2000.5,
                connectivity=2,
                by_measure=True,
                independent_channels=False,
            ),
            *(invert(nearest=True), step("FillHolesd")),
        ],
    ),
    "channels that overlap, holes filled": Chain(
        [*RAS, RANGE],
        [
            *(step("Activationsd", sigmoid=True), step("AsDiscreted", threshold=0.5)),
            *(step("FillHolesd"), invert(nearest=True)),
        ],
    ),
}


def resized(mode: str, **args: Any) -> dict[str, Any]:
    return step("Resized", spatial_size=[24, 40, 20], mode=mode, **args)


CHAINS |= {
    "resized trilinearly": Chain([orient("RAS"), resized("trilinear"), RANGE]),
    "resized with the outermost voxels in both": Chain(
        [orient("LPS"), RANGE, resized("trilinear", align_corners=True)]
    ),
    "resized trilinearly, labels back": Chain(
        [orient("RAS"), resized("bilinear", align_corners=False), RANGE], LABELS_BACK
    ),
    "resized to a half and twice, labels back": Chain(
        [RANGE, step("Resized", spatial_size=[66, 15, 42], mode="trilinear")], LABELS_BACK
    ),
    "resized by area, labels back": Chain([orient("RAS"), resized("area"), RANGE], LABELS_BACK),
    "resized trilinearly, normalised where it is not 0": Chain(
        [
            *(orient("RAS"), {**RANGE, "a_min": 0}, resized("trilinear")),
            step("NormalizeIntensityd", nonzero=True),
        ]
    ),
}


def crop(**args: Any) -> dict[str, Any]:
    return step("CropForegroundd", source_key="image", **args)


WHOLE = {"_target_": "SimpleInferer"}
CHAINS |= {
    "cropped, with a margin beyond the scan": Chain(
        [*RAS, RANGE, crop(margin=9, select_fn="$lambda x: x > 0.3")]
    ),
    "cropped to a multiple, normalised, whole": Chain(
        [*RAS, RANGE, crop(margin=[1, 1, 1], k_divisible=[4, 8, 6]), step("NormalizeIntensityd")],
        inferer=WHOLE,
    ),
    "padded to a size, labels back": Chain(
        [*RAS, RANGE, step("SpatialPadd", spatial_size=[60, -1, 33], value=0.4)], LABELS_BACK
    ),
    "padded at the ends, repeated, on the scan's own grid": Chain(
        [
            *(orient("LPS"), RANGE),
            step("SpatialPadd", spatial_size=37, method="end", mode="edge"),
            step("ScaleIntensityd", minv=-1),
        ]
    ),
    "padded to a multiple, whole": Chain(
        [*RAS, step("DivisiblePadd", k=[8, 4, 16], mode="reflect"), RANGE], inferer=WHOLE
    ),
    "cropped or padded to a size": Chain(
        [*RAS, RANGE, step("ResizeWithPadOrCropd", spatial_size=[22, 41, 17])]
    ),
    "cropped or padded to a size, labels back": Chain(
        [
            *(orient("RAS"), step("ResizeWithPadOrCropd", spatial_size=[31, 23, 26])),
            *(RANGE, step("ScaleIntensityd", minv=0.1)),
        ],
        LABELS_BACK,
    ),
    "cropped, then padded to a size": Chain(
        [
            *(*RAS, crop(select_fn="$lambda x: x > -999", margin=2, allow_smaller=True), RANGE),
            step("SpatialPadd", spatial_size=[40, 40, 40], constant_values=0.2),
            step("NormalizeIntensityd", nonzero=True),
        ]
    ),
    "cropped, then padded to a size, the largest component of labels and padding": Chain(
        [
            *(*RAS, RANGE, crop(margin=4, k_divisible=[5, 3, 8])),
            step("SpatialPadd", spatial_size=[44, 40, 36], mode="edge"),
        ],
        [
            *(SOFTMAX, ARGMAX),
            step("KeepLargestConnectedComponentd", applied_labels=[1, 2], connectivity=1),
            *(step("FillHolesd"), invert(nearest=True)),
        ],
    ),
    "resized trilinearly, then padded": Chain(
        [orient("RAS"), resized("trilinear"), RANGE, step("DivisiblePadd", k=16)], inferer=WHOLE
    ),
}


IN_BRIEF = (
    "percentiles of the resampled scan, relative, labels back",
    "small objects of all structures removed on the network grid, by volume; holes filled",
    "resized trilinearly, normalised where it is not 0",
    "cropped, then padded to a size",
    "cropped, then padded to a size, the largest component of labels and padding",
)
GROUPS = {"brief": (IN_BRIEF, ["permuted"]), "all": (tuple(CHAINS), [*GRIDS])}
"""Chains and scans that one process of MONAI's runner takes: `make test` compares the first."""

Runs = tuple[Path, Mapping[str, Volume]]


@pytest.fixture(scope="module")
def runs_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Runs]:
    """Run the bundles of a group by MONAI's runner, once; return their folder, and the scans."""

    def run_group(group: str) -> Runs:
        folder, (names, scans) = tmp_path_factory.mktemp("monai"), GROUPS[group]
        written = write_scans(folder / "imagesTs", GRIDS, scans, air=2)
        for number, name in enumerate(names):
            write_bundle(folder / f"bundle{number}", CHAINS[name])
        run_monai(folder, *(folder / f"bundle{number}" for number in range(len(names))))
        return folder, written

    return cache(run_group)


def write_bundle(bundle: Path, chain: Chain) -> None:
    """Write a bundle whose random weights make all classes appear."""
    import torch
    from monai.networks.nets.unet import UNet

    torch.manual_seed(3)
    scan = model_cards.smooth_scan((32, 32, 32), 0)
    steps = (ScaleRange(-400, 400, 0, 1, clip=True),)
    weights = bundle / "models" / "model.pt"
    model_cards.balanced_weights(UNet(**model_cards.SMALL_UNET), steps, scan, weights)
    metadata = spleen_metadata()
    output = metadata["network_data_format"]["outputs"]["pred"]
    output.update(num_channels=3, channel_def={"0": "background", "1": "spleen", "2": "liver"})
    text = config(NETWORK, list(chain.before), chain.inferer, list(chain.after))
    (bundle / "configs").mkdir()
    (bundle / "configs" / "inference.json").write_text(json.dumps(text))
    (bundle / "configs" / "metadata.json").write_text(json.dumps(metadata))


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("group", "name"),
    [
        *(("brief", name) for name in IN_BRIEF),
        *(pytest.param("all", name, marks=pytest.mark.thorough) for name in CHAINS),
    ],
)
def test_labels_equal_those_of_monais_runner(
    runs_of: Callable[[str], Runs], group: str, name: str
) -> None:
    """99.95 % of voxels are equal, and all three classes occur."""
    folder, scans = runs_of(group)
    bundle = folder / f"bundle{GROUPS[group][0].index(name)}"
    compute = ComputeOptions(precision="float32")
    predictor = TorchPredictor(load_card(bundle), compute, device="cpu")
    for scan, volume in scans.items():
        layers = [layer.labels for layer in predictor.predict(volume).layers]
        saved = nib.load(bundle / "eval" / f"{scan}_trans.nii.gz")
        theirs = np.squeeze(np.asarray(saved.dataobj))
        if len(layers) > 1:  # channels that may overlap, without that of the background
            theirs = theirs[..., 1:]
            ours, numbers = np.stack([labels > 0 for labels in layers], axis=-1), range(2)
        else:
            ours, numbers = layers[0], range(3)
        assert ours.shape == theirs.shape
        equal = float(np.mean(ours == theirs))
        shares = [float(np.mean(theirs == number)) for number in numbers]
        print(f"{name}, {scan}: {equal:.4%} equal, classes fill {[f'{s:.1%}' for s in shares]}")
        assert min(shares) >= 0.01
        assert equal >= 0.9995
