#!/usr/bin/env bash
# Gathers what a machine without internet needs to install scanloom: `make offline`.
#
#   deploy/offline.sh FOLDER
#
# FOLDER gets wheels/ for the Python and the system of this machine, requirements.txt with their
# hashes, sbom.cdx.json (CycloneDX), and the files of deploy/. That the wheels are complete is shown by
# installing them without an index.
#
# PYTHON       an interpreter of the version that the other machine has (python3)
# EXTRAS       extras of pyproject.toml (hospital,review,surface)
# TORCH_INDEX  another index for torch, such as https://download.pytorch.org/whl/cpu for machines
#              without a GPU: PyPI's torch brings CUDA, some 3 GB
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:?a folder} python=${PYTHON:-python3} extras=${EXTRAS:-hospital,review,surface}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
quiet=(--disable-pip-version-check --quiet)

rm -rf "$folder/wheels"
mkdir -p "$folder/wheels"
"$python" -m venv "$scratch/tools"
"$scratch/tools/bin/python" -m pip "${quiet[@]}" install --upgrade pip cyclonedx-bom packaging
"$scratch/tools/bin/python" -m pip "${quiet[@]}" wheel --constraint constraints.txt \
    ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} --wheel-dir "$folder/wheels" ".[$extras]"

"$scratch/tools/bin/python" - "$folder" <<'PYTHON'
import hashlib
import sys
from pathlib import Path

from packaging.utils import parse_wheel_filename

folder = Path(sys.argv[1])
with (folder / "requirements.txt").open("w") as file:
    for wheel in sorted((folder / "wheels").glob("*.whl")):
        name, version, _, _ = parse_wheel_filename(wheel.name)
        with wheel.open("rb") as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
        print(f"{name}=={version} --hash=sha256:{digest}", file=file)
PYTHON

"$python" -m venv "$scratch/venv"
"$scratch/venv/bin/python" -m pip "${quiet[@]}" install --no-index --find-links "$folder/wheels" \
    --require-hashes --requirement "$folder/requirements.txt"
"$scratch/venv/bin/scanloom" --version
# Without pip and setuptools, which are no part of it
"$scratch/venv/bin/python" -m pip "${quiet[@]}" uninstall --yes setuptools pip
"$scratch/tools/bin/cyclonedx-py" environment --output-reproducible --output-file \
    "$folder/sbom.cdx.json" "$scratch/venv/bin/python"
cp deploy/Containerfile deploy/compose.yaml deploy/orthanc.json deploy/scanloom.def \
    deploy/scanloom-listen.service deploy/site.yaml "$folder"
echo "$(find "$folder/wheels" -name '*.whl' | wc -l) wheels," \
    "$(du --summarize --block-size=1M "$folder" | cut -f1) MiB in $folder"
