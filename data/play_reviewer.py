"""Play a reviewer of the drawn archive: accept results, and correct those with wrong bone.

    python data/play_reviewer.py RESULTS TRUTH LINK

RESULTS is the output folder, TRUTH the folder of true label maps, LINK that of `scanloom review
--patients`. What a person sees, this script looks up: where a result has bone and the truth soft
tissue. It asks the server for the same things as the page in a browser does, and draws polygons.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
from contourpy import FillType, contour_generator
from draw_archive import SPACING, TISSUES
from numpy.typing import NDArray
from scipy.ndimage import binary_opening, binary_propagation, generate_binary_structure

SOFT_TISSUE, BONE = TISSUES.index("soft_tissue"), TISSUES.index("bone")
LEAST_ML = 10.0
"""Least wrong bone of a case that this reviewer corrects."""
AXIAL = {"plane": "axial", "layer": 0, "shape": "polygon", "radius_mm": 1.0, "label": SOFT_TISSUE}


class Browser:
    """A reviewer's link, as a browser uses it."""

    def __init__(self, link: str) -> None:
        address, _, token = link.partition("#")
        self.origin = "/".join(address.split("/")[:3])
        self._headers = {"Origin": self.origin, "Content-Type": "application/json"}
        reviewer = address.rstrip("/").rpartition("/")[2]
        self.session = self.ask("session", {"token": token, "reviewer": reviewer})["session"]
        self._headers["Authorization"] = f"Bearer {self.session}"

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Return an answer of the server; with a body, something is changed."""
        content = None if body is None else json.dumps(body).encode()
        address = f"{self.origin}/api/{path}"
        request = urllib.request.Request(address, content, self._headers)
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)


def wrong_bone(result: Path, truth: Path) -> NDArray[np.intp]:
    """Return the voxels (n, 3) of a result that are bone, and in truth soft tissue.

    Of each slice, the parts that are nowhere two voxels thick are left: borders of true bone.
    """
    found, true = (np.asarray(nib.load(path).dataobj) for path in (result, truth))
    wrong = (found == BONE) & (true == SOFT_TISSUE)
    thick = binary_opening(wrong, np.ones((2, 2, 1)))
    in_slice = generate_binary_structure(3, 1) & np.array([False, True, False])
    return np.argwhere(binary_propagation(thick, in_slice, wrong))


def polygons(mask: NDArray[np.bool_]) -> list[NDArray[np.float64]]:
    """Return lines (n, 2) around the parts of a mask (x, y), in voxels; holes are left out."""
    shares = np.pad(mask, 1).astype(float).T
    parts = contour_generator(z=shares, fill_type=FillType.OuterOffset).filled(0.5, 2)
    return [points[: ends[1]] - 1 for points, ends in zip(*parts, strict=True)]


def on_slices(case: dict[str, Any], voxels: NDArray[np.intp], path: Path) -> NDArray[np.bool_]:
    """Return a mask of voxels of a file, on the axes on which the page shows its slices."""
    to_mm = np.diag((-1, -1, 1, 1)) @ nib.load(path).affine
    to_shown = np.linalg.solve(np.array(case["affine"]), to_mm)
    shown = np.round(voxels @ to_shown[:3, :3].T + to_shown[:3, 3]).astype(int)
    mask = np.zeros(case["shape"], bool)
    mask[tuple(shown.T)] = True
    return mask


def correct(browser: Browser, case: dict[str, Any], mask: NDArray[np.bool_]) -> int:
    """Draw soft tissue around a mask, slice by slice, and save; return the number of polygons."""
    of_case = f"case/{case['id']}"
    version, drawn = browser.ask(f"{of_case}/draft")["version"], 0
    for index in np.flatnonzero(mask.any(axis=(0, 1))).tolist():
        for line in polygons(mask[:, :, index]):
            stroke = {**AXIAL, "index": index, "points": line.tolist(), "version": version}
            version = browser.ask(f"{of_case}/stroke", stroke)["version"]
            drawn += 1
    browser.ask(f"{of_case}/draft/save", {"version": version})
    return drawn


def main(results: Path, truth: Path, link: str) -> None:
    """Look at each case, correct it where needed, and accept it."""
    browser, accepted, corrected, drawn = Browser(link), 0, 0, 0
    listed = browser.ask("worklist?rows=0-999")
    for row in listed["cases"]:
        case = browser.ask(f"case/{row['id']}")
        path = results / case["folder"] / "segmentation.nii.gz"
        voxels = wrong_bone(path, truth / row["who"][0])
        if len(voxels) * SPACING**3 / 1000 >= LEAST_ML:
            drawn += correct(browser, case, on_slices(case, voxels, path))
            corrected += 1
            case = browser.ask(f"case/{row['id']}")
        else:
            accepted += 1
        shown = {name: case[name] for name in ("version", "last")}
        browser.ask(f"case/{row['id']}/verdict", {"decision": "accept", **shown})
    print(f"{accepted} accepted as they were, {corrected} corrected with {drawn} polygons")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
