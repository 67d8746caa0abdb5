"""Evaluation of predicted label maps by reference labels, per structure and case."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from scanloom.core import Grid, Reason, ScanError, did_you_mean
from scanloom.engine.results.tables import write_table
from scanloom.io.output.crosswalk import path_text
from scanloom.io.output.json_file import write_document
from scanloom.io.output.layout import CASES
from scanloom.io.output.measurements import SIGNIFICANT_DIGITS
from scanloom.io.system.atomic_write import atomic_write, check_replaceable
from scanloom.io.system.disk_errors import output_error
from scanloom.review.label_files import grid_of_both, on_grid
from scanloom.training.label_sets import (
    IGNORED,
    CaseLabels,
    Labels,
    LabelSet,
    Names,
    Values,
)
from scanloom.training.metrics import (
    TOLERANCE_MM,
    Agreement,
    Difference,
    Outcome,
    Statistics,
    compare_masks,
    paired_differences,
    statistics_of,
)

Side = Literal["first", "second"]
"""The predictions, and those that they are compared with."""
Figure = Literal["dice", "hd95_mm", "nsd", "volume_error_ml", "volume_error_percent"]
FIGURES: Final[tuple[Figure, ...]] = get_args(Figure)
COMPARED: Final[tuple[Figure, ...]] = ("dice", "hd95_mm", "nsd")
"""Figures of which two predictions are compared: a difference means better or worse."""


@dataclass(frozen=True)
class StructureRow:
    """Agreement of one structure of one case.

    Parameters
    ----------
    case : str
        Name of the case in the results.
    reference : str
        Name of the case among the references.
    """

    case: str
    side: Side
    structure: str
    agreement: Agreement
    reference: str
    patient: str


@dataclass(frozen=True)
class LeftOut:
    """A case without figures, by its name; beside ids, by a number.

    Parameters
    ----------
    private : str
        Path of its labels, for the terminal.
    """

    case: str
    side: Side
    reason: Reason
    detail: str
    private: str


@dataclass(frozen=True)
class StructureSummary:
    """Statistics of a structure over the cases of one side.

    Parameters
    ----------
    outcomes : mapping
        Number of cases in which it is found, missed, invented, or absent in both.
    figures : mapping
        Statistics of each figure over the cases in which it is defined.
    limits_ml : (low, high) or None
        Limits of agreement of the volumes (Bland and Altman, 1986): mean error +- 1.96 standard
        deviations, over the cases in which the structure is in one of the masks; None for fewer
        than three.
    """

    structure: str
    side: Side
    outcomes: Mapping[str, int]
    figures: Mapping[Figure, Statistics]
    limits_ml: tuple[float, float] | None


@dataclass(frozen=True)
class FigureDifference:
    """Difference of a figure, first minus second; `structure` is empty for the mean over all."""

    structure: str
    figure: Figure
    difference: Difference


@dataclass(frozen=True)
class Evaluation:
    """The evaluation of one or two sets of predictions.

    Parameters
    ----------
    not_compared : mapping
        Structures that only the references ("reference"), or only the predictions of a side have.
    names : mapping or None
        Values of the structures in label maps without names, as of `match_structures`.
    for_training : mapping
        Number of each side's cases that the dataset of the references has for training: they are
        not compared, and lack no reference.
    """

    tolerance_mm: float
    rows: tuple[StructureRow, ...]
    left_out: tuple[LeftOut, ...]
    structures: tuple[str, ...]
    not_compared: Mapping[str, tuple[str, ...]]
    summaries: tuple[StructureSummary, ...]
    differences: tuple[FigureDifference, ...] = ()
    names: Names | None = None
    pairs: Mapping[str, Mapping[str, CaseLabels]] = field(default_factory=dict, repr=False)
    """Labels of each case, by its name and by "reference" or side."""
    for_training: Mapping[Side, int] = field(default_factory=dict)

    @property
    def sides(self) -> tuple[Side, ...]:
        """The sides that were evaluated."""
        return ("first", "second") if self.differences else ("first",)

    def count(self, side: Side) -> int:
        """Return the number of cases of a side that were compared."""
        return len({row.case for row in self.rows if row.side == side})

    @property
    def patients(self) -> int:
        """Number of patients whose cases were compared; with two sides, on both of them."""
        of_side = [{r.reference for r in self.rows if r.side == side} for side in self.sides]
        shared = set.intersection(*of_side)
        return len({row.patient for row in self.rows if row.reference in shared})

    @cached_property
    def agreements(self) -> Mapping[tuple[Side, str], Sequence[Agreement]]:
        """Agreements by side and structure, of the cases in which it is in one of the masks."""
        return _present(self.rows)


def evaluate(
    predictions: LabelSet,
    references: LabelSet,
    against: LabelSet | None = None,
    *,
    tolerance_mm: float = TOLERANCE_MM,
    labels: Names | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Evaluation:
    """Compare predictions, or two sets of them, with reference labels.

    Structures are matched by name where both sides have names, else by value.

    Parameters
    ----------
    against : LabelSet or None
        Other predictions for the same references, to be compared with the first ones.
    tolerance_mm : float
        Of the normalised surface distance.
    labels : mapping or None
        Values of the structures in the references; None for the names that the references have.
    progress : callable
        Is called with the numbers of cases that are done, and of all.

    Returns
    -------
    Evaluation
        Cases that can't be compared are in `left_out`, each with its reason.

    Raises
    ------
    ScanError
        NO_REFERENCE or NO_PREDICTION if no prediction has a reference; otherwise the reason of
        the first case if none can be compared.
    """
    sets: dict[Side, LabelSet] = {"first": predictions}
    if against is not None:
        sets["second"] = against
    public = _public_names(sets, references)
    matches: dict[Side, list[tuple[CaseLabels, CaseLabels]]] = {}
    left_out: list[LeftOut] = []
    for_training: dict[Side, int] = {}
    for side, cases in sets.items():
        matches[side], unmatched, for_training[side] = _match(side, cases, references, public)
        left_out += unmatched
    names, patients = _shown_names(sets, matches, public), _patients(matches)
    pairs = [
        _Pair(side, *pair, names[pair[1].name], patients[pair[1].name])
        for side, matched in matches.items()
        for pair in matched
    ]
    unnamed = None
    if labels is None and against is not None:
        unnamed = _known_values([pair for each in matches.values() for pair in each[:1]])
    compare = partial(_compare, tolerance_mm=tolerance_mm, labels=labels, unnamed=unnamed)
    compared, failed = _compare_all(pairs, compare, progress)
    left_out += failed
    rows = _rows(compared, compare)
    if not rows:
        raise _nothing_compared(left_out)
    structures = tuple(sorted({row.structure for row in rows}, key=_by_number))
    outcomes = Counter((row.side, row.structure, row.agreement.outcome) for row in rows)
    present = _present(rows)
    labels_of: dict[str, dict[str, CaseLabels]] = defaultdict(dict)
    for pair, _ in compared:
        labels_of[pair.case] |= {"reference": pair.reference, pair.side: pair.prediction}
    return Evaluation(
        tolerance_mm,
        tuple(rows),
        tuple(left_out),
        structures,
        _lacking(compared, structures),
        tuple(
            _summary(structure, side, outcomes, present.get((side, structure), ()))
            for side in sets
            for structure in structures
        ),
        _differences(rows, structures) if against is not None else (),
        unnamed,
        dict(labels_of),
        for_training,
    )


def _compare_all(
    pairs: Sequence[_Pair],
    compare: Callable[[_Pair], _Comparison],
    progress: Callable[[int, int], None],
) -> tuple[list[tuple[_Pair, _Comparison]], list[LeftOut]]:
    """Return the pairs that can be compared, each with its comparison, and the other cases."""
    compared: list[tuple[_Pair, _Comparison]] = []
    left_out: list[LeftOut] = []
    for done, pair in enumerate(pairs):
        progress(done, len(pairs))
        try:
            compared.append((pair, compare(pair)))
        except OSError as exc:
            detail = f"the labels can't be read ({type(exc).__name__})"
            path = str(pair.prediction.path)
            left_out.append(LeftOut(pair.case, pair.side, Reason.UNREADABLE, detail, path))
        except ScanError as error:
            private = error.private or str(pair.prediction.path)
            left_out.append(LeftOut(pair.case, pair.side, error.reason, error.detail, private))
    progress(len(pairs), len(pairs))
    return compared, left_out


def _rows(
    compared: Sequence[tuple[_Pair, _Comparison]], compare: Callable[..., _Comparison]
) -> list[StructureRow]:
    """Return the rows of all cases, also of structures that only other cases show to be due."""
    of_side: dict[Side, set[str]] = defaultdict(set)
    for pair, result in compared:
        of_side[pair.side] |= result.agreements.keys()
    every = set[str]().union(*of_side.values())
    rows = []
    for pair, result in compared:
        agreements = dict(result.agreements)
        lacking = frozenset(of_side[pair.side] - agreements.keys())
        if result.has_segments and lacking:
            # a file of segments has those that were found: another case shows which could be
            agreements |= compare(pair, expected=lacking).agreements
        if result.is_by_value:
            # without names, only the other cases tell which structures a case could have
            absent = Agreement(0.0, 0.0, math.nan)
            agreements |= dict.fromkeys(every - agreements.keys(), absent)
        of_case = pair.reference.name, pair.patient
        rows += [
            StructureRow(pair.case, pair.side, name, a, *of_case) for name, a in agreements.items()
        ]
    rows.sort(key=lambda row: (row.side, row.case, _by_number(row.structure)))
    return rows


def _lacking(
    compared: Sequence[tuple[_Pair, _Comparison]], structures: Sequence[str]
) -> dict[str, tuple[str, ...]]:
    """Return the structures without a figure that the references, or a side, have alone."""
    alone: dict[str, set[str]] = defaultdict(set)
    for pair, result in compared:
        alone["reference"] |= result.only_reference
        alone[pair.side] |= result.only_prediction
    without = {name: each.difference(structures) for name, each in alone.items()}
    return {name: tuple(sorted(each, key=_by_number)) for name, each in without.items() if each}


def _nothing_compared(left_out: Sequence[LeftOut]) -> ScanError:
    """Return the error of an evaluation without a figure."""
    if not left_out:
        return ScanError(Reason.LABELS_UNKNOWN, "no label map has a structure")
    # why a pair failed says more than that others have no partner
    order = {Reason.NO_REFERENCE: 1, Reason.NO_PREDICTION: 2}
    first = min(left_out, key=lambda each: order.get(each.reason, 0))
    count = f" (and {len(left_out) - 1} more)" if len(left_out) > 1 else ""
    return ScanError(first.reason, f"{first.detail}{count}", first.private)


def _by_number(name: str) -> tuple[int, str]:
    """Return a key that sorts names that are numbers by their value."""
    return (int(name) if name.isdecimal() else 0), name


# --- pairs ----------------------------------------------------------------------------------------


def _public_names(sets: Mapping[Side, LabelSet], references: LabelSet) -> dict[int, str]:
    """Return the name of each case for files; beside ids, that of a file becomes a number.

    Names of files may name patients, whom the ids of an output folder do not.
    """
    kinds = {"reference": references, "prediction": sets["first"]}
    if "second" in sets:
        kinds["against"] = sets["second"]
    has_ids = any(each.pseudonymous for each in kinds.values())
    return {
        id(case): f"{kind} {n}" if has_ids and not cases.pseudonymous else path_text(case.name)
        for kind, cases in kinds.items()
        for n, case in enumerate(cases.cases, 1)
    }


def _match(
    side: Side, predictions: LabelSet, references: LabelSet, public: Mapping[int, str]
) -> tuple[list[tuple[CaseLabels, CaseLabels]], list[LeftOut], int]:
    """Return pairs of prediction and reference, the cases that have none, and how many train."""
    if len(predictions.cases) == len(references.cases) == 1 and (
        predictions.is_file or references.is_file
    ):
        return [(predictions.cases[0], references.cases[0])], [], 0
    by_name: dict[str, list[CaseLabels]] = defaultdict(list)
    for reference in references.cases:
        for name in {*reference.names, reference.folder} - {""}:
            by_name[name].append(reference)
    of_series = Counter(each.series for each in predictions.cases)
    candidates = {
        id(each): _candidates(each, by_name, each.series if of_series[each.series] == 1 else "")
        for each in predictions.cases
    }
    claims: dict[int, list[int]] = defaultdict(list)
    for rank, own in candidates.values():
        for reference in own:
            claims[id(reference)].append(rank)
    pairs, left_out, for_training = [], [], 0
    for prediction in predictions.cases:
        rank, own = candidates[id(prediction)]
        if len(own) == 1:
            ranks = claims[id(own[0])]
            if min(ranks) < rank:  # another case has a surer name of it
                own = []
            elif ranks.count(rank) == 1:
                pairs.append((prediction, own[0]))
                continue
        names = {*prediction.names, prediction.folder}
        if not own and not references.training.isdisjoint(names):
            for_training += 1
            continue
        reason, detail = Reason.NO_REFERENCE, "no reference has the name of this case"
        if own:
            reason, detail = Reason.PAIR_AMBIGUOUS, "several cases have the name of a reference"
        case, path = public[id(prediction)], str(prediction.path)
        left_out.append(LeftOut(case, side, reason, detail, path))
    for reference in references.cases:
        if not claims[id(reference)]:
            detail = "no prediction has the name of this reference"
            case, path = public[id(reference)], str(reference.path)
            left_out.append(LeftOut(case, side, Reason.NO_PREDICTION, detail, path))
    return pairs, left_out, for_training


def _candidates(
    prediction: CaseLabels, by_name: Mapping[str, list[CaseLabels]], series: str
) -> tuple[int, list[CaseLabels]]:
    """Return the references that a case may belong to, and how sure that is: 0 is the surest.

    A name of files that several references have says nothing, unless it is the own name of one
    side; nor does the folder of a scan, which others may lie in. A series that no other prediction
    is of is surer than names: files of archives are numbered.
    """
    names = (series, *prediction.names, prediction.folder)
    for rank, name in enumerate(names):
        named = by_name.get(name, [])
        is_own = any(each.name == name for each in (prediction, *named))
        is_of_both = name in prediction.names and all(name in each.names for each in named)
        if named and (is_own or (is_of_both and len(named) == 1)):
            return rank, named
    return len(names), []


def _shown_names(
    sets: Mapping[Side, LabelSet],
    matches: Mapping[Side, Sequence[tuple[CaseLabels, CaseLabels]]],
    public: Mapping[int, str],
) -> dict[str, str]:
    """Return the name of each case in the results: its id, if an output folder has one."""
    pairs = [pair for each in matches.values() for pair in each]
    names = {reference.name: public[id(reference)] for _, reference in pairs}
    for side in reversed(list(sets)):
        if sets[side].pseudonymous:
            names |= {reference.name: case.name for case, reference in matches[side]}
    return names


def _patients(
    matches: Mapping[Side, Sequence[tuple[CaseLabels, CaseLabels]]],
) -> dict[str, str]:
    """Return the patient of each reference; one that no side knows counts as a patient."""
    patients: dict[str, str] = {}
    for each in matches.values():
        for pair in each:
            name = pair[1].name
            patients[name] = patients.get(name) or pair[0].patient or pair[1].patient
    return {name: patient or f"case {name}" for name, patient in patients.items()}


# --- a case ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Pair:
    """A prediction and its reference, with the names of case and patient in the results."""

    side: Side
    prediction: CaseLabels
    reference: CaseLabels
    case: str
    patient: str


@dataclass(frozen=True)
class _Comparison:
    agreements: Mapping[str, Agreement]
    only_reference: frozenset[str]
    only_prediction: frozenset[str]
    is_by_value: bool
    """Whether structures are the values that occur, since no side has names."""
    has_segments: bool
    """Whether a side names its segments, of which it may lack some."""


def read_pair(prediction: CaseLabels, reference: CaseLabels) -> tuple[Labels, Labels]:
    """Return the labels of both on one grid.

    Raises
    ------
    ScanError
        GRID_DIFFERS; otherwise why one of them can't be read.
    """
    # on the grid of the reference, unless its file does not state one
    if reference.has_grid:
        referred = reference.read(None)
        return prediction.read(referred.grid), referred
    predicted = prediction.read(None)
    if prediction.has_grid:
        return predicted, reference.read(predicted.grid)
    # each may leave out other slices
    referred = reference.read(None)
    grid = grid_of_both(referred.grid, predicted.grid)
    return extended(predicted, grid), extended(referred, grid)


def extended(labels: Labels, grid: Grid) -> Labels:
    """Return labels on a grid of which theirs is a part."""
    own = labels.grid.affine
    layers = tuple(on_grid(layer, own, grid, partial=True) for layer in labels.layers)
    return replace(labels, layers=layers, grid=grid)


Region = tuple[int, Values]
"""Layer and values of a structure."""
Slices = tuple[slice, slice, slice]


def match_structures(
    prediction: Labels,
    reference: Labels,
    labels: Names | None,
    unnamed: Names | None,
    expected: Iterable[str] = (),
) -> dict[str, tuple[Region, Region]]:
    """Return the region of each structure that both have, in the prediction and the reference.

    Parameters
    ----------
    labels : mapping or None
        Values of the structures in the reference, which replace its names.
    unnamed : mapping or None
        Values of structures where neither side has names.
    expected : iterable of str
        Structures that are empty where a file of segments lacks them.

    Raises
    ------
    ScanError
        LABELS_UNKNOWN if both have names, and none in common, or `labels` are given for segments;
        STRUCTURE_UNKNOWN if the prediction lacks a structure of `labels`.
    """
    predicted, referred = _named_regions(prediction, reference, labels, unnamed)
    empty: dict[str, Region] = dict.fromkeys(expected, (0, ()))
    predicted = {**(empty if prediction.are_segments else {}), **predicted}
    referred = {**(empty if reference.are_segments else {}), **referred}
    common = {
        name: (predicted[name], referred[name])
        for name in referred
        if name in predicted and name != IGNORED
    }
    if not common and (predicted or referred):
        names = [", ".join(sorted(each)[:3]) or "none" for each in (predicted, referred)]
        detail = f"no structure has one name: predictions have {names[0]}, references {names[1]}"
        raise ScanError(Reason.LABELS_UNKNOWN, detail)
    return common


def _named_regions(
    prediction: Labels, reference: Labels, labels: Names | None, unnamed: Names | None
) -> tuple[Mapping[str, Region], Mapping[str, Region]]:
    """Return the regions of prediction and reference by names that both use.

    Arguments and errors are those of `match_structures`.
    """
    predicted, referred = prediction.names, reference.names
    if labels is not None:
        if len(reference.layers) > 1 or reference.are_segments:
            detail = "the references have several label maps or segments: --labels gives values"
            raise ScanError(Reason.LABELS_UNKNOWN, detail)
        referred = _by_value(labels)
        if unknown := sorted(labels.keys() - (referred if predicted is None else predicted).keys()):
            hint = did_you_mean(unknown[0], sorted(predicted or ()))
            detail = f"the predictions have no structure {unknown[0]}: {hint}"
            raise ScanError(Reason.STRUCTURE_UNKNOWN, detail)
    if predicted is None and referred is None:
        if unnamed is None:
            values = {int(v) for each in (prediction, reference) for v in np.unique(each.layers[0])}
            unnamed = {str(value): (value,) for value in values - {0}}
        predicted = referred = _by_value(unnamed)
    # values of the side with names, where the opposite one has numbers only
    elif predicted is None or referred is None:
        if prediction.are_segments or reference.are_segments:
            detail = "one side has named segments, and the label maps of the other no names"
            raise ScanError(Reason.LABELS_UNKNOWN, detail)
        values_of = {name: values for name, (_, values) in (predicted or referred or {}).items()}
        predicted = predicted or _by_value(values_of)
        referred = referred or _by_value(values_of)
    return predicted, referred


def _by_value(names: Names) -> dict[str, Region]:
    """Return the regions of structures in a label map without names."""
    return {name: (0, values) for name, values in names.items()}


def _known_values(pairs: Sequence[tuple[CaseLabels, CaseLabels]]) -> Names | None:
    """Return the values of structures by the first label map with names, None without any.

    Two predictions without names, or one of them, are compared under the names of the other.
    """
    for pair in pairs:
        for labels in pair:
            with suppress(ScanError, OSError):  # told when the case is compared
                if labels.has_grid and (names := labels.read(None).names):  # no segments
                    return {name: values for name, (_, values) in names.items()}
    return None


def _compare(
    pair: _Pair,
    *,
    tolerance_mm: float,
    labels: Names | None,
    unnamed: Names | None,
    expected: frozenset[str] = frozenset(),
) -> _Comparison:
    """Compare a case; only the `expected` structures if there are any."""
    predicted, referred = read_pair(pair.prediction, pair.reference)
    common = match_structures(predicted, referred, labels, unnamed, expected)
    if expected:
        common = {name: common[name] for name in expected if name in common}
    unknown = (referred.names or {}).get(IGNORED)
    boxes = [_Boxes(each) for each in (predicted, referred)]
    ignored = None if unknown is None else mask_of(referred, unknown)
    agreements = {}
    for name, regions in common.items():
        extents = [b for each, region in zip(boxes, regions, strict=True) for b in each.of(region)]
        if not extents:
            agreements[name] = Agreement(0.0, 0.0, math.nan)
            continue
        box = _union(extents)
        masks = [
            mask_of(each, region, box)
            for each, region in zip((predicted, referred), regions, strict=True)
        ]
        if ignored is not None:
            masks = [mask & ~ignored[box] for mask in masks]
        agreements[name] = compare_masks(masks[1], masks[0], predicted.grid, tolerance_mm)
    only = [frozenset[str](), frozenset[str]()]
    if labels is None:
        known = [set(each.names or common) for each in (predicted, referred)]
        only = [
            frozenset(known[n] - known[1 - n] - {IGNORED}) | boxes[n].unnamed(common, n)
            for n in (0, 1)
        ]
    by_value = labels is None and unnamed is None and predicted.names is referred.names is None
    has_segments = predicted.are_segments or referred.are_segments
    return _Comparison(agreements, only[1], only[0], by_value, has_segments)


def mask_of(labels: Labels, region: Region, box: Slices | None = None) -> NDArray[np.bool_]:
    """Return the mask of a structure, in a box or on the whole grid."""
    layer, values = region
    array = labels.layers[layer] if box is None else labels.layers[layer][box]
    return array == values[0] if len(values) == 1 else np.isin(array, values)


class _Boxes:
    """Boxes of the values in each layer, which is searched once."""

    def __init__(self, labels: Labels) -> None:
        self._labels = labels
        self._boxes: dict[int, list[Slices | None]] = {}

    def of(self, region: Region) -> list[Slices]:
        """Return the boxes of a structure's values that have voxels."""
        from scipy.ndimage import find_objects

        layer, values = region
        if layer not in self._boxes:
            self._boxes[layer] = find_objects(self._labels.layers[layer])
        boxes = self._boxes[layer]
        known = [boxes[value - 1] for value in values if value <= len(boxes)]
        return [box for box in known if box is not None]

    def unnamed(self, common: Mapping[str, tuple[Region, Region]], side: int) -> set[str]:
        """Return the values of a label map that belong to no structure; none of segments."""
        if len(self._labels.layers) > 1 or self._labels.are_segments:
            return set()
        named = list((self._labels.names or {}).values()) or [
            pair[side] for pair in common.values()
        ]
        values = {value for _, values in named for value in values}
        self.of((0, ()))
        return {
            str(value)
            for value, box in enumerate(self._boxes[0], 1)
            if box is not None and value not in values
        }


def _union(boxes: Sequence[Slices]) -> Slices:
    i, j, k = (
        slice(min(each.start for each in axis), max(each.stop for each in axis))
        for axis in zip(*boxes, strict=True)
    )
    return i, j, k


# --- statistics -----------------------------------------------------------------------------------


def _present(rows: Sequence[StructureRow]) -> dict[tuple[Side, str], list[Agreement]]:
    """Return agreements by side and structure, without cases that have it in neither mask."""
    groups: dict[tuple[Side, str], list[Agreement]] = defaultdict(list)
    for row in rows:
        if row.agreement.outcome != "absent":
            groups[row.side, row.structure].append(row.agreement)
    return dict(groups)


def _summary(
    structure: str,
    side: Side,
    outcomes: Mapping[tuple[Side, str, Outcome], int],
    agreements: Sequence[Agreement],
) -> StructureSummary:
    errors = np.array([each.volume_error_ml for each in agreements])
    limits = None
    if errors.size > 2:
        middle, reach = float(errors.mean()), 1.96 * float(errors.std(ddof=1))
        limits = middle - reach, middle + reach
    return StructureSummary(
        structure,
        side,
        {outcome: outcomes.get((side, structure, outcome), 0) for outcome in get_args(Outcome)},
        {name: statistics_of([getattr(a, name) for a in agreements]) for name in FIGURES},
        limits,
    )


def _difference(first: Agreement, second: Agreement, figure: Figure) -> float:
    """Return first minus second; NaN if a figure is not defined, or both lack the structure."""
    values = [getattr(first, figure), getattr(second, figure)]
    outcomes = [first.outcome, second.outcome]
    # To find nothing where there is nothing is right, and to invent it wrong: without this, a
    # model that invents structures would lose nothing by it
    if figure != "hd95_mm" and set(outcomes) == {"absent", "invented"}:
        values[outcomes.index("absent")] = 1.0
    return float(values[0] - values[1])


def _differences(
    rows: Sequence[StructureRow], structures: Sequence[str]
) -> tuple[FigureDifference, ...]:
    """Return first minus second of each figure, for each structure and the mean over all."""
    sides: dict[Side, dict[tuple[str, str], StructureRow]] = {
        side: {(r.reference, r.structure): r for r in rows if r.side == side}
        for side in ("first", "second")
    }
    shared = set.intersection(*({name for name, _ in rows_of} for rows_of in sides.values()))
    # drawing patients without a pair too would make the interval one of fewer pairs
    patients = {r.reference: r.patient for r in reversed(rows) if r.reference in shared}
    differences = []
    for figure in COMPARED:
        table = np.full((len(patients), len(structures)), np.nan)
        for i, case in enumerate(patients):
            for j, structure in enumerate(structures):
                pair = [each.get((case, structure)) for each in sides.values()]
                if pair[0] is not None and pair[1] is not None:
                    table[i, j] = _difference(pair[0].agreement, pair[1].agreement, figure)
        each, mean = paired_differences(table, list(patients.values()))
        differences += [
            FigureDifference(structure, figure, difference)
            for structure, difference in zip((*structures, ""), (*each, mean), strict=True)
        ]
    return tuple(differences)


# --- files ----------------------------------------------------------------------------------------

COLUMNS: Final = (
    *("case", "predictions", "structure", "outcome", "reference_ml", "prediction_ml"),
    *("volume_error_ml", "volume_error_percent", "dice", "hd95_mm", "nsd", "reason"),
)
"""Columns of the table."""


def write_evaluation(evaluation: Evaluation, page: str, folder: Path) -> Path:
    """Write `evaluation.csv`, `.parquet`, `.json` and `.html` to a folder; return the last.

    Raises
    ------
    ScanError
        OUTPUT_UNWRITABLE, also for an output folder of results; DISK_FULL.
    """
    document = evaluation_document(evaluation)
    table = folder / "evaluation"
    check_evaluation_folder(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_table(table, COLUMNS, _table_rows(evaluation))
        atomic_write(table.with_suffix(".json"), lambda draft: write_document(draft, document))
        html = table.with_suffix(".html")
        atomic_write(html, lambda draft: draft.write_text(page, encoding="utf-8"))
    except OSError as exc:
        raise output_error(exc, "the evaluation") from exc
    return html


def check_evaluation_folder(folder: Path) -> None:
    """Refuse a folder that an evaluation can't be written to.

    Raises
    ------
    ScanError
        OUTPUT_UNWRITABLE.
    """
    if (folder / CASES).is_dir():
        detail = "this is an output folder with results: name another one for the evaluation"
        raise ScanError(Reason.OUTPUT_UNWRITABLE, detail, str(folder))
    if folder.exists() and not folder.is_dir():
        raise ScanError(Reason.OUTPUT_UNWRITABLE, "this is not a folder", str(folder))
    for suffix in ("csv", "parquet", "json", "html"):
        check_replaceable(folder / f"evaluation.{suffix}", "the evaluation")


def _table_rows(evaluation: Evaluation) -> Iterator[dict[str, Any]]:
    """Yield a row for each structure of each case, and one for each case that was left out."""
    for row in evaluation.rows:
        figures = {name: rounded(getattr(row.agreement, name)) for name in COLUMNS[4:11]}
        yield {
            **dict.fromkeys(COLUMNS),
            "case": row.case,
            "predictions": row.side,
            "structure": row.structure,
            "outcome": row.agreement.outcome,
            **figures,
        }
    for each in evaluation.left_out:
        yield {
            **dict.fromkeys(COLUMNS),
            "case": each.case,
            "predictions": each.side,
            "outcome": "left out",
            "reason": each.reason.code,
        }


def evaluation_document(evaluation: Evaluation) -> dict[str, Any]:
    """Return `evaluation.json`: statistics, differences, and the cases that were left out."""
    return {
        "tolerance_mm": evaluation.tolerance_mm,
        "patients": evaluation.patients,
        "cases": {side: evaluation.count(side) for side in evaluation.sides},
        "for_training": {side: evaluation.for_training.get(side, 0) for side in evaluation.sides},
        "structures": [
            {
                "structure": each.structure,
                "predictions": each.side,
                **each.outcomes,
                "figures": {name: _plain(value) for name, value in each.figures.items()},
                "limits_of_agreement_ml": each.limits_ml and [rounded(v) for v in each.limits_ml],
            }
            for each in evaluation.summaries
        ],
        "differences": [
            {"structure": each.structure or None, "figure": each.figure, **_plain(each.difference)}
            for each in evaluation.differences
        ],
        "not_compared": {name: list(each) for name, each in evaluation.not_compared.items()},
        "left_out": [
            {
                "case": each.case,
                "predictions": each.side,
                "reason": each.reason.code,
                "detail": each.detail,
            }
            for each in evaluation.left_out
        ],
    }


def _plain(value: Statistics | Difference) -> dict[str, Any]:
    return {
        name: rounded(each) if isinstance(each, float) else each
        for name, each in asdict(value).items()
    }


def rounded(value: float) -> float | None:
    """Return a number with the digits of a table, None if it is not a number."""
    return None if math.isnan(value) else float(f"{value:.{SIGNIFICANT_DIGITS}g}")
