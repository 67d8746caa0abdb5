"""Cases as a workflow wants them: the same for one scan and for an archive."""

from __future__ import annotations

from collections.abc import Sequence

from scanloom.cards.card import ModelCard
from scanloom.core import Case, Series
from scanloom.engine.record import recipe_hash
from scanloom.engine.workflow import Workflow


def workflow_recipe(workflow: Workflow, cards: Sequence[ModelCard]) -> str:
    """Return the hash (SHA-256, hex) over all of a workflow that can change a result."""
    policy, execution = workflow.policy, workflow.execution
    options = {
        "gaps": policy.gaps,
        "orientation": policy.orientation,
        "modality": policy.modality,
        "precision": execution.precision,
        "body_box": execution.body_box,
        "fused_restore": execution.fused_restore,
    }
    return recipe_hash(cards, options, workflow.outputs.outputs())


def make_case(
    case_id: str, series: Series, workflow: Workflow, recipe: str, *, phase: int | None
) -> Case:
    """Return the case of a series.

    Parameters
    ----------
    case_id : str
        As `scanloom.io.identity.case_id` makes it of series and phase.
    series : Series
        Where it is.
    workflow : Workflow
        What is to be done.
    recipe : str
        Of the workflow.
    phase : int or None
        Which of several volumes.
    """
    policy = workflow.policy
    return Case(
        id=case_id,
        series=series,
        outputs=workflow.outputs.outputs(),
        source_hash="",  # the files are read for it when the case is worked on
        recipe=recipe,
        orientation=policy.orientation,
        modality=policy.modality,
        phase=phase,
        gaps=policy.gaps,
        max_bytes=policy.max_size,
    )
