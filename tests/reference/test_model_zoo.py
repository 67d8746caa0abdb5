"""The configs of MONAI's model zoo: each gives a card, or is refused for what it is.

SCANLOOM_ZOO names a checkout of github.com/Project-MONAI/model-zoo (or its `models` folder).
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from scanloom.cards.card import ModelCard, NetworkGrid, NetworkSpec, Window
from scanloom.cards.intensity import Normalize, ScaleMinMax, ScaleRange
from scanloom.cards.monai.bundle import read_bundle
from scanloom.core import ScanError

pytestmark = pytest.mark.reference


def bundle(name: str, tmp_path: Path) -> Path:
    """Return a copy of a bundle's configs with a weights file of no content."""
    zoo = Path(os.environ.get("SCANLOOM_ZOO", ""))
    if "SCANLOOM_ZOO" not in os.environ:
        pytest.skip("no checkout of MONAI's model zoo (SCANLOOM_ZOO)")
    source = next((p for p in (zoo / "models" / name, zoo / name) if p.is_dir()), None)
    if source is None:
        pytest.skip(f"the model zoo of SCANLOOM_ZOO has no {name}")
    folder = tmp_path / name
    shutil.copytree(source / "configs", folder / "configs")
    if (source / "LICENSE").is_file():
        shutil.copy(source / "LICENSE", folder)
    (folder / "models").mkdir()
    (folder / "models" / "model.pt").write_bytes(b"stands for the weights")
    return folder


def card_of(name: str, tmp_path: Path) -> ModelCard:
    return read_bundle(bundle(name, tmp_path))


def config_of(name: str, tmp_path: Path) -> dict[str, Any]:
    file = bundle(name, tmp_path / "raw") / "configs" / "inference.json"
    entries: dict[str, Any] = json.loads(file.read_text())
    return entries


def test_spleen(tmp_path: Path) -> None:
    card = card_of("spleen_ct_segmentation", tmp_path)
    network = config_of("spleen_ct_segmentation", tmp_path)["network_def"]

    assert card.network == NetworkSpec("UNet", {k: v for k, v in network.items() if k[0] != "_"})
    assert card.grid == NetworkGrid("RAS", (1.5, 1.5, 2.0))
    assert card.after == (ScaleRange(-57, 164, 0, 1, clip=True),)
    assert card.window == Window((96, 96, 96), 0.5)
    assert (card.activation, card.restore) == ("softmax", "scores")
    assert [s.type.meaning for s in card.structures] == ["Spleen"]
    assert card.license == "Apache-2.0"


def test_swin_unetr(tmp_path: Path) -> None:
    """`img_size` has gone from MONAI's SwinUNETR."""
    card = card_of("swin_unetr_btcv_segmentation", tmp_path)

    assert card.network.name == "SwinUNETR"
    assert "img_size" not in card.network.args
    assert len(card.structures) == 13
    assert [s.laterality.meaning for s in card.structures if s.laterality is not None] == [
        "Right",
        "Left",
        "Right",
        "Left",
    ]


def test_whole_body(tmp_path: Path) -> None:
    """Its settings are chosen by an expression; its labels come back by nearest neighbour."""
    card = card_of("wholeBody_ct_segmentation", tmp_path)

    assert card.name == "wholebody_ct_segmentation"
    assert card.grid == NetworkGrid("RAS", (1.5, 1.5, 1.5))
    assert card.after == (Normalize(nonzero=True), ScaleMinMax(-1.0, 1.0))
    assert card.window == Window((96, 96, 96), 0.25, "gaussian", padding="replicate")
    assert card.restore == "labels"
    assert len(card.structures) == 104
    assert all(s.type.meaning != "Tissue" for s in card.structures)


REFUSED = [
    ("brats_mri_segmentation", "MODEL_UNSUPPORTED", "Lambdad"),
    ("multi_organ_segmentation", "MODEL_NETWORK", "DiNTS"),
    ("pancreas_ct_dints_segmentation", "MODEL_NETWORK", "DiNTS"),
    ("pediatric_abdominal_ct_segmentation", "MODEL_UNSUPPORTED", "CropForegroundd"),
    ("prostate_mri_anatomy", "MODEL_UNSUPPORTED", "Invertd"),
    ("renalStructures_CECT_segmentation", "MODEL_UNSAFE", "ConcatImages"),
    ("renalStructures_UNEST_segmentation", "MODEL_UNSAFE", "UNesT"),
    ("segmentation_template", "MODEL_UNSUPPORTED", "modality"),
    ("spleen_deepedit_annotation", "MODEL_UNSAFE", "DeepEdit"),
    ("ventricular_short_axis_3label", "MODEL_UNSUPPORTED", "2 dimensions"),
    ("vista3d", "MODEL_UNSAFE", "vista3d132"),
    ("wholeBrainSeg_Large_UNEST_segmentation", "MODEL_UNSAFE", "UNesT"),
]


@pytest.mark.parametrize(("name", "code", "named"), REFUSED)
def test_refused(name: str, code: str, named: str, tmp_path: Path) -> None:
    with pytest.raises(ScanError) as caught:
        card_of(name, tmp_path)

    assert caught.value.code == code
    assert named in caught.value.detail
