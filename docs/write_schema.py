"""Write docs/workflow.schema.json and its like for other pages: editors check pages by them."""

from __future__ import annotations

import json
from pathlib import Path

from scanloom.engine.listen.site import Site
from scanloom.engine.workflow.schema import Workflow
from scanloom.training.recipe import TrainingRecipe

PAGE = Path(__file__).with_name("workflow.schema.json")
PAGES = {
    PAGE: Workflow,
    PAGE.with_name("training.schema.json"): TrainingRecipe,
    PAGE.with_name("site.schema.json"): Site,
}

if __name__ == "__main__":
    for page, model in PAGES.items():
        page.write_text(json.dumps(model.model_json_schema(), indent=2) + "\n", encoding="utf-8")
        print(page.name)
