"""The closed lists: why a scan was not used (`Reason`), what must be known of a result (`Flag`)."""

from __future__ import annotations

from enum import Enum, unique
from typing import Literal, Self, get_args

Outcome = Literal["skipped", "ambiguous", "failed"]


OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
"""What becomes of a file, a series or a case beside being used."""


@unique
class Reason(Enum):
    """Why something gave no result: its code, what became of it, and what a person can do.

    `skipped`: it is not for us, all is well. `ambiguous`: all is well, but it holds several volumes
    and waits until one is chosen. `failed`: it should have worked. `retry` says whether trying the
    same again can help.
    """

    outcome: Outcome
    retry: bool
    advice: str

    def __new__(cls, outcome: Outcome, retry: bool, advice: str) -> Self:
        """Give each member a value of its own: the number of its line."""
        member = object.__new__(cls)
        member._value_ = len(cls.__members__)
        member.outcome, member.retry, member.advice = outcome, retry, advice
        return member

    @property
    def code(self) -> str:
        """The name that users, logs and tables see."""
        return self.name

    @property
    def wanted(self) -> bool:
        """Whether there might have been a result: a case that ends so is noted in `failed/`."""
        return self.outcome != "skipped"

    # --- finding and reading -------------------------------------------------------------------
    NO_IMAGES = ("skipped", False, "Name a DICOM folder, or a .nii, .nii.gz, .nrrd or .mha file")
    NOT_FOUND = ("failed", False, "Check the spelling and that the disk is mounted")
    ID_UNKNOWN = ("failed", False, "Check the ids, and that --out is the folder they are from")
    COLUMN_UNKNOWN = ("failed", False, "Name the column of the ids with --column")
    ID_TAKEN = ("failed", False, "Give each file an output folder of its own, or compress one")
    UNREADABLE = ("failed", True, "Check the permissions and the disk, then run it again")
    SOURCE_CHANGED = ("failed", True, "Wait until its files are complete, then run it again")
    SERIES_AMBIGUOUS = ("ambiguous", False, "Choose one with --series")
    SERIES_UNKNOWN = ("failed", False, "Choose one of the listed series with --series")
    NOT_AN_IMAGE = ("skipped", False, "Only image series can be segmented")
    DUPLICATE_LINK = ("skipped", False, "A link to a file that is counted already")
    LEFT_OUT = ("skipped", False, "Not among a BIDS dataset's scans: name its folder to use it")
    NESTED_ARCHIVE = (
        "skipped",
        False,
        "An archive inside another or a folder: use --archives, or name it",
    )
    LOCALIZER = ("skipped", False, "A localiser is no volume: choose the scan itself")
    SECONDARY_CAPTURE = ("skipped", False, "A secondary capture has no geometry: use the original")
    PROJECTION = ("skipped", False, "A projection is no volume: use a CT or MR series")
    COLOR = ("skipped", False, "Colour images can't be segmented: use the grey original")
    DERIVED = ("skipped", False, "Computed from other slices: use those, or name it with --series")
    MOSAIC = ("failed", False, "Its tiles can't be told apart: export it again with private data")
    FOUR_D = ("ambiguous", False, "Choose one volume with --phase")
    PHASES = ("ambiguous", False, "Several volumes share this series: choose one with --phase")
    TOO_FEW_SLICES = ("failed", False, "A volume needs at least 3 slices")
    SLICE_GAP = (
        "failed",
        False,
        "Slices are missing: export the series again, or fill them in with --gaps interpolate",
    )
    SPACING_CHANGES = (
        "failed",
        False,
        "Slices must be equally spaced: export each part as a series",
    )
    DUPLICATE_SLICES = ("failed", False, "Slices contradict each other: export the series again")
    MIXED_SLICES = (
        "failed",
        False,
        "Slices of several acquisitions or contrasts: export each of them as a series",
    )
    REVERSED_ROWS = (
        "failed",
        False,
        "GE's epi_pepolar stores rows in reverse under an unchanged header: use the other polarity",
    )
    SLICE_SIZE = ("failed", False, "All slices must have the same rows and columns")
    SLICE_SPACING = ("failed", False, "All slices must have the same pixel spacing")
    SLICE_ORIENTATION = ("failed", False, "All slices must have the same orientation")
    FRAME_OF_REFERENCE = ("failed", False, "Slices of several frames of reference can't be stacked")
    NO_POSITION = (
        "failed",
        False,
        "Without positions its geometry can't be known: export it again",
    )
    BAD_GEOMETRY = ("failed", False, "Its geometry can't be that of a scan: export it again")
    HEADER_CONTRADICTS = (
        "failed",
        False,
        "A header says two things of one attribute: export the series again",
    )
    RESCALE = ("failed", False, "Its rescale values can't be right: export the series again")
    TRUNCATED = ("failed", False, "The file ends too early: copy or export it again")
    DAMAGED = ("failed", False, "The file is damaged: copy or export it again")
    ENCRYPTED = ("failed", False, "It needs a password: unpack it, and name the folder")
    DECODE_TIMEOUT = (
        "failed",
        True,
        "Its data are damaged, or the machine is too busy: run it again",
    )
    DECODER = ("failed", False, "No decoder for its compression: see `scanloom doctor`")
    PIXEL_TYPE = ("failed", False, "Its voxels are no plain numbers: convert it to a grey image")
    ORIENTATION_UNKNOWN = ("failed", False, "Say it with --orientation, for example RAS")
    TOO_LARGE = ("failed", False, "More voxels than the limit: crop it, or raise the limit")
    # --- models --------------------------------------------------------------------------------
    MODEL_UNKNOWN = ("failed", False, "See `scanloom models list`, or name a bundle's folder")
    MODEL_DAMAGED = ("failed", False, "Copy the bundle again, complete")
    MODEL_UNSUPPORTED = ("failed", False, "This model needs something that a card can't express")
    MODEL_UNSAFE = ("failed", False, "A bundle may hold data only, no code")
    MODEL_NETWORK = ("failed", False, "Use a bundle whose network is on the list in the docs")
    MODEL_HASH = ("failed", False, "The weights are not those of the card: get them again")
    MODEL_WEIGHTS = ("failed", False, "The weights don't fit the network of the card")
    MODEL_CHANGED = ("failed", True, "Leave the model's files as they are, and run it again")
    # --- a scan and a model --------------------------------------------------------------------
    MODALITY = ("skipped", False, "The model was made for another modality: choose another model")
    CHANNELS = ("failed", False, "A model of several inputs needs a workflow with `channels`")
    CHANNEL_MISSING = ("skipped", False, "Its study lacks another input that the model needs")
    IMPLAUSIBLE = ("failed", False, "The model's card refuses such a scan: see the detail")
    NOT_FINITE = (
        "failed",
        False,
        "Numbers overflow or are none: check the model's weights, and the scan's intensities",
    )
    STRUCTURE_UNKNOWN = ("failed", False, "See `scanloom models show` for the model's structures")
    # --- a run ---------------------------------------------------------------------------------
    WORKFLOW = ("failed", False, "Correct the workflow at the lines that are named")
    WORKFLOW_UNKNOWN = ("failed", False, "Name a YAML or JSON file, or a workflow that ships")
    NOT_SELECTED = ("skipped", False, "The workflow's selection leaves it out")
    LOCKED = ("failed", True, "Another run holds this output folder: wait for it")
    CLUSTER = ("failed", True, "See `--cluster` in the docs, and the cluster's own log")
    WORKER_LOST = (
        "failed",
        True,
        "Its workers were lost again and again: see the cluster's own log",
    )
    # --- running -------------------------------------------------------------------------------
    OUT_OF_MEMORY = (
        "failed",
        True,
        "Raise the limit, use more memory, or crop the scan",
    )
    DEVICE_UNAVAILABLE = ("failed", True, "See `scanloom doctor`, or run with --device cpu")
    ENVIRONMENT = (
        "failed",
        True,
        "The machine or its settings are at fault, no scan: see `scanloom doctor`",
    )
    CASE_TIMEOUT = ("failed", False, "Give a case more time, or leave this scan out")
    CRASHED = ("failed", False, "It brings its process down, even alone: please report it")
    WRITE_MISMATCH = ("failed", True, "What was written differs from the result: please report it")
    SCRATCH_FULL = (
        "failed",
        True,
        "Make room in the folder for temporary files, or name another one by TMPDIR",
    )
    DISK_FULL = ("failed", True, "Make room on the output disk, then run it again")
    OUTPUT_UNWRITABLE = ("failed", True, "Check that the folder is there and can be written")
    KEY_MISMATCH = (
        "failed",
        False,
        "This output folder belongs to another key: give it with --key",
    )
    RESULT_DAMAGED = ("failed", False, "See `scanloom verify`; take its folder away, or --replace")
    STALE = ("failed", False, "A result of another recipe is there: use --replace or another --out")
    INTERNAL = ("failed", True, "A fault of scanloom: run with --debug and report it")


@unique
class Flag(Enum):
    """What was done, or what is odd, and must be known with the result."""

    text: str

    def __new__(cls, text: str) -> Self:
        """Give each member a value of its own: the number of its line."""
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
        "The slices are sheared (gantry tilt); a rectangular copy is written beside the result"
    )
    MODALITY_UNKNOWN = "The file does not say its modality; it was taken to be the model's"
    HU_IMPLAUSIBLE = "The intensities are unlike those of the scans the model was made for"
    SPACING_IMPLAUSIBLE = "The voxel spacing lies outside the range the model was made for"
    FOV_IMPLAUSIBLE = "The field of view lies outside the range the model was made for"
    ORIENTATION_GIVEN = "The file does not say its orientation; it was given by the caller"
    FORMS_DISAGREE = "sform and qform of the NIfTI differ; the sform was used"
    AFFINE_ROUNDED = "The directions were not quite orthogonal (rounding) and were made so"
    ATTRIBUTES_CONTRADICT = "Header values contradict the slice positions; the positions were used"
    POSITIONS_ROUNDED = (
        "Slice positions are rounded in the headers; the regular stack that fits them was used"
    )
    FRAMES_OF_REFERENCE = (
        "Each slice has a frame of reference of its own; their positions were taken to be in one"
    )
    GAPS_INTERPOLATED = "Missing slices were filled in from those around them, as was asked for"
    SLICES_SET_ASIDE = "A few slices that cross the others, as localisers do, were left out"
    OUTDATED = "A later attempt to make this result anew failed; this is the earlier one"
    FILES_LOST = "Files beside its slices can't be read: slices at its ends may be missing"
    DUPLICATES_DROPPED = "Slices that were there twice, identical, were used once"
    NOT_HOUNSFIELD = "The CT values are not in Hounsfield units"
    NAN_PADDED = "Voxels that were no numbers (NaN) took the padding value, as was asked for"
    VALUES_ROUNDED = "Whole numbers beyond 16777216 are rounded: networks compute in float32"
    BURNED_IN = "The image says that it has identifying text burned in; no picture was made"
    HALF_OVERFLOWED = "Half precision overflowed on it; the network ran in float32"
    SEG_NOT_POSSIBLE = "The source lacks what DICOM SEG must refer to; no DICOM SEG was written"
    # --- of a structure ------------------------------------------------------------------------
    TOUCHES_BORDER = "It reaches the border of the scan, so its volume is a part"
    EMPTY = "No voxel of it was found"
