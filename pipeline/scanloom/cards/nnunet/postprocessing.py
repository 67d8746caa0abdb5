"""Reads nnU-Net's `postprocessing.pkl`: largest components that its cross-validation chose."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from scanloom.cards.cleaning import KeepLargest
from scanloom.cards.monai.files import find_file
from scanloom.cards.nnunet.checkpoint import NUMBERS
from scanloom.cards.nnunet.inert_pickle import Name, read_pickle
from scanloom.core import Reason, ScanError, format_bytes

FILE: Final = "postprocessing.pkl"
_MAX_BYTES: Final = 1 << 20
_LARGEST: Final = (
    "nnunetv2.postprocessing.remove_connected_components."
    "remove_all_but_largest_component_from_segmentation"
)


def read_cleaning(folder: Path) -> tuple[KeepLargest, ...]:
    """Return the cleaning that nnU-Net determined for a model's folds.

    nnU-Net itself applies it only by a separate command. Of components of equal size, nnU-Net keeps
    all, and scanloom one.

    Raises
    ------
    ScanError
        MODEL_DAMAGED if the file is missing or invalid; MODEL_UNSAFE if it names anything but that
        one function of nnU-Net and numbers.
    """
    places = ["", *sorted((e.name + "/" for e in folder.glob("crossval_results*")), key=len)]
    files = [find_file(folder, place + FILE) for place in reversed(places)]
    file = next((file for file in files if file is not None), None)
    if file is None:
        raise ScanError(Reason.MODEL_DAMAGED, f"the model has no {FILE}")
    try:
        with file.open("rb") as stream:
            data = stream.read(_MAX_BYTES + 1)
    except OSError as exc:
        raise ScanError(Reason.MODEL_DAMAGED, f"{FILE} can't be read") from exc
    if len(data) > _MAX_BYTES:
        raise ScanError(Reason.MODEL_DAMAGED, f"{FILE} is larger than {format_bytes(_MAX_BYTES)}")
    content = read_pickle(data, {**NUMBERS, _LARGEST: _never}, name=FILE)
    try:
        functions, arguments = content
        return tuple(_rule(*pair) for pair in zip(functions, arguments, strict=True))
    except (TypeError, ValueError, AttributeError) as exc:
        raise ScanError(Reason.MODEL_DAMAGED, f"{FILE} is not a list of functions") from exc


def _rule(function: Any, arguments: Any) -> KeepLargest:
    """Return a call of nnU-Net's function as a rule."""
    if not isinstance(function, Name) or function.text != _LARGEST:
        raise TypeError("not the function")
    if not {"background_label", "labels_or_regions"}.issuperset(arguments):
        raise ScanError(Reason.MODEL_UNSUPPORTED, f"{FILE}: an unknown argument")
    if arguments.get("background_label", 0) != 0:
        raise ScanError(Reason.MODEL_UNSUPPORTED, f"{FILE}: another background than 0")
    chosen = arguments.get("labels_or_regions", ())
    regions = chosen if isinstance(chosen, list) else [chosen]
    numbers = [
        number
        for region in regions
        for number in (region if isinstance(region, tuple | list) else (region,))
    ]
    if not numbers or not all(type(n) is int and 0 < n <= 65535 for n in numbers):
        raise ValueError("not labels")
    return KeepLargest(tuple(sorted(set(numbers))), together=True, connectivity=26, ties="all")


def _never(*_: Any) -> Any:
    raise ScanError(Reason.MODEL_UNSAFE, f"{FILE} would run code")
