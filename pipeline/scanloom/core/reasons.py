"""Closed lists: `Reason`, why a scan gave no result, and `Flag`, a caveat of a result."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum, unique
from typing import Literal, Self, get_args

Outcome = Literal["skipped", "ambiguous", "failed"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
"""Outcomes of a file, series or case that was not used."""
Subject = Literal["case", "result", "run"]

_LATER = "failed", True
_OF_RESULT, _OF_RUN = ("failed", False, "result"), ("failed", False, "run")
"""Further arguments of `Reason`: of one that may pass, and of those whose subject is no case."""


@unique
class Reason(Enum):
    """Why a file, series or case gave no result: code, outcome and advice.

    `skipped`: not meant to be segmented. `ambiguous`: several volumes, of which one has to be
    chosen. `failed`: it should have worked. `retry`: whether the same attempt may succeed later.

    `subject`: a case, as most; an existing result, which keeps its case from being run; or a run,
    which ends, since every case is affected.
    """

    outcome: Outcome
    retry: bool
    advice: str
    subject: Subject

    def __new__(
        cls,
        advice: str,
        outcome: Outcome = "failed",
        retry: bool = False,
        subject: Subject = "case",
    ) -> Self:
        """Give each member a number, since their fields may be equal."""
        member = object.__new__(cls)
        member._value_ = len(cls.__members__)
        member.outcome, member.retry, member.advice = outcome, retry, advice
        member.subject = subject
        return member

    @property
    def code(self) -> str:
        """The name that users, logs and tables see."""
        return self.name

    @property
    def expects_result(self) -> bool:
        """Whether a result was expected; if so, the case is recorded in `failed/`."""
        return self.outcome != "skipped"

    # --- finding and reading -------------------------------------------------------------------
    NO_IMAGES = ("Give a DICOM folder, or a .nii, .nii.gz, .nrrd or .mha file", "skipped")
    NOT_FOUND = "Check the spelling and that the disk is mounted"
    NO_RESULTS = "Give the output folder of `scanloom segment` or `scanloom run`"
    ID_UNKNOWN = "Check the ids, and that --out is the folder they come from"
    COLUMN_UNKNOWN = "Select the column of the ids with --column"
    ID_TAKEN = "Use a separate output folder for each of them"
    UNREADABLE = ("Check the permissions, the disk and links, then run it again", *_LATER)
    SLICES_UNREADABLE = (
        "Copy these files again or make them readable, or accept their loss with "
        "`segment --gaps interpolate` or a workflow's `gaps`",
        *_LATER,
    )
    SOURCE_CHANGED = ("Wait until its files are complete, then run it again", *_LATER)
    SERIES_AMBIGUOUS = (
        "Choose with --series: a # or name of the list, a UID, best or all",
        "ambiguous",
    )
    SERIES_UNKNOWN = "Choose with --series: a # or name of the list, or a UID"
    NOT_AN_IMAGE = ("Give an image series: nothing else can be segmented", "skipped")
    DUPLICATE_LINK = ("Nothing to do: it is a link to a file that is counted itself", "skipped")
    LEFT_OUT = ("Not a scan of the BIDS dataset: give its folder to use it", "skipped")
    NESTED_ARCHIVE = (
        "An archive in a folder or another archive: use --archives or its path",
        "skipped",
    )
    LOCALIZER = ("Choose the scan that was planned on it: a localiser is not a volume", "skipped")
    SECONDARY_CAPTURE = ("Use the original images: a secondary capture has no geometry", "skipped")
    PROJECTION = (
        "Use a series of slices, such as CT or MR: a projection is not a volume",
        "skipped",
    )
    COLOR = ("Use the grey original: colour images can't be segmented", "skipped")
    DERIVED = (
        "Use the slices that it was computed from, or select it with `segment --series`",
        "skipped",
    )
    MOSAIC = "Export it again with private data, which hold the positions of its tiles"
    FOUR_D = (
        "Choose one volume with `segment --phase`, or all with a workflow's `phases`",
        "ambiguous",
    )
    PHASES = (
        "Choose one of the volumes with `segment --phase`, or all with a workflow's `phases`",
        "ambiguous",
    )
    TOO_FEW_SLICES = "Give the whole series: a volume has at least 3 slices"
    SLICE_GAP = (
        "Export the series again, or fill missing slices in with `segment --gaps interpolate` or a "
        "workflow's `gaps`"
    )
    SPACING_CHANGES = "Export each part with equal spacing as a series of its own"
    DUPLICATE_SLICES = "Export the series again, with a single slice at each position"
    SEVERAL_PATIENTS = "Export the images of each patient again, with a series UID of their own"
    MIXED_SLICES = "Export each acquisition or contrast as a series of its own"
    REVERSED_ROWS = (
        "Use the other polarity: GE's epi_pepolar reverses these rows under an unchanged header"
    )
    SLICE_SIZE = "Export slices of equal rows and columns as a series of their own"
    SLICE_SPACING = "Export slices of equal pixel spacing as a series of their own"
    SLICE_ORIENTATION = "Export slices of equal orientation as a series of their own"
    FRAME_OF_REFERENCE = "Export each frame of reference as a series of its own"
    NO_POSITION = "Export the series again with the positions of its slices"
    BAD_GEOMETRY = "Export it again with the geometry of the scanner"
    SHEAR_NOT_SUPPORTED = (
        "Use `to_nibabel` or `to_metatensor`, or segment it: a rectangular copy is written"
    )
    HEADER_CONTRADICTS = "Export the series again, with a single value for each attribute"
    RESCALE = "Export the series again with plausible rescale values"
    TRUNCATED = "Copy or export it again"
    DAMAGED = "Copy or export the file again"
    ENCRYPTED = "Unpack the archive with its password, and give the folder"
    DECODE_TIMEOUT = ("Run it again when the machine is less busy, or copy the file again", *_LATER)
    DECODER = "See `scanloom doctor` for the decoders that can be installed"
    PIXEL_TYPE = "Convert it to a grey image of plain, finite numbers"
    ORIENTATION_UNKNOWN = (
        "Specify it with `segment --orientation RAS`, or a workflow's `orientation`"
    )
    TOO_LARGE = (
        "Unpack an archive, crop a scan, or raise its limit with `segment --max-size`, a "
        "workflow's `max_size` or `load_volume(max_bytes=...)`"
    )
    # --- models --------------------------------------------------------------------------------
    MODEL_UNKNOWN = (
        "See `scanloom models list`, get it by `scanloom models add` (a name or a zip file), or "
        "give its folder"
    )
    MODEL_FORMAT = "See the formats on the page on models, or use another model"
    MODEL_DAMAGED = "Copy or add the model again; in a model of your own, correct what is named"
    MODEL_UNSUPPORTED = (
        "The page on models lists what is understood: change the model's files, bring its network "
        "in ONNX (`scanloom models new`), or use another model"
    )
    MODEL_UNSAFE = (
        "A model may hold only data: copy what it links to into its folder, and bring a network "
        "with code of its own in ONNX (`scanloom models new`)"
    )
    MODEL_NETWORK = (
        "Use one of the networks that the page on models lists, or bring it in ONNX "
        "(`scanloom models new`)"
    )
    MODEL_HASH = "A file differs from its checksum: get the model again"
    MODEL_WEIGHTS = "Get the model again, or give the weights that were trained with its network"
    MODEL_CHANGED = ("Do not change the model's files during a run; run it again", *_LATER, "run")
    MODEL_EXISTS = "Choose another name with --name, or remove the model first"
    LICENCE = "Read the licence; to accept it in a script, add --accept-licence"
    DOWNLOAD = (
        "Check the address, network, proxy and certificates; the next attempt continues. Or add "
        "a folder, a zip file, or the file of `scanloom models bundle` on another machine",
        *_LATER,
    )
    OFFLINE = (
        "Allow the network, or add a folder, a zip file, or the file of `scanloom models bundle` "
        "on another machine"
    )
    # --- a scan and a model --------------------------------------------------------------------
    MODALITY = ("Choose a model for this modality: see `scanloom models list`", "skipped")
    CHANNELS = "A model of several inputs needs a workflow with `channels`"
    CHANNEL_MISSING = ("Complete the study, or correct the workflow's `channels`", "skipped")
    IMPLAUSIBLE = "Check the scan; `scanloom models show` lists what the model accepts"
    NOT_FINITE = "Check the model's weights and the scan's intensities"
    STRUCTURE_UNKNOWN = "See `scanloom models show` for the model's structures"
    # --- a run ---------------------------------------------------------------------------------
    WORKFLOW = "Correct the workflow at the given lines"
    SITE = "Correct the page of the receiver at the given lines"
    RECIPE = "Correct the training recipe"
    TRAINING_DATA = "Correct the recipe's `data`, or the cases that the report of the data names"
    TRAINING = "See the message of `python -m monai.bundle run` in the bundle: docs/training.md"
    WORKFLOW_UNKNOWN = (
        "Give a YAML or JSON file, or the name of a shipped workflow, before the paths"
    )
    NOT_SELECTED = (
        "To include it, change `select`, or set `policy.modality` if its files state none",
        "skipped",
    )
    SAMPLE = "Plan the archive without --sample, or with more of it"
    LOCKED = ("Wait for the other run in this output folder to end", *_LATER)
    CLUSTER = ("See `--cluster` in the docs, and the cluster's own log", *_LATER)
    WORKER_LOST = ("See the cluster's own log", *_LATER)
    # --- a source ------------------------------------------------------------------------------
    ROW_INVALID = "Give an accession number, a UID or a patient's ID, without wildcards"
    NO_MATCH = "Check the row, or the question: the source has no such study or series"
    MATCH_AMBIGUOUS = (
        "Name the study by its UID, or add the patient's ID: several patients match",
        "ambiguous",
    )
    SOURCE_AWAY = (
        "Check its title, address, port, certificate and credentials, and that it knows our title",
        *_LATER,
    )
    NOT_FETCHED = ("Give the same command again: only what is missing is asked for", *_LATER)
    # --- running -------------------------------------------------------------------------------
    OUT_OF_MEMORY = (
        "Raise the memory limit, use a machine with more memory, or crop the scan",
        *_LATER,
    )
    DEVICE_UNAVAILABLE = (
        "See `scanloom doctor`, or leave device, engine and precision at their default, `auto`",
        *_LATER,
    )
    ENVIRONMENT = (
        "A fault of the machine or its settings, not of a scan: see `scanloom doctor`",
        *_LATER,
    )
    NOT_INSTALLED = "Install it with the command that is named"
    CASE_TIMEOUT = "Raise the workflow's `time_limit`, or exclude this scan"
    CRASHED = "The case crashed its worker process even when run alone: please report it"
    WRITE_MISMATCH = ("The written files differ from the result: please report it", *_LATER)
    SCRATCH_FULL = (
        "Free space in the folder for temporary files, or set TMPDIR to another one",
        *_LATER,
    )
    DISK_FULL = ("Free space on the output disk, then run it again", *_LATER, "run")
    OUTPUT_UNWRITABLE = ("Name another folder, or check that this one is writable", *_LATER)
    KEY_MISMATCH = ("Use the key of this output folder with --key, or another --out", *_OF_RUN)
    KEY_DAMAGED = (
        "Restore the key from a copy: with another key, the same scans have other case ids"
    )
    RESULT_DAMAGED = ("See `scanloom verify`; remove its folder, or use --replace", *_OF_RESULT)
    OLDER_VERSION = (
        "Written by an older scanloom: use another --out, and segment the scans again",
        *_OF_RESULT,
    )
    NEWER_VERSION = ("Written by a newer scanloom: use that version, or another --out", *_OF_RESULT)
    RESULT_FILE = (
        "Use --out with a folder, which takes every result, or a file whose name ends in .nii.gz, "
        ".seg.nrrd or .dcm"
    )
    STALE = ("Use --replace, or another --out to keep both", *_OF_RESULT)
    GRID_DIFFERS = "Save the labels on the grid of the scan, without resampling"
    LABELS_UNKNOWN = "Use the structures of the case: `segments.json` lists them"
    SERIES_DIFFERS = "Put the scan that was segmented back in its place, or segment this one"
    CORRECTED = "Look at the result that there is now, and correct that"
    NOT_REVIEWED = "Accept or correct cases first: `scanloom review OUT`"
    LABELS_OVERLAP = "Name structures with `dataset --structures`: the later covers the earlier"
    TOO_FEW_PATIENTS = "Accept results of more patients, or change the folds or the share"
    REVIEW_OPEN = "Use the links that it printed, or stop it with Ctrl-C first"
    READERS = (
        "Name two reviewers, and keep the shares; or move `review/readers.json` away to begin anew"
    )
    NO_REFERENCE = "Give the label map the name of the scan's file, or of its case"
    NO_PREDICTION = "Segment its scan, or give the references that were predicted only"
    PAIR_AMBIGUOUS = "Give each label map the name of one case"
    REVIEW_DAMAGED = "Restore the file from a copy; or move it away to begin anew"
    INTERNAL = ("A bug in scanloom: run with --debug and report it", *_LATER)


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
    TILT_IMPLAUSIBLE = "The scan's axes are tilted from those of the body beyond the model's limit"
    DIRECTION_IMPLAUSIBLE = (
        "Structures lie in unusual directions from one another: the body is tilted in the scan, "
        "the header's axes are wrong, or a part is missing; labels, also of sides, may be wrong"
    )
    HEAD_IN_VIEW = "A head is in view, on which the model is known to err"
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
    MAYBE_INCOMPLETE = (
        "The sender had more slices than had arrived, or did not say how many, for the longest wait"
    )
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
    CROP_CUT = (
        "The scan ends within the margin around the structures that a model is cropped to: it saw "
        "less than it should"
    )
    HALF_OVERFLOWED = "Half precision overflowed on this scan; the network ran in float32"
    HALF_WRONG = "This machine's libraries compute half precision wrong; the network ran in float32"
    DEVICE_TOO_SMALL = (
        "The memory of the GPU did not suffice; the network ran on the CPU, which takes far longer"
    )
    OTHER_ENGINE = (
        "The network was run by another library, or in another precision, than was requested or "
        "recorded for this output folder; labels may differ slightly from those of other cases"
    )
    SEG_NOT_POSSIBLE = (
        "No DICOM SEG was written: the source lacks a UID that it must reference, of study, "
        "series, frame of reference or each slice"
    )
    RTSTRUCT_NOT_POSSIBLE = (
        "No RTSTRUCT was written: the slices are sheared, or the source is not DICOM or lacks "
        "attributes that it must reference"
    )
    SR_NOT_POSSIBLE = (
        "No DICOM SR was written: the source is not DICOM or lacks attributes that it must "
        "reference"
    )
    # --- of a structure ------------------------------------------------------------------------
    TOUCHES_BORDER = "It reaches the border of the scan, so its volume is incomplete"
    EMPTY = "Nothing was found: there are no voxels"
    OUT_OF_RANGE = "Its volume or mean intensity is outside the usual range that the model states"
    EXPERIMENTAL = "The authors of the model advise against relying on this structure"


def known_flags(codes: Iterable[str]) -> tuple[Flag, ...]:
    """Return the flags of codes that were read; codes of a later version are left out."""
    return tuple(Flag[code] for code in codes if code in Flag.__members__)
