#!/usr/bin/env bash
# SPDX-License-Identifier: MIT-0
# Fill in a template from environment variables, and print it. The values that it used appear on
# stderr. After an error, nothing is printed.
#
# usage: IMAGE_URI=NAME CLAIM_NAME=NAME bash render.sh TEMPLATE > my-job.yaml
#
#   IMAGE_URI         the image
#   CLAIM_NAME        the claim, mounted at /fsx
#   SCRIPT            cpu_ddp: folder of the script, my for my/train.py
#   JOB_NAME          as SCRIPT, cpu-ddp: name of the job and of the checkpoint /fsx/JOB_NAME.pt.
#                     Use a different one for each training
#   ARGS              flags of the script: "--epochs=100 --lr=0.01"
#   NUM_NODES         2: pods. mnist_dp always has one
#   CPU_PER_NODE      1: CPUs of a pod, fewer than `allocatable`, for example 3 on a node of 4
#   GPU_PER_NODE      0: GPUs of a pod, by NVIDIA's device plugin
#   WORKERS_PER_NODE  one per GPU, else one per CPU: processes of a pod. In synthetic_ddp, the
#                     number of processes in all pods must divide --global-batch
#   MEMORY_PER_NODE   4Gi per process: memory of a pod, with /dev/shm
#   RDZV_BACKEND      c10d: or etcd, for a PyTorchJob, see etcd.yaml
#
# shellcheck disable=SC2034  # the template uses them
set -euo pipefail

template=$(<"${1:?usage: bash render.sh TEMPLATE > my-job.yaml}")

SCRIPT=${SCRIPT:-cpu_ddp}
JOB_NAME=${JOB_NAME:-${SCRIPT//_/-}}
ARGS=${ARGS:-}
NUM_NODES=${NUM_NODES:-2}
CPU_PER_NODE=${CPU_PER_NODE:-1}
GPU_PER_NODE=${GPU_PER_NODE:-0}

# One process per GPU, or per CPU where there are no GPUs
devices=$CPU_PER_NODE
if [[ $GPU_PER_NODE != 0 ]]; then
    devices=$GPU_PER_NODE
    # The device plugin sets this variable to the GPUs of the pod.
    template=$(grep -v NVIDIA_VISIBLE_DEVICES <<<"$template")
fi
WORKERS_PER_NODE=${WORKERS_PER_NODE:-$devices}

CHECKPOINT=--checkpoint=/fsx/$JOB_NAME.pt
if [[ $SCRIPT = mnist_dp ]]; then     # one process on all GPUs of one pod
    NUM_NODES=1
    WORKERS_PER_NODE=1
    CHECKPOINT=
fi

for name in NUM_NODES CPU_PER_NODE GPU_PER_NODE WORKERS_PER_NODE; do
    if [[ ! $name=${!name} =~ ^(GPU_PER_NODE=0|[A-Z_]+=[1-9][0-9]*)$ ]]; then
        echo "error: $name=${!name} is not a whole number, or too small" >&2
        exit 1
    fi
done
MEMORY_PER_NODE=${MEMORY_PER_NODE:-$((4 * WORKERS_PER_NODE))Gi}
threads=$((CPU_PER_NODE / WORKERS_PER_NODE))
THREADS_PER_WORKER=$((threads > 1 ? threads : 1))

# PyTorchJob: where the pods meet, and how often their processes may restart
RDZV_BACKEND=${RDZV_BACKEND:-c10d}
RDZV_ID=$JOB_NAME-$(date +%s)
case $RDZV_BACKEND in
    c10d) RDZV_HOST=$JOB_NAME-worker-0 RDZV_PORT=23456 MAX_RESTARTS=10 ;;
    etcd) RDZV_HOST=etcd RDZV_PORT=2379 MAX_RESTARTS=100 ;; # see etcd.yaml
    *) echo "error: RDZV_BACKEND=$RDZV_BACKEND is neither c10d nor etcd" >&2 && exit 1 ;;
esac
BACKOFF_LIMIT=$((20 * NUM_NODES))

manifest=
used=()
while [[ $template =~ [$]([A-Z][A-Z0-9_]*) ]]; do
    name=${BASH_REMATCH[1]}
    if [[ -z ${!name:-} && $name != ARGS && $name != CHECKPOINT ]]; then
        echo "error: export $name, see the first lines of render.sh" >&2
        exit 1
    fi
    manifest+=${template%%"\$$name"*}${!name}
    template=${template#*"\$$name"}
    used+=("$name=${!name}")
done
printf '%s\n' "${used[@]}" | sort -u >&2
printf '%s\n' "$manifest$template"
