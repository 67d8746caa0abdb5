from __future__ import annotations

import shutil

import numpy as np
import pytest
from PIL import Image

import scanloom
from scanloom.core import Code, Grid, Layer, Segmentation, Structure
from scanloom.ops.measure import measure
from scanloom.review.preview.content import About, choose_content
from scanloom.review.preview.page import HEADER_HEIGHT, draw_preview
from scanloom.review.preview.slicing import Raster, View, find_body, label_pixels
from support.empty_share import empty_share
from support.outline_contrast import contrasts
from support.real_scans import scans
from support.shown_scans import SHOWN_SCANS, parts_of

pytestmark = pytest.mark.reference

CODE = Code("85756007", "SCT", "Tissue")


def page(path, out) -> np.ndarray:
    """Draw a scan with its bright half marked."""
    volume = scanloom.load_volume(path)
    labels = (volume.array > np.median(volume.array)).astype(np.uint8)
    bright = Structure("bright", 1, "Bright", CODE, CODE, (230, 159, 0))
    segmentation = Segmentation("bright", (Layer(labels, (bright,)),), volume.grid)
    draw_preview(volume, (segmentation,), measure(segmentation, volume), volume.flags, out)
    with Image.open(out) as image:
        return np.asarray(image.convert("RGB")).astype(int)[HEADER_HEIGHT - 7 :]


def test_one_brain_stored_in_many_orders_is_one_picture(tmp_path):
    """A published set of NIfTI files that differ only in the order of their axes."""
    files = sorted(scans("orientation/nifti_space").glob("[RLAPSI][RLAPSI][RLAPSI].nii.gz"))
    pictures = [page(path, tmp_path / f"{path.name}.png") for path in files]

    assert len(pictures) > 3
    for picture in pictures[1:]:
        difference = np.abs(picture - pictures[0]).max(axis=-1)
        assert (difference > 2).mean() < 1e-3


@pytest.mark.parametrize(
    "scan", ["ct/crlm1004_abdomen_dicom", "ct/totalseg_example_dicom/dicom", "mr/d2n_hitachi/dicom"]
)
def test_real_scans_are_drawn(scan, tmp_path):
    """Axial stacks and a doubly oblique sagittal one give a page that pictures fill."""
    assert page(scans(scan), tmp_path / "p.png").std() > 10
    assert empty_share(tmp_path / "p.png") <= 0.15


COLORS = ((225, 45, 30), (255, 192, 0), (30, 160, 135), (60, 160, 255), (127, 85, 255))
"""Of soft tissue, fat, bone and lung; and a dark colour of the table."""


@pytest.mark.parametrize("scan", SHOWN_SCANS)
def test_every_outline_stands_out_from_the_tissue_below_it(scan, tmp_path):
    """Five structures by intensity, from the darkest to the brightest, in all planes: each outline
    has 3 to 1 at least in the median, and all outlines together nearly everywhere."""
    volume = scanloom.load_volume(scans(scan))
    labels = parts_of(volume)
    structures = tuple(
        Structure(f"s{n}", n, f"Part {n}", Code("1", "SCT", "Part"), CODE, color)
        for n, color in enumerate(COLORS, start=1)
    )
    grid = Grid(volume.grid.shape, volume.grid.affine)
    segmentation = Segmentation("parts", (Layer(labels, structures),), grid)
    content = choose_content(
        volume, (segmentation,), measure(segmentation, volume), About("", volume.modality)
    )
    seen: dict[int, list[np.ndarray]] = {}
    for plane in content.planes:
        wide, high = plane.area.size
        size = 400, max(40, round(400 * high / wide))
        alone, drawn = (np.asarray(content.picture(plane, size, w)) for w in ("scan", "labels"))
        raster = Raster(plane.area, size)
        cut = plane.view.cut(labels, plane.direction, plane.position, None, raster)
        for number, found in contrasts(alone, drawn, label_pixels(cut, raster)).items():
            seen.setdefault(number, []).append(found)

    of_each = {number: np.concatenate(found) for number, found in seen.items()}
    table = {number: round(float(np.median(found)), 1) for number, found in of_each.items()}
    share = float((np.concatenate(list(of_each.values())) >= 3).mean())
    print(f"{scan}: {table}, {share:.3f} of all outlines at 3:1 or more")
    assert len(table) >= 3
    assert min(table.values()) >= 3
    assert share >= 0.88


@pytest.mark.parametrize(
    ("scan", "head", "enhanced"),
    [
        ("ct/crlm1004_abdomen_dicom", False, False),
        ("ct/sts002_thigh/dicom_ct", False, False),
        ("ct/totalseg_example/example_ct.nii.gz", False, False),
        ("ct/totalseg_example_dicom/dicom", False, False),
        ("ct/totalseg_pulmonary/ct_cropped.nii.gz", False, True),
        ("../train/labelled_ct/totalseg_aorta/image_ct.nii.gz", False, True),
        ("ct/ge_head_tilt_dicom/dicom", True, False),
    ],
)
def test_heads_and_contrast_agents_are_told(scan, head, enhanced, tmp_path):
    path = scans(scan)
    if head:  # the part of the series with even spacing
        path = tmp_path / "head"
        path.mkdir()
        for n in range(7, 15):
            shutil.copy(scans(f"{scan}/{n:02d}.dcm"), path)
    volume = scanloom.load_volume(path)
    body = find_body(volume, View(volume.grid), hounsfield=True)
    assert (body.head, body.enhanced) == (head, enhanced)
