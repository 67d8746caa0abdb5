"""What several commands are asked: which workflow, which of its cases, whose key."""

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
    from scanloom.engine.workflow import Workflow

ArchivesOption = Annotated[
    bool,
    typer.Option("--archives", help="Look into zip and tar archives inside folders too."),
]
ShardOption = Annotated[
    str | None, typer.Option(metavar="K/N", help="Only the K-th of N parts: for job arrays.")
]
ReplaceOption = Annotated[
    bool, typer.Option("--replace", help="Replace results of another recipe.")
]
RetryOption = Annotated[bool, typer.Option("--retry-failed", help="Try all failed cases again.")]


def find_workflow(name: str) -> Workflow:
    """Return the workflow of a file, or the one of that name that ships.

    Raises
    ------
    ScanError
        WORKFLOW_UNKNOWN where it is neither, with those that ship; WORKFLOW for mistakes in it.
    """
    from scanloom.cards.shipped import shipped
    from scanloom.core import Reason, ScanError, nearest
    from scanloom.engine.workflow import read_workflow

    known = {path.stem: path for path in sorted(shipped("workflows").glob("*.yaml"))}
    if os.path.isdir(name):  # noqa: PTH112 says no where Path raises
        seen = "a folder is no workflow"
    elif os.path.exists(name):  # noqa: PTH110
        return read_workflow(Path(name))
    elif name in known:
        return read_workflow(known[name])
    else:
        seen = f"there is no workflow {name!r}"
    raise ScanError(Reason.WORKFLOW_UNKNOWN, f"{seen}; {nearest(name, known)}")


@contextmanager
def telling_new_key(key: Path | None) -> Iterator[None]:
    """Say on stderr that a key was made in the block, and where: a wrong name is noticed.

    Likewise, that another user may know or change a key which is there: one in the usual place is
    refused then, one that was named may be meant.
    """
    from scanloom.io.identity import usual_key_file
    from scanloom.own_python import is_ours

    file = key or usual_key_file()
    named = bool(key or os.environ.get("SCANLOOM_KEY"))
    with suppress(OSError):  # not there yet, or not to be read: loading it tells
        if named and not is_ours(file):
            words = "belongs to another user, or others may write to it: ids hang on it"
            say(f"scanloom: the key in {file} {words}.", err=True)
    there = os.path.exists(file)  # noqa: PTH110 says no where Path raises
    try:
        yield
    finally:
        if not there and os.path.exists(file):  # noqa: PTH110
            say(f"scanloom: made a new key in {file}: keep it, ids hang on it.", err=True)


def parse_shard(text: str | None) -> tuple[int, int] | None:
    """Return the numbers that "K/N" says."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise typer.BadParameter("two numbers such as 1/4, the first from 1 to the second")
    return int(match[1]), int(match[2])
