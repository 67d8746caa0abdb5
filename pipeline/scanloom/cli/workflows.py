"""Workflows by name or file."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from scanloom.cli.console import say

if TYPE_CHECKING:
    from scanloom.engine.workflow.schema import Workflow


def find_workflow(name: str, paths: Sequence[Path] = ()) -> Workflow:
    """Return the workflow in a file, or a shipped workflow by its name.

    `paths` are the scans of the command, to notice that both were swapped.

    Raises
    ------
    ScanError
        WORKFLOW_UNKNOWN, with the shipped names, if it is neither; WORKFLOW if it has errors.
    """
    from scanloom.core import Reason, ScanError, did_you_mean
    from scanloom.core.paths import shipped_workflows
    from scanloom.engine.workflow.schema import read_workflow

    known = shipped_workflows()
    is_folder = os.path.isdir(name)  # noqa: PTH112 False where Path.is_dir() raises
    is_file = not is_folder and os.path.exists(name)  # noqa: PTH110  # likewise
    # Before the name is looked up: of two swapped arguments both exist, and neither error helps
    swapped = [str(path) for path in paths if _names_workflow(path, known)]
    if swapped and not _names_workflow(Path(name), known):
        detail = f"{name!r} is not a workflow, but {swapped[0]!r} is: swap them"
        raise ScanError(Reason.WORKFLOW_UNKNOWN, f"{detail}, the workflow comes first")
    if is_file or name in known:
        return read_workflow(Path(name) if is_file else known[name])
    if not is_folder and _names_workflow(Path(name), known):
        raise ScanError(Reason.WORKFLOW_UNKNOWN, "this file does not exist", name)
    problem = "a folder is not a workflow" if is_folder else f"there is no workflow {name!r}"
    raise ScanError(Reason.WORKFLOW_UNKNOWN, f"{problem}; {did_you_mean(name, known)}")


def explain_nothing_selected(
    reasons: Mapping[str, int], unstated: int, name: str, workflow: Workflow
) -> None:
    """Report on stderr why no file of an archive became part of a case.

    Parameters
    ----------
    reasons : mapping
        Counts of files or series by the code of their reason; the key of a file without is "".
    unstated : int
        Number of series that were not selected because their files state no modality.
    name, workflow
        The workflow, as it was given and as it was read.
    """
    counts = Counter({reason: count for reason, count in reasons.items() if reason})
    listed = ", ".join(f"{count} {reason}" for reason, count in counts.most_common())
    why = listed or "none of them belongs to a scan"
    say(f"scanloom: files were found, but no case ({why}).", err=True)
    if unstated:
        explain_unstated(unstated, name, workflow)
    else:
        check = "Check `select` and `policy` of the workflow. " if "NOT_SELECTED" in counts else ""
        say(f"{check}`scanloom index` lists the series.", err=True)


def explain_unstated(unstated: int, name: str, workflow: Workflow) -> None:
    """Report on stderr that series were not selected because their files state no modality.

    The advice names the modalities that the workflow selects, and its other conditions that such
    files, which state nothing but a grid, fail too. Parameters are those of
    `explain_nothing_selected`.
    """
    from scanloom.core import counted
    from scanloom.core.paths import shipped_workflows

    series = counted(unstated, "series states", "series state")
    file = shipped_workflows().get(name)
    target = f"a copy of {file}" if file else "the workflow"
    selections = [workflow.select, *workflow.channels.values()]
    modalities = sorted({m for selection in selections for m in selection.modality})
    stated = [
        f"`{condition}`"
        for condition in ("body_part", "description", "image_type")
        if any(getattr(selection, condition) for selection in selections)
    ]
    policies = " or ".join(f"`policy: {{modality: {modality}}}`" for modality in modalities)
    removed = f" and remove {' and '.join(stated)} from its `select`" if stated else ""
    models = "".join(f" --model {model}" for model in workflow.models)
    commands = " or ".join(
        f"`scanloom segment --modality {m}{models} --series all`" for m in modalities
    )
    say(
        f"{series} no modality, such as NIfTI, and the workflow selects by it. If they are "
        f"{' or '.join(modalities)}, add {policies} to {target}{removed}, or use {commands}. "
        "`scanloom index` marks those that look like label maps: keep them out.",
        err=True,
    )


def _names_workflow(path: Path, known: Mapping[str, Path]) -> bool:
    """Return whether an argument is the name of a shipped workflow, or has a workflow's suffix."""
    return str(path) in known or path.suffix.lower() in (".yaml", ".yml", ".json")
