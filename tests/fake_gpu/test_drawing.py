"""Images are drawn of label maps on the device that holds them."""

from __future__ import annotations

import pytest
import torch

from scanloom.training import transforms
from scanloom.training.transforms import RandAcquisitiond, RandBiasd, RandDrawnPatchd, RandMirrord
from support.fake_cuda import StandIn


@pytest.fixture
def device_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw fields of noise on the CPU: a stand-in has no generator."""
    plain = transforms.standard_normal

    def on_cpu(shape: object, state: object, device: torch.device) -> torch.Tensor:
        return plain(shape, state, torch.device("cpu")).to(device)

    monkeypatch.setattr(transforms, "standard_normal", on_cpu)


@pytest.mark.usefixtures("device_noise")
def test_images_are_drawn_on_the_device_of_the_map(fake: StandIn) -> None:
    numbers = torch.zeros(1, 24, 26, 22, dtype=torch.uint8)
    numbers[0, 4:-4, 4:-4, 4:-4] = 2
    numbers[0, 8:16, 8:16, 8:16] = 1
    geometry = {"size": (16, 16, 12), "spacing": (2, 2, 2), "scan_spacing": (1, 1, 1)}
    deformed = {"prob": 1.0, "rotate": 20, "scale": 0.1, "elastic": 1.0}
    steps = [
        RandDrawnPatchd("label", [0, 1, 0], [0, 1, 2], [-1, -1, -1], 0.0, **geometry, **deformed),
        RandBiasd("image", 0.4),
        RandAcquisitiond("image", (2, 2, 2), 4.0, 7.0, 0.1),
        RandMirrord(["image", "label"], [0]),
    ]
    drawn = []
    for device in ("cpu", "cuda:0"):
        case = {"label": numbers.to(device)}
        for seed, step in enumerate(steps):
            case = step.set_random_state(seed=seed)(case)
        assert {str(value.device) for value in case.values()} == {device}
        drawn.append({key: value.cpu() for key, value in case.items()})
    assert torch.equal(drawn[0]["label"], drawn[1]["label"])
    assert torch.equal(drawn[0]["image"], drawn[1]["image"])
