#!/usr/bin/env bash
# SPDX-License-Identifier: MIT-0
# Import a container image as an Enroot image, for slurm/cpu-container.sbatch.
#
# usage: bash create-enroot-image.sh [IMAGE [OUTPUT]]
#
#   IMAGE    docker://[HOST#]NAME:TAG, dockerd://NAME:TAG or podman://NAME:TAG
#            (default: the official PyTorch image)
#   OUTPUT   the file to write (default: pytorch.sqsh)
#
# Requires enroot (github.com/NVIDIA/enroot). For docker://, users other than root require its
# capabilities (package enroot+caps). The official image requires about 20 GB of free space in
# ENROOT_TEMP_PATH (default: /tmp) and ENROOT_CACHE_PATH.
set -euo pipefail

image=${1:-docker://pytorch/pytorch:2.14.1-cuda13.0-cudnn9-runtime}
output=${2:-pytorch.sqsh}

type -P enroot >/dev/null || {
    echo "error: requires enroot. If the compute nodes have it: srun bash $0 $*" >&2
    exit 1
}

# For podman://, enroot removes its container with `docker rm`, which fails without docker.
if [[ $image == podman://* ]]; then
    docker() {
        podman "$@"
    }
    export -f docker
fi

# Written beside the old image, which is replaced once the new one is complete.
partial=$output.$$
trap 'rm -f "$partial"' EXIT
enroot import --output "$partial" "$image"
mv "$partial" "$output"
echo "$output is ready"
