"""Names of nnU-Net's trainers that change training only, not the network or its processing."""

from __future__ import annotations

import re
from typing import Final

from scanloom.cards.monai.config import truncate
from scanloom.core import Reason, ScanError

_VARIANTS: Final = (
    r"\d+ep(ochs?)?",
    "NoMirroring",
    "onlyMirror01",
    "DASegOrd0",
    "DAOrd0",
    "DA5((Seg)?ord0)?",
    "NoDA",
    "noDummy2DDA",
    "CELoss",
    "DiceLoss",
    "DiceCELoss_noSmooth",
    "DiceTopK10Loss",
    "Topk10Loss(LS01)?",
    "(Vanilla)?Adam",
    "Adan",
    "[13]en[134]",
    "CosAnneal",
    "warmup",
    "NoDeepSupervision",
    r"probabilisticOversampling(_\d+)?",
    "Benchmark",
    "noDataLoading",
    "SkeletonRecall",
    "MOSAIC_1k_QuarterLR",
)
"""Suffixes of trainers: length, augmentation, loss, optimiser and sampling.

The last two are TotalSegmentator's: another loss; a quarter of the learning rate on other data."""
_TRAINER: Final = re.compile(f"nnUNetTrainer(_?({'|'.join(_VARIANTS)}))*")


def check_trainer(name: str) -> None:
    """Refuse a trainer that may change the network or its processing: MODEL_UNSUPPORTED."""
    if len(name) > 128 or not _TRAINER.fullmatch(name):
        raise ScanError(Reason.MODEL_UNSUPPORTED, f"the trainer {truncate(name)!r}")
