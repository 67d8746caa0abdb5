"""Make the model that ships of a bundle that `scanloom train` wrote.

    python models/hippocampus_mr/training/package.py BUNDLE

Weights become float16, half as large, and each is stored once: DynUNet lists its layers again under
`skip_layers`. So MONAI's loader is told that names may be missing.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import torch

from scanloom.convert.conversion import convert_model
from scanloom.training.bundle import inference_config, metadata
from scanloom.training.recipe import read_recipe

MODEL = Path(__file__).parents[1]


def package(bundle: Path, model: Path = MODEL) -> None:
    """Write `configs`, `models`, card and weights of a model of a trained bundle."""
    recipe = read_recipe(Path(__file__).with_name("recipe.yaml"))
    state = torch.load(bundle / "models" / "model.pt", weights_only=True)
    state = {k: v.half() for k, v in state.items() if not k.startswith("skip_layers.")}
    for folder in ("configs", "models", "weights"):
        (model / folder).mkdir(parents=True, exist_ok=True)
        for file in (model / folder).iterdir():
            file.unlink()
    weights = model / "models" / "model.pt"
    torch.save(state, weights)
    inference, fields = inference_config(recipe), metadata(recipe)
    inference["handlers"][0]["strict"] = False
    fields["scanloom"]["weights_sha256"] = hashlib.sha256(weights.read_bytes()).hexdigest()
    fields["scanloom"]["precisions"] = ["float32", "bfloat16"]  # compared: see README.md
    for name, document in (("inference", inference), ("metadata", fields)):
        text = json.dumps(document, indent=4) + "\n"
        (model / "configs" / f"{name}.json").write_text(text, encoding="utf-8")
    convert_model(model, {}, model)


if __name__ == "__main__":
    package(Path(sys.argv[1]))
