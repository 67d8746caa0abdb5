"""Names of the files of a case."""

from __future__ import annotations

import pytest

from scanloom.io.output.file_names import label_map_name, mask_name, seg_name


def test_one_model_needs_no_prefix() -> None:
    assert label_map_name("segmentation", "a", ["a"]) == "segmentation.nii.gz"
    assert label_map_name("segmentation", "a", ["a"], 1) == "segmentation-2.nii.gz"
    assert label_map_name("segmentation_rect", "a", ["a"]) == "segmentation_rect.nii.gz"
    assert seg_name("segmentation", "a", ["a"]) == "dicom/segmentation.dcm"
    assert mask_name("liver", "a", ["a"]) == "split/liver.nii.gz"


def test_several_models_have_their_names_in_front() -> None:
    assert label_map_name("segmentation", "b", ["a", "b"]) == "b-segmentation.nii.gz"
    assert seg_name("segmentation", "b", ["a", "b"], 2) == "dicom/b-segmentation-3.dcm"
    assert mask_name("liver", "a", ["a", "b"]) == "split/a-liver.nii.gz"


@pytest.mark.parametrize("models", [["a", "a"], ["b"], []])
def test_names_that_would_collide_are_a_fault(models: list[str]) -> None:
    with pytest.raises(ValueError, match="must be one of"):
        label_map_name("segmentation", "a", models)
