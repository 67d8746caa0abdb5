"""The folder of a run, `OUT/runs/<run id>/`: its workflow, and the versions it runs with."""

from __future__ import annotations

import platform
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scanloom.cards.card import ModelCard
from scanloom.cards.card_file import card_digest
from scanloom.core.packages import package_versions
from scanloom.engine.case.documents import VERSIONED_PACKAGES
from scanloom.engine.workflow.schema import Workflow
from scanloom.io.output.json_file import write_json
from scanloom.io.output.private import private_folder, write_private

RUNS = "runs"
WORKFLOW = "workflow.json"


def create_run_folder(out: Path, workflow: Workflow, cards: Sequence[ModelCard]) -> str:
    """Create the folder of a new run; return the run's id."""
    name = f"{time.strftime('%Y%m%dT%H%M%S')}-{secrets.token_hex(3)}"
    folder = out / RUNS / name
    folder.mkdir(parents=True)
    write_json(folder / WORKFLOW, publishable_workflow(workflow, [card.name for card in cards]))
    versions: dict[str, Any] = {
        "python": platform.python_version(),
        **package_versions((*VERSIONED_PACKAGES, "distributed")),
        "models": {card.name: card_digest(card) for card in cards},
    }
    write_json(folder / "versions.json", versions)
    return name


def private_run_folder(out: Path, fingerprint: str, name: str) -> Path:
    """Return the folder of a run in `OUT/private/`, created if it is missing."""
    with private_folder(out, fingerprint) as private:
        for folder in (private / RUNS, private / RUNS / name):
            folder.mkdir(exist_ok=True, mode=0o700)
    return folder


def save_workflow(private: Path, workflow: Workflow) -> None:
    """Save a workflow unchanged, with its paths, in a run's folder of `OUT/private/`."""
    document = workflow.model_dump(mode="json")
    write_private(private / WORKFLOW, lambda draft: write_json(draft, document))


def publishable_workflow(workflow: Workflow, models: Sequence[str]) -> dict[str, Any]:
    """Return a workflow as results may publish it: without paths and the site's cluster.

    Parameters
    ----------
    workflow : Workflow
        The requested workflow, which may name bundles by their folders.
    models : sequence of str
        The names of its models.

    Returns
    -------
    dict
        Plain data, again a valid workflow.
    """
    document = workflow.model_dump(mode="json", exclude={"execution": {"cluster"}})
    return {**document, "models": list(models)}
