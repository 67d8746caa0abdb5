"""Draw the sample study: a synthetic torso as CT, its volumes known. No patient's data is in it.

    python data/draw_torso.py [FOLDER]

writes `torso_ct/` (DICOM), `torso_ct.nii.gz` and `torso_truth.json` into FOLDER (here by default).
The same files, byte for byte, each time.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import sys
from pathlib import Path

import nibabel as nib
import numpy as np
from numpy.typing import NDArray
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian, RLELossless
from scipy.ndimage import gaussian_filter
from torso_anatomy import Array, M, Slab, Torso, torso
from torso_organs import paint_torso

SEED = 9
SHAPE = (192, 144, 60)  # columns, rows, slices
SPACING = (2.2, 2.2, 5.0)  # mm
FINE = (2, 2, 4)  # points along each axis of a voxel: what is drawn is averaged over 16 points
FIRST = (-210.1, -146.3, -147.5)  # LPS mm, centre of the first voxel
MATERIALS: dict[M, tuple[float, float, str]] = {  # HU, how much it varies, what it counts as
    M.AIR: (-1000, 0, "outside"),
    M.TABLE: (110, 0, "outside"),
    M.FOAM: (-945, 4, "outside"),
    M.SKIN: (40, 4, "soft_tissue"),
    M.FAT: (-104, 5, "fat"),
    M.MUSCLE: (54, 5, "soft_tissue"),
    M.LUNG: (-860, 14, "lung"),
    M.LUNG_VESSEL: (42, 0, "soft_tissue"),
    M.GAS: (-992, 4, "gas"),
    M.HEART: (48, 3, "soft_tissue"),
    M.BLOOD: (42, 2, "soft_tissue"),
    M.LIVER: (61, 4, "soft_tissue"),
    M.SPLEEN: (50, 3, "soft_tissue"),
    M.KIDNEY: (35, 3, "soft_tissue"),
    M.BOWEL_WALL: (42, 4, "soft_tissue"),
    M.BOWEL_FLUID: (22, 12, "soft_tissue"),
    M.BILE: (8, 2, "soft_tissue"),
    M.PANCREAS: (38, 7, "soft_tissue"),
    M.DISC: (85, 6, "soft_tissue"),
    M.CORD: (28, 3, "soft_tissue"),
    M.CARTILAGE: (100, 10, "soft_tissue"),
    M.CORTICAL: (880, 60, "bone"),
    M.CANCELLOUS: (235, 32, "bone"),
    M.AIRWAY_WALL: (20, 5, "soft_tissue"),
}
ORGANS: dict[str, M] = {
    "liver": M.LIVER,
    "spleen": M.SPLEEN,
    "kidney": M.KIDNEY,
    "lung": M.LUNG,
    "pancreas": M.PANCREAS,
    "gallbladder": M.BILE,
}
PAIRED = ("kidney", "lung")


def ticks(axis: int) -> Array:
    """Return the coordinates (LPS mm) of the fine points along an axis."""
    step = SPACING[axis] / FINE[axis]
    start = FIRST[axis] - SPACING[axis] / 2 + step / 2
    return np.asarray(start + step * np.arange(SHAPE[axis] * FINE[axis]))


def draw_slab(body: Torso, k: int) -> Slab:
    """Draw the fine points of slice k."""
    return draw_points(body, (ticks(0), ticks(1), ticks(2)[k * FINE[2] : (k + 1) * FINE[2]]))


def draw_points(body: Torso, axes: tuple[Array, Array, Array]) -> Slab:
    """Draw the points with these coordinates (LPS mm) along each axis."""
    bent = [np.array(g) for g in np.meshgrid(*axes, indexing="ij")]
    for n, (wx, wy, wz, phase, amplitude) in enumerate(body.waves):
        # sin(a + b + c) by the product of e^ia, e^ib, e^ic: three short rows in place of all points
        ex, ey, ez = (np.exp(1j * w * t) for w, t in zip((wx, wy, wz), axes, strict=True))
        plane = ex[:, None] * (amplitude * np.exp(1j * phase) * ey)[None, :]
        bent[n % 3] += (plane[..., None] * ez).imag
    material = np.zeros(bent[0].shape, np.uint8)
    slab = Slab(bent[0], bent[1], bent[2], material, axes)
    paint_torso(body, slab)
    return slab


def average(fine: Array) -> Array:
    """Average the fine points of one slice to its voxels (I, J)."""
    i, j, k = SHAPE[0], SHAPE[1], FINE[2]
    return np.asarray(fine.reshape(i, FINE[0], j, FINE[1], k).mean(axis=(1, 3, 4)))


def draw(seed: int) -> tuple[NDArray[np.int16], dict[M, tuple[int, int]]]:
    """Draw a torso: HU (I, J, K), i to the left, j to the back, k to the head.

    Returns also how many fine points of each material lie on the patient's right and left.
    """
    body = torso(seed)
    hu, varies = (np.array([MATERIALS[m][n] for m in M], float) for n in (0, 1))
    clean, spread = np.zeros(SHAPE), np.zeros(SHAPE)
    sides = np.zeros((2, len(M)), np.int64)
    for k in range(SHAPE[2]):
        material = draw_slab(body, k).material
        clean[..., k] = average(hu[material])
        spread[..., k] = average(varies[material])
        half = material.shape[0] // 2
        for side, part in enumerate((material[:half], material[half:])):
            sides[side] += np.bincount(part.ravel(), minlength=len(M))
    scan = scanner(clean, spread, seed)
    return scan, {m: (int(sides[0, m]), int(sides[1, m])) for m in M}


def scanner(clean: Array, spread: Array, seed: int) -> NDArray[np.int16]:
    """Blur as a scanner does, and add texture and noise that is correlated within a slice."""
    rng = np.random.RandomState(seed + 1)
    image = gaussian_filter(clean, (0.45, 0.45, 0.0))
    texture = gaussian_filter(rng.normal(size=SHAPE), (1.3, 1.3, 0.6))
    image += spread * texture / texture.std()
    body = (clean > -300).astype(float)
    body = gaussian_filter(body, (22, 22, 2))
    for k in range(SHAPE[2]):
        white = rng.normal(size=SHAPE[:2])
        grain = gaussian_filter(white, 0.55) - 0.55 * gaussian_filter(white, 1.6)
        image[..., k] += (5.0 + 7.5 * body[..., k]) * grain / grain.std()
    return np.asarray(np.clip(np.round(image), -1024, 3071).astype(np.int16))


def truth(points: dict[M, tuple[int, int]]) -> dict[str, object]:
    """Return volumes in ml of tissues and organs, counted at the fine points."""
    ml = float(np.prod(np.divide(SPACING, FINE))) / 1000
    tissues = dict.fromkeys(("lung", "gas", "fat", "soft_tissue", "bone"), 0.0)
    for m, (_, _, tissue) in MATERIALS.items():
        if tissue != "outside":
            tissues[tissue] += sum(points[m]) * ml
    organs: dict[str, float] = {}
    for name, m in ORGANS.items():
        right, left = points[m]
        if name in PAIRED:
            organs[f"{name}_right"], organs[f"{name}_left"] = right * ml, left * ml
        else:
            organs[name] = (right + left) * ml
    return {
        "definition": (
            "ml within the field of view, counted at 16 points a voxel of the drawing, before "
            "blur and noise. lung: air spaces without vessels and airways. gas: in bowel, stomach, "
            "gullet, windpipe and main bronchi. fat: under the skin and inside. soft_tissue: skin, "
            "muscle, organs, blood (also in the lungs), fluid and walls of the bowel, discs, "
            "cartilage. bone: hard and spongy, marrow included. Table and air outside count "
            "nowhere."
        ),
        "tissues_ml": {k: round(v, 1) for k, v in tissues.items()},
        "organs_ml": {k: round(v, 1) for k, v in sorted(organs.items())},
    }


def uid(what: str) -> str:
    """Return a UID of the 2.25 root (PS3.5 B.2) that is always the same for the same words."""
    digest = hashlib.sha256(f"scanloom sample torso {SEED} {what}".encode()).digest()
    return f"2.25.{int.from_bytes(digest[:16], 'big')}"


def header() -> Dataset:
    """Return what all slices say: a CT Image (PS3.3 A.3) of nobody."""
    ds = Dataset()
    ds.SpecificCharacterSet = "ISO_IR 100"
    ds.ImageType = ["ORIGINAL", "PRIMARY", "AXIAL"]
    ds.SOPClassUID = CTImageStorage
    ds.StudyDate = ds.SeriesDate = ds.AcquisitionDate = ds.ContentDate = "20260101"
    ds.StudyTime = ds.SeriesTime = ds.AcquisitionTime = ds.ContentTime = "120000"
    ds.AccessionNumber, ds.ReferringPhysicianName = "", ""
    ds.Modality, ds.Manufacturer, ds.ManufacturerModelName = "CT", "scanloom", "draw_torso.py"
    ds.StudyDescription, ds.SeriesDescription = "Synthetic torso", "Torso 5 mm"
    ds.SoftwareVersions, ds.DeviceSerialNumber = "1", "0"
    ds.PatientName, ds.PatientID = "Phantom^Torso", "SCANLOOM-TORSO"
    ds.PatientBirthDate, ds.PatientSex, ds.PatientAge = "", "O", ""
    ds.QualityControlSubject = "YES"
    ds.BodyPartExamined, ds.PatientPosition = "CHESTABDOMEN", "HFS"
    ds.KVP, ds.SliceThickness = "120", str(SPACING[2])
    ds.ConvolutionKernel = "SOFT"
    ds.StudyInstanceUID, ds.SeriesInstanceUID = uid("study"), uid("series")
    ds.FrameOfReferenceUID, ds.PositionReferenceIndicator = uid("frame"), ""
    ds.StudyID, ds.SeriesNumber, ds.AcquisitionNumber = "1", "2", "1"
    ds.ImageOrientationPatient = [1, 0, 0, 0, 1, 0]
    ds.PixelSpacing = [SPACING[1], SPACING[0]]
    ds.SamplesPerPixel, ds.PhotometricInterpretation = 1, "MONOCHROME2"
    ds.Columns, ds.Rows = SHAPE[0], SHAPE[1]
    ds.BitsAllocated, ds.BitsStored, ds.HighBit, ds.PixelRepresentation = 16, 12, 11, 0
    ds.RescaleIntercept, ds.RescaleSlope, ds.RescaleType = "-1024", "1", "HU"
    ds.WindowCenter, ds.WindowWidth = "40", "400"
    ds.BurnedInAnnotation, ds.LossyImageCompression = "NO", "00"
    return ds


def write_slice(scan: NDArray[np.int16], k: int, folder: Path) -> None:
    """Write slice k, RLE lossless, numbered from the head down as scanners do."""
    ds = header()
    number = SHAPE[2] - k
    ds.InstanceNumber = str(number)
    ds.SOPInstanceUID = uid(f"slice {number}")
    ds.ImagePositionPatient = [FIRST[0], FIRST[1], round(FIRST[2] + k * SPACING[2], 3)]
    ds.SliceLocation = str(round(FIRST[2] + k * SPACING[2], 3))
    ds.PixelData = (scan[:, :, k].T.astype(np.int32) + 1024).astype("<u2").tobytes()
    ds["PixelData"].VR = "OW"
    ds.file_meta = FileMetaDataset()
    ds.file_meta.MediaStorageSOPClassUID = CTImageStorage
    ds.file_meta.MediaStorageSOPInstanceUID = ds.SOPInstanceUID
    ds.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    ds.file_meta.ImplementationClassUID = uid("implementation")
    ds.file_meta.ImplementationVersionName = "SCANLOOM_TORSO"
    # pydicom's own encoder: other libraries may give other bytes from one version to the next
    ds.compress(RLELossless, encoding_plugin="pydicom", generate_instance_uid=False)
    ds.save_as(folder / f"slice_{number:03d}.dcm", enforce_file_format=True)


def write_nifti(scan: NDArray[np.int16], path: Path) -> None:
    """Write the same voxels in the same order, with the affine in RAS."""
    affine = np.diag((-SPACING[0], -SPACING[1], SPACING[2], 1.0))
    affine[:3, 3] = (-FIRST[0], -FIRST[1], FIRST[2])
    image = nib.Nifti1Image(scan, affine)
    image.set_sform(affine, code=1)
    image.set_qform(affine, code=1)
    image.header.set_xyzt_units("mm")
    path.write_bytes(gzip.compress(image.to_bytes(), 9, mtime=0))


def main(folder: Path) -> None:
    """Draw the torso and write it in both formats."""
    scan, points = draw(SEED)
    series = folder / "torso_ct"
    series.mkdir(parents=True, exist_ok=True)
    for k in range(SHAPE[2]):
        write_slice(scan, k, series)
    write_nifti(scan, folder / "torso_ct.nii.gz")
    (folder / "torso_truth.json").write_text(json.dumps(truth(points), indent=2) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
