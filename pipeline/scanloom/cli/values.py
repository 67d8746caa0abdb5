"""Values of options that are listed as text, and their completion by the shell.

`scanloom.options` names these functions. Wrong values are refused with the expected ones.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import typer  # typer evaluates the annotations of completions

from scanloom.options import DEVICES, EXTRAS, MAX_OVERLAP

if TYPE_CHECKING:
    from scanloom.core import Structure


def output_folder(text: str | Path) -> Path:
    """Return the path of an output folder; refuse the name of a file."""
    from scanloom.core import ScanError
    from scanloom.engine.result_file import refuse_file_name

    try:
        refuse_file_name(Path(text))
    except ScanError as error:
        raise typer.BadParameter(
            f"{error.detail}: only `segment` writes a result to a file"
        ) from error
    return Path(text)


def axis_codes(text: str) -> str:
    """Return axis codes such as RAS in capitals; refuse any other text."""
    codes = text.strip().upper()
    # Each axis once: a letter's index is 0 or 1, 3 or 4, 6 or 7 by its pair
    if sorted("LR PA IS".find(c) // 3 for c in codes) != [0, 1, 2] or " " in codes:
        raise typer.BadParameter("three letters, one each of R or L, A or P, S or I: RAS, LPS ...")
    return codes


def device_name(text: str) -> str:
    """Return the name of a device; refuse any other text."""
    if re.fullmatch(DEVICES, text) is None:
        raise typer.BadParameter('"auto", "cpu", "cuda" or "cuda:0", "cuda:1" ..., "mps" or "xpu"')
    return text


def names(text: str) -> tuple[str, ...]:
    """Return the names of a text with commas between them; refuse one without any name."""
    listed = tuple(name.strip() for name in text.split(",") if name.strip())
    if not listed:
        raise typer.BadParameter("at least one name, several as in A,B; or leave the option out")
    return listed


def extra_names(text: str) -> tuple[str, ...]:
    """Return the names of optional writers, with commas between them; refuse any other."""
    from scanloom.core import did_you_mean

    listed = names(text.lower())
    for name in listed:
        if name not in EXTRAS:
            raise typer.BadParameter(did_you_mean(name, EXTRAS))
    return listed


def _number(text: str, most: float, expected: str) -> float:
    """Return a number from 0 to `most`; refuse any other text."""
    with suppress(ValueError):
        if 0 <= (number := float(text)) <= most:
            return number
    raise typer.BadParameter(expected)


def volume(text: str) -> float:
    """Return a volume in mm3, 0 or more; refuse any other text."""
    return _number(text, sys.float_info.max, "a volume in mm3, such as 200")


def distance(text: str) -> float:
    """Return a distance in mm, 0 or more; refuse any other text."""
    return _number(text, sys.float_info.max, "a distance in mm, such as 2")


def window_overlap(text: str) -> float:
    """Return the share of a window by which windows overlap, 0 to 0.9; refuse any other text."""
    return _number(text, MAX_OVERLAP, f"a number from 0 to {MAX_OVERLAP}, such as 0.5")


def percentage(text: str) -> float:
    """Return the share of "20%" or "0.2", 0 to 1; refuse any other text."""
    text, expected = text.strip(), "a share from 0 to 1, such as 0.2 or 20%"
    if text.endswith("%"):
        return _number(text[:-1], 100.0, expected) / 100
    return _number(text, 1.0, expected)


def sample_size(text: str) -> float:
    """Return the share of "1%" or "0.01", or the number of folders of "200"; refuse other text."""
    expected = "a share below 100 %, such as 1% or 0.01, or a number of folders, such as 200"
    number, percent = text.strip().removesuffix("%"), "%" in text
    size = _number(number, sys.float_info.max, expected) / (100 if percent else 1)
    if size == 0 or (size >= 1 and (percent or size < 2 or size % 1)):
        raise typer.BadParameter(expected)
    return size


def byte_count(text: str) -> int:
    """Return the number of bytes of a size such as 8GB or 7.5GiB; refuse any other text."""
    from scanloom.core import parse_bytes

    try:
        return parse_bytes(text)
    except ValueError as exc:
        raise typer.BadParameter(str(exc)) from exc


# typer takes a plain tuple for an option with two values
class Shard(NamedTuple):
    """Part k of n parts of an archive, from 1."""

    k: int
    n: int


def shard(text: str) -> Shard:
    """Return K and N of "K/N"; refuse any other text."""
    match = re.fullmatch(r"(\d+)/(\d+)", text.strip())
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise typer.BadParameter(f"expected K/N with 1 <= K <= N, such as 1/4, not {text}")
    return Shard(int(match[1]), int(match[2]))


class Days(NamedTuple):
    """The first and the last of some days, YYYYMMDD; "" for no limit."""

    first: str
    last: str


def days(text: str) -> Days:
    """Return the days of "2026-11-28" or "2026-11-01..2026-11-30"; an end may be left out."""
    from scanloom.engine.listen.rows import read_date

    first, dots, last = text.partition("..")
    try:
        ends = [read_date(each) if each.strip() else "" for each in (first, last)]
    except ValueError:
        ends = ["", ""]
    period = Days(ends[0], ends[1] if dots else ends[0])
    if not any(period) or (period.last and period.last < period.first):
        raise typer.BadParameter("a day, or days such as 2026-11-01..2026-11-30")
    return period


def complete_models(incomplete: str) -> list[str]:
    """Return the names of the models in the store."""
    from scanloom.convert.store import stored_models

    return _starting(incomplete, stored_models())


def complete_structures(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return labels of the models on the command line, or else of all; after a comma, the next."""
    return _next_of(incomplete, [s.label for s in _structures_of(ctx.params.get("models") or ())])


def _structures_of(names: Iterable[str]) -> Iterable[Structure]:
    from scanloom.convert.store import find_model, stored_models
    from scanloom.core import ScanError

    for name in names or stored_models():
        try:
            yield from find_model(name).structures
        except ScanError:
            continue


def complete_workflows(incomplete: str) -> list[str]:
    """Return the names of the shipped workflows; files are completed by the shell otherwise."""
    from scanloom.core.paths import shipped_workflows

    return _starting(incomplete, shipped_workflows())


def complete_extras(incomplete: str) -> list[str]:
    """Return the names of the files on request; after a comma, the next."""
    return _next_of(incomplete, EXTRAS)


def complete_devices(incomplete: str) -> list[str]:
    """Return the kinds of devices."""
    return _starting(incomplete, ("auto", "cpu", "cuda", "mps", "xpu"))


def _next_of(incomplete: str, names: Iterable[str]) -> list[str]:
    """Return lists of names that a text begins, each with one more name than before."""
    before, comma, last = incomplete.rpartition(",")
    taken = set(before.split(","))
    listed = _starting(last, dict.fromkeys(names))
    return [before + comma + name for name in listed if name not in taken]


def _starting(incomplete: str, names: Iterable[str]) -> list[str]:
    return sorted(name for name in names if name.startswith(incomplete))
