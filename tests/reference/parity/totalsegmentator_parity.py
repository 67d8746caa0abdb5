"""Labels of TotalSegmentator's tasks, compared with its own: voxels that are equal, and Dice.

    python totalsegmentator_parity.py FOLDER [TASK...] [--env PYTHON] [--threads N]

FOLDER is the output of `totalsegmentator_home.py`; with --env, the Python of TotalSegmentator's
environment, it is made first. Prints a line for each task and scan; the exit status is 1 if fewer
than 99.95 % of voxels are equal, or a class of 1,000 voxels has a Dice below 0.999.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import nibabel
import numpy as np
from agreement import agreement, compare_all

from scanloom.convert.conversion import load_card
from scanloom.core import ComputeOptions
from scanloom.inference.combined import make_predictor
from scanloom.io.read import load_volume


def compare(folder: Path, task: str) -> bool:
    """Compare all scans of a task; return whether all agree."""
    card = load_card(folder / "weights", {"task": task})
    predictor = make_predictor(card, ComputeOptions(precision="float32"), device="cpu")
    agreed = True
    for file in sorted((folder / "labels" / task).glob("*.nii.gz")):
        theirs = np.asarray(nibabel.load(file).dataobj)
        volume = load_volume(folder / "scans" / file.name, modality=card.channels[0].modality)
        start = time.process_time()
        (layer,) = predictor.predict(volume).layers
        ours = np.asarray(layer.labels)
        result, present = agreement(ours, theirs), len(np.unique(theirs)) - 1
        print(
            f"{task:16} {file.name[:9]:10} {result}  {present:3} of "
            f"{len(card.structures):3} classes in {float((theirs > 0).mean()):4.0%} of the scan  "
            f"{time.process_time() - start:5.1f} CPU s",
            flush=True,
        )
        agreed &= result.enough
    return agreed


if __name__ == "__main__":
    home = Path(__file__).with_name("totalsegmentator_home.py")
    sys.exit(compare_all(compare, {"stand-in": home}, root="labels", smallest="body"))
