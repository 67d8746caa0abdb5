"""Masks, files, measurements and previews of a segmentation in memory."""

from __future__ import annotations

import pickle
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from PIL import Image

from scanloom.core import Code, Flag, Layer, Segmentation, Structure, Volume

CODE = Code("10200004", "SCT", "Liver")


@pytest.fixture
def volume() -> Volume:
    array = np.full((30, 20, 10), -1000, np.int16)
    array[10:20, 5:15, 2:8] = 60
    affine = np.diag((-1.0, -1.0, 3.0, 1.0))
    return Volume.from_array(array, affine, modality="CT")


@pytest.fixture
def segmented(volume: Volume) -> Segmentation:
    labels = np.where(volume.array > 0, 3, 0).astype(np.uint8)
    liver = Structure("liver", 3, "Liver", CODE, CODE, (200, 10, 10))
    spleen = Structure("spleen", 4, "Spleen", CODE, CODE, (10, 10, 200))
    layers = (Layer(labels, (liver, spleen)),)
    return Segmentation("tiny", layers, volume.grid, flags=(Flag.MODALITY_UNKNOWN,))


def test_a_structure_is_a_mask_on_the_grid_of_the_scan(
    volume: Volume, segmented: Segmentation
) -> None:
    assert segmented["liver"].dtype == bool
    np.testing.assert_array_equal(segmented["liver"], volume.array > 0)
    assert not segmented["spleen"].any()
    assert segmented.labels == ("liver", "spleen")
    assert list(segmented) == ["liver", "spleen"]
    assert "liver" in segmented
    assert "kidney" not in segmented


def test_an_unknown_structure_is_answered_with_the_nearest(segmented: Segmentation) -> None:
    with pytest.raises(KeyError, match="no structure 'liverr': did you mean liver"):
        segmented["liverr"]


def test_saved_files_are_read_by_nibabel(segmented: Segmentation, tmp_path: Path) -> None:
    segmented.save(tmp_path / "labels.nii.gz")
    segmented.save(str(tmp_path / "liver.nii.gz"), "liver")

    labels = nib.load(tmp_path / "labels.nii.gz")
    np.testing.assert_array_equal(np.asarray(labels.dataobj), segmented.layers[0].labels)
    np.testing.assert_allclose(labels.affine, segmented.grid.affine)
    assert labels.header.get_intent() == segmented.to_nibabel().header.get_intent()
    assert labels.header.get_intent()[0] == "label"
    mask = np.asarray(nib.load(tmp_path / "liver.nii.gz").dataobj)
    np.testing.assert_array_equal(mask, segmented["liver"])


def test_other_formats_are_refused(segmented: Segmentation, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\.nii\.gz"):
        segmented.save(tmp_path / "labels.nrrd")
    assert not list(tmp_path.iterdir())


def test_measurements_are_those_of_the_scan(volume: Volume, segmented: Segmentation) -> None:
    liver, spleen = segmented.measure(volume)

    assert liver.volume_ml == pytest.approx(1.8)
    assert (liver.mean, spleen.voxels) == (60.0, 0)
    assert Flag.MODALITY_UNKNOWN in liver.flags


def test_copies_in_another_process_are_read_only(volume: Volume, segmented: Segmentation) -> None:
    for array in (
        pickle.loads(pickle.dumps(volume)).array,
        pickle.loads(pickle.dumps(segmented)).layers[0].labels,
    ):
        with pytest.raises(ValueError, match="read-only"):
            array[0, 0, 0] = 1


def test_a_preview_is_a_png(volume: Volume, segmented: Segmentation, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must end in \.png"):
        segmented.preview(volume, tmp_path / "preview.jpg")


def test_a_preview_is_a_picture(volume: Volume, segmented: Segmentation, tmp_path: Path) -> None:
    segmented.preview(volume, tmp_path / "preview.png")

    with Image.open(tmp_path / "preview.png") as picture:
        assert min(picture.size) > 300
