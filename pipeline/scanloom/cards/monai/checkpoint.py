"""Finds the weights of a bundle."""

from __future__ import annotations

import hashlib
from pathlib import Path, PurePosixPath
from typing import Any, Final

from scanloom.cards.card import Weights
from scanloom.cards.monai.config.arguments import describe
from scanloom.cards.monai.config.parser import Config
from scanloom.cards.monai.config.values import truncate
from scanloom.cards.monai.files import check_archive, find_file, is_safetensors
from scanloom.core import Reason, ScanError, format_bytes

MAX_WEIGHTS: Final = 4 << 30
"""Largest weights file; the largest in MONAI's model zoo has about 900 MB."""


def read_weights_file(folder: Path, config: Config, pinned: str | None) -> Weights:
    """Return the weights file with its SHA-256.

    Raises
    ------
    ScanError
        MODEL_UNSAFE if the file lies outside the bundle or is a program; MODEL_DAMAGED if it is
        missing or too large; MODEL_HASH if its hash is not `pinned`.
    """
    listed, key = _checkpoint(config)
    path = PurePosixPath(listed or "models/model.pt")
    if path.is_absolute() or ".." in path.parts:
        detail = f"the weights {truncate(str(path))} are outside the bundle"
        raise ScanError(Reason.MODEL_UNSAFE, detail)
    file = find_file(folder, str(path))
    if file is None and path.name:
        file = find_file(folder, str(path.with_suffix(".safetensors")))
    if file is None:
        raise ScanError(Reason.MODEL_DAMAGED, f"the weights {truncate(str(path))} are missing")
    if file.suffix not in (".pt", ".pth", ".safetensors"):
        raise ScanError(Reason.MODEL_UNSAFE, f"{truncate(str(path))} is not a state dict")
    try:
        sha256, safetensors = _digest(file)
    except OSError as exc:
        raise ScanError(Reason.MODEL_DAMAGED, f"{truncate(str(path))} can't be read") from exc
    if pinned is not None and sha256 != pinned:
        detail = f"the weights have SHA-256 {sha256[:12]}..., not {pinned[:12]}..."
        raise ScanError(Reason.MODEL_HASH, detail)
    return Weights(file, sha256, None if safetensors else key)


def _checkpoint(config: Config) -> tuple[str | None, str | None]:
    """Return the weights file that the config loads and its key, None for each if not given."""
    loader = _loader(config)
    if loader is not None:
        load_dict = loader.get("load_dict")
        keys = list(load_dict) if isinstance(load_dict, dict) else []
        path = config.value(loader["load_path"])
        key = keys[0] if len(keys) == 1 and isinstance(keys[0], str) else None
    elif "ckpt_path" in config:
        path, key = config.get("ckpt_path"), None
    else:
        return None, None
    if not isinstance(path, str):
        raise ScanError(Reason.MODEL_UNSUPPORTED, f"the weights are {describe(path)}")
    return path, key


def _loader(config: Config) -> dict[str, Any] | None:
    """Return the entry of MONAI's CheckpointLoader: of its own, or among the handlers."""
    handlers = config.raw("handlers")
    listed = handlers if isinstance(handlers, list) else []
    for entry in (config.raw("checkpointloader"), *listed):
        if not isinstance(entry, dict) or "load_path" not in entry:
            continue
        name = str(entry.get("_target_", "CheckpointLoader")).rpartition(".")[2]
        if name == "CheckpointLoader":
            return entry
    return None


def _digest(file: Path) -> tuple[str, bool]:
    """Return the SHA-256 (hex) of weights and whether they are safetensors, after checks."""
    with file.open("rb") as stream:
        if file.stat().st_size > MAX_WEIGHTS:
            detail = f"the weights are larger than {format_bytes(MAX_WEIGHTS)}"
            raise ScanError(Reason.MODEL_DAMAGED, detail)
        check_archive(stream)
        safetensors = is_safetensors(stream)
        stream.seek(0)
        return hashlib.file_digest(stream, "sha256").hexdigest(), safetensors
