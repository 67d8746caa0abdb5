"""Folders with small MeshNets of random weights, in the forms in which brainchop's are stored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

NAMES = ("Unknown", "Cerebral-White-Matter", "Cerebral-Cortex", "Brain-Stem")
DILATIONS = (1, 2, 4, 1)

Weights = dict[str, NDArray[np.float32]]


def random_weights(
    channels: int = 5, classes: int = 4, *, bias: bool = True, seed: int = 0
) -> Weights:
    """Return weights by the names of the class; kernels (C', C, x, y, z)."""
    draw = np.random.default_rng(seed).standard_normal
    weights: Weights = {}
    for n in range(len(DILATIONS)):
        inputs = channels if n else 1
        scale = 1.5 / np.sqrt(27 * inputs)
        weights[f"layers.{n}.weight"] = scale * draw((channels, inputs, 3, 3, 3))
        if bias:
            weights[f"layers.{n}.bias"] = 0.1 * draw(channels)
    weights["classifier.weight"] = draw((classes, channels, 1, 1, 1))
    weights["classifier.bias"] = 0.1 * draw(classes)
    return {name: values.astype(np.float32) for name, values in weights.items()}


def layers_model(weights: Weights, activation: str = "elu", suffix: str = "") -> dict[str, Any]:
    """Return the `model.json` of a network."""
    layers: list[dict[str, Any]] = [
        {
            "class_name": "InputLayer",
            "config": {"batch_input_shape": [None, 256, 256, 256, 1], "name": "input"},
            "name": "input",
            "inbound_nodes": [],
        }
    ]
    tensors: list[dict[str, Any]] = []

    def add(kind: str, name: str, config: dict[str, Any]) -> None:
        nodes = [[[layers[-1]["name"], 0, 0, {}]]]
        config = {"name": name, "trainable": False, **config}
        layers.append({"class_name": kind, "config": config, "name": name, "inbound_nodes": nodes})

    for prefix in [*(f"layers.{n}" for n in range(len(DILATIONS))), "classifier"]:
        kernel, bias = weights[f"{prefix}.weight"], weights.get(f"{prefix}.bias")
        last = prefix == "classifier"
        name = "output" if last else f"{prefix}{suffix}"
        dilation = 1 if last else DILATIONS[int(prefix[-1])]
        config = {
            "filters": len(kernel),
            "kernel_size": list(kernel.shape[2:]),
            "strides": [1, 1, 1],
            "dilation_rate": [dilation] * 3,
            "padding": "same",
            "data_format": "channels_last",
            "activation": "linear",
            "use_bias": bias is not None,
        }
        add("Conv3D", name, config)
        shape = [*kernel.shape[2:], kernel.shape[1], kernel.shape[0]]
        tensors.append({"name": f"{name}/kernel", "shape": shape, "dtype": "float32"})
        if bias is not None:
            shape = [len(bias)]
            tensors.append({"name": f"{name}/bias", "shape": shape, "dtype": "float32"})
        if not last:
            add("Activation", f"activation.{prefix}", {"activation": activation})
    return {
        "format": "layers-model",
        "modelTopology": {
            "model_config": {"class_name": "Functional", "config": {"layers": layers}}
        },
        "weightsManifest": [{"paths": ["model.bin"], "weights": tensors}],
    }


def write_layers_model(folder: Path, weights: Weights, **options: str) -> Path:
    """Write a layer model with its weights and colours; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    document = layers_model(weights, **options)
    (folder / "model.json").write_text(json.dumps(document))
    stored = [v.transpose(2, 3, 4, 1, 0) if v.ndim == 5 else v for v in weights.values()]
    (folder / "model.bin").write_bytes(b"".join(v.astype("<f4").tobytes() for v in stored))
    colors = [[n * 20 for n in range(len(NAMES))]] * 3
    colormap = {"R": colors[0], "G": colors[1], "B": colors[2], "labels": NAMES}
    (folder / "colormap.json").write_text(json.dumps(colormap))
    return folder


def write_safetensors(folder: Path, weights: Weights, **changes: Any) -> Path:
    """Write the form with `config.json`; return the folder."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    count = len(DILATIONS)
    names = {
        "classifier.weight": f"layers.{count}.weight",
        "classifier.bias": f"layers.{count}.bias",
    }
    save_file(
        {names.get(name, name): values for name, values in weights.items()},
        folder / "model.safetensors",
    )
    config = {
        "network": "MeshNet",
        "channels": len(weights["layers.0.weight"]),
        "classes": len(NAMES),
        "dilations": DILATIONS,
        "activation": "elu",
        "bias": ["layers.0.bias" in weights] * count + [True],
        "normalise": {"kind": "minmax"},
        "modality": "MR (T1)",
        **changes,
    }
    (folder / "config.json").write_text(json.dumps(config))
    labels = [{"number": n, "name": name, "color": [n * 20] * 3} for n, name in enumerate(NAMES)]
    (folder / "labels.json").write_text(json.dumps(labels))
    return folder
