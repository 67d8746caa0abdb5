"""Write docs/workflow.schema.json, by which editors check workflows."""

from __future__ import annotations

import json
from pathlib import Path

from scanloom.engine.workflow.schema import Workflow

PAGE = Path(__file__).with_name("workflow.schema.json")

if __name__ == "__main__":
    PAGE.write_text(json.dumps(Workflow.model_json_schema(), indent=2) + "\n", encoding="utf-8")
    print(PAGE.name)
