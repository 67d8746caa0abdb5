"""`.seg.nrrd`, as slicerio, pynrrd and SimpleITK read it, and what its read-back refuses."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import nrrd
import numpy as np
import pytest
import SimpleITK as sitk
import slicerio

from scanloom.core import Code, Grid, Reason, ScanError, Segmentation, Structure
from scanloom.core.grid import LPS_TO_RAS_AFFINE
from scanloom.core.segmentation import Layer
from scanloom.io.extras.segnrrd import _check, write_seg_nrrd
from support import model_cards

SHAPE = (9, 8, 7)
CATEGORY = Code("123037004", "SCT", "Anatomical Structure")
LEFT = Code("7771000", "SCT", "Left")


def structure(number: int, name: str = "", laterality: Code | None = None) -> Structure:
    kidney = Code("64033007", "SCT", "Kidney")
    name = name or f"Structure {number}"
    return Structure(f"s{number}", number, name, CATEGORY, kidney, (10, 200, 255), laterality)


def segmentation(
    grid: Grid, layers: int = 1, dtype: type = np.uint8, highest: int = 2
) -> Segmentation:
    random = np.random.default_rng(layers)
    made = []
    for n in range(layers):
        numbers = [2 * n + 1, highest + 2 * n]
        labels = random.choice([0, *numbers], size=grid.shape, p=[0.6, 0.3, 0.1])
        made.append(Layer(np.asfortranarray(labels.astype(dtype)), tuple(map(structure, numbers))))
    return Segmentation("model", tuple(made), grid)


@pytest.mark.parametrize("codes", ["RAS", "LPS", "PIR", "SAL"])
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_others_read_voxels_grid_and_segments(layers: int, codes: str, tmp_path: Path) -> None:
    grid = model_cards.grid(SHAPE, (0.7, 1.3, 2.9), codes=codes, turn=11)
    written, path = segmentation(grid, layers), tmp_path / "a.seg.nrrd"

    write_seg_nrrd(written, path)

    image = sitk.ReadImage(path)
    stack = sitk.GetArrayFromImage(image).reshape(*SHAPE[::-1], layers)
    voxels, header = nrrd.read(str(path))
    assert list(header["kinds"]) == ["list"] * (layers > 1) + ["domain"] * 3
    theirs = slicerio.read_segmentation(str(path))
    for n, layer in enumerate(written.layers):
        np.testing.assert_array_equal(stack[..., n].T, layer.labels)
        np.testing.assert_array_equal(voxels if layers == 1 else voxels[n], layer.labels)
        read = theirs["voxels"] if layers == 1 else theirs["voxels"][n]
        np.testing.assert_array_equal(read, layer.labels)
    np.testing.assert_allclose(LPS_TO_RAS_AFFINE @ theirs["ijkToLPS"], grid.affine, atol=1e-12)
    expected = [
        (f"s{s.number}", s.name, s.number, n, ["SCT", "64033007", "Kidney"])
        for n, layer in enumerate(written.layers)
        for s in layer.structures
    ]
    found = [
        (s["id"], s["name"], s["labelValue"], s["layer"], s["terminology"]["type"])
        for s in theirs["segments"]
    ]
    assert found == expected
    assert theirs["segments"][0]["color"] == pytest.approx([10 / 255, 200 / 255, 1.0], abs=1e-6)
    _check(path, written, "a.seg.nrrd")


def test_extents_are_those_of_the_voxels(tmp_path: Path) -> None:
    labels = np.zeros(SHAPE, np.uint8, order="F")
    labels[2:5, 1:8, 6] = 1
    layer = Layer(labels, (structure(1), structure(2)))
    grid = model_cards.grid(SHAPE, (1.0, 1.0, 1.0))

    write_seg_nrrd(Segmentation("model", (layer,), grid), tmp_path / "a.seg.nrrd")

    found, absent = slicerio.read_segmentation(str(tmp_path / "a.seg.nrrd"))["segments"]
    assert found["extent"] == [2, 4, 1, 7, 6, 6]
    assert absent["extent"] == [0, -1, 0, -1, 0, -1]


def test_sides_large_numbers_and_strange_names(tmp_path: Path) -> None:
    grid = model_cards.grid(SHAPE, (1.0, 1.0, 1.0))
    labels = np.full(SHAPE, 60_000, np.uint16, order="F")
    name = "Left\nkidney | ~^ := \\n1\\"
    layer = Layer(labels, (structure(60_000, name, LEFT),))
    written, path = Segmentation("model", (layer,), grid), tmp_path / "a.seg.nrrd"

    write_seg_nrrd(written, path)

    [segment] = slicerio.read_segmentation(str(path))["segments"]
    assert segment["labelValue"] == 60_000
    assert segment["name"] == "Left kidney := n1"
    assert segment["terminology"]["typeModifier"] == ["SCT", "7771000", "Left"]
    _check(path, written, "a.seg.nrrd")


def test_a_sheared_scan_is_on_the_rectangular_grid(tmp_path: Path) -> None:
    grid = model_cards.grid(SHAPE, (1.0, 1.0, 3.0), tilt=15)
    written, path = segmentation(grid), tmp_path / "a.seg.nrrd"

    write_seg_nrrd(written, path)

    directions = slicerio.read_segmentation(str(path))["ijkToLPS"][:3, :3]
    products = directions.T @ directions
    assert np.abs(products - np.diag(np.diag(products))).max() < 1e-9
    moved = path.with_name(os.fsdecode(b"M\xfcller"))  # not UTF-8: SimpleITK would end the process
    moved.mkdir()
    _check(path.rename(moved / path.name), written, "a.seg.nrrd")


def test_equal_content_has_equal_bytes(tmp_path: Path) -> None:
    written = segmentation(model_cards.grid(SHAPE, (1.0, 1.0, 1.0)), 2)
    for name in ("a", "b"):
        write_seg_nrrd(written, tmp_path / name)

    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def _other_voxel(written: Segmentation) -> Segmentation:
    labels = written.layers[-1].labels.copy()
    labels[3, 3, 3] = 0 if labels[3, 3, 3] else written.layers[-1].structures[0].number
    last = Layer(labels, written.layers[-1].structures)
    return replace(written, layers=(*written.layers[:-1], last))


def _other_place(written: Segmentation) -> Segmentation:
    affine = written.grid.affine.copy()
    affine[0, 3] += 0.01
    return replace(written, grid=Grid(SHAPE, affine))


def _changed(**fields: Any) -> Any:
    def change(written: Segmentation) -> Segmentation:
        first, *others = written.layers[0].structures
        other = Layer(written.layers[0].labels, (replace(first, **fields), *others))
        return replace(written, layers=(other, *written.layers[1:]))

    return change


def _fewer_layers(written: Segmentation) -> Segmentation:
    return replace(written, layers=written.layers[:1])


@pytest.mark.parametrize(
    "change",
    [
        *(_other_voxel, _other_place, _fewer_layers),
        _changed(name="Other"),
        _changed(color=(10, 200, 254)),
        _changed(laterality=LEFT),
        _changed(type=Code("10200004", "SCT", "Liver")),
    ],
)
def test_a_file_of_other_content_is_a_mismatch(change: Any, tmp_path: Path) -> None:
    written = segmentation(model_cards.grid(SHAPE, (1.0, 1.0, 1.0)), 2)
    write_seg_nrrd(change(written), tmp_path / "a.seg.nrrd")

    with pytest.raises(ScanError) as caught:
        _check(tmp_path / "a.seg.nrrd", written, "a.seg.nrrd")

    assert caught.value.reason is Reason.WRITE_MISMATCH
