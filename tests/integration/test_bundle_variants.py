"""Variants of a bundle give the labels of MONAI's runner, or are refused."""

from __future__ import annotations

import os
import secrets
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from scanloom.core import ScanError
from support.bundle_variants import home_labels, our_labels, run_home, variants, write_variants

pytest.importorskip("ignite", reason="MONAI's runner needs pytorch-ignite")


@pytest.mark.parametrize(
    ("count", "seed"),
    [(10, 35), pytest.param(320, None, marks=pytest.mark.thorough)],
    ids=["sample", "all"],
)
def test_variant_gives_the_labels_of_monais_runner_or_is_refused(
    count: int, seed: int | None, tmp_path: Path
) -> None:
    """Changes and scans are drawn anew in each thorough run; SCANLOOM_SEED repeats a run."""
    if seed is None:
        seed = int(os.environ.get("SCANLOOM_SEED") or secrets.randbelow(2**31))
    drawn = variants(seed, count)
    volume, bundles = write_variants(tmp_path, drawn)
    run_home(tmp_path, bundles)
    counts: Counter[str] = Counter()
    wrong, least = [], []
    for variant, bundle in zip(drawn, bundles, strict=True):
        ours, theirs = our_labels(bundle, volume), home_labels(bundle)
        if theirs is not None and variant.harmless:
            counts["harmless"] += 1
            counts["harmless and accepted"] += not isinstance(ours, ScanError)
        if isinstance(ours, ScanError):
            counts["refused"] += 1
            if theirs is not None and variant.harmless:
                least.append((variant.names, ours.detail))
        elif theirs is None:
            counts["accepted, but MONAI fails"] += 1
            least.append((variant.names, "MONAI fails"))
        elif ours.shape == theirs.shape and np.mean(ours == theirs) >= 0.9995:
            counts["equal"] += 1
            counts["all classes occur"] += len(np.unique(theirs)) == 3
        else:
            share = np.mean(ours == theirs) if ours.shape == theirs.shape else 0.0
            wrong.append((variant.names, f"{share:.1%} equal"))
    print(f"seed {seed}, {count} variants: {dict(counts)}, {len(wrong)} other")
    for names, reason in least:
        print(f"  {names}: {reason}")
    assert wrong == [], f"seed {seed}"
    assert counts["harmless and accepted"] >= 0.8 * counts["harmless"], f"seed {seed}"
    assert counts["all classes occur"] >= 0.9 * counts["equal"], f"seed {seed}"
