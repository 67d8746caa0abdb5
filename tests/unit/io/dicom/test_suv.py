"""Standardised uptake values are known if the headers state all that they follow from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydicom import dcmread
from pydicom.dataset import Dataset

import scanloom
from scanloom.core import Flag
from scanloom.io.dicom.header.header import pydicom_muted
from scanloom.io.dicom.suv import suv_factor
from support.write_dicom import Words, noise, write_series

F18_S, DOSE_BQ, WEIGHT_KG = 6586.0, 370e6, 70.0


def pet(injected: dict[str, Any] | None = None, **changes: Any) -> Dataset:
    """Return a header of FDG PET, started an hour after the injection."""
    injection = Dataset()
    times = {"RadiopharmaceuticalStartTime": "091500", **(injected or {})}
    dose = {"RadionuclideTotalDose": DOSE_BQ, "RadionuclideHalfLife": F18_S}
    for keyword, value in {**dose, **times}.items():
        setattr(injection, keyword, value)
    header = {
        "Units": "BQML",
        "CorrectedImage": ["DECY", "ATTN", "SCAT"],
        "DecayCorrection": "START",
        "PatientWeight": WEIGHT_KG,
        "SeriesDate": "20200105",
        "SeriesTime": "101500",
        "AcquisitionDate": "20200105",
        "AcquisitionTime": "101500.00",
        "RadiopharmaceuticalInformationSequence": [injection],
        **changes,
    }
    dataset = Dataset()
    for keyword, value in header.items():
        if value is not None:
            setattr(dataset, keyword, value)
    return dataset


HOUR = WEIGHT_KG * 1000 / (DOSE_BQ * 0.5 ** (3600 / F18_S))
HALF_DAY = WEIGHT_KG * 1000 / (DOSE_BQ * 0.5 ** (12 * 3600 / F18_S))


@pytest.mark.parametrize(
    "header",
    [
        pet(),
        pet({"RadiopharmaceuticalStartDateTime": "20200105091500.00"}),
        pet({"RadiopharmaceuticalStartDateTime": "20200106091500"}),  # dates shifted differently
        pet({"RadiopharmaceuticalStartDateTime": "20200103091500"}),
        pet({"RadiopharmaceuticalStartDateTime": "2020"}),
        pet({"RadiopharmaceuticalStartTime": "0915"}),
        pet({"RadiopharmaceuticalStartDateTime": "202001050915"}),
    ],
)
def test_activity_decays_from_injection_to_scan(header: Dataset) -> None:
    assert suv_factor(header) == pytest.approx(HOUR)


def test_a_time_may_end_in_a_point() -> None:
    with pydicom_muted():  # which warns of it
        header = pet({"RadiopharmaceuticalStartTime": "091500."})
        assert suv_factor(header) == pytest.approx(HOUR)


def test_an_injection_before_midnight() -> None:
    header = pet({"RadiopharmaceuticalStartTime": "221500"})
    assert suv_factor(header) == pytest.approx(HALF_DAY)


def test_activity_that_was_corrected_to_the_injection() -> None:
    assert suv_factor(pet(DecayCorrection="ADMIN")) == pytest.approx(WEIGHT_KG * 1000 / DOSE_BQ)


@pytest.mark.parametrize(("kind", "factor"), [("BW", 1.0), (None, 1.0), ("LBM", None)])
def test_images_in_suv(kind: str | None, factor: float | None) -> None:
    assert suv_factor(pet(Units="GML", SUVType=kind)) == factor


@pytest.mark.parametrize(
    "header",
    [
        pet(Units="CNTS"),
        pet(Units="BQML", CorrectedImage=["ATTN"]),
        pet(DecayCorrection="NONE"),
        pet(PatientWeight=None),
        pet(PatientWeight=0),
        pet(RadiopharmaceuticalInformationSequence=None),
        pet({"RadionuclideTotalDose": 0}),
        pet({"RadionuclideTotalDose": 370.0}),  # MBq
        pet({"RadionuclideHalfLife": 0}),
        pet({"RadiopharmaceuticalStartTime": ""}),
        pet({"RadiopharmaceuticalStartTime": "09"}),
        pet({"RadiopharmaceuticalStartTime": "101501"}),  # after the scan, by a second
        pet(SeriesTime="103000"),  # reconstructed again
        pet(SeriesDate=None),
    ],
)
def test_nothing_is_guessed(header: Dataset) -> None:
    assert suv_factor(header) is None


@pytest.mark.parametrize(
    ("weight", "dose", "is_known"),
    [
        (70, 370e6, True),
        ("70.0", "3.7E8", True),
        (7, 370e6, False),
        (70, 37e6, False),
        (None, 370e6, False),
        (70, None, False),
    ],
)
def test_slices_that_contradict_each_other_have_no_factor(
    tmp_path: Path, weight: Any, dose: Any, is_known: bool
) -> None:
    for n, file in enumerate(sorted(write_series(tmp_path, noise(), words=Words("PT")))):
        slice_ = dcmread(file)
        changes = {"PatientWeight": weight} if n > 2 else {}
        injected = {"RadionuclideTotalDose": dose} if n > 2 else {}
        slice_.update(pet(injected, AcquisitionTime=f"10{15 + n}00", **changes))
        slice_.save_as(file)

    volume = scanloom.load_volume(tmp_path)
    assert volume.suv_factor == (pytest.approx(HOUR) if is_known else None)
    assert (Flag.SLICES_DIFFER in volume.flags) is not is_known
