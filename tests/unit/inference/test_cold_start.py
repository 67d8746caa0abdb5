"""A first scan does not wait for imports that it does not need."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scanloom.convert.store import shipped

ESTIMATE = """
import sys
import torch
from scanloom.convert.store import find_model
from scanloom.engine.machine.lean_imports import without_optional_imports
from scanloom.inference.network.loading import load_network
from scanloom.inference.memory import network_bytes
dtype = getattr(torch, sys.argv[1])
card = find_model("ct_tissue")
with without_optional_imports():
    load_network(card, dtype)
    network_bytes(card.network, card.window.size, dtype)
print([name for name in ("torch._dynamo", "sympy") if name in sys.modules])
"""

META = """
import sys
from scanloom.engine.machine.lean_imports import leave_out_unused_modules, without_optional_imports
leave_out_unused_modules()
with without_optional_imports():
    import torch
    from scanloom.cards.card import NetworkSpec
    from scanloom.inference.network.architectures import build_network, meta_dispatch
    spatial = {"spatial_dims": 3, "in_channels": 1, "out_channels": 3}
    kernels = {"kernel_size": [3, 3, 3], "upsample_kernel_size": [2, 2]}
    arguments = {
        "UNet": {**spatial, "channels": [8, 16, 16], "strides": [2, 2]},
        "DynUNet": {**spatial, **kernels, "strides": [1, 2, 2]},
    }
    spec = NetworkSpec(sys.argv[1], arguments[sys.argv[1]])
    with torch.device("meta"), torch.inference_mode(), meta_dispatch():
        scores = build_network(spec)(torch.zeros(1, 1, 16, 16, 16))
assert scores.shape == (1, 3, 16, 16, 16)
print([name for name in ("torch._dynamo", "sympy") if name in sys.modules])
"""

SEGMENT = """
import sys
from scanloom.cli.main import main
try:
    main()
except SystemExit as end:
    assert end.code == 0, end.code
names = "matplotlib nrrd requests scipy.signal skimage sympy tifffile torch._dynamo"
modules = "apps.detection engines inferers losses metrics"
named = [*names.split(), *(f"monai.{name}" for name in modules.split())]
print([name for name in named if sys.modules.get(name) is not None])
"""

LIBRARY = """
import gc, os, sys
timeout = os.environ.get("OPENBLAS_THREAD_TIMEOUT")
usual = gc.get_threshold(), gc.get_freeze_count()  # Python 3.12 begins with frozen objects
import scanloom
scanloom.segment(sys.argv[1], model="ct_tissue", out=sys.argv[2])
assert gc.isenabled() and (gc.get_threshold(), gc.get_freeze_count()) == usual
assert os.environ.get("OPENBLAS_THREAD_TIMEOUT") == timeout
assert None not in sys.modules.values()
import monai
import pyarrow, scipy.optimize, scipy.signal, scipy.sparse.linalg, skimage.measure, ssl
assert monai.losses.DiceLoss and monai.metrics.DiceMetric and monai.inferers.SimpleInferer
assert pyarrow.table({"a": [1]}).to_pandas()["a"].sum() == 1
assert len(scanloom.measurements(sys.argv[2])) > 0
"""


@pytest.mark.sampled(2)
@pytest.mark.parametrize("network", ["UNet", "DynUNet"])
def test_shapes_of_common_networks_need_no_compiler(network: str) -> None:
    """MONAI's UNet has PReLU, and its DynUNet draws normally distributed weights."""
    command = [sys.executable, "-c", META, network]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_neither_loading_nor_the_estimate_imports_torchs_compiler(dtype: str) -> None:
    """It takes a second or more, and nothing else here needs it."""
    program = [sys.executable, "-c", ESTIMATE, dtype]
    done = subprocess.run(program, capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"


def test_segment_imports_no_optional_library(
    tmp_path: Path,
) -> None:
    scan = tmp_path / "part"
    scan.mkdir()
    for path in sorted((shipped("data") / "torso_ct").iterdir())[:20]:
        shutil.copy2(path, scan)
    arguments = ["segment", str(scan), "--model", "ct_tissue", "--quiet"]
    program = [sys.executable, "-c", SEGMENT, *arguments, "--out", str(tmp_path / "out")]
    done = subprocess.run(program, capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"


@pytest.mark.thorough
def test_a_program_that_imports_scanloom_keeps_its_libraries_and_its_settings(
    tmp_path: Path,
) -> None:
    scan = str(shipped("data") / "torso_ct")
    subprocess.run([sys.executable, "-c", LIBRARY, scan, str(tmp_path / "out")], check=True)
