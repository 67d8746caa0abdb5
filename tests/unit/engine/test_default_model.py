"""The model of a scan for which none was named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from scanloom.cards.card import ANY_MODALITY, Channel, Checks
from scanloom.core import Reason, ScanError
from scanloom.engine import default_model as module
from support.model_cards import card


@pytest.mark.parametrize(
    ("modalities", "named"),
    [
        (["CT"], "m0"),
        (["CT", ANY_MODALITY], "m0"),
        (["MR", ANY_MODALITY], "m1"),
        ([ANY_MODALITY], "m0"),
        (["CT", "CT", ANY_MODALITY], None),
        (["MR", "PT"], None),
        (["CT", "CT crop"], "m0"),
        (["CT crop"], None),
    ],
)
def test_a_model_for_the_modality_precedes_one_for_any_and_for_a_crop(
    modalities: list[str], named: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = tmp_path / "weights"
    weights.touch()
    cards = [
        replace(
            card(weights),
            name=f"m{n}",
            channels=(Channel("image", modality.removesuffix(" crop")),),
            checks=Checks(refuse=("extent",) if modality.endswith("crop") else ()),
        )
        for n, modality in enumerate(modalities)
    ]
    listed = tuple(SimpleNamespace(card=each) for each in cards)
    monkeypatch.setattr(module, "list_models", lambda: listed)
    monkeypatch.setattr(module, "_modalities", lambda *_, **__: {"CT"})
    if named is not None:
        assert module.default_model([tmp_path]) == named
        return
    with pytest.raises(ScanError) as caught:
        module.default_model([tmp_path])
    assert caught.value.reason is Reason.MODEL_UNKNOWN
