"""Notebooks and prompts show short lines and pictures, never arrays."""

from __future__ import annotations

import base64
import io
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from scanloom.core import (
    CaseRecord,
    Code,
    Flag,
    Grid,
    Layer,
    Reason,
    Segmentation,
    Structure,
    Volume,
)

CODE = Code("10200004", "SCT", "Liver")
RED = (200, 10, 10)
FLAG = Flag.GAPS_INTERPOLATED


def picture_of(text: str) -> np.ndarray:
    match = re.search(r'src="data:image/png;base64,([^"]+)"', text)
    assert match is not None
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(match[1]))))


def phantom() -> Volume:
    """Return a CT of air with a bright cube in the right, anterior, superior corner."""
    array = np.full((60, 50, 40), -1000, np.int16)
    array[40:, 30:, 25:] = 200
    return Volume.from_array(array, np.eye(4), modality="CT")


def found_in(volume: Volume) -> Segmentation:
    labels = (volume.array > 0).astype(np.uint8)
    empty = Structure("spleen", 2, "Spleen", CODE, CODE, (0, 0, 250))
    structures = (Structure("liver", 1, "Liver", CODE, CODE, RED), empty)
    return Segmentation("tiny", (Layer(labels, structures),), volume.grid, version="1.2")


def test_representations_are_one_line_without_arrays() -> None:
    volume = phantom()
    texts = found_in(volume)
    shape = "60 x 50 x 40 voxels of 1.00 x 1.00 x 1.00 mm, RAS"

    assert repr(volume) == f"Volume(CT, {shape}, int16, HU)"
    assert repr(volume.grid) == f"Grid({shape})"
    assert repr(texts) == f"Segmentation(tiny 1.2; 2 structures: liver, spleen; {shape})"
    assert repr(texts.layers[0]) == "Layer(60 x 50 x 40 uint8: 2 structures: liver, spleen)"


def test_a_representation_names_what_is_unusual() -> None:
    sheared = np.eye(4)
    sheared[1, 2] = 0.5
    volume = Volume(np.zeros((4, 4, 4)), Grid((4, 4, 4), sheared), "unknown", None, flags=(FLAG,))

    for text in ("modality unknown", "sheared", "GAPS_INTERPOLATED"):
        assert text in repr(volume)


def test_long_lists_of_structures_are_cut() -> None:
    structures = tuple(Structure(f"s{n}", n, "S", CODE, CODE, RED) for n in range(1, 119))
    layer = Layer(np.zeros((3, 3, 3), np.uint8), structures)

    text = repr(Segmentation("tiny", (layer,), Grid((3, 3, 3), np.eye(4))))

    assert "118 structures: s1, s2, s3, s4, s5, s6, and 112 more" in text


def test_records_are_one_line() -> None:
    folder = Path("out/cases/ABC")
    done = CaseRecord("ABC", None, "", (FLAG,), folder, found_in(phantom()).measure(phantom()))
    failed = CaseRecord("", Reason.NOT_FOUND, "no such path", (), None)

    assert repr(done) == (
        "CaseRecord(ABC, published, 1 of 2 structures found, GAPS_INTERPOLATED, out/cases/ABC)"
    )
    assert repr(failed) == "CaseRecord(no id, NOT_FOUND: no such path)"
    assert "<img" not in failed._repr_html_()


def test_a_volume_is_shown_as_a_radiologist_sees_it() -> None:
    """Axial, coronal and sagittal: the patient's right on the left, front and head up."""
    array = np.full((60, 60, 60), -1000, np.int16)
    array[40:, 25:35, 25:35] = 200  # right of the middle
    array[25:35, 25:35, 40:] = 200  # above the middle
    picture = picture_of(Volume.from_array(array, np.eye(4), modality="CT")._repr_html_())[..., 0]
    height, width = picture.shape
    axial, coronal = picture[:, : width // 3], picture[:, width // 3 : 2 * width // 3]

    assert axial[height // 2, width // 24] > 200
    assert axial[height // 2, -width // 24] == 0
    assert coronal[height // 8].max() > 200
    assert coronal[-height // 8].max() == 0


def test_planes_have_one_scale() -> None:
    """A long thin stack: 100 mm wide, 50 mm deep, 20 mm high."""
    volume = Volume.from_array(np.full((50, 50, 5), 40.0), np.diag((2, 1, 4, 1)), modality="CT")

    picture = picture_of(volume._repr_html_())

    assert picture.shape[:2] == (140, 280 + 280 + 140 + 8)


def test_a_segmentation_shows_colours_and_volumes() -> None:
    text = found_in(phantom())._repr_html_()

    picture = picture_of(text).reshape(-1, 3)
    assert (picture == RED).all(axis=1).mean() > 0.01
    assert "<td>liver</td><td>6.0 ml</td>" in text
    assert "<td>spleen</td><td>0 ml</td>" in text


def test_a_record_shows_its_preview(tmp_path: Path) -> None:
    Image.new("RGB", (8, 6), RED).save(tmp_path / "preview.png")
    record = CaseRecord("ABC", None, "", (), tmp_path)

    assert picture_of(record._repr_html_()).shape == (6, 8, 3)


def test_text_is_escaped() -> None:
    record = CaseRecord("", Reason.NOT_FOUND, "<script>", (), None)

    assert "<script>" not in record._repr_html_()


def test_no_picture_with_text_that_identifies() -> None:
    volume = phantom()
    marked = Volume(volume.array, volume.grid, "HU", "CT", flags=(Flag.BURNED_IN,))

    assert "<img" not in marked._repr_html_()


@pytest.mark.parametrize("value", [np.nan, 7.0])
def test_constant_and_empty_scans_are_shown(value: float) -> None:
    volume = Volume.from_array(np.full((5, 4, 3), value, np.float32), np.eye(4), modality="MR")

    assert picture_of(volume._repr_html_()).ndim == 3
