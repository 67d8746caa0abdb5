#!/usr/bin/env bash
# Builds the image from the wheels of `make offline`, and runs it without a network, as user 10001,
# with a read-only root. Needs root, buildah, mmdebstrap and unshare; no container engine.
#
#   deploy/check.sh FOLDER      the folder of `make offline`
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$(cd "${1:?the folder of make offline}" && pwd)
for program in buildah mmdebstrap unshare; do
    command -v "$program" >/dev/null || { echo "not tried: $program is not installed"; exit 77; }
done
export STORAGE_DRIVER=vfs BUILDAH_ISOLATION=chroot
scratch=$(mktemp -d) container=""
finish() {
    [[ -z $container ]] || buildah rm "$container" >/dev/null
    rm -rf "$scratch"
}
trap finish EXIT

say() { printf '\n== %s\n' "$*"; }

say "wheels in a new environment, without a network"
python3 -m venv "$scratch/venv"
unshare --net "$scratch/venv/bin/python" -m pip --disable-pip-version-check --quiet install --no-index \
    --find-links "$folder/wheels" --require-hashes --requirement "$folder/requirements.txt"
SCANLOOM_KEY="$scratch/key" unshare --net "$scratch/venv/bin/scanloom" demo --out "$scratch/demo"

say "the image, on a Debian of 3 packages"
if ! buildah inspect --type image localhost/scanloom-base >/dev/null 2>&1; then
    mmdebstrap --quiet --variant=minbase --include=python3,python3-venv bookworm "$scratch/base.tar"
    base=$(buildah from scratch)
    buildah add --quiet "$base" "$scratch/base.tar" / >/dev/null
    buildah commit --quiet "$base" localhost/scanloom-base >/dev/null
    buildah rm "$base" >/dev/null
fi
# The build has a network namespace of its own: pip could not download if it tried
unshare --net buildah bud --quiet --build-arg BASE=localhost/scanloom-base --tag localhost/scanloom \
    --file deploy/Containerfile "$folder"
container=$(buildah from localhost/scanloom)

say "as user 10001, root read-only, without a network"
mkdir -m 777 "$scratch/out"
cp -r data/torso_ct "$scratch/scans"
root=$(buildah mount "$container")
unshare --net --mount bash -euc '
    root=$1 scratch=$2
    mount --bind "$root" "$root"
    mkdir -p "$root/scans" "$root/out"
    mount --bind "$scratch/scans" "$root/scans"
    mount --bind "$scratch/out" "$root/out"
    mount -t tmpfs tmpfs "$root/tmp"
    mount -t proc proc "$root/proc"
    mount -o remount,bind,ro "$root"
    mount -o remount,bind,ro "$root/scans"
    rm -f "$root/bin/sh" 2>/dev/null && { echo "the root can be written"; exit 1; }
    inside() { env -i SCANLOOM_KEY=/out/key SCANLOOM_OFFLINE=1 /usr/sbin/chroot --userspec=10001:10001 \
        "$root" /opt/scanloom/bin/scanloom "$@"; }
    inside --version
    inside demo --out /out/demo
    inside segment /scans --out /out/results
    inside verify /out/results
    inside export /out/results --folder /out/copy
    inside doctor --out /out/results
' - "$root" "$scratch"
say "all well"
