"""Images are drawn of label maps on the device that holds them, which the host doesn't wait for."""

from __future__ import annotations

import pytest
import torch
from monai.transforms import Compose

from scanloom.training import transforms
from scanloom.training.transforms import (
    RandAcquisitiond,
    RandBiasd,
    RandDeformedPatchd,
    RandDrawnPatchd,
    RandFieldOfViewd,
    RandGammad,
    RandMirrord,
    ZScored,
)
from support.fake_cuda import TO_DEVICE, TO_HOST, Ledger, StandIn

GEOMETRY = {"size": (16, 16, 12), "spacing": (2, 2, 2), "scan_spacing": (1, 1, 1)}
DEFORMED = {"prob": 1.0, "rotate": 20, "scale": 0.1, "elastic": 1.0}
BOTH = ["image", "label"]


@pytest.fixture
def device_noise(monkeypatch: pytest.MonkeyPatch, fake: StandIn) -> None:
    """Draw fields of noise on the CPU, at no cost: a stand-in has no generator."""
    plain = transforms.standard_normal

    def on_cpu(shape: object, state: object, device: torch.device) -> torch.Tensor:
        before, fake.ledger = fake.ledger, Ledger()
        noise = plain(shape, state, torch.device("cpu")).to(device)
        fake.ledger = before
        return noise

    monkeypatch.setattr(transforms, "standard_normal", on_cpu)


def head() -> torch.Tensor:
    """Return a label map of a cube in a cube, in air."""
    numbers = torch.zeros(1, 24, 26, 22, dtype=torch.uint8)
    numbers[0, 4:-4, 4:-4, 4:-4] = 2
    numbers[0, 8:16, 8:16, 8:16] = 1
    return numbers


@pytest.mark.usefixtures("device_noise")
def test_images_are_drawn_on_the_device_of_the_map_without_a_wait(fake: StandIn) -> None:
    steps = Compose(
        [
            RandDrawnPatchd(
                "label", [0, 1, 2], [0, 1, 2], [-1, -1, -1], 0.0, **GEOMETRY, **DEFORMED
            ),
            RandBiasd("image", 0.4),
            RandAcquisitiond("image", (2, 2, 2), 4.0, 7.0, 0.1),
            RandGammad("image", 0.5, [0.6, 1.6]),
            RandMirrord(BOTH, [0], pairs=[[1, 2]]),
            ZScored("image"),
            RandFieldOfViewd(BOTH, 0.5, 0.6),
        ]
    )
    numbers = head()
    for seed in range(12):  # acquisitions of all kinds, mirrored or not
        drawn = []
        for device in ("cpu", "cuda:0"):
            case = {"label": numbers.to(device)}
            fake.clear()
            case = steps.set_random_state(seed=seed)(case)
            assert {str(value.device) for value in case.values()} == {device}
            if device != "cpu":
                assert fake.ledger.operations > 0
            assert fake.ledger.waits == 0, fake.ledger
            assert fake.ledger.sizes[TO_HOST] == 0, fake.ledger
            # tables and control points
            assert fake.ledger.sizes[TO_DEVICE] < 8192, fake.ledger
            drawn.append({key: value.cpu() for key, value in case.items()})
        assert torch.equal(drawn[0]["label"], drawn[1]["label"])
        # the stand-in divides as CUDA does: the last bits differ
        torch.testing.assert_close(drawn[0]["image"], drawn[1]["image"], atol=1e-5, rtol=0)


def test_patches_of_scans_are_cut_on_their_device_without_a_wait(fake: StandIn) -> None:
    numbers = head()
    deform = RandDeformedPatchd(BOTH, ["bilinear", "nearest"], **GEOMETRY, **DEFORMED)
    drawn = []
    for device in ("cpu", "cuda:0"):
        case = {"image": numbers.float().to(device), "label": numbers.to(device)}
        fake.clear()
        case = deform.set_random_state(seed=1)(case)
        assert fake.ledger.waits == 0, fake.ledger
        assert {str(value.device) for value in case.values()} == {device}
        drawn.append({key: value.cpu() for key, value in case.items()})
    assert all(torch.equal(drawn[0][key], drawn[1][key]) for key in BOTH)
