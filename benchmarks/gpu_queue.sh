#!/usr/bin/env bash
# Measures what waits for a CUDA device, in two commands of at most 8 minutes each. See gpu-queue.md.
#
#   benchmarks/gpu_queue.sh gather FOLDER [VERSION]  wheels for a machine that is offline, of what
#                                                    PyTorch does not bring
#   benchmarks/gpu_queue.sh tests                    tests/gpu, the roofline of a network
#   benchmarks/gpu_queue.sh measure                  gpu_bench.py, topic by topic
#
# Each part has its own limit of time and prints as it goes; files in OUT are complete at any time.
#
# PYTHON  an interpreter with torch for CUDA (python3)
# WHEELS  the folder of `gather`; empty where PYTHON has what scanloom needs
# OUT     where gpu-*.txt, gpu-bench.json, roofline.png and gpu-errors.log go (gpu-results)
# TRIAL   1: the same commands in small, on a stand-in for a device or on the CPU
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3} out=${OUT:-gpu-results} trial=${TRIAL:-0}

# What tests and measurements import beside torch, pytest and what is usual beside them.
needed=(
    annotated-types connected-components-3d isal monai nibabel nvidia-ml-py platformdirs pydantic
    pydantic-core pydicom pyyaml safetensors typing-inspection
)
most_mib=60 # what some machines take in one transfer, beside a checkout

gather() {
    local folder=${1:?a folder for the wheels} platforms=() glibc version
    version=${2:-$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')}
    for glibc in 2_28 2_27 2_26 2_24 2_17 2_12 2_5; do
        platforms+=(--platform "manylinux_${glibc}_x86_64")
    done
    mkdir -p "$folder" && rm -f "$folder"/*.whl || return # also those for another Python
    "$python" -m pip --disable-pip-version-check download --quiet --no-deps --only-binary=:all: \
        --dest "$folder" --constraint constraints.txt --implementation cp \
        --python-version "$version" "${platforms[@]}" --platform manylinux2014_x86_64 \
        "${needed[@]}" || return
    local mib=$(($(du --summarize --block-size=1M "$folder" | cut -f1)))
    echo "$(find "$folder" -name '*.whl' | wc -l) wheels, $mib MiB in $folder"
    ((mib <= most_mib)) || { echo "more than $most_mib MiB"; return 1; }
}

# Unpacks the wheels into a folder of this run; scanloom itself is this checkout's.
prepare() {
    mkdir -p "$out" || exit
    out=$(cd "$out" && pwd)
    rm -f "$out/gpu-errors.log"
    scratch=$(mktemp -d)
    trap 'rm -rf "$scratch"' EXIT
    export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
    export XDG_CACHE_HOME="$scratch/cache" TRITON_CACHE_DIR="$scratch/triton" # compiled here, by us
    export PYTHONPATH="$PWD/pipeline${PYTHONPATH:+:$PYTHONPATH}"
    if [[ -n ${WHEELS:-} ]]; then
        # Unpacked, as by `pip install --target`, but for programs: pip may be missing here
        "$python" - "$scratch/site" "$WHEELS"/*.whl <<'PYTHON' || exit
import sys
import zipfile

for wheel in sys.argv[2:]:
    zipfile.ZipFile(wheel).extractall(sys.argv[1])
PYTHON
        export PYTHONPATH="$scratch/site:$PYTHONPATH"
    fi
    if ((trial)); then
        export PYTHONPATH="$PWD/tests/support/few_packages${PYTHONPATH:+:$PYTHONPATH}"
        [[ ! -f tests/support/fake_cuda.py ]] || export SCANLOOM_STAND_IN=1
    fi
    limit 60 start "$python" - "$trial" <<'PYTHON' || exit
import platform
import sys

import numpy
import torch

import scanloom

print(f"scanloom {scanloom.__version__}, Python {platform.python_version()}, "
      f"torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}, numpy {numpy.__version__}")
if torch.cuda.is_available():
    found = torch.cuda.get_device_properties(0)
    print(f"{found.name}, {found.total_memory / 2**30:.0f} GiB")
elif sys.argv[1] != "1":
    sys.exit("no CUDA device is here: nothing was measured")
PYTHON
    command -v nvidia-smi >/dev/null &&
        nvidia-smi --query-gpu=name,driver_version,memory.total,power.limit --format=csv,noheader
}

# limit SECONDS NAME COMMAND...: runs a part, interrupts it in time, and says how it ended.
limit() {
    local seconds=$1 name=$2 start=$SECONDS status
    shift 2
    timeout --signal=INT --kill-after=10 "$seconds" "$@" 2>>"$out/gpu-errors.log"
    status=$?
    case $status in
        0) echo "== $name: $((SECONDS - start)) s" ;;
        124 | 137) printf '\n== %s: STOPPED after %s s\n' "$name" "$seconds" ;;
        *) printf '\n== %s: FAILED with %s after %s s\n' "$name" "$status" $((SECONDS - start)) ;;
    esac
    ((status == 0)) || { touch "$scratch/failed" && tail -n 5 "$out/gpu-errors.log"; }
    return "$status"
}

tests() {
    local pytest=("$python" -m pytest -m gpu -p no:cacheprovider -W default -rfEs -v -s)
    local chosen="not compile" size=(--network DynUNet --window 128 --precision float16 float32)
    # On the stand-in all tests take many minutes: `make test-thorough` runs one of each path
    ((trial)) && size=(--smallest) chosen="meshnets"
    # -s: a measure of agreement is in the log at once, not after the last test
    limit 250 "tests/gpu" "${pytest[@]}" -k "$chosen" tests/gpu |
        tee "$out/gpu-tests.txt" | grep --line-buffered -E "$interesting"
    limit 70 "roofline.py" "$python" benchmarks/roofline.py "${size[@]}" \
        --picture "$out/roofline.png" | tee "$out/gpu-roofline.txt"
    ((trial)) && return
    # The compiler takes minutes for a network, so that it comes last
    limit 100 "torch.compile" "${pytest[@]}" -k compile tests/gpu/test_engines_gpu.py |
        tee -a "$out/gpu-tests.txt" | grep --line-buffered -E "$interesting"
}
interesting='FAILED|ERROR|^SKIPPED|%.* equal|: Dice|^E  |^=+ .*(passed|failed|skipped)|^== '

measure() {
    local topics topic seconds monitor="" options
    topics=$'copies 30\nstudies 180\nnetwork 100\nrestore 55\nshipped 55'
    ((trial)) && topics="all 300" # one process: nearly all of a trial is imports
    if command -v nvidia-smi >/dev/null; then
        nvidia-smi --loop=1 --format=csv,nounits \
            --query-gpu=timestamp,utilization.gpu,power.draw,memory.used,clocks.sm \
            >"$out/gpu-smi.csv" &
        monitor=$!
    fi
    rm -f "$out/gpu-bench.json" "$out/gpu-bench.txt"
    # Each in a process of its own: after some errors of CUDA a process can use no device any more
    while read -r topic seconds; do
        options=(--out "$out/gpu-bench.json")
        [[ $topic == all ]] || options+=(--topic "$topic")
        ((trial)) && options+=(--smallest)
        limit "$seconds" "gpu_bench.py, $topic" "$python" benchmarks/gpu_bench.py "${options[@]}" \
            </dev/null | tee -a "$out/gpu-bench.txt"
    done <<<"$topics"
    [[ -z $monitor ]] || kill "$monitor"
}

case ${1:-} in
    gather) gather "${@:2}"; exit ;;
    tests | measure) prepare; "$1"; [[ ! -e $scratch/failed ]] ;;
    *) sed -n '2,$s/^# \?//p' "$0" | head -n 15; exit 64 ;;
esac
