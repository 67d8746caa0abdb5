"""Whether a model's network computes in half precision what it computes in float32, on a device.

Libraries have computed convolutions in half precision wrong without an error, for some sizes and on
some devices only. So what is compared is a model's own network with a window of its own size.
"""

from __future__ import annotations

import json
import math
import tempfile
from contextlib import suppress
from pathlib import Path

import torch
from torch.nn import functional

from scanloom.cards.card import ModelCard
from scanloom.inference.device import cudnn_version, deterministic, is_out_of_memory
from scanloom.inference.engines.cache import device_model, export_key, exports_folder
from scanloom.inference.network.loading import LoadedNetwork, load_network
from scanloom.own_python import make_private_folder

LARGEST_ERROR = 0.2
"""Root mean square of the differences of the scores, in their standard deviations. It is about
0.002 in float16 and 0.02 in bfloat16 for networks of 20 to 40 layers, and about 1 for a convolution
that is computed wrong, so that labels of such a window are noise."""
_WHOLE_SCAN = (64, 64, 64)
"""Window of a model without one."""
_SCHEMA = 1


def wrong_half(card: ModelCard, loaded: LoadedNetwork, device: torch.device) -> str:
    """Return why a model's half precision can't be used on a device; empty if it can.

    The comparison takes two windows' time. Its result is kept in the user's cache, for the weights,
    the versions of torch and cuDNN, and the device.

    Parameters
    ----------
    card : ModelCard
        The model.
    loaded : LoadedNetwork
        Its networks in half precision; the first of them is compared.
    device : torch.device
        The device.
    """
    size = card.window.size or _WHOLE_SCAN
    subject = {
        "form": ["half", _SCHEMA],
        "weights": [card.weights.sha256, card.weights.key],
        "shape": [card.n_inputs, *size],
        "type": str(loaded.dtype),
        "versions": [torch.__version__, cudnn_version()],
        "device": device_model(device),
    }
    path = exports_folder() / "half" / f"{export_key(subject)}.json"
    error = _known(path)
    if error is None:
        try:
            error = half_error(card, loaded, device, size)
        except (RuntimeError, MemoryError) as exc:
            if not is_out_of_memory(exc):
                raise
            return ""  # as every scan will be told
        _keep(path, error)
    if error <= LARGEST_ERROR:
        return ""
    return f"{str(loaded.dtype).removeprefix('torch.')} was wrong by {error:.1g} in a window here"


def half_error(
    card: ModelCard, loaded: LoadedNetwork, device: torch.device, size: tuple[int, int, int]
) -> float:
    """Return the error of a window's scores in half precision, relative to their deviation.

    Of scores that overflow, the error is 0: each scan on which they do is repeated in float32.
    """
    source = torch.Generator().manual_seed(0)
    coarse = torch.randn((1, card.n_inputs, *(-(-n // 8) for n in size)), generator=source)
    window = functional.interpolate(coarse, size, mode="trilinear")
    window += 0.2 * torch.randn(window.shape, generator=source)  # normalised intensities, roughly
    exact = load_network(card, torch.float32).network.to(device)
    with deterministic(), torch.inference_mode():
        expected = exact(window.to(device)).to(torch.float32)
        found = loaded.network.to(device)(window.to(device, loaded.takes)).to(torch.float32)
        if not bool(torch.isfinite(found).all()):
            return 0.0
        deviation = float(expected.std())
        return float((found - expected).square().mean().sqrt()) / max(deviation, 1e-12)


def _known(path: Path) -> float | None:
    """Return an error that was measured before."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        error = float(json.loads(path.read_text(encoding="utf-8"))["error"])
        return error if math.isfinite(error) else None
    return None


def _keep(path: Path, error: float) -> None:
    """Keep an error; without a writable cache folder it is measured again."""
    with suppress(OSError):
        make_private_folder(path.parent)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as draft:
            json.dump({"error": error}, draft)
        Path(draft.name).replace(path)
