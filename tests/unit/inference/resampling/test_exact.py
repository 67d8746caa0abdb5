"""Values that the last bit decides are those of the models' own programs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import ndimage

from scanloom.cards.card import NetworkGrid, Normalize, ScaleRange, Truncate
from scanloom.core import Grid
from scanloom.inference.geometry import plan_grid
from scanloom.inference.intensity import apply_steps
from scanloom.inference.resampling.resample import ResampleOptions, decisive_values, to_network
from support import model_cards as model_cards

CPU = torch.device("cpu")
ZEROS, INTEGERS = ResampleOptions(0.0), ResampleOptions("integers")


def scan_with_zeros(shape: tuple[int, int, int]) -> NDArray[np.int16]:
    """Return small integers of both signs, and empty corners: many interpolated values are 0."""
    values = np.random.default_rng(0).integers(-3, 4, shape).astype(np.int16)
    values[:4] = values[:, -5:] = 0
    return np.asfortranarray(values)


def monai_image(array: NDArray[Any], grid: Grid, requested: NetworkGrid) -> Any:
    """Return MONAI's image after Orientation and Spacing."""
    from monai.data import MetaTensor
    from monai.transforms import Orientation, Spacing

    image = MetaTensor(torch.from_numpy(array.astype(np.float32))[None], torch.tensor(grid.affine))
    image = Orientation(requested.orientation, labels=(("L", "R"), ("P", "A"), ("I", "S")))(image)
    return Spacing(requested.spacing)(image)


GRIDS = {
    "ratio of 1/2": (model_cards.grid((20, 22, 24), (3, 3, 3)), (1.5, 1.5, 1.5)),
    "ratio of 2": (model_cards.grid((40, 41, 30), (1.2, 1.1, 2.5), "LPS"), (2.4, 2.2, 5.0)),
    "turned": (model_cards.grid((20, 22, 24), (3, 3, 3), "PIR", turn=7), (1.5, 1.5, 1.5)),
    "tilted": (model_cards.grid((30, 31, 20), (1, 1, 3), "LPS", tilt=12), (1.5, 1.5, 1.5)),
}


@pytest.mark.parametrize("name", GRIDS)
def test_zeros_are_monais(name: str) -> None:
    """Voxels are 0 where MONAI's float64 is 0; in float32, many others would be."""
    grid, spacing = GRIDS[name]
    requested, array = NetworkGrid("RAS", spacing), scan_with_zeros(grid.shape)
    plan = plan_grid(grid, requested)

    image = to_network(array, plan, CPU, options=ZEROS).numpy()

    expected = monai_image(array, grid, requested)[0].numpy()
    np.testing.assert_array_equal(image == 0, expected == 0)
    np.testing.assert_allclose(image, expected, atol=1e-5)


def test_zeros_after_intensity_steps_are_those_of_the_changed_scan() -> None:
    grid, spacing = GRIDS["turned"]
    requested, array = NetworkGrid("RAS", spacing), scan_with_zeros(grid.shape)
    steps = (ScaleRange(0.0, 2.0, 1.0, 2.0), ScaleRange(1.0, 2.0, 0.0, 1.0))  # halves all values

    image = to_network(array, plan_grid(grid, requested), CPU, steps, options=ZEROS).numpy()

    expected = monai_image(array / 2, grid, requested)[0].numpy()
    np.testing.assert_array_equal(image == 0, expected == 0)


def test_normalised_nonzero_voxels_and_labels_equal_monais() -> None:
    """The network's input, and at least 99.99 % of its labels, at a ratio of 3 to 1.5 mm."""
    from monai.networks.nets.segresnet import SegResNet
    from monai.transforms import NormalizeIntensity

    grid, spacing = GRIDS["ratio of 1/2"]
    requested, array = NetworkGrid("RAS", spacing), scan_with_zeros(grid.shape)
    resampled = to_network(array, plan_grid(grid, requested), CPU, options=ZEROS)

    normalised = apply_steps(resampled, [Normalize(nonzero=True)])

    expected = NormalizeIntensity(nonzero=True)(monai_image(array, grid, requested))[0].as_tensor()
    torch.testing.assert_close(normalised, expected, atol=1e-5, rtol=0)
    torch.manual_seed(0)
    network = SegResNet(init_filters=8, out_channels=4, blocks_down=(1, 1), blocks_up=(1,)).eval()
    size = [n // 2 * 2 for n in normalised.shape]
    with torch.inference_mode():
        ours, theirs = (
            network(image[None, None, : size[0], : size[1], : size[2]])
            for image in (normalised, expected)
        )
    balanced = theirs.median(dim=2).values.median(dim=2).values.median(dim=2).values
    labels, reference = ((s - balanced[..., None, None, None]).argmax(1) for s in (ours, theirs))
    assert len(reference.unique()) == 4
    assert (labels == reference).float().mean() >= 0.9999


@pytest.mark.parametrize("codes", ["RAS", "LPS", "PIL"])
def test_truncated_values_are_those_of_scipys_zoom(codes: str) -> None:
    """TotalSegmentator: zoom of order 1 in float64, converted to int32."""
    grid = model_cards.grid((20, 17, 13), (1.1, 0.9, 2.5), codes)
    array = model_cards.smooth_scan(grid.shape)
    array[:6] = -1000  # in which rounding errors decide between -1000 and -999
    requested = NetworkGrid("RAS", (1.5, 1.5, 1.5), alignment="ends")
    plan = plan_grid(grid, requested)

    image = apply_steps(to_network(array, plan, CPU, options=INTEGERS), [Truncate()]).numpy()

    oriented = array.transpose(plan.follows)[
        tuple(slice(None, None, -1 if back else None) for back in plan.flipped)
    ].astype(np.float64)
    zoom = np.array(plan.oriented.spacing) / 1.5
    expected = ndimage.zoom(oriented, zoom, order=1, mode="nearest").astype(np.int32)
    np.testing.assert_array_equal(image, expected)


def test_only_steps_that_depend_on_the_last_bit_need_exact_voxels(tmp_path: Any) -> None:
    """No card pays for a precision that it does not need."""
    weights = tmp_path / "weights.pt"
    weights.write_bytes(b"")
    steps: dict[Any, Any] = {
        (): None,
        (ScaleRange(-200, 200, 0, 1), Normalize(nonzero=True)): -200,
        (ScaleRange(-200, 200, -1, 1), Normalize(nonzero=True)): None,
        (Normalize(),): None,
        (Normalize(nonzero=True),): 0.0,
        (Truncate(), Normalize()): "integers",
    }

    for after, expected in steps.items():
        assert decisive_values(model_cards.card(weights, after=after)) == expected
