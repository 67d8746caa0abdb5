"""Bundles of MONAI's Model Zoo that consist of scripts are read if the scripts are known."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from scanloom.cards.card import ANY_MODALITY
from scanloom.convert import meshnet
from scanloom.convert.meshnet import is_known_bundle
from scanloom.convert.readers import find_reader, read_model
from scanloom.core import Reason, ScanError

NAMES = ("checkpoint", "conform", "network", "postprocess", "transforms")
CLASSES = meshnet.MINDGRAB_CLASSES
CONFIG: dict[str, Any] = {
    "network_def": {"_target_": CLASSES[0]},
    "inferer": {"_target_": "SimpleInferer"},
    "preprocessing": {
        "transforms": [
            {"_target_": "LoadImaged", "keys": "@image_key"},
            {"_target_": CLASSES[1], "keys": "@image_key"},
            {"_target_": "EnsureTyped", "keys": "@image_key"},
        ]
    },
    "postprocessing": {
        "transforms": [
            {"_target_": CLASSES[2], "keys": "pred"},
            {"_target_": "SaveImaged", "keys": "pred"},
        ]
    },
}
METADATA = {
    "network_data_format": {"outputs": {"pred": {"channel_def": {"0": "background", "1": "brain"}}}}
}


@pytest.fixture
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a bundle with stand-ins for the scripts, whose hashes are known."""
    folder = tmp_path / "mindgrab"
    for name in ("scripts", "configs", "models"):
        (folder / name).mkdir(parents=True)
    hashes = {}
    for name in NAMES:
        content = f"raise SystemExit('{name} ran')\n".encode()
        (folder / "scripts" / f"{name}.py").write_bytes(content)
        hashes[f"scripts/{name}.py"] = hashlib.sha256(content).hexdigest()
    monkeypatch.setattr(meshnet, "MINDGRAB_SCRIPTS", hashes)
    write(folder, CONFIG)
    (folder / "configs" / "metadata.json").write_text(json.dumps(METADATA))
    (folder / "models" / "model.pt").write_bytes(b"weights")
    return folder


def write(folder: Path, config: dict[str, Any]) -> None:
    """Write the bundle's config."""
    (folder / "configs" / "inference.json").write_text(json.dumps(config))


def test_known_scripts_become_a_card_and_do_not_run(bundle: Path) -> None:
    card = read_model(bundle)

    assert card.channels[0].modality == ANY_MODALITY
    assert (card.grid.crop, card.window.size) == (None, None)
    assert [structure.label for structure in card.structures] == ["brain"]
    assert len(card.network.args["dilations"]) == 25


@pytest.mark.parametrize("change", ["changed", "further", "missing"])
def test_other_scripts_are_left_to_the_reader_of_bundles(bundle: Path, change: str) -> None:
    script = bundle / "scripts" / "conform.py"
    if change == "changed":
        script.write_text("import os\n")
    elif change == "further":
        (bundle / "scripts" / "more.py").write_text("")
    else:
        script.unlink()

    reader = find_reader(bundle)

    assert not is_known_bundle(bundle)
    assert reader is not None
    assert reader.name == "MONAI bundle"


@pytest.mark.parametrize(
    "change",
    [
        {"network_def": {"_target_": CLASSES[0], "channels": 30}},
        {"inferer": {"_target_": "SlidingWindowInferer", "roi_size": [96, 96, 96]}},
        {"preprocessing": {"transforms": []}},
        {"postprocessing": {}},
    ],
)
def test_a_config_that_does_more_is_refused(bundle: Path, change: dict[str, Any]) -> None:
    write(bundle, {**CONFIG, **change})

    with pytest.raises(ScanError) as caught:
        read_model(bundle)
    assert caught.value.reason is Reason.MODEL_UNSUPPORTED


def test_weights_of_another_hash_are_refused(bundle: Path) -> None:
    write(bundle, {**CONFIG, "checkpoint_sha256": "0" * 64})

    with pytest.raises(ScanError) as caught:
        read_model(bundle)
    assert caught.value.reason is Reason.MODEL_HASH
