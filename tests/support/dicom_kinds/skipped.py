"""Kinds that are skipped: not a volume."""

from __future__ import annotations

import shutil
from pathlib import Path

from pydicom import Dataset, dcmread, dcmwrite

from support.dicom_kinds.base import DX, SC, SEG, SR, Kind, assign, changed, every, stack
from support.dicom_kinds.enhanced import enhanced, every_frame, nuclear, of_class


def colour(k: int, ds: Dataset) -> None:
    ds.SamplesPerPixel, ds.PhotometricInterpretation, ds.PlanarConfiguration = 3, "RGB", 0
    ds.BitsAllocated = ds.BitsStored = 8
    ds.HighBit, ds.PixelRepresentation = 7, 0
    ds.PixelData = bytes(ds.Rows * ds.Columns * 3)


def report(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = stack(folder)[0]
    ds = dcmread(path)
    shutil.rmtree(folder)
    folder.mkdir()
    del ds.PixelData
    ds.SOPClassUID = ds.file_meta.MediaStorageSOPClassUID = SR
    dcmwrite(folder / "sr.dcm", ds)


SKIPPED: dict[str, Kind] = {
    "reprojections of a PET scan": Kind(
        every(Modality="PT", SeriesType=["STATIC", "REPROJECTION"]), "PROJECTION"
    ),
    "localisers": Kind(every(ImageType=["ORIGINAL", "PRIMARY", "LOCALIZER"]), "LOCALIZER"),
    "captures": Kind(every(SOPClassUID=SC, ImagePositionPatient=None), "SECONDARY_CAPTURE"),
    "colour": Kind(changed(colour), "COLOR"),
    "tomosynthesis": Kind(enhanced(edit=of_class("13.1.3", "MG")), "PROJECTION"),
    "X-rays": Kind(every(SOPClassUID=DX, ImagePositionPatient=None), "PROJECTION"),
    "report": Kind(report, "NOT_AN_IMAGE"),
    "reformats": Kind(
        every(ImageType=["DERIVED", "SECONDARY", "MPR"]), "DERIVED", options={"series": "1"}
    ),
    "reformats by a scanner": Kind(
        every(ImageType=["DERIVED", "PRIMARY", "AXIAL", "REFORMATTED"]),
        "DERIVED",
        options={"series": "1"},
    ),
    "segmentation": Kind(every(SOPClassUID=SEG), "NOT_AN_IMAGE"),
    "projections": Kind(every(ImageType=["DERIVED", "SECONDARY", "AXIAL", "MIP"]), "PROJECTION"),
    "rendered": Kind(
        every(ImageType=["DERIVED", "SECONDARY", "PROJECTION IMAGE"], Modality="MR"), "PROJECTION"
    ),
    "scintigrams": Kind(nuclear(1, ImageType=["ORIGINAL", "PRIMARY", "STATIC"]), "PROJECTION"),
    "enhanced, localisers": Kind(
        enhanced(
            edit=lambda ds: assign(ds, ImageType=["ORIGINAL", "PRIMARY", "LOCALIZER", "NONE"])
        ),
        "LOCALIZER",
    ),
}


def unplaced_eye(ds: Dataset) -> None:
    """Make it a tomography of an eye whose frames lie on a photograph of its fundus."""
    of_class("77.1.5.4", "OPT")(ds)
    for group in ds.PerFrameFunctionalGroupsSequence:
        del group.PlanePositionSequence


SKIPPED |= {
    "tomography of an eye, not placed in the patient": Kind(
        enhanced(edit=unplaced_eye), "NOT_AN_IMAGE"
    ),
    "enhanced, projections": Kind(
        enhanced(edit=every_frame(VolumeBasedCalculationTechnique="MAX_IP")), "PROJECTION"
    ),
    "enhanced, projections by the object": Kind(
        enhanced(edit=lambda ds: assign(ds, VolumeBasedCalculationTechnique="MAX_IP")), "PROJECTION"
    ),
    "enhanced, curved": Kind(
        enhanced(edit=every_frame(VolumeBasedCalculationTechnique="CURVED_MPR")), "DERIVED"
    ),
}
