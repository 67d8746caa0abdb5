"""Options that several commands share: archives, shards, retries, the workflow, the key."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from scanloom.cli.console import say

if TYPE_CHECKING:
    from scanloom.engine.workflow.schema import Workflow

WorkflowArgument = Annotated[
    str, typer.Argument(metavar="WORKFLOW", help="A YAML or JSON file, or a shipped workflow.")
]
SourcesArgument = Annotated[
    list[Path], typer.Argument(metavar="PATH...", help="Folders, files, archives, patterns.")
]
RunKeyOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Key file for the ids; also SCANLOOM_KEY.")
]
ArchivesOption = Annotated[
    bool,
    typer.Option("--archives", help="Also read zip and tar archives inside folders."),
]
ShardOption = Annotated[
    str | None, typer.Option(metavar="K/N", help="Process only part K of N, for job arrays.")
]
ReplaceOption = Annotated[
    bool, typer.Option("--replace", help="Replace results of another recipe.")
]
RetryOption = Annotated[bool, typer.Option("--retry-failed", help="Retry all failed cases.")]


def find_workflow(name: str) -> Workflow:
    """Return the workflow in a file, or a shipped workflow by its name.

    Raises
    ------
    ScanError
        WORKFLOW_UNKNOWN, with the shipped names, if it is neither; WORKFLOW if it has errors.
    """
    from scanloom.core import Reason, ScanError, did_you_mean
    from scanloom.core.resources import shipped
    from scanloom.engine.workflow.schema import read_workflow

    known = {path.stem: path for path in sorted(shipped("workflows").glob("*.yaml"))}
    if os.path.isdir(name):  # noqa: PTH112 False where Path.is_dir() raises
        problem = "a folder is not a workflow"
    elif os.path.exists(name):  # noqa: PTH110
        return read_workflow(Path(name))
    elif name in known:
        return read_workflow(known[name])
    else:
        problem = f"there is no workflow {name!r}"
    raise ScanError(Reason.WORKFLOW_UNKNOWN, f"{problem}; {did_you_mean(name, known)}")


@contextmanager
def report_new_key(key: Path | None) -> Iterator[None]:
    """Report on stderr a key that is created in the block, so that a wrong path is noticed.

    Also warn about an explicit key file that another user may read or change. The default key
    file is refused in that case, but an explicit one may be intended.
    """
    from scanloom.io.identity import default_key_file
    from scanloom.own_python import is_ours

    file = key or default_key_file()
    explicit = bool(key or os.environ.get("SCANLOOM_KEY"))
    with suppress(OSError):  # missing or unreadable: reported when it is loaded
        if explicit and not is_ours(file):
            warning = "belongs to another user or is writable by others: case ids depend on it"
            say(f"scanloom: the key in {file} {warning}.", err=True)
    existed = os.path.exists(file)  # noqa: PTH110 False where Path.exists() raises
    try:
        yield
    finally:
        if not existed and os.path.exists(file):  # noqa: PTH110
            say(
                f"scanloom: created a new key in {file}. Back it up: case ids depend on it.",
                err=True,
            )


def parse_shard(text: str | None) -> tuple[int, int] | None:
    """Return K and N of "K/N"."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise typer.BadParameter("expected K/N with 1 <= K <= N, such as 1/4")
    return int(match[1]), int(match[2])
