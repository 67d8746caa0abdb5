"""Labels that come back from another program."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from scanloom.core import Grid, Layer, Segmentation, Structure
from scanloom.engine.revisions import _by_name
from scanloom.io.extras.segnrrd import write_seg_nrrd
from scanloom.review.label_files import read_label_file
from support.model_cards import TISSUE


def test_our_own_file_comes_back_whatever_its_names(tmp_path: Path) -> None:
    names = ("T1 ~ T2 | left", "a\\nb^2", "Left_kidney  ")
    structures = tuple(
        Structure(f"s{n}", n, name, TISSUE, TISSUE, (n, n, n)) for n, name in enumerate(names, 1)
    )
    labels = np.asfortranarray(np.arange(24).reshape(4, 3, 2) % 4, np.uint8)
    grid = Grid((4, 3, 2), np.eye(4))
    path = tmp_path / "a.seg.nrrd"
    write_seg_nrrd(Segmentation("model", (Layer(labels, structures),), grid), path)
    entry = {
        "file": "a.nii.gz",
        "structures": [{"number": s.number, "name": s.name, "label": s.label} for s in structures],
    }

    before = {"a.nii.gz": np.zeros_like(labels)}
    after = _by_name(read_label_file(path, grid), [entry], before)

    np.testing.assert_array_equal(after["a.nii.gz"], labels)
