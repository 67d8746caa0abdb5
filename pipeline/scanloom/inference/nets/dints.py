"""MONAI's DiNTS, built from plain numbers."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from monai.networks import nets


class DiNTS(nets.DiNTS):
    """DiNTS of a searched architecture.

    Parameters
    ----------
    dints_space : mapping
        Arguments of MONAI's TopologyInstance; `arch_code` as nested lists: which paths are used,
        and the operation of each.
    node_a : nested list
        Which nodes are used.
    args
        Further arguments of MONAI's DiNTS.
    """

    def __init__(self, dints_space: Mapping[str, Any], node_a: Any, **args: Any) -> None:
        paths, operations = (np.asarray(code) for code in dints_space["arch_code"])
        others = {key: value for key, value in dints_space.items() if key != "arch_code"}
        with contextlib.redirect_stdout(io.StringIO()):  # MONAI prints a recommendation
            space = nets.TopologyInstance(arch_code=[paths, operations], device="cpu", **others)
        # MONAI compares entries one by one: on the CPU, whatever the default device is
        super().__init__(space, node_a=torch.from_numpy(np.asarray(node_a)), **args)
