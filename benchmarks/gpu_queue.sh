#!/usr/bin/env bash
# Measures what waits for a CUDA device: tests/gpu, gpu_bench.py, roofline.py. See gpu-queue.md.
#
#   benchmarks/gpu_queue.sh                     run, on a machine with an NVIDIA GPU
#   benchmarks/gpu_queue.sh gather FOLDER 3.12  collect wheels for such a machine that is offline
#
# PYTHON  an interpreter with torch for CUDA (python3)
# WHEELS  a folder of wheels that it lacks: installed to a folder of this run, nothing is fetched
# OUT     where gpu-tests.txt, gpu-bench.txt, gpu-bench.json and roofline.* go (gpu-results)
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}

# What tests and measurements import beside torch and what comes with scientific Python.
needed=(
    annotated-types connected-components-3d isal monai nibabel nvidia-ml-py platformdirs pydantic
    pydantic-core pydicom pyyaml safetensors typing-inspection
)

if [[ ${1:-} == gather ]]; then
    folder=${2:?a folder for the wheels} version=${3:?the Python version there, such as 3.12}
    platforms=()
    for glibc in 2_28 2_27 2_26 2_24 2_17 2_12 2_5; do
        platforms+=(--platform "manylinux_${glibc}_x86_64")
    done
    exec "$python" -m pip download --no-deps --only-binary=:all: --dest "$folder" \
        --constraint constraints.txt --implementation cp --python-version "$version" \
        "${platforms[@]}" --platform manylinux2014_x86_64 "${needed[@]}"
fi

out=${OUT:-gpu-results}
mkdir -p "$out"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export PYTHONPATH="$PWD/pipeline${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export XDG_CACHE_HOME="$scratch/cache" TRITON_CACHE_DIR="$scratch/triton" # compiled here, by us
if [[ -n ${WHEELS:-} ]]; then
    "$python" -m pip install --quiet --no-index --no-deps --no-compile --target "$scratch/site" \
        "$WHEELS"/*.whl
    export PYTHONPATH="$PYTHONPATH:$scratch/site"
fi

"$python" - <<'PYTHON'
import platform
import sys

import torch

if not torch.cuda.is_available():
    sys.exit("no CUDA device is here: nothing was measured")
found = torch.cuda.get_device_properties(0)
print(f"{found.name}, {found.total_memory / 2**30:.0f} GiB; Python {platform.python_version()},"
      f" torch {torch.__version__}")
PYTHON

failed=0
echo "== tests/gpu"
"$python" -m pytest -m gpu -p no:cacheprovider -rP -q tests/gpu >"$out/gpu-tests.txt" 2>&1 || failed=1
grep -E '^(FAILED|ERROR|SKIPPED)|equal|Dice|^[0-9]+ (passed|failed)|passed|failed' \
    "$out/gpu-tests.txt" || true
echo "== gpu_bench.py"
"$python" benchmarks/gpu_bench.py --out "$out/gpu-bench.json" 2>"$out/gpu-bench.log" |
    tee "$out/gpu-bench.txt" || { failed=1; tail -n 5 "$out/gpu-bench.log"; }
echo "== roofline.py"
"$python" benchmarks/roofline.py --window 128 --precision float32 float16 \
    --picture "$out/roofline.png" 2>"$out/roofline.log" |
    tee "$out/roofline.txt" || { failed=1; tail -n 5 "$out/roofline.log"; }
exit "$failed"
