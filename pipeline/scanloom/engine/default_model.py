"""The model of a scan for which none was named: the only one of the store that fits."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from scanloom.cards.card import ANY_MODALITY, CT, ModelCard
from scanloom.cards.check import hounsfield_by_values, looks_like_labels
from scanloom.convert.store import list_models
from scanloom.core import ReadOptions, Reason, ScanError, Series, Volume
from scanloom.io.index.ranking import ALL, BEST, select_series
from scanloom.io.index.series import find_series
from scanloom.io.index.walk import check_paths
from scanloom.io.read import read_scan


def default_model(
    paths: Sequence[Path],
    modality: str | None = None,
    *,
    selection: str | None = None,
    archives: bool = False,
) -> str:
    """Return the name of the only model that fits the scans at some paths.

    A model that refuses scans by their extent is for a crop, and has to be named. Headers are read
    only if the store has several others. `modality` is that of scans that do not state theirs;
    without it, the values of the first of them that can be read, and is not a label map, tell CT
    from others, where they can: each scan is checked again before its model runs. `selection` is
    that of `select_series`: if it names a series, only that one asks for a model. With `archives`,
    archives in a folder are looked into.

    Raises
    ------
    ScanError
        MODEL_UNKNOWN if no model fits, or several do, or there are only label maps. If there is no
        scan at any of the paths, none that is selected, or none can be read, the error that says
        so: a typo in a path is not a question of models.
    """
    missing = []
    for path in paths:
        try:
            check_paths([path])
        except ScanError as error:  # reported when the path is segmented, if there are others
            missing.append(error)
    if missing and len(missing) == len(paths):
        raise missing[0]
    cards = [entry.card for entry in list_models() if entry.card is not None]
    single = [
        card for card in cards if len(card.channels) == 1 and "extent" not in card.checks.refuse
    ]
    if len(single) == 1:
        return single[0].name
    scans = _scans(paths, selection, archives=archives)
    modalities = {series.modality or modality for series in scans} or {modality}
    is_ct = None
    if None in modalities:
        try:
            is_ct = _is_ct([series for series in scans if series.modality is None])
        except ScanError:
            if modalities == {None}:
                raise
            modalities.discard(None)  # label maps and what can't be read ask for no model
    fitting = _fitting(single, modalities, is_ct)
    if len(fitting) == 1:
        return fitting[0]
    kinds = sorted(m for m in modalities if m)
    if None in modalities:
        kinds.append("scans of unknown modality")
    of = " and ".join(kinds)
    problem = f"{len(fitting)} models fit" if fitting else "no model of the store is for"
    names = ": " + ", ".join(fitting) if fitting else ""
    advice = "name one with --model"
    if len(modalities) > 1:
        advice += ", or segment scans of different kinds one by one"
    raise ScanError(Reason.MODEL_UNKNOWN, f"{problem} {of}{names}; {advice}")


def _fitting(
    cards: Sequence[ModelCard], modalities: Collection[str | None], is_ct: bool | None
) -> list[str]:
    """Return the names of the models for scans of some modalities.

    Scans without a modality, for which None stands, are CT or not, or it is unknown (`is_ct` None).
    """
    possible = []
    for card in cards:
        of = card.channels[0].modality
        unstated = None in modalities and (is_ct is None or (of == CT) is is_ct)
        if of == ANY_MODALITY or of in modalities or unstated:
            possible.append(card)
    # A model for this modality goes before a model for any
    own = [card for card in possible if card.channels[0].modality != ANY_MODALITY]
    return [card.name for card in own or possible]


def _scans(paths: Sequence[Path], selection: str | None, *, archives: bool) -> list[Series]:
    """Return the scans at some paths: the selected ones, without reformats where there are others.

    A path without scans has none, unless it is the only one: its error is raised. If there are
    others, it is reported when they are segmented.
    """
    scans, errors = list[Series](), list[ScanError]()
    for path in paths:
        try:
            listed = find_series(path, archives=archives)
            if selection not in (None, ALL, BEST):  # the best depends on the model
                listed = select_series(listed, selection)
        except ScanError as error:
            errors.append(error.about(str(path)))
            continue
        scans += [series for series in listed if not series.derived] or listed
    if errors and not scans:
        raise errors[0]
    return scans


def _is_ct(scans: Sequence[Series]) -> bool | None:
    """Return whether the first scan's values are those of CT; None if they do not tell.

    Files that can't be read and label maps are passed over. Nothing else asks for no model: the
    error of the first label map is raised, or else that of the first file.
    """
    # what the reader would refuse does not matter here: only values are looked at
    options = ReadOptions(gaps="interpolate", nan="padding", orientation="RAS")
    errors, labels = list[ScanError](), list[ScanError]()
    for scan in scans:
        try:
            volume = _read(scan, options)
        except ScanError as error:
            errors.append(error.about(str(scan.files[0])))
            continue
        if not looks_like_labels(volume.array):
            return hounsfield_by_values(volume)
        detail = "this file looks like a label map: if it is a scan, name a model with --model"
        labels.append(ScanError(Reason.MODEL_UNKNOWN, detail, str(scan.files[0])))
    if labels or errors:
        raise (labels or errors)[0]
    return None


def _read(scan: Series, options: ReadOptions) -> Volume:
    """Read a scan, of several volumes the first, which tells as well."""
    try:
        return read_scan(scan, options).volume
    except ScanError as error:
        if error.reason not in (Reason.FOUR_D, Reason.PHASES):
            raise
    return read_scan(scan, options, phase=0).volume
