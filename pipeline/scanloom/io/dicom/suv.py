"""Standardised uptake values (SUV) by body weight, from the headers of a PET series.

The factor follows QIBA's description for vendor-neutral headers: the activity of the injected dose
at the time to which the images' decay correction refers (DecayCorrection START or ADMIN).
"""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime, timedelta
from typing import Any

_MOST_HALF_LIVES = 10
"""After more, there is nothing left to measure: the date of the injection is wrong."""
_WEIGHT_KG = (0.3, 500.0)
_DOSE_BQ = (1e5, 1e11)
"""Doses in MBq, which some programs write, are below: SUVs would be a million times too high."""
_MOMENT = re.compile(r"(\d{12})(?:(\d\d)(\.\d+)?)?\.?", re.ASCII)
"""Date, hour and minute, then second and fraction, which may be left out (PS3.5 6.2, TM)."""


def suv_factor(dataset: Any) -> float | None:
    """Return the SUV (g/ml) of a voxel with the value 1 by an image's header; None if unstated."""
    units, kind = _text(dataset, "Units"), _text(dataset, "SUVType")
    if units == "GML":
        return 1.0 if kind in ("", "BW") else None
    corrected = dataset.get("CorrectedImage") or ()
    if units != "BQML" or not {"DECY", "ATTN"} <= set(corrected):
        return None
    [injection, *further] = dataset.get("RadiopharmaceuticalInformationSequence") or [None]
    if injection is None or further:
        return None
    weight, dose = _number(dataset, "PatientWeight"), _number(injection, "RadionuclideTotalDose")
    if not _WEIGHT_KG[0] <= weight <= _WEIGHT_KG[1] or not _DOSE_BQ[0] <= dose <= _DOSE_BQ[1]:
        return None
    decayed = dose * _remaining(dataset, injection)
    factor = weight * 1000 / decayed if decayed > 0 else math.nan
    return factor if math.isfinite(factor) else None


def tracer(dataset: Any) -> str:
    """Return the names of the tracers of an image, in capitals; empty if it states none."""
    names = []
    for injection in dataset.get("RadiopharmaceuticalInformationSequence") or ():
        codes = injection.get("RadiopharmaceuticalCodeSequence") or ()
        coded = next((_text(code, "CodeValue") for code in codes), "")
        names.append(_text(injection, "Radiopharmaceutical").strip().upper() or coded)
    return "\\".join(sorted(filter(None, names)))


def _remaining(dataset: Any, injection: Any) -> float:
    """Return the share of the dose at the time of the decay correction; NaN if it is unknown."""
    reference = _text(dataset, "DecayCorrection")
    if reference == "ADMIN":
        return 1.0
    half_life = _number(injection, "RadionuclideHalfLife")
    started = _series_start(dataset)
    if reference != "START" or not half_life > 0 or started is None:
        return math.nan
    # The date first, which is right where it gives a likely delay; else the time of day alone
    half_lives = [elapsed / half_life for elapsed in _times_elapsed(injection, started)]
    likely = [n for n in half_lives if 0 <= n <= _MOST_HALF_LIVES]
    return 0.5 ** likely[0] if likely else math.nan


def _series_start(dataset: Any) -> datetime | None:
    """Return the start of the series; None if it was reconstructed later than it was acquired."""
    series = _moment(_text(dataset, "SeriesDate") + _text(dataset, "SeriesTime"))
    acquired = _moment(_text(dataset, "AcquisitionDate") + _text(dataset, "AcquisitionTime"))
    return series if series is not None and acquired is not None and series <= acquired else None


def _times_elapsed(injection: Any, started: datetime) -> list[float]:
    """Return the seconds from injection to scan: by the date, then by the time of day alone.

    The date of the injection is often wrong, since programs that shift dates overlook it.
    """
    by_date = _moment(_text(injection, "RadiopharmaceuticalStartDateTime"))
    delays = [] if by_date is None else [(started - by_date).total_seconds()]
    time = _text(injection, "RadiopharmaceuticalStartTime")
    by_time = _moment(f"{started:%Y%m%d}{time}") if time else None
    if by_time is not None:
        delays.append(((started - by_time) % timedelta(days=1)).total_seconds())
    return delays


def _moment(text: str) -> datetime | None:
    """Return the moment of a DICOM date and time without time zone, seconds being optional.

    None if it is malformed, or less precise.
    """
    match = _MOMENT.fullmatch(text)
    if match is None:
        return None
    minute, second, fraction = match.groups(default="00")
    try:
        moment = datetime.strptime(minute + second, "%Y%m%d%H%M%S").replace(tzinfo=UTC)
    except ValueError:
        return None
    return moment + timedelta(seconds=float(fraction))


def _text(dataset: Any, keyword: str) -> str:
    """Return a value as text without padding; empty if it is missing."""
    return str(dataset.get(keyword) or "").strip()


def _number(dataset: Any, keyword: str) -> float:
    """Return a number; NaN if it is missing or malformed."""
    try:
        return float(dataset.get(keyword))
    except (TypeError, ValueError):
        return math.nan
