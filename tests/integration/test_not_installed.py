"""The package works where it is only on Python's path, beside few other packages."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

import scanloom
from support.few_packages.sitecustomize import HIDDEN

PIPELINE = Path(scanloom.__file__).parents[1]
SITE = next(Path(folder) for folder in sys.path if Path(folder, "torch").is_dir())


@pytest.fixture(scope="module")
def scan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("scan") / "ct.nii.gz"
    array = np.full((48, 48, 32), -900, np.int16)
    array[8:40, 8:40, 4:28] = 40
    nib.save(nib.Nifti1Image(array, np.diag((2.0, 2.0, 2.0, 1.0))), path)
    return path


def run(folder: Path, lacks: Collection[str], code: str) -> str:
    """Run code where packages are found in a folder of links: no metadata of scanloom, no hooks."""
    for entry in SITE.iterdir():
        module, _, rest = entry.name.partition(".")
        name = module.partition("-")[0] if rest.endswith("-info") else module
        linked = entry.suffix != ".pth" and "scanloom" not in name and name not in lacks
        if linked:
            (folder / entry.name).symlink_to(entry)
    started = (
        f"import sys; sys.path[:0] = [{str(PIPELINE)!r}, {str(folder)!r}]\n"
        "import importlib.metadata as m\n"
        "assert not [d for d in m.distributions() if d.name == 'scanloom']\n"
    )
    environment = {
        "PATH": "/usr/bin:/bin",
        "OMP_NUM_THREADS": "1",
        "HOME": str(folder),
        "SCANLOOM_MODELS": "",
        "XDG_CACHE_HOME": str(folder / "cache"),
    }
    done = subprocess.run(
        [sys.executable, "-S", "-c", started + code],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.thorough
@pytest.mark.parametrize("lacks", [frozenset(), HIDDEN], ids=["all", "few"])
def test_a_model_predicts(tmp_path: Path, scan: Path, lacks: frozenset[str]) -> None:
    code = f"""
import numpy as np, scanloom
volume = scanloom.load_volume({str(scan)!r}, modality="CT")
model = scanloom.load_model("ct_tissue", device="cpu")
model.predictor.engines.planned_cases = 1000  # so that an engine is worth its measurement
result = model.predict(volume)
print(np.count_nonzero(result.layers[0].labels) > 0, scanloom.__version__)
"""
    assert run(tmp_path, lacks, code) == f"True {scanloom.__version__}"


@pytest.mark.thorough
def test_commands_work(tmp_path: Path, scan: Path) -> None:
    """segment writes versions and a header with scanloom's; doctor has its say."""
    out = tmp_path / "out"
    code = f"""
import contextlib, io, json
from scanloom.cli.main import main
def command(*words):
    with contextlib.redirect_stdout(io.StringIO()) as text:
        try:
            main(list(words))
        except SystemExit as end:
            return end.code, text.getvalue()
print(command("--version"))
code, text = command("segment", {str(scan)!r}, "-o", {str(out)!r}, "--modality", "CT",
                     "--model", "ct_tissue", "--device", "cpu")
case = next(__import__("pathlib").Path({str(out)!r}).glob("cases/*/case.json"))
print(code, json.loads(case.read_text())["versions"]["scanloom"])
code, text = command("doctor", "--json")
print(next(f for f in json.loads(text)["findings"] if f["name"] == "scanloom")["level"])
"""
    version = scanloom.__version__
    assert run(tmp_path, (), code).splitlines() == [
        *(f"(0, 'scanloom {version}\\n')", f"0 {version}", "warn")
    ]
