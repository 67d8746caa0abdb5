"""The network sees the box around the foreground, and finds nothing outside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from scipy import ndimage

from scanloom.cards.card import (
    Channel,
    Clip,
    Crop,
    Fit,
    ModelCard,
    NetworkGrid,
    Normalize,
    Paint,
    ScaleRange,
    Stage,
    Window,
)
from scanloom.core import ComputeOptions, ScanError, Volume
from scanloom.core.grid import Box
from scanloom.inference.geometry import plan_grid
from scanloom.inference.predictor import TorchPredictor
from scanloom.inference.resampling.image import (
    ModelInput,
    filled_foreground,
    largest_box,
    network_image,
    source_box,
)
from scanloom.ops.label_maps import crop_volume
from support import model_cards as cards_by_hand

CPU = torch.device("cpu")
WHERE = (CPU, 2**20)
SHAPE = (40, 36, 28)
BOX = Box((5, 4, 6), (35, 29, 24))
INNER = BOX.slices


def volume(array: NDArray[Any], codes: str = "LPS", turn: float = 0.0) -> Volume:
    grid = cards_by_hand.grid((SHAPE[0], SHAPE[1], SHAPE[2]), (1.2, 1.1, 2.0), codes, turn=turn)
    return Volume(array, grid, "unknown", "MR")


def boxed_scan() -> NDArray[np.int16]:
    """Return a scan that is 0 outside a box, with a hole in it."""
    array = np.zeros(SHAPE, np.int16, order="F")
    array[INNER] = np.abs(cards_by_hand.smooth_scan(SHAPE)[INNER]) + 1
    array[15:20, 12:18, 12:16] = 0
    return array


def predict(card: ModelCard, scan: Volume) -> NDArray[Any]:
    predictor = TorchPredictor(card, ComputeOptions(precision="float32"), device="cpu")
    return predictor.predict(scan).layers[0].labels


def mr_card(folder: Path, **changes: Any) -> ModelCard:
    channels = (Channel("mr", "MR"),)
    return cards_by_hand.card(
        cards_by_hand.small_weights(folder), **{"channels": channels, **changes}
    )


def test_holes_are_scipys() -> None:
    """Those that faces alone don't connect to the border."""
    mask = np.random.default_rng(0).random(SHAPE) < 0.72

    filled = filled_foreground([volume(mask.astype(np.uint8))], "nonzero")

    np.testing.assert_array_equal(filled, ndimage.binary_fill_holes(mask))
    assert filled.sum() > mask.sum()


def test_box_holds_what_is_foreground_in_any_channel() -> None:
    first, second = boxed_scan(), np.zeros(SHAPE, np.int16)
    second[38, 20, 20] = -3

    box = source_box([volume(first), volume(second)], Crop("nonzero", margin=1))

    assert box == ((4, 3, 5), (39, 30, 25))
    only_positive = source_box([volume(first), volume(second)], Crop("positive"))
    assert only_positive == BOX
    assert source_box([volume(second * 0)], Crop("nonzero")) is None


@pytest.mark.parametrize("seed", range(30))
def test_box_is_numpys(seed: int) -> None:
    """Wherever the foreground is: in the middle planes, beside them only, at an end, nowhere."""
    source = np.random.default_rng(seed)
    scans = []
    for _ in range(1 + seed % 2):
        low, size = source.integers(0, 28, 3), source.integers(1, 20, 3)
        inside = tuple(slice(a, a + n) for a, n in zip(low, size, strict=True))
        array = np.zeros(SHAPE, np.int16, order="F")
        array[inside] = source.choice((-5, 0, 7), array[inside].shape, p=(0.02, 0.96, 0.02))
        scans.append(array)

    for kind in ("nonzero", "positive"):
        mask = np.any([array != 0 if kind == "nonzero" else array > 0 for array in scans], axis=0)
        if not mask.any():
            continue
        box = source_box([volume(array) for array in scans], Crop(kind))
        corners = [(n.min(), n.max()) for n in np.nonzero(mask)]
        assert box == tuple(zip(*corners, strict=True)), kind


def test_labels_of_a_box_are_pasted_into_background(tmp_path: Path) -> None:
    """nnU-Net: as if the scan had been cropped before."""
    scan = volume(boxed_scan())
    grid = {"orientation": None, "spacing": (2.0, 2.0, 2.0), "alignment": "edges"}
    cropping = mr_card(tmp_path, grid=NetworkGrid(**grid, crop=Crop("nonzero")))
    whole = mr_card(tmp_path, grid=NetworkGrid(**grid))

    labels = predict(cropping, scan)

    expected = np.zeros(SHAPE, np.uint8)
    expected[INNER] = predict(whole, crop_volume(scan, BOX))
    np.testing.assert_array_equal(labels, expected)
    assert labels.any()


def test_intensities_of_the_filled_foreground_are_measured(tmp_path: Path) -> None:
    """nnU-Net's masked z-score, on the scan's own voxels, in the box, before resampling."""
    array = boxed_scan()
    array[5, 4, 6:12] = 0  # open to the side of the box: not a hole
    steps = (Clip(0.0, 900.0), Normalize(filled=True, smallest_divisor=1e-8))
    grid = NetworkGrid(None, None, alignment="edges", crop=Crop("nonzero"))
    card = mr_card(tmp_path, grid=grid, channels=(Channel("mr", "MR", steps),), after=())
    cropped = crop_volume(volume(array), BOX)

    image = (
        network_image(ModelInput((cropped,)), plan_grid(cropped.grid, grid), card, WHERE)
        .image[0]
        .numpy()
    )

    values = array[INNER].astype(np.float32)
    mask = ndimage.binary_fill_holes(values != 0)
    values = values.clip(0, 900)
    inside = values[mask]
    values[mask] = (inside - inside.mean()) / max(inside.std(), 1e-8)
    np.testing.assert_allclose(image, values, atol=1e-5)
    assert 0 < (~mask).sum() < 100


def monai_labels(scan: Volume, weights: Path, spacing: tuple[float, float, float]) -> Any:
    """Return the labels of MONAI's transforms, inferer and network."""
    from monai.data import MetaTensor
    from monai.inferers import SlidingWindowInferer
    from monai.networks.nets.unet import UNet
    from monai.transforms import (
        Compose,
        CropForegroundd,
        Invertd,
        Orientationd,
        ScaleIntensityRanged,
        Spacingd,
    )

    before = Compose(
        [
            Orientationd("image", axcodes="RAS", labels=(("L", "R"), ("P", "A"), ("I", "S"))),
            Spacingd("image", pixdim=spacing, mode="bilinear"),
            ScaleIntensityRanged("image", 0, 400, 0, 1, clip=True),
            CropForegroundd("image", source_key="image"),
        ]
    )
    values = torch.from_numpy(scan.array.astype(np.float32))[None]
    item = before({"image": MetaTensor(values, torch.tensor(scan.grid.affine))})
    network = UNet(**cards_by_hand.SMALL_UNET).eval()
    network.load_state_dict(load_file(weights))
    with torch.inference_mode():
        scores = SlidingWindowInferer((16, 16, 16), 1, 0.5)(item["image"][None], network)[0]
    item["pred"] = torch.softmax(scores, dim=0)
    item["pred"] = MetaTensor(torch.Tensor(item["pred"]), meta=item["image"].meta)
    invert = Invertd(
        "pred", transform=before, orig_keys="image", nearest_interp=False, to_tensor=True
    )
    return invert(item)["pred"].argmax(dim=0).numpy()


@pytest.mark.parametrize(
    ("codes", "turn", "spacing"),
    [
        ("LPS", 0.0, (1.5, 1.5, 1.5)),
        ("PIR", 7.0, (1.5, 1.5, 1.5)),
        ("LPS", 0.0, (2.4, 2.2, 4.0)),
        ("LPS", 7.0, (2.4, 2.2, 4.0)),
    ],
)
def test_scores_outside_a_box_of_the_network_grid_are_monais(
    tmp_path: Path, codes: str, turn: float, spacing: tuple[float, float, float]
) -> None:
    """CropForegroundd: at least 99.95 % of labels equal, at a ratio of exactly 2 as well."""
    scan = volume(boxed_scan(), codes, turn)
    weights = cards_by_hand.small_weights(tmp_path)
    grid = NetworkGrid("RAS", spacing, crop=Crop("positive", "network"))
    steps = (ScaleRange(0, 400, 0, 1, clip=True),)
    card = cards_by_hand.card(weights, grid=grid, after=steps)

    labels = predict(card, scan)

    expected = monai_labels(scan, weights, spacing)
    equal = float((labels == expected).mean())
    print(f"{codes}, {spacing}: {equal:.4%}")
    assert len(np.unique(expected)) == 3
    assert equal >= 0.9995


def test_later_steps_measure_the_box_only(tmp_path: Path) -> None:
    """TotalSegmentator: the box is found on the network grid, before intensities are changed."""
    grid = NetworkGrid("RAS", (1.5, 1.5, 1.5), crop=Crop("nonzero", "network", steps=0))
    card = mr_card(tmp_path, grid=grid, after=(Normalize(),), restore="labels")
    scan = volume(boxed_scan())

    seen = network_image(ModelInput((scan,)), plan_grid(scan.grid, grid), card, WHERE)

    assert seen.box is not None
    assert abs(float(seen.image.mean())) < 1e-4
    assert abs(float(seen.image.std()) - 1) < 1e-3
    assert not predict(card, scan)[:4].any()


def test_structures_of_a_previous_stage_are_measured_where_the_scan_is_0(tmp_path: Path) -> None:
    """nnU-Net's `use_mask_for_norm` in a cascade: the mask are labels that are not negative."""
    step = Normalize(filled=True, smallest_divisor=1e-8)
    grid = NetworkGrid(alignment="edges", crop=Crop("nonzero"))
    first = mr_card(tmp_path, grid=grid)
    channels = (Channel("mr", "MR", (step,)),)
    card = mr_card(tmp_path, grid=grid, channels=channels, after=(), stage=Stage(first, "channels"))
    scan = volume(boxed_scan())
    labels = np.zeros(SHAPE, np.uint8)
    labels[:10, :8] = 1  # mostly outside of the box

    seen = network_image(ModelInput((scan,), labels), plan_grid(scan.grid, grid), card, WHERE)

    values = scan.array.astype(np.float64)
    mask = filled_foreground([scan], "nonzero") | (labels == 1)
    expected = np.where(mask, (values - values[mask].mean()) / values[mask].std(), 0)
    np.testing.assert_allclose(seen.image[0].numpy(), expected, atol=1e-4)
    np.testing.assert_array_equal(seen.image[1].numpy(), labels == 1)


def test_painted_regions_make_one_layer(tmp_path: Path) -> None:
    decision = Paint(((0, 2), (2, 1)), 0.5)
    card = mr_card(tmp_path, decision=decision, activation="sigmoid")

    predictor = TorchPredictor(card, ComputeOptions(precision="float32"), device="cpu")
    segmentation = predictor.predict(volume(boxed_scan()))

    assert len(segmentation.layers) == 1
    assert set(np.unique(segmentation.layers[0].labels)) == {0, 1, 2}


@pytest.mark.parametrize("grid", ["source", "network"])
def test_a_scan_without_foreground_is_refused(
    tmp_path: Path, grid: Literal["source", "network"]
) -> None:
    crop = Crop("positive", grid)
    card = mr_card(tmp_path, grid=NetworkGrid("RAS", (2.0, 2.0, 2.0), crop=crop))
    air = volume(np.full(SHAPE, -1000, np.int16, order="F"))

    with pytest.raises(ScanError, match="IMPLAUSIBLE"):
        predict(card, air)


FITS: list[dict[str, Any]] = [
    {"fits": (Fit((50, None, 21)),)},
    {"fits": (Fit((20, 90, 28), crops=True), Fit(multiple=(16, 1, 7), at_end=True))},
    {"crop": Crop("positive", "network", 7, beyond=True)},
    {"crop": Crop("positive", "network", multiple=(9, 5, 4)), "fits": (Fit((None, 44, 60)),)},
]


@pytest.mark.parametrize("changes", FITS)
@pytest.mark.parametrize("full", [False, True], ids=["with air", "without"])
def test_no_image_is_larger_than_the_largest_box(
    tmp_path: Path, changes: dict[str, Any], full: bool
) -> None:
    """By which memory is estimated: all of a scan without air."""
    grid = NetworkGrid("RAS", (1.5, 1.5, 2.5), **changes)
    scan = volume(np.full(SHAPE, 300, np.int16, order="F") if full else boxed_scan(), "PIR", 5)
    plan = plan_grid(scan.grid, grid)

    card = mr_card(tmp_path, grid=grid, after=(ScaleRange(0, 400, 0, 1),))
    seen = network_image(ModelInput((scan,)), plan, card, WHERE)

    shape, largest = tuple(seen.image.shape[1:]), largest_box(plan, grid)
    assert all(n <= most for n, most in zip(shape, largest, strict=True))
    if full or grid.crop is None:
        assert shape == largest


@pytest.mark.parametrize("restore", ["scores", "labels"])
def test_maps_of_uncertainty_and_air_are_those_of_the_scan_alone(
    tmp_path: Path, restore: str
) -> None:
    """A scan on its own grid, padded to the lengths that the windows would pad it to."""
    scan = volume(boxed_scan())
    whole = NetworkGrid(None, None)
    padded = NetworkGrid(None, None, fits=(Fit((48, 48, 48), padding_value=0.0),))
    results = []
    for grid in (whole, padded):
        card = mr_card(
            tmp_path, grid=grid, window=Window((48, 48, 48)), air_below=-2000.0, restore=restore
        )
        predictor = TorchPredictor(card, ComputeOptions(precision="float32"), device="cpu")
        results.append(predictor.predict(scan, uncertainty=True))
    first, second = results
    np.testing.assert_array_equal(first.layers[0].labels, second.layers[0].labels)
    assert first.uncertainty is not None
    assert second.uncertainty is not None
    np.testing.assert_array_equal(first.uncertainty.entropy, second.uncertainty.entropy)
    assert len(np.unique(first.layers[0].labels)) == 3


def test_a_scan_that_is_too_small_to_be_reflected_is_refused(tmp_path: Path) -> None:
    fit = Fit((SHAPE[0] * 4, None, None), padding="reflect")
    card = mr_card(tmp_path, grid=NetworkGrid(None, None, fits=(fit,)))

    with pytest.raises(ScanError, match="too small for the model's padding"):
        predict(card, volume(boxed_scan()))
