"""The model of a scan for which none was named: the only one of the store that fits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from scanloom.cards.card import ANY_MODALITY
from scanloom.convert.store import list_models
from scanloom.core import Reason, ScanError
from scanloom.io.index.series import find_series
from scanloom.io.index.walk import check_paths

HINT = "name one with --model"


def default_model(
    paths: Sequence[Path], modality: str | None = None, *, archives: bool = False
) -> str:
    """Return the name of the only model that fits the scans at some paths.

    A model that refuses scans by their extent is for a crop, and has to be named. Headers are read
    only if the store has several others. `modality` is that of scans that do not state theirs;
    with `archives`, archives in a folder are looked into.

    Raises
    ------
    ScanError
        MODEL_UNKNOWN if no model fits, or several do. If there is no scan at any of the paths, the
        error that says so: a path with a typo is not a question of models.
    """
    missing = []
    for path in paths:
        try:
            check_paths([path])
        except ScanError as error:  # reported when the path is segmented, if there are others
            missing.append(error)
    if len(missing) == len(paths):
        raise missing[0]
    cards = [entry.card for entry in list_models() if entry.card is not None]
    single = [
        card for card in cards if len(card.channels) == 1 and "extent" not in card.checks.refuse
    ]
    if len(single) == 1:
        return single[0].name
    modalities = _modalities(paths, modality, archives=archives)
    known = {ANY_MODALITY, *modalities}
    possible = [c for c in single if None in modalities or c.channels[0].modality in known]
    # A model for this modality goes before a model for any
    stated = [card for card in possible if card.channels[0].modality != ANY_MODALITY]
    fitting = [card.name for card in stated or possible]
    if len(fitting) == 1:
        return fitting[0]
    scans = " and ".join(sorted(m for m in modalities if m)) or "scans of unknown modality"
    problem = f"{len(fitting)} models fit" if fitting else "no model of the store is for"
    names = ": " + ", ".join(fitting) if fitting else ""
    raise ScanError(Reason.MODEL_UNKNOWN, f"{problem} {scans}{names}; {HINT}")


def _modalities(paths: Sequence[Path], modality: str | None, *, archives: bool) -> set[str | None]:
    """Return the modalities of the scans at some paths.

    A path without scans has none, unless it is the only one: its error is raised. If there are
    others, it is reported when they are segmented.
    """
    modalities, errors = set[str | None](), list[ScanError]()
    for path in paths:
        try:
            listed = find_series(path, archives=archives)
        except ScanError as error:
            errors.append(error.about(str(path)))
            continue
        original = [series for series in listed if not series.derived] or listed
        modalities.update(series.modality or modality for series in original)
    if errors and not modalities:
        raise errors[0]
    return modalities or {modality}
