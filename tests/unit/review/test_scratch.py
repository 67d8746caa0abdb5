"""Texts and columns of numbers come back as they were added, in memory and from a file."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from scanloom.review import scratch
from scanloom.review.scratch import Columns, Texts, decoded

TEXTS = ["", "a", "é\n", "x" * 300, "\ud800", "b", "Z"] * 9


@pytest.fixture(params=["memory", "file"])
def folder(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> object:
    """Return where scratch files are: each of a few hundred bytes is written."""
    monkeypatch.setattr(scratch, "WRITTEN_BYTES", 100)
    monkeypatch.setattr(scratch, "COLUMN_NUMBERS", 7)
    return tmp_path if request.param == "file" else None


def test_texts_come_back_in_any_order(folder: Path | None) -> None:
    texts = Texts(folder)
    for n, text in enumerate(TEXTS):
        texts.add(text)
        assert texts[n // 2] == TEXTS[n // 2]

    assert (len(texts), list(texts)) == (len(TEXTS), TEXTS)
    encoded = texts.as_bytes()
    order = np.argsort(encoded, kind="stable")
    assert [TEXTS[n] for n in order] == sorted(TEXTS)
    assert folder is None or not list(folder.iterdir())


def test_texts_in_memory_are_a_column_of_arrow() -> None:
    texts = Texts()
    assert texts.as_arrow().to_pylist() == []
    texts = Texts()
    for text in TEXTS:
        texts.add(text)
    assert list(map(decoded, texts.as_arrow().to_pylist())) == TEXTS


def test_columns_come_back_whole(folder: Path | None) -> None:
    columns, numbers = Columns[str](folder), np.random.default_rng(1).normal(size=50)
    for n, number in enumerate(numbers.tolist()):
        columns.add("all", number)
        if n % 3 == 0:
            columns.add("third", number)

    np.testing.assert_array_equal(columns.read("all"), numbers)
    np.testing.assert_array_equal(columns.read("third"), numbers[::3])
    assert (list(columns), columns.count("third")) == (["all", "third"], 17)
    assert (columns.count("none"), columns.read("none").size) == (0, 0)


def test_a_short_write_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "WRITTEN_BYTES", 100)
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:13]))
    texts = Texts(tmp_path)
    for text in TEXTS:
        texts.add(text)

    assert list(texts) == TEXTS
