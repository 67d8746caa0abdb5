"""Make a model that ships of a bundle that `scanloom train` wrote.

    python models/package.py models/hippocampus_mr BUNDLE [OUT]

Weights become float16, half as large, and each is stored once: DynUNet lists its layers again under
`skip_layers`. So MONAI's loader is told that names may be missing. Of a training that still runs,
the averaged weights of the last checkpoint are taken. OUT is the model's own folder unless given.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import torch

from scanloom.convert.conversion import convert_model
from scanloom.training.bundle import inference_config, metadata
from scanloom.training.handlers import last_checkpoint
from scanloom.training.recipe import read_recipe


def package(model: Path, bundle: Path, out: Path) -> None:
    """Write `configs`, `models`, card and weights of a model of a trained bundle."""
    recipe = read_recipe(model / "training" / "recipe.yaml")
    trained, checkpoint = (
        bundle / "models" / "model.pt",
        last_checkpoint(str(bundle / "checkpoints")),
    )
    if trained.is_file() or checkpoint is None:
        state = torch.load(trained, weights_only=True)
    else:
        state = torch.load(checkpoint, weights_only=True)["average"]
    state = {k: v.half() for k, v in state.items() if not k.startswith("skip_layers.")}
    for folder in ("configs", "models", "weights"):
        (out / folder).mkdir(parents=True, exist_ok=True)
        for file in (out / folder).iterdir():
            file.unlink()
    weights = out / "models" / "model.pt"
    torch.save(state, weights)
    inference, fields = inference_config(recipe), metadata(recipe)
    inference["handlers"][0]["strict"] = False
    fields["scanloom"]["weights_sha256"] = hashlib.sha256(weights.read_bytes()).hexdigest()
    fields["scanloom"]["precisions"] = ["float32", "bfloat16"]  # compared: see README.md
    for name, document in (("inference", inference), ("metadata", fields)):
        text = json.dumps(document, indent=4) + "\n"
        (out / "configs" / f"{name}.json").write_text(text, encoding="utf-8")
    convert_model(out, {}, out)


if __name__ == "__main__":
    package(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[-1 if len(sys.argv) > 3 else 1]))
