"""`scanloom review`: look at results in a browser, and decide on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from scanloom.cli.command import is_typed
from scanloom.cli.console import error_boundary, say
from scanloom.cli.options import General, KeyOptions, ResultsOptions, takes_panels
from scanloom.cli.values import percentage

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from scanloom.review.verdicts.verdict import Seen

LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class ReaderOptions:
    """Reviewers, and the share of cases that several of them read."""

    panel: ClassVar[str] = "Readers"

    reviewers: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...",
            help="Reviewers: each gets a link. Default: those of the last start.",
        ),
    ] = None
    double: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            parser=percentage,
            help="Share of cases that two read, blind: 20% or 0.2; a third one if they differ.",
        ),
    ] = None
    repeat: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            parser=percentage,
            help="Share of a reviewer's cases that come back later.",
        ),
    ] = None
    patients: Annotated[
        bool,
        typer.Option(
            "--patients",
            help="Show reviewers names and dates of patients, from OUT/private; takes the key.",
        ),
    ] = False
    remove_reviewer: Annotated[
        str | None,
        typer.Option(
            metavar="CODE",
            help="Take a reviewer off the list, by code or name: verdicts stay. Starts no server.",
        ),
    ] = None


@dataclass(frozen=True)
class AddressOptions:
    """Address at which the server listens."""

    panel: ClassVar[str] = "Server"

    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Another than this machine's needs TLS.")
    ] = LOOPBACK[0]
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 for a free one.")] = 0
    tls_cert: Annotated[Path | None, typer.Option(metavar="FILE", help="Certificate, PEM.")] = None
    tls_key: Annotated[Path | None, typer.Option(metavar="FILE", help="Its key, PEM.")] = None


@dataclass(frozen=True)
class CorrectionOptions:
    """Corrections from other programs, and for training: the server is not started."""

    panel: ClassVar[str] = "Corrections"

    take: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Take corrected labels: NIfTI, NRRD, .seg.nrrd or DICOM SEG; needs --case.",
        ),
    ] = None
    case: Annotated[
        str | None, typer.Option(metavar="ID", help="The case that they belong to.")
    ] = None
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            envvar="SCANLOOM_REVIEW_MODEL",
            help="The model, if there are results of several.",
        ),
    ] = None


@takes_panels
def review(
    results: ResultsOptions,
    readers: ReaderOptions,
    corrections: CorrectionOptions,
    key: KeyOptions,
    address: AddressOptions,
    general: General,
) -> None:
    """Review results in a browser: look, accept or reject, comment.

    Prints a link for each reviewer, which works once. Verdicts are kept in OUT/review, names,
    comments and corrections in progress in OUT/private. Stop it with Ctrl-C. New results appear
    while it runs.
    """
    _check(readers, corrections, address)
    out = results.path
    names = _names(readers)
    with error_boundary(general.mode):
        from scanloom.core import Reason, ScanError
        from scanloom.io.output.layout import CASES, LISTEN, no_results

        # Beside a `listen`, the first results come while the server runs
        if not any((out / name).is_dir() for name in (CASES, LISTEN)):
            raise no_results(out)
        # Before the server is imported: these need no server, which is an extra
        if readers.remove_reviewer is not None:
            from scanloom.review.verdicts.readers import remove_reviewer

            code = remove_reviewer(out, readers.remove_reviewer)
            say(f"Reviewer {code} is off the list and gets no link any more; the verdicts stay.")
            return
        if corrections.take is not None and corrections.case is not None:
            reviewer = next(iter(names), "reviewer")
            take, case = corrections.take, corrections.case
            _take(out, take, case, reviewer, corrections.model, key.key)
            return
        try:
            from scanloom.review.server.serve import ServerOptions, serve
        except ModuleNotFoundError as exc:
            detail = "the review server is not installed: pip install 'scanloom[review]'"
            raise ScanError(Reason.NOT_INSTALLED, detail) from exc
        options = ServerOptions(
            reviewers=names,
            host=address.host,
            port=address.port,
            certificate=address.tls_cert,
            certificate_key=address.tls_key,
            double=readers.double,
            repeat=readers.repeat,
            key=key.key,
            patients=readers.patients,
        )
        say("Reading the results ...")
        serve(out, options, _tell, partial(_publish, out, key.key), _tell_kept)
        if (table := out / "review" / "review.csv").is_file():
            say(f"Verdicts: {table}")


def _check(readers: ReaderOptions, corrections: CorrectionOptions, address: AddressOptions) -> None:
    """Refuse options that don't fit each other."""
    if readers.reviewers is not None and not _names(readers):
        raise typer.BadParameter("give the reviewers' names: --reviewers anna,ben")
    if (corrections.take is None) != (corrections.case is None):
        raise typer.BadParameter("--take and --case belong together")
    if corrections.model is not None and corrections.take is None and is_typed("model"):
        raise typer.BadParameter("--model tells which results --take corrects: give both")
    if corrections.take is not None and readers.remove_reviewer is not None:
        raise typer.BadParameter("give --take and --remove-reviewer one after the other")
    if (address.tls_cert is None) != (address.tls_key is None):
        raise typer.BadParameter("--tls-cert and --tls-key belong together")
    if address.host not in LOOPBACK and address.tls_cert is None:
        raise typer.BadParameter(
            f"--host {address.host} can be reached from other machines: it needs --tls-cert and "
            "--tls-key"
        )


def _names(readers: ReaderOptions) -> tuple[str, ...]:
    names = (name.strip() for name in (readers.reviewers or "").split(","))
    return tuple(dict.fromkeys(name for name in names if name))


def _publish(
    out: Path,
    key: Path | None,
    name: str,
    seen: Seen,
    labels: Mapping[str, NDArray[Any]],
    reviewer: str,
) -> Path:
    """Publish label maps that were corrected in the browser."""
    from scanloom.engine.revisions import Correction, publish_revision

    return publish_revision(out, name, Correction(labels, reviewer, "brush", seen), key)


def _take(
    out: Path, file: Path, case: str, reviewer: str, model: str | None, key: Path | None
) -> None:
    """Publish corrected labels from a file."""
    from scanloom.engine.revisions import changed_structures, take_file
    from scanloom.review.revisions import latest_result
    from scanloom.review.verdicts.log import reviewer_codes

    [code] = reviewer_codes(out, [reviewer]).values()
    before = latest_result(out, case)
    folder = take_file(out, file, case, code, model=model, key=key)
    if folder is None:
        say("The file has the labels of the case: there is nothing to take.")
    else:
        say(f"Revision {folder.name}: {folder}")
        for label, (was, now) in changed_structures(before, folder).items():
            say(f"{label}: {was} voxels before, {now} now")


def _tell_kept(kept: dict[tuple[str, str], int]) -> None:
    from scanloom.core import counted

    for (case, reviewer), count in kept.items():
        strokes = f"{counted(count, 'stroke')} of {reviewer} on case {case}"
        say(f"Not saved, and kept for the next start: {strokes}.")


def _tell(links: dict[str, str]) -> None:
    for name, link in links.items():
        say(f"{name}: {link}")
    say("Each link works once. Stop with Ctrl-C.")
