"""Numbers of folds, stages, labels and options that no model of nnU-Net has are refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from scanloom.convert.nnunet import read_nnunet
from scanloom.core import ScanError
from support.nnunet_folders import write_model


def refused(folder: Path, **options: str) -> str:
    """Return the message with which a model is refused."""
    with pytest.raises(ScanError) as caught:
        read_nnunet(folder, options)
    return str(caught.value)


def test_another_configuration_than_the_models_own(tmp_path: Path) -> None:
    folder = write_model(tmp_path)

    assert "configuration is 3d_fullres" in refused(folder, configuration="2d")
    assert read_nnunet(folder, {"configuration": "3d_fullres"}).folds == ()


def test_folds_are_different_and_few(tmp_path: Path) -> None:
    folder = write_model(tmp_path, folds=("0", "1"))

    assert "named twice" in refused(folder, folds="0+0")
    assert "more than 100 folds" in refused(folder, folds="+".join(map(str, range(101))))


def change(file: Path, entries: dict[str, Any]) -> None:
    """Change entries of a JSON file."""
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))


def test_labels_are_few(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    change(folder / "dataset.json", {"labels": {f"l{n}": n for n in range(1001)}})

    assert "labels has more than 1000 values" in refused(folder)


def test_configurations_inherit_a_few_times(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    chain = {f"c{n}": {"inherits_from": f"c{n + 1}"} for n in range(30)}
    configurations = {**chain, "3d_fullres": {"inherits_from": "c0"}}
    change(folder / "plans.json", {"configurations": configurations})

    assert "inherits over 20 others" in refused(folder)
