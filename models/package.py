"""Make a model that ships of a bundle that `scanloom train` wrote.

    python models/package.py models/hippocampus_mr BUNDLE [OUT]

Weights become float16, half as large, and each is stored once: DynUNet lists its layers again under
`skip_layers`. So MONAI's loader is told that names may be missing. Of a training that still runs,
the averaged weights of the last checkpoint are taken. OUT is the model's own folder unless given.

Small weights are stored a second time, as card and safetensors that scanloom reads at once; it
converts a bundle without them when it is first used.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import torch

from scanloom.cards.card_file import CARD_FILE, WEIGHTS_FOLDER
from scanloom.convert.conversion import convert_model
from scanloom.training.bundle import inference_config, metadata
from scanloom.training.handlers import last_checkpoint
from scanloom.training.recipe import read_recipe

BFLOAT16 = ("ct_tissue", "hippocampus_mr")
"""Models whose labels in bfloat16 are those of float32, as their README.md says."""
STORED_TWICE = 4_000_000
"""Largest bytes of weights that are also stored as safetensors."""


def package(model: Path, bundle: Path, out: Path) -> None:
    """Write `configs`, `models`, card and weights of a model of a trained bundle."""
    recipe = read_recipe(model / "training" / "recipe.yaml")
    trained = bundle / "models" / "model.pt"
    checkpoint = None if trained.is_file() else last_checkpoint(str(bundle / "checkpoints"))
    if checkpoint is None:
        state = torch.load(trained, weights_only=True)
    else:
        state = torch.load(checkpoint, weights_only=True)["average"]
    state = {k: v.half() for k, v in state.items() if not k.startswith("skip_layers.")}
    (out / CARD_FILE).unlink(missing_ok=True)
    for folder in ("configs", "models", WEIGHTS_FOLDER):
        (out / folder).mkdir(parents=True, exist_ok=True)
        for file in (out / folder).iterdir():
            file.unlink()
    weights = out / "models" / "model.pt"
    torch.save(state, weights)
    inference, fields = inference_config(recipe), metadata(recipe)
    inference["handlers"][0]["strict"] = False
    fields["scanloom"]["weights_sha256"] = hashlib.sha256(weights.read_bytes()).hexdigest()
    if recipe.name in BFLOAT16:
        fields["scanloom"]["precisions"] = ["float32", "bfloat16"]
    for name, document in (("inference", inference), ("metadata", fields)):
        text = json.dumps(document, indent=4) + "\n"
        (out / "configs" / f"{name}.json").write_text(text, encoding="utf-8")
    if weights.stat().st_size <= STORED_TWICE:
        convert_model(out, {}, out)
    else:
        (out / WEIGHTS_FOLDER).rmdir()


if __name__ == "__main__":
    package(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[-1 if len(sys.argv) > 3 else 1]))
