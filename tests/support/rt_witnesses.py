"""Structures that outlines are difficult for, and foreign programs that fill outlines."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import SimpleITK as sitk

from scanloom.core import Layer, Segmentation
from scanloom.io.extras.rtstruct import RTSTRUCT
from scanloom.io.output.case_folder import CaseContent
from scanloom.io.scan import Scan
from support import case_folders
from support.seg_witnesses import itk_affine, program

Masks = dict[str, np.ndarray]
"""Masks (I, J, K) on the scan's grid by label."""


def difficult(scan: Scan, seed: int = 0) -> Segmentation:
    """Return nested rings with an island, noise up to the border, and lines and single voxels.

    They stand in layers of their own, since they overlap.
    """
    shape = scan.volume.grid.shape
    i, j, k = np.indices(shape)
    ring = np.maximum(np.abs(i - shape[0] // 2), np.abs(j - shape[1] // 2)) // 2
    rings = (ring % 2 == 0) & (ring < 6) & (k > 1)
    noise = np.random.default_rng(seed).random(shape) < (k + 1) / (shape[2] + 1)
    lines = (j % 4 == 0) & (k % 3 == 0) | (i % 4 == 0) & (k % 3 == 1)
    lines |= (i % 5 == j % 5) & (k % 3 == 2)
    layers = tuple(
        Layer(np.asfortranarray(mask * np.uint8(s.number), np.uint8), (s,))
        for mask, s in zip((rings, noise, lines), case_folders.STRUCTURES, strict=True)
    )
    return Segmentation("organs", layers, scan.volume.grid, "1.2.0")


def masks_of(segmentation: Segmentation) -> Masks:
    return {
        s.label: layer.labels == s.number for layer in segmentation.layers for s in layer.structures
    }


def rtstruct_of(folder: Path, scan: Scan, segmentation: Segmentation) -> Path:
    """Write an RTSTRUCT and read it back."""
    content = CaseContent(case_folders.case_with(also=("rtstruct",)), scan, [segmentation])
    RTSTRUCT.write(folder, content)
    RTSTRUCT.read_back(folder, content)
    return folder / "dicom" / "rtstruct.dcm"


def dciodvfy_says(path: Path) -> str:
    """Return all that dciodvfy says of a file, warnings included, but the name of its kind."""
    done = subprocess.run([program("dciodvfy"), path], capture_output=True, text=True, timeout=120)
    return (done.stdout + done.stderr).replace("RTStructureSet", "", 1).strip()


def filled_by_plastimatch(path: Path, scan: Scan, folder: Path) -> Masks:
    """Return the structures of an RTSTRUCT as plastimatch fills them on the scan's grid."""
    folder.mkdir()
    grid = scan.volume.grid
    image = sitk.GetImageFromArray(np.zeros(grid.shape[::-1], np.uint8))
    image.SetSpacing(grid.spacing)
    image.SetOrigin((grid.affine[:3, 3] * case_folders.LPS).tolist())
    axes = grid.affine[:3, :3] / grid.spacing * case_folders.LPS[:, None]
    image.SetDirection(axes.ravel().tolist())
    sitk.WriteImage(image, folder / "fixed.mha")
    command = [program("plastimatch"), "convert", "--input", path]
    command += ["--fixed", folder / "fixed.mha", "--output-prefix", folder / "masks"]
    subprocess.run(
        [*command, "--prefix-format", "nii.gz"], check=True, capture_output=True, timeout=300
    )
    return _masks(folder / "masks", "", scan)


def filled_by_dcmrtstruct2nii(path: Path, scan: Scan, source: Path, folder: Path) -> Masks:
    """Return the same by dcmrtstruct2nii, which needs pydicom 2: an environment of its own."""
    command = [program("dcmrtstruct2nii"), "convert", "-r", path, "-d", source, "-o", folder]
    subprocess.run([*command, "-c", "false"], check=True, capture_output=True, timeout=600)
    return _masks(folder, "mask_", scan)


def _masks(folder: Path, prefix: str, scan: Scan) -> Masks:
    """Return masks by label, their voxels moved to the scan's order by their place."""
    masks = {}
    for path in sorted(folder.glob(f"{prefix}*.nii.gz")):
        image = sitk.ReadImage(path)
        array = sitk.GetArrayFromImage(image).T > 0
        places = np.argwhere(array) @ itk_affine(image)[:3, :3].T + itk_affine(image)[:3, 3]
        index = scan.volume.grid.index(places) if len(places) else np.zeros((0, 3))
        np.testing.assert_allclose(index, np.rint(index), atol=0.05)
        masks[path.name.removesuffix(".nii.gz").removeprefix(prefix)] = mask = np.zeros(
            scan.volume.grid.shape, bool
        )
        mask[tuple(np.rint(index).astype(int).T)] = True
    return masks


def assert_same_masks(found: Masks, expected: Masks) -> None:
    assert {
        name: int((found[name] != mask).sum()) for name, mask in expected.items()
    } == dict.fromkeys(expected, 0)
