#!/usr/bin/env bash
# Fill in a template from environment variables, which ../README.md lists, and print it.
# The values that it used appear on stderr.
#
# usage: IMAGE_URI=NAME CLAIM_NAME=NAME bash render.sh TEMPLATE > job.yaml
#
# Requires envsubst (Debian: gettext-base, Homebrew: gettext).
set -euo pipefail

file=${1:?usage: bash render.sh TEMPLATE > job.yaml}
template=$(<"$file")

SCRIPT=${SCRIPT:-cpu_ddp}
if [[ $file == *pod.yaml-template ]]; then
    SCRIPT=mnist_dp
fi
JOB_NAME=${JOB_NAME:-${SCRIPT//_/-}}
ARGS=${ARGS:-}
NUM_NODES=${NUM_NODES:-2}
CPU_PER_NODE=${CPU_PER_NODE:-1}
GPU_PER_NODE=${GPU_PER_NODE:-0}

# One process per GPU, or per CPU where there are no GPUs
device=CPU
devices=$CPU_PER_NODE
if [[ $GPU_PER_NODE != 0 ]]; then
    device=GPU
    devices=$GPU_PER_NODE
fi
WORKERS_PER_NODE=${WORKERS_PER_NODE:-$devices}

for name in NUM_NODES CPU_PER_NODE GPU_PER_NODE WORKERS_PER_NODE; do
    if [[ ! ${!name} =~ ^(0|[1-9][0-9]*)$ ]]; then
        echo "error: $name=${!name} is not a whole number" >&2
        exit 1
    fi
done
MEMORY_PER_NODE=${MEMORY_PER_NODE:-$((4 * WORKERS_PER_NODE))Gi}
BACKOFF_LIMIT=$((20 * NUM_NODES))
RDZV_ID=$JOB_NAME-$(date +%s)

export SCRIPT JOB_NAME ARGS NUM_NODES CPU_PER_NODE GPU_PER_NODE WORKERS_PER_NODE
export MEMORY_PER_NODE BACKOFF_LIMIT RDZV_ID

names=$(envsubst --variables "$template" | sort -u)
for name in $names; do
    if [[ -z ${!name:-} && $name != ARGS ]]; then
        echo "error: export $name, see containers/README.md" >&2
        exit 1
    fi
done
for name in $names; do
    echo "$name=${!name}" >&2
done
if [[ $names == *WORKERS_PER_NODE* && $WORKERS_PER_NODE != "$devices" ]]; then
    echo "hint: $WORKERS_PER_NODE process(es) per pod for $devices $device(s):" \
        "WORKERS_PER_NODE=$devices starts one for each $device" >&2
fi
envsubst <<<"$template"
