"""The rows of the list: what filters and searches look at, and the state of each for a reviewer.

A list may have a million rows. What all reviewers share is kept once (`CaseRows`), what a reviewer
sees in a few bytes a row (`ReviewerRows`); both change with a case or verdict, by its row alone.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from scanloom.core import Measurement
from scanloom.io.output.lookup import Lookup
from scanloom.review import outliers
from scanloom.review.outliers import Finding
from scanloom.review.report.data import references_of
from scanloom.review.scratch import Texts, decoded, encoded
from scanloom.review.verdicts.verdict import Seen

if TYPE_CHECKING:
    import pyarrow as pa

STATES = ("open", "accept", "edit", "reject", "disagreed", "stale")
WAITING = ("open", "stale")
"""States of cases that wait for a decision."""
_CODES = {state: n for n, state in enumerate(STATES)}
_MAX_WORDS = 16
"""Words of a search whose rows are remembered, of a byte a row each."""


@dataclass(frozen=True)
class MeasuredCase:
    """A published case, as far as order, filters and searches need it: tables have that much."""

    name: str
    modality: str
    axes: str
    models: tuple[str, ...]
    measurements: tuple[Measurement, ...]
    references: Mapping[str, Any]

    @classmethod
    def of(
        cls, name: str, document: Mapping[str, Any], measurements: tuple[Measurement, ...]
    ) -> MeasuredCase:
        """Return a case by its `case.json`; LookupError or TypeError if that is damaged."""
        models = document["models"]
        return cls(
            name=name,
            modality=document["source"]["modality"] or "",
            axes=document["grid"]["axes"],
            models=tuple(each["name"] for each in models),
            measurements=measurements,
            references={each["name"]: references_of(each) for each in models},
        )

    @property
    def as_measured(self) -> MeasuredCase:
        """The case without what its folder alone says."""
        return MeasuredCase(*(getattr(self, each.name) for each in fields(MeasuredCase)))


@dataclass(frozen=True)
class ListedCase(MeasuredCase):
    """A published case, as far as its row and verdicts need it: its folder was read.

    Parameters
    ----------
    stamp : object
        Changes when the case or its latest revision is replaced.
    revision : int
        Number of the latest revision; 0 without any.
    """

    stamp: object
    shape: tuple[int, ...]
    spacing: tuple[float, ...]
    seen: Seen
    revision: int


class ListRow(NamedTuple):
    """Data of a case for filters and searches; the text is in lower case."""

    name: str
    modality: str
    models: tuple[str, ...]
    risk: float
    text: str

    @classmethod
    def of(cls, case: MeasuredCase, findings: Sequence[Finding]) -> ListRow:
        """Return the row of a case with its findings."""
        doubts = (text for text, _ in doubts_of(findings))
        text = " ".join((case.name, case.modality, *case.models, *doubts))
        risk = outliers.risk_score(findings)
        return cls(case.name, case.modality, case.models, risk, text.lower())


@dataclass(frozen=True)
class Query:
    """The selection of rows that a list shows.

    Parameters
    ----------
    words : tuple of str
        Lower case; each must be in the row.
    state : str
        One of `STATES`, "mine", or empty for all.
    model, modality : str
        Empty for all.
    doubtful : bool
        Whether only cases are shown that are to be reviewed.
    """

    words: tuple[str, ...] = ()
    state: str = ""
    model: str = ""
    modality: str = ""
    doubtful: bool = False


class CaseRows:
    """Rows in columns, in the order in which they come, which is that of their indices.

    Parameters
    ----------
    rows : iterable of ListRow
    by_risk : bool
        Whether to put them into the order of review: of equal ones, none moves.
    """

    def __init__(self, rows: Iterable[ListRow], *, by_risk: bool = False) -> None:
        import pyarrow as pa

        self._modalities, self._models = dict[str, int](), dict[tuple[str, ...], int]()
        names, texts, codes, risks = Texts(), Texts(), array("i"), array("d")
        for row in rows:
            names.add(row.name)
            texts.add(row.text)
            codes.extend(self._codes(row))
            risks.append(row.risk)
        risk = np.array(risks, np.float64)
        order = np.argsort(-risk, kind="stable") if by_risk else np.arange(len(names))
        modality, models = np.array(codes, np.int32).reshape(-1, 2)[order].T.copy()
        arrow_names = names.as_arrow().cast(pa.large_string())
        columns = arrow_names.take(order), texts.as_arrow().take(order)
        self._set_columns(*columns, modality, models, risk[order])

    def _set_columns(
        self,
        names: pa.Array,
        texts: pa.Array,
        modality: NDArray[np.int32],
        models: NDArray[np.int32],
        risk: NDArray[np.float64],
    ) -> None:
        import pyarrow as pa

        self.names, self._texts = Lookup(pa.chunked_array([names])), texts
        self._who: pa.Array | None = None
        self._new_texts = dict[int, bytes]()
        """Texts of rows that were replaced."""
        self.modality, self.models, self.risk = modality, models, risk
        self.present = np.ones(len(risk), bool)
        self.review = self.risk >= outliers.REVIEW_THRESHOLD
        self.updated = list[int]()
        """Places of rows that were replaced or removed since, in the order of these events."""
        self._with_word, self._guard = dict[str, NDArray[np.bool_]](), threading.Lock()

    @classmethod
    def from_table(
        cls, table: pa.Table, modalities: Iterable[str], models: Iterable[Iterable[str]]
    ) -> CaseRows:
        """Return the rows of what `as_table` returned."""
        rows = cls(())
        rows._modalities = {value: n for n, value in enumerate(modalities)}
        rows._models = {tuple(value): n for n, value in enumerate(models)}
        names, texts = (table[column].combine_chunks() for column in ("name", "text"))
        numbers = (np.array(table[column].to_numpy()) for column in ("modality", "models", "risk"))
        rows._set_columns(names, texts, *numbers)
        return rows

    def as_table(self) -> tuple[pa.Table, list[str], list[tuple[str, ...]]]:
        """Return the rows that were not removed, in their order.

        Returns
        -------
        table : pyarrow.Table
            Modality and models of a row are indices into the lists.
        modalities : list of str
        models : list of tuple of str
        """
        import pyarrow as pa
        from pyarrow import compute

        texts, new = self._texts, sorted(self._new_texts.copy().items())
        if new:
            mask = np.zeros(len(texts), bool)
            mask[[index for index, _ in new]] = True
            replaced = pa.array([text for _, text in new], texts.type)
            texts = compute.replace_with_mask(texts, pa.array(mask), replaced)
        columns = {
            "name": self.names.column,
            "text": texts,
            "modality": self.modality,
            "models": self.models,
            "risk": self.risk,
        }
        table = pa.table(columns).filter(pa.array(self.present))
        return table, list(self._modalities), list(self._models)

    def __iter__(self) -> Iterator[ListRow]:
        """Yield the rows that were not removed."""
        modalities, models = list(self._modalities), list(self._models)
        for index in np.flatnonzero(self.present).tolist():
            yield self._row(index, modalities, models)

    def of(self, name: str) -> ListRow | None:
        """Return the row of a case; None if it is missing or was removed."""
        index = self.names.first_row(name)
        if index is None or not self.present[index]:
            return None
        return self._row(index, list(self._modalities), list(self._models))

    def put(self, row: ListRow) -> bool:
        """Replace the row of a case, which stays in its place; return whether there is one."""
        index = self.names.first_row(row.name)
        if index is None:
            return False
        self.modality[index], self.models[index] = self._codes(row)
        self.risk[index], self._new_texts[index] = row.risk, encoded(row.text)
        self.review[index] = row.risk >= outliers.REVIEW_THRESHOLD
        self.present[index] = True
        self._note(index)
        return True

    def remove(self, name: str) -> None:
        """Remove the row of a case."""
        index = self.names.first_row(name)
        if index is not None:
            self.present[index] = False
            self._note(index)

    def name_patients(self, identities: Iterable[str]) -> None:
        """Let a search look into further texts, one for each row; nothing to have none."""
        texts = Texts()
        for text in identities:
            texts.add(text.lower())
        self._who, self._with_word = texts.as_arrow() if len(texts) else None, {}

    def chosen(self, query: Query) -> NDArray[np.bool_]:
        """Return the rows that a query leaves, whatever their state (N,)."""
        rows = self.present.copy()
        if query.doubtful:
            rows &= self.review
        if query.modality:
            rows &= self.modality == self._modalities.get(query.modality, -1)
        if query.model:
            codes = [code for models, code in self._models.items() if query.model in models]
            rows &= np.isin(self.models, codes)
        for word in query.words:
            rows &= self._having(word)
        return rows

    def choices(self, rows: NDArray[np.bool_]) -> tuple[list[str], list[str]]:
        """Return the models and the modalities of some rows (N,), sorted."""
        models, modalities = (
            set(np.flatnonzero(np.bincount(codes[rows])).tolist())
            for codes in (self.models, self.modality)
        )
        return (
            sorted({name for key, code in self._models.items() if code in models for name in key}),
            sorted(name for name, code in self._modalities.items() if name and code in modalities),
        )

    def _row(
        self, index: int, modalities: Sequence[str], models: Sequence[tuple[str, ...]]
    ) -> ListRow:
        text = self._new_texts.get(index)
        text = self._texts[index].as_py() if text is None else text
        of_scan = modalities[self.modality[index]], models[self.models[index]]
        return ListRow(self.names[index], *of_scan, float(self.risk[index]), decoded(text))

    def _codes(self, row: ListRow) -> tuple[int, int]:
        modality = self._modalities.setdefault(row.modality, len(self._modalities))
        return modality, self._models.setdefault(row.models, len(self._models))

    def _note(self, index: int) -> None:
        self._with_word = {}  # another mapping: who looks a word up now still has the one before
        self.updated.append(index)

    def _having(self, word: str) -> NDArray[np.bool_]:
        """Return the rows with a word (N,); typing asks for the same words again and again."""
        with self._guard:
            known = self._with_word
            if word in known:
                return known[word]
            rows = _with_word(self._texts, word)
            for index, text in self._new_texts.copy().items():  # another thread may add one
                rows[index] = encoded(word) in text
            if self._who is not None:
                rows |= _with_word(self._who, word)
            if len(known) >= _MAX_WORDS:
                del known[next(iter(known))]
            known[word] = rows
            return rows


def _with_word(texts: pa.Array, word: str) -> NDArray[np.bool_]:
    """Return which texts in UTF-8 contain a word (N,)."""
    from pyarrow import compute

    matches = compute.match_substring(texts, encoded(word))
    rows: NDArray[np.bool_] = matches.to_numpy(zero_copy_only=False)
    return rows


class ReviewerRows:
    """The state of each row for a reviewer, with the number of the change that made it.

    Parameters
    ----------
    rows : CaseRows
    reads : (N,) array of bool
        Which cases the reviewer reads as long as there is no verdict.
    """

    def __init__(self, rows: CaseRows, reads: NDArray[np.bool_]) -> None:
        self.rows, self.reads = rows, reads
        count = len(rows.names)
        self.states = np.full(count, _CODES["open"], np.uint8)
        self.own = np.zeros(count, bool)
        """Cases with a verdict of the reviewer."""
        self.number = 0
        self._changed = np.zeros(count, np.int64)

    def set(self, index: int, state: str, *, own: bool, reads: bool) -> None:
        """Set the state of a row, of which something changed."""
        self.states[index], self.own[index], self.reads[index] = _CODES[state], own, reads
        self._changed[index] = self.number

    def changed_since(self, indices: NDArray[np.int64], number: int) -> NDArray[np.int64]:
        """Return those of some indices whose rows changed after a number."""
        return indices[self._changed[indices] > number]

    @property
    def all(self) -> NDArray[np.bool_]:
        """The reviewer's rows (N,)."""
        return self.reads & self.rows.present

    def chosen(self, query: Query) -> NDArray[np.int64]:
        """Return the indices of the rows that a query leaves, ascending."""
        rows = self.reads & self.rows.chosen(query)
        if query.state == "mine":
            rows &= self.own
        elif query.state:
            rows &= self.states == _CODES[query.state]
        return np.flatnonzero(rows)

    def next_waiting(self, chosen: NDArray[np.int64], index: int = -1) -> str | None:
        """Return the next case that waits for a decision: after an index, else the first.

        Of the chosen ones, else of all; never the one at the index.
        """
        for indices in (chosen, np.flatnonzero(self.all)):
            waiting = indices[np.isin(self.states[indices], [_CODES[state] for state in WAITING])]
            waiting = waiting[waiting != index]
            if waiting.size:
                after = int(np.searchsorted(waiting, index))
                return self.rows.names[waiting[after % waiting.size]]
        return None

    def counts(self) -> dict[str, int]:
        """Return the number of rows by state, of all, and of those with an own verdict."""
        rows = self.all
        by_code = np.bincount(self.states[rows], minlength=len(STATES)).tolist()
        # each case counts once by its state, and again if it is the reviewer's own
        own = int((self.own & rows).sum())
        return {"all": int(rows.sum()), **dict(zip(STATES, by_code, strict=True)), "mine": own}


def doubts_of(findings: Sequence[Finding]) -> list[tuple[str, Finding]]:
    """Return the text of each doubt, each once, with its finding, the heaviest first.

    Structures at the border are one doubt: the scan ends there for all of them.
    """
    doubts = dict[str, Finding]()
    borders = [finding for finding in findings if finding.kind == "border"]
    for finding in sorted(findings, key=lambda finding: -finding.weight):
        text = f"{finding.structure}: {finding.text}"
        if finding.kind == "border" and len(borders) > 1:
            names = ", ".join(dict.fromkeys(each.structure for each in borders))
            text = f"cut off by the border of the scan: {names}"
        doubts.setdefault(text, finding)
    return [(text, finding) for text, finding in doubts.items()]
