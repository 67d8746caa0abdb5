"""`scanloom where`: look up the source of a case or file id."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from scanloom.cli.console import Exit, console, error_boundary, print_result, say
from scanloom.cli.options import KeyOption, Reporting, takes_panels
from scanloom.options import DEFAULT_OUT

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from scanloom.io.output.crosswalk import SourceRecord

SHOWN = (
    ("path", "path"),
    ("patient_id", "patient"),
    ("patient_name", "name"),
    ("accession_number", "accession"),
    ("study_date", "study date"),
    ("study_uid", "study UID"),
    ("series_uid", "series UID"),
    ("series_number", "series"),
    ("series_description", "description"),
    ("phase", "phase"),
    ("folder", "case folder"),
)


@dataclass(frozen=True)
class CrosswalkOptions:
    """The output folder that leads ids back to their sources, and its key."""

    panel: ClassVar[str] = "Input"

    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="DIR", help="Output folder of the ids.")
    ] = DEFAULT_OUT
    key: KeyOption = None


@takes_panels
def where(
    ids: Annotated[list[str], typer.Argument(metavar="ID", help="Case or file ids.")],
    crosswalk: CrosswalkOptions,
    general: Reporting,
) -> None:
    """Show the source of cases and files: path, UIDs, patient.

    Requires the key and read access to OUT/private. The output identifies patients.
    """
    with error_boundary(general.mode):
        from scanloom.core import Reason, ScanError
        from scanloom.io.output.crosswalk import find_sources

        key = check_holder(crosswalk.out, crosswalk.key)
        texts = dict.fromkeys(text.strip() for text in ids)
        named = find_sources(crosswalk.out, sorted(texts.keys() - {""}), "folder")
        folders = {source.folder for source in named}
        requested = list(dict.fromkeys(t.lower() for t in texts if t not in folders))
        of_cases = find_sources(crosswalk.out, sorted(requested))
        file_ids = set(requested).difference(source.id for source in of_cases)
        of_files = (source for _, source in find_files_of(crosswalk.out, file_ids, key))
        sources = list(dict.fromkeys([*named, *of_cases, *of_files]))
        unknown = [text for text in requested if text not in {source.id for source in sources}]
        if not sources:
            raise ScanError(Reason.ID_UNKNOWN, _why_unknown(crosswalk.out, requested))
        rows = [asdict(source) for source in sources]
        plain = {"schema": 1, "sources": rows, "unknown": unknown}
        print_result(general.mode, lambda: plain, lambda: _show(sources))
        if unknown:
            say(f"scanloom: not in the crosswalk: {', '.join(unknown)}.", err=True)
            raise typer.Exit(Exit.SOME_FAILED)


def find_files_of(
    out: Path, ids: Collection[str], key: bytes
) -> Sequence[tuple[int, SourceRecord]]:
    """Return the sources of file ids, with the number of the copy."""
    # File ids are not in the crosswalk; the index, which is large, is read for them alone
    if not (unknown := set(ids) - {""}):
        return ()
    from scanloom.engine.results.tables import find_files

    return find_files(out, unknown, key)


def _why_unknown(out: Path, ids: Collection[str]) -> str:
    """Return why neither the crosswalk nor the index of an output folder has these ids."""
    from scanloom.engine.results.tables import is_in_manifest

    if not is_in_manifest(out, ids):
        return "the crosswalk has none of these ids"
    return (
        "the manifest has these files, but other paths were indexed since: run `scanloom index` on "
        f"the paths of the run with --out {out}"
    )


def check_holder(out: Path, key: Path | None) -> bytes:
    """Return the key of an output folder, which the caller must have.

    Raises
    ------
    ScanError
        NOT_FOUND or NO_RESULTS if the folder has no crosswalk; KEY_MISMATCH.
    """
    from scanloom.core import Reason, ScanError
    from scanloom.io.output.layout import no_results, published_cases
    from scanloom.io.output.private import PRIVATE, read_fingerprint, read_key_of

    if read_fingerprint(out) is None:
        if published_cases(out) and not (out / PRIVATE).exists():
            detail = "a copy by `scanloom export` does not tell whose its results are"
            raise ScanError(Reason.NO_RESULTS, detail, str(out))
        raise no_results(out, "sources of results")
    return read_key_of(out, key)


def _show(sources: Sequence[SourceRecord]) -> None:
    from rich.table import Table

    from scanloom.core import printable

    screen = console()
    for source in sources:
        table = Table.grid(padding=(0, 2))
        for field, title in SHOWN:
            if text := str(getattr(source, field)):
                table.add_row("", title, printable(text))
        screen.print(source.id)
        screen.print(table)
