"""MONAI's bundle runner on one scan; runs in MONAI's environment.

    python zoo_home.py BUNDLE CONFIG RUN OVERRIDES

OVERRIDES is a JSON object as of `monai.bundle run`. Prints CPU seconds and peak memory as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
from pathlib import Path

import torch
from monai.bundle import run


def main(bundle: Path, config: str, run_id: str, overrides: str) -> None:
    """Run the bundle as `python -m monai.bundle run` does."""
    torch.set_num_threads(2)
    os.chdir(bundle)
    sys.path.insert(0, str(bundle))  # as for a user, who starts MONAI in the bundle's folder
    run(
        run_id,
        config_file=str(bundle / "configs" / config),
        bundle_root=str(bundle),
        **json.loads(overrides),
    )
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(json.dumps({"cpu_s": used.ru_utime + used.ru_stime, "peak_bytes": used.ru_maxrss * 1024}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("bundle", type=Path)
    for name in ("config", "run", "overrides"):
        parser.add_argument(name)
    main(*vars(parser.parse_args()).values())
