"""The closed list of flags: facts about a result that its user must know."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum, unique
from typing import Self


@unique
class Flag(Enum):
    """A caveat that belongs to a result: a correction, an assumption, an oddity of the scan."""

    text: str

    def __new__(cls, text: str) -> Self:
        """Give each member a number."""
        member = object.__new__(cls)
        member._value_ = len(cls.__members__)
        member.text = text
        return member

    @property
    def code(self) -> str:
        """The name that users, logs and tables see."""
        return self.name

    # --- of a case -----------------------------------------------------------------------------
    SHEARED = (
        "The slices are sheared (gantry tilt); a rectangular copy is written next to the result"
    )
    MODALITY_UNKNOWN = "The file or the model states no modality; they were assumed to match"
    HU_IMPLAUSIBLE = "The intensities are unlike those of the scans that the model was trained on"
    SPACING_IMPLAUSIBLE = "The voxel spacing is outside the model's range"
    FOV_IMPLAUSIBLE = "The field of view is outside the model's range"
    ORIENTATION_GIVEN = "The file does not state its orientation; the one given was used"
    FORMS_DISAGREE = "sform and qform of the NIfTI differ; the sform was used"
    AFFINE_ROUNDED = "The axes were not exactly orthogonal (rounding) and were corrected"
    ATTRIBUTES_CONTRADICT = "Header values contradict the slice positions; the positions were used"
    SLICES_DIFFER = (
        "Slices differ in an attribute that may matter, such as a pause or the image type, "
        "or some lack one that the others have; they were read as one volume"
    )
    POSITIONS_ROUNDED = (
        "Slice positions are rounded in the headers; the best-fitting regular stack was used"
    )
    FRAMES_OF_REFERENCE = (
        "Each slice has its own frame of reference; positions were assumed to share one"
    )
    GAPS_INTERPOLATED = "Missing slices were interpolated from their neighbours, as requested"
    SLICES_SET_ASIDE = "A few slices that cross the others, such as localisers, were excluded"
    OUTDATED = "A later run did not replace this result: its attempt failed, or the recipe differs"
    FILES_LOST = "Files next to its slices are unreadable: slices at its ends may be missing"
    DUPLICATES_DROPPED = "Identical duplicates of slices were dropped"
    NOT_HOUNSFIELD = "The CT values are not in Hounsfield units"
    NAN_PADDED = "NaN voxels were replaced by the padding value, as requested"
    VALUES_ROUNDED = "Integers above 16777216 are rounded: networks compute in float32"
    CHECKPOINT_BEST = (
        "The model has no final checkpoint; the best one of an unfinished training was used"
    )
    LABELS_NEAREST = (
        "The model's own program mixes neighbouring labels; here each voxel has the nearest one"
    )
    AXES_AS_NIFTI = (
        "The model takes voxels in a file's order, not by direction: it was given this series in "
        "the order in which dcm2niix stores it"
    )
    BURNED_IN = "The header reports burned-in identifying text; no preview was made"
    CROP_EMPTY = "The structures that a model is cropped to were not found; it was not run"
    HALF_OVERFLOWED = "Half precision overflowed on this scan; the network ran in float32"
    HALF_WRONG = "This machine's libraries compute half precision wrong; the network ran in float32"
    OTHER_ENGINE = (
        "The network was run by another library, or in another precision, than was requested or "
        "recorded for this output folder; labels may differ slightly from those of other cases"
    )
    SEG_NOT_POSSIBLE = "The source lacks attributes that DICOM SEG must reference; none was written"
    # --- of a structure ------------------------------------------------------------------------
    TOUCHES_BORDER = "It reaches the border of the scan, so its volume is incomplete"
    EMPTY = "Nothing was found: there are no voxels"


def known_flags(codes: Iterable[str]) -> tuple[Flag, ...]:
    """Return the flags of codes that were read; codes of a later version are left out."""
    return tuple(Flag[code] for code in codes if code in Flag.__members__)
