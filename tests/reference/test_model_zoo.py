"""The configs of MONAI's model zoo: each gives a card, or is refused with its obstacles.

SCANLOOM_ZOO names a checkout of github.com/Project-MONAI/model-zoo (or its `models` folder).
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from scanloom.cards.card import (
    Argmax,
    Decision,
    ModelCard,
    NetworkGrid,
    NetworkSpec,
    Normalize,
    Paint,
    ScaleMinMax,
    ScaleRange,
    Window,
)
from scanloom.convert.readers import read_model
from scanloom.core import ScanError
from scanloom.inference.network.architectures import build_network

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
    shutil.copytree(source, folder)
    (folder / "models").mkdir(exist_ok=True)
    for file in ("model.pt", "model_lowres.pt", "dynunet_FT.pt"):
        (folder / "models" / file).write_bytes(b"stands for the weights")
    code = {"node_a": (13, 4), "arch_code_a": (12, 10), "arch_code_c": (12, 10)}
    arrays = {key: np.ones(shape) for key, shape in code.items()}
    torch.save(arrays, folder / "models" / "search_code_18590.pt")
    return folder


def card_of(name: str, tmp_path: Path, **options: str) -> ModelCard:
    return read_model(bundle(name, tmp_path), options)


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


def test_low_resolution_variant_of_the_whole_body(tmp_path: Path) -> None:
    card = card_of("wholeBody_ct_segmentation", tmp_path, highres="false")

    assert card.grid == NetworkGrid("RAS", (3.0, 3.0, 3.0))
    assert card.weights.file.name == "model_lowres.pt"


ACCEPTED = [
    ("brats_mri_segmentation", "SegResNet", 4, 3, Paint(((1, 2), (0, 1), (2, 4)))),
    ("multi_organ_segmentation", "DiNTS", 1, 7, Argmax()),
    ("pancreas_ct_dints_segmentation", "DiNTS", 1, 2, Argmax()),
    ("pediatric_abdominal_ct_segmentation", "DynUNet", 1, 3, Argmax()),
    ("prostate_mri_anatomy", "UNet", 1, 2, Argmax()),
    (
        *("renalStructures_CECT_segmentation", "SegResNet", 3, 5),
        Paint(((5, 5), (4, 4), (3, 3), (2, 2), (1, 1)), 0.0),
    ),
    ("renalStructures_UNEST_segmentation", "UNesT", 1, 3, Argmax()),
    ("segmentation_template", "UNet", 1, 3, Argmax()),
    ("spleen_deepedit_annotation", "DynUNetWithoutClicks", 1, 1, Argmax()),
    ("ventricular_short_axis_3label", "UNet", 1, 3, Argmax()),
    ("vista3d", "Vista3d", 1, 117, Argmax()),
    ("wholeBrainSeg_Large_UNEST_segmentation", "UNesT", 1, 132, Argmax()),
]


@pytest.mark.parametrize(("name", "network", "channels", "structures", "decision"), ACCEPTED)
def test_accepted(
    name: str, network: str, channels: int, structures: int, decision: Decision, tmp_path: Path
) -> None:
    """Each gives a card, and its network can be built."""
    card = card_of(name, tmp_path)

    assert (card.network.name, len(card.channels)) == (network, channels)
    assert (len(card.structures), card.decision) == (structures, decision)
    with torch.device("meta"):
        build_network(card.network)


def test_changed_script_is_refused(tmp_path: Path) -> None:
    folder = bundle("renalStructures_CECT_segmentation", tmp_path)
    script = folder / "scripts" / "my_transforms.py"
    script.write_text(script.read_text() + "\n")

    with pytest.raises(ScanError) as caught:
        read_model(folder)
    assert caught.value.code == "MODEL_UNSAFE"
    assert "scripts/my_transforms.py, SHA-256 " in caught.value.detail


REFUSED = [
    ("lung_nodule_ct_detection", "MODEL_UNSAFE", ("RetinaNet", "scripts/detection_inferer.py")),
    ("pathology_nuclick_annotation", "MODEL_UNSAFE", ("AddClickSignalsd", "sys.path.append")),
    ("vista2d", "MODEL_UNSAFE", ("CellSamWrapper", "scripts/components.py")),
]


@pytest.mark.parametrize(("name", "code", "named"), REFUSED)
def test_refused(name: str, code: str, named: tuple[str, ...], tmp_path: Path) -> None:
    """The refusal lists all obstacles, not only the first."""
    with pytest.raises(ScanError) as caught:
        card_of(name, tmp_path)

    assert caught.value.code == code
    assert all(subject in caught.value.detail for subject in named)
