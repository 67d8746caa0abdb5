"""Write docs/workflow.schema.json and docs/training.schema.json, by which editors check pages."""

from __future__ import annotations

import json
from pathlib import Path

from scanloom.engine.workflow.schema import Workflow
from scanloom.training.recipe import TrainingRecipe

PAGE = Path(__file__).with_name("workflow.schema.json")
PAGES = {PAGE: Workflow, Path(__file__).with_name("training.schema.json"): TrainingRecipe}

if __name__ == "__main__":
    for page, model in PAGES.items():
        page.write_text(json.dumps(model.model_json_schema(), indent=2) + "\n", encoding="utf-8")
        print(page.name)
