"""Inputs and entries with which MONAI's runner takes each bundle of MONAI's Model Zoo."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

CPU = "$torch.device('cpu')"


@dataclass(frozen=True)
class Home:
    """Inputs and entries with which MONAI's runner takes a bundle.

    Parameters
    ----------
    data : str
        Entry of the config that lists the scans.
    form : "paths", "images", "list", "clicks", "phases" or "prompts"
        Content of the entry.
    run : str
        Entry that is run.
    overrides : mapping
        Further entries to replace.
    edits : mapping
        Entries of the bundle's config that are changed for both programs.
    dropped : tuple of str
        Arguments of the network that MONAI 1.6.1 does not know any more.
    scans : int
        Number of channels.
    options : mapping
        Options of the model in scanloom.
    same : bool
        Whether labels must be equal.
    """

    data: str = "datalist"
    form: str = "paths"
    run: str = "run"
    overrides: dict[str, Any] = field(default_factory=dict)
    edits: dict[str, Any] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()
    scans: int = 1
    options: dict[str, str] = field(default_factory=dict)
    same: bool = True


_DINTS = Home(
    form="images",
    overrides={
        "arch_ckpt": "$torch.load(@arch_ckpt_path, map_location='cpu', weights_only=False)",
        "dints_space#device": CPU,
    },
    edits={"inferer#roi_size": [64, 64, 64]},
)
BUNDLES = {
    "spleen_ct_segmentation": Home(),
    "swin_unetr_btcv_segmentation": Home(dropped=("img_size",)),
    "wholeBody_ct_segmentation": Home(),
    "segmentation_template": Home("data_list"),
    "ventricular_short_axis_3label": Home(run="evaluating"),
    "prostate_mri_anatomy": Home(  # MONAI mixes its labels, scanloom flags it
        edits={"inferer#roi_size": [64, 64, 64]}, same=False
    ),
    "brats_mri_segmentation": Home(
        "test_datalist", "list", scans=4, edits={"inferer#roi_size": [64, 64, 48]}
    ),
    "pediatric_abdominal_ct_segmentation": Home(form="images"),
    "multi_organ_segmentation": _DINTS,
    "pancreas_ct_dints_segmentation": _DINTS,
    "renalStructures_CECT_segmentation": Home("dataset#data", "phases", run="inference", scans=3),
    "spleen_deepedit_annotation": Home("dataset#data", "clicks"),
    "vista3d": Home(
        "input_dict",
        "prompts",
        overrides={"evaluator#amp": False},
        options={"structures": "liver+spleen+aorta"},
    ),
    "renalStructures_UNEST_segmentation": Home(run="evaluating"),
    "wholeBrainSeg_Large_UNEST_segmentation": Home(run="evaluating"),
}
