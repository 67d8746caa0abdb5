from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

import scanloom
from scanloom.core import Code, Layer, Segmentation, Structure
from scanloom.ops.measure import measure
from scanloom.review.preview.page import HEADER_HEIGHT, draw_preview
from support.empty_share import empty_share
from support.real_scans import scans

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
