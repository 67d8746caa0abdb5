"""The review's outlines on real scans, in a real Chromium, by screenshots without and with labels.

Needs playwright and a Chromium, as `tests/unit/review/server/test_review_browser.py`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest

import scanloom
from scanloom.cards.card import ANY_MODALITY
from scanloom.core import Layer, Segmentation, StepTimer, Volume
from support.model_cards import structures
from support.outline_contrast import contrasts
from support.real_scans import scans
from support.review_browser import Running, asked, chromium, picture_of
from support.review_cases import Bands, publish_scan
from support.shown_scans import SHOWN_SCANS, parts_of

pytestmark = pytest.mark.reference

__all__ = ["chromium"]

LPS = np.diag((-1.0, -1.0, 1.0, 1.0))
PLANES = ("axial", "coronal", "sagittal")
BARE = """() => {
  for (const each of document.querySelectorAll(".line, .letter")) each.style.display = "none";
}"""
PLACE = """(plane) => {
  const canvas = document.querySelector(`#${plane} canvas`), style = canvas.style;
  return [Number(canvas.dataset.index),
    ...[style.left, style.top, style.width, style.height].map(parseFloat)];
}"""


class Parts(Bands):
    """Labels five parts of a scan by intensity."""

    def __init__(self, weights: Path, first: int = 1, layers: int = 1) -> None:
        super().__init__(weights, first, layers)
        channels = tuple(replace(each, modality=ANY_MODALITY) for each in self.card.channels)
        self.card = replace(self.card, structures=structures(5), channels=channels)

    def predict(self, volume: Volume, clock: StepTimer | None = None, **_: object) -> Segmentation:
        with (clock or StepTimer()).step("network"):
            labels = np.asfortranarray(parts_of(volume))
        layer = Layer(labels, self.card.structures)
        return Segmentation("threshold", (layer,), volume.grid, "1")


@pytest.mark.parametrize("scan", SHOWN_SCANS)
def test_every_outline_stands_out_from_the_tissue_below_it(
    scan: str, chromium: Any, tmp_path: Path
) -> None:
    """Each outline has 3 to 1 at least in the median, over the three planes of the first view."""
    volume = scanloom.load_volume(scans(scan))
    modality = volume.modality if volume.modality in ("CT", "MR") else "MR"
    array = np.nan_to_num(volume.array).clip(-32768, 32767).astype(np.int16)
    (tmp_path / "scans").mkdir()
    path = tmp_path / "scans" / "scan.nii.gz"
    nib.save(nib.Nifti1Image(array, volume.grid.affine), path)
    case = publish_scan(tmp_path, path, also=("image",), kind=Parts, modality=modality)
    labels = np.asarray(nib.load(case / "segmentation.nii.gz").dataobj)
    server = Running(tmp_path / "out", tmp_path / "key", "--reviewers", "anna")
    context = chromium.new_context(viewport={"width": 1400, "height": 900})
    try:
        tab = context.new_page()
        tab.goto(server.links["anna"])
        tab.wait_for_selector("#filters button", state="attached")
        tab.click(f"text={case.name}")
        tab.wait_for_selector(f"body[data-opened='{case.name}']")
        about = asked(tab, f"/api/case/{case.name}").json()
        tab.evaluate(BARE)
        drawn = {plane: picture_of(tab, plane) for plane in PLANES}
        tab.keyboard.press("h")
        seen: dict[int, list[np.ndarray]] = {}
        for plane in PLANES:
            alone = picture_of(tab, plane)
            shown = labels_shown(labels, case, about, plane, tab.evaluate(PLACE, plane), alone)
            for number, found in contrasts(alone, drawn[plane], shown).items():
                seen.setdefault(number, []).append(found)
    finally:
        context.close()
        server.stop()

    medians = {n: round(float(np.median(np.concatenate(found))), 1) for n, found in seen.items()}
    print(f"{scan}: {medians}")
    assert len(medians) >= 3
    assert min(medians.values()) >= 3


def labels_shown(
    labels: np.ndarray,
    case: Path,
    about: dict[str, Any],
    plane: str,
    place: list[float],
    picture: np.ndarray,
) -> np.ndarray:
    """Return the label at each pixel of a screenshot of a plane, 0 beside the slice."""
    index, left, top, wide, high = place
    at = about["planes"][plane]
    voxel = np.zeros((at["height"], at["width"], 3))
    voxel[..., at["normal"]] = index
    voxel[..., at["down"]], voxel[..., at["across"]] = np.indices((at["height"], at["width"]))
    to_lps = np.array(about["affine"])
    of_file = LPS @ nib.load(case / "segmentation.nii.gz").affine
    mm = voxel @ to_lps[:3, :3].T + to_lps[:3, 3]
    source = np.rint((mm - of_file[:3, 3]) @ np.linalg.inv(of_file[:3, :3]).T).astype(int)
    cut = labels[tuple(np.moveaxis(source, -1, 0))]
    rows, columns = (
        np.floor((np.arange(n) + 0.5 - low) / length * count).astype(int)
        for n, low, length, count in (
            (picture.shape[0], top, high, at["height"]),
            (picture.shape[1], left, wide, at["width"]),
        )
    )
    y, x = ((n >= 0) & (n < size) for n, size in zip((rows, columns), cut.shape, strict=True))
    shown = np.zeros(picture.shape[:2], int)
    shown[np.ix_(y, x)] = cut[np.ix_(rows[y], columns[x])]
    return shown
