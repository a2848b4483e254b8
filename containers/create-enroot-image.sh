#!/usr/bin/env bash
# Make an Enroot image for `srun --container-image` (pyxis) from a container image.
#
# usage: bash create-enroot-image.sh [IMAGE [OUTPUT]]
#
#   IMAGE    docker://[HOST#]NAME:TAG from a registry, dockerd://NAME:TAG or podman://NAME:TAG from this machine
#            (the official PyTorch image, pinned below)
#   OUTPUT   pytorch.sqsh; one that exists is replaced when the new one is complete, not before
#
# Enroot unpacks in ENROOT_TEMP_PATH (/tmp) and keeps layers in ENROOT_CACHE_PATH: some 20 GB for the official image.
set -euo pipefail

die() { echo "create-enroot-image.sh: $*" >&2; exit 1; }

image=${1:-docker://pytorch/pytorch:2.9.1-cuda12.8-cudnn9-runtime}
output=${2:-pytorch.sqsh}
[[ $# -le 2 && $image =~ ^(docker|dockerd|podman)://. ]] ||
    die "usage: bash create-enroot-image.sh [docker://IMAGE | dockerd://IMAGE | podman://IMAGE [OUTPUT]]"
[[ ! -d $output ]] || die "$output is a folder: name the file to write"
command -v enroot >/dev/null ||
    die "enroot is missing: install it (its releases are on GitHub, NVIDIA/enroot), or run this on a compute node that has it"
folder=$(mktemp -d "$(dirname "$output")/.enroot.XXXXXX" 2>/dev/null) ||
    die "cannot write to $(dirname "$output"): name an OUTPUT in a folder that exists and is yours"
trap 'rm -rf "$folder"' EXIT
trap 'exit 130' INT TERM HUP

# Its progress is shown, its complaints become one line
if ! enroot import --output "$folder/image.sqsh" "$image" 2>&1 | tee "$folder/log" | { grep --line-buffered INFO || true; }; then
    reason=$(grep -m 1 -E 'ERROR|[Ee]rror|[Ff]ailed|No space' "$folder/log" || tail -n 1 "$folder/log")
    case $reason in
        *"No space left"* | *"quota exceeded"*)
            remedy="free 20 GB, or set ENROOT_TEMP_PATH and ENROOT_CACHE_PATH to folders on a larger disk" ;;
        *"daemon socket"* | *.sock*)
            remedy="see whether ${image%%:*} runs here, and whether you may use it" ;;
        *"not permitted"* | *ermission*)
            remedy="have an administrator install enroot+caps, or set subordinate uids, as Enroot's installation says" ;;
        *" 401"* | *" 403"* | *[Uu]nauthorized* | *denied*)
            remedy="check the name, and for a private one put the login into ~/.config/enroot/.credentials" ;;
        *) remedy="check the image's name and the way to the registry" ;;
    esac
    die "no image from $image: $remedy (${reason:-enroot said nothing})"
fi
[[ $(head -c 4 "$folder/image.sqsh" 2>/dev/null) == hsqs ]] || die "enroot left no whole image of $image: check the disk (df -h) and try again"
mv -f "$folder/image.sqsh" "$output"
echo "$output is ready ($(du -h "$output" | cut -f1)), from $image"
