"""Differences between a published result and a request for the same scan, in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from scanloom.cards.card import ModelCard
from scanloom.cards.card_file import card_digest
from scanloom.cards.requested import requested_card
from scanloom.core import Case, ComputeOptions, Outputs, ReadOptions, ScanError
from scanloom.io.output.file_names import CASE
from scanloom.io.output.json_file import read_json
from scanloom.io.output.layout import case_folder
from scanloom.io.output.published import OTHER_RECIPE, ResultState, result_state
from scanloom.options import take

_ABSENT = "none"


def options_document(read: ReadOptions, compute: ComputeOptions) -> dict[str, Any]:
    """Return the options that can change a result, as `case.json` has them."""
    return {
        option.name: getattr(each, option.name)
        for each in (read, compute)
        for option in fields(each)
        if option.metadata["changes_result"]
    }


def outputs_document(outputs: Outputs) -> dict[str, Any]:
    """Return the outputs as `case.json` has them: with the settings of files that are written."""
    document = asdict(outputs)
    if "radiomics" not in outputs.also:
        del document["radiomics"]
    return document


def explained_result_state(
    out: Path, case: Case, cards: Sequence[ModelCard], *, replace: bool
) -> ResultState:
    """Return the state of a published result, compared with a request; see `result_state`.

    Raises
    ------
    ScanError
        As `result_state`; STALE says what differs from the request.
    """
    folder = case_folder(out, case.folder_name)
    try:
        return result_state(folder, case, replace=replace)
    except ScanError as error:
        if error.detail != OTHER_RECIPE:
            raise
        differences = describe_differences(folder, case, cards)
        raise ScanError(error.reason, f"{OTHER_RECIPE}: {differences}") from error


def describe_differences(folder: Path, case: Case, cards: Sequence[ModelCard]) -> str:
    """Return the differences between a published case and a request, such as "seg was binary"."""
    try:
        document = read_json(folder / CASE)
        used = dict.fromkeys(model["engine"]["name"] for model in document["models"])
        differences = [
            *_models(document["models"], cards, take(ComputeOptions, document.get("options", {}))),
            *_fields(document["outputs"], outputs_document(case.outputs)),
            *_fields(
                document.get("options", {}),
                options_document(case.read, case.compute),
                {"engine": f"auto ({', '.join(used)})"},
            ),
        ]
    except (OSError, ValueError, KeyError, TypeError):
        differences = []
    return "; ".join(differences) or "its models are the same, but an option or relation differs"


def _models(
    before: Sequence[Mapping[str, Any]], cards: Sequence[ModelCard], compute: ComputeOptions
) -> Iterator[str]:
    """Yield a sentence for each model that is another, beside what options changed then."""
    old = {model["name"]: model for model in before}
    new = {card.name: card for card in cards}
    if set(old) != set(new):
        yield f"it was made by {', '.join(old)}, and {', '.join(new)} is requested"
        return
    for name, card in new.items():
        unchanged = card_digest(card), card_digest(requested_card(card, compute))
        if old[name]["card_sha256"] in unchanged:
            continue
        versions = (old[name]["version"], card.version)
        if versions[0] != versions[1]:
            yield f"{name} was version {versions[0]}, and is {versions[1]} now"
        else:
            yield f"{name} was the same version with another card or other weights"


def _fields(
    before: Mapping[str, Any], now: Mapping[str, Any], meaning: Mapping[str, str] = {}
) -> Iterator[str]:
    """Yield a sentence for each option of the older document that has another value now.

    `meaning` tells what "auto" led to.
    """
    for name, value in before.items():
        current = now.get(name)
        if isinstance(value, Mapping):
            if isinstance(current, Mapping):  # else another option says that it is gone
                yield from (f"{name}.{each}" for each in _fields(value, current))
            continue
        if _plain(value) != _plain(current):
            was = meaning.get(name) if value == "auto" else None
            yield f"{name} was {was or _text(value)}, and is {_text(current)} now"


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple | list) else value


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple | list):
        return ", ".join(map(str, value)) or _ABSENT
    return _ABSENT if value is None else f"{value:g}" if isinstance(value, float) else str(value)
