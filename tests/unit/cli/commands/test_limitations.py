"""Known errors of a model are told where it is used."""

from __future__ import annotations

import json
from pathlib import Path

from scanloom.cli.commands.segment import limitation_lines
from support.commands import scanloom, write_tiny_bundle

SENTENCES = ["Misses ribs.", "Takes metal for bone."]


def test_models_show_prints_each(tmp_path: Path) -> None:
    bundle = write_tiny_bundle(tmp_path / "bundles")
    path = bundle / "configs" / "metadata.json"
    metadata = json.loads(path.read_text())
    metadata.setdefault("scanloom", {})["limitations"] = SENTENCES
    path.write_text(json.dumps(metadata))
    printed = scanloom("models", "show", bundle).out
    assert all(f"! {sentence}" in printed for sentence in SENTENCES)
    assert (
        scanloom("models", "show", bundle, "--json").document["model"]["limitations"] == SENTENCES
    )


def test_a_line_for_each_model_with_the_first_limitation() -> None:
    models = [{"name": "a", "limitations": SENTENCES}, {"name": "b"}]
    single = {"name": "c", "limitations": SENTENCES[:1]}
    assert limitation_lines([*models, *models, single]) == [
        "! a: Misses ribs. 1 more: scanloom models show a",
        "! c: Misses ribs.",
    ]
