"""The nouns: NumPy only, no files."""

from scanloom.core.blame import blame, lacks_memory
from scanloom.core.case import DICOM, Case, CaseRecord, Gaps, Nan, Outputs, Series
from scanloom.core.clock import Clock, Seconds, duration
from scanloom.core.errors import ScanError
from scanloom.core.grid import Grid
from scanloom.core.home import home, settle_in
from scanloom.core.measurement import Measurement
from scanloom.core.reasons import OUTCOMES, Flag, Reason
from scanloom.core.secrecy import keep_memory_private
from scanloom.core.segmentation import Code, Layer, Segmentation, Structure, is_slug
from scanloom.core.volume import MODALITIES, Volume
from scanloom.core.words import byte_words, nearest, printable

__all__ = [
    "DICOM",
    "MODALITIES",
    "OUTCOMES",
    "Case",
    "CaseRecord",
    "Clock",
    "Code",
    "Flag",
    "Gaps",
    "Grid",
    "Layer",
    "Measurement",
    "Nan",
    "Outputs",
    "Reason",
    "ScanError",
    "Seconds",
    "Segmentation",
    "Series",
    "Structure",
    "Volume",
    "blame",
    "byte_words",
    "duration",
    "home",
    "is_slug",
    "keep_memory_private",
    "lacks_memory",
    "nearest",
    "printable",
    "settle_in",
]
