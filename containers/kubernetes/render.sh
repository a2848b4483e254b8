#!/usr/bin/env bash
# SPDX-License-Identifier: MIT-0
# Fill in a template from environment variables, which ../README.md lists, and print it.
# The values that it used appear on stderr.
#
# usage: IMAGE_URI=NAME CLAIM_NAME=NAME bash render.sh TEMPLATE > my-job.yaml
#
# Requires envsubst (Debian: gettext-base, Homebrew: gettext).
set -euo pipefail

template=$(<"${1:?usage: bash render.sh TEMPLATE > my-job.yaml}")

export SCRIPT=${SCRIPT:-cpu_ddp}
export JOB_NAME=${JOB_NAME:-${SCRIPT//_/-}}
export ARGS=${ARGS:-}
export NUM_NODES=${NUM_NODES:-2}
export CPU_PER_NODE=${CPU_PER_NODE:-1}
export GPU_PER_NODE=${GPU_PER_NODE:-0}

# One process per GPU, or per CPU where there are no GPUs
devices=$CPU_PER_NODE
if [[ $GPU_PER_NODE != 0 ]]; then
    devices=$GPU_PER_NODE
fi
export WORKERS_PER_NODE=${WORKERS_PER_NODE:-$devices}

export CHECKPOINT=--checkpoint=/fsx/$JOB_NAME.pt
case $SCRIPT in
    mnist_dp) # one process on all GPUs of one pod
        NUM_NODES=1
        WORKERS_PER_NODE=1
        CHECKPOINT=
        ;;
    synthetic_ddp) CHECKPOINT= ;;
esac

for name in NUM_NODES CPU_PER_NODE GPU_PER_NODE WORKERS_PER_NODE; do
    if [[ ! $name=${!name} =~ ^(GPU_PER_NODE=0|[A-Z_]+=[1-9][0-9]*)$ ]]; then
        echo "error: $name=${!name} is not a whole number, or too small" >&2
        exit 1
    fi
done
export MEMORY_PER_NODE=${MEMORY_PER_NODE:-$((4 * WORKERS_PER_NODE))Gi}
threads=$((CPU_PER_NODE / WORKERS_PER_NODE))
export THREADS_PER_WORKER=$((threads > 1 ? threads : 1))
export BACKOFF_LIMIT=$((20 * NUM_NODES))
RDZV_ID=$JOB_NAME-$(date +%s)
export RDZV_ID

names=$(envsubst --variables "$template" | sort -u)
for name in $names; do
    if [[ -z ${!name:-} && $name != ARGS && $name != CHECKPOINT ]]; then
        echo "error: export $name, see containers/README.md" >&2
        exit 1
    fi
done
for name in $names; do
    echo "$name=${!name}" >&2
done
envsubst <<<"$template"
