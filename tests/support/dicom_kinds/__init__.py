"""Kinds of DICOM series, each drawn from the standard with a ball of known position and values."""

import support.dicom_kinds.enhanced  # noqa: F401 - adds to READ
from support.dicom_kinds.chosen import CHOSEN
from support.dicom_kinds.refused import REFUSED
from support.dicom_kinds.single import READ
from support.dicom_kinds.skipped import SKIPPED

KINDS = READ | CHOSEN | REFUSED | SKIPPED
