"""Data types of the domain; NumPy only, no file access."""

from scanloom.core.case import DICOM, Case, CaseRecord, Series, SeriesChoice
from scanloom.core.errors import ScanError, WorkflowError
from scanloom.core.grid import Grid
from scanloom.core.measurement import Measurement
from scanloom.core.paths import (
    home,
    settle_in,
    user_cache_folder,
    user_config_folder,
    user_data_folder,
)
from scanloom.core.process import (
    blame,
    is_passing,
    keep_memory_private,
    lacks_memory,
    read_error,
)
from scanloom.core.reasons import OUTCOMES, Flag, Reason
from scanloom.core.relations import Relations
from scanloom.core.segmentation import Code, Layer, Segmentation, Structure, is_slug, slug
from scanloom.core.text import (
    counted,
    did_you_mean,
    format_bytes,
    milliliters,
    parse_bytes,
    plain_number,
    printable,
)
from scanloom.core.timing import CpuWall, StepTimer, format_duration
from scanloom.core.volume import MODALITIES, Volume
from scanloom.options import ComputeOptions, Gaps, Nan, Outputs, ReadOptions

__all__ = [
    "DICOM",
    "MODALITIES",
    "OUTCOMES",
    "Case",
    "CaseRecord",
    "Code",
    "ComputeOptions",
    "CpuWall",
    "Flag",
    "Gaps",
    "Grid",
    "Layer",
    "Measurement",
    "Nan",
    "Outputs",
    "ReadOptions",
    "Reason",
    "Relations",
    "ScanError",
    "Segmentation",
    "Series",
    "SeriesChoice",
    "StepTimer",
    "Structure",
    "Volume",
    "WorkflowError",
    "blame",
    "counted",
    "did_you_mean",
    "format_bytes",
    "format_duration",
    "home",
    "is_passing",
    "is_slug",
    "keep_memory_private",
    "lacks_memory",
    "milliliters",
    "parse_bytes",
    "plain_number",
    "printable",
    "read_error",
    "settle_in",
    "slug",
    "user_cache_folder",
    "user_config_folder",
    "user_data_folder",
]
