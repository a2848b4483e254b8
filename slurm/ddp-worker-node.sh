#!/bin/bash
# Join a training run on several nodes, with one process per GPU, or per CPU core, of this node. ddp-master-node.sh
# prints the command.
#
# usage: bash slurm/ddp-worker-node.sh HOST:PORT NODES train.py [arguments]
set -euo pipefail

[[ $# -ge 3 ]] || { sed -n 's/^# usage/usage/p' "$0" >&2; exit 1; }
endpoint=$1 nodes=$2
shift 2

command -v torchrun >/dev/null || PATH=$PWD/.venv/bin:$PATH
processes=${SLURM_GPUS_ON_NODE:-${SLURM_CPUS_ON_NODE:?requires a terminal on a compute node: srun --pty bash}}
export OMP_NUM_THREADS=$((SLURM_CPUS_ON_NODE > processes ? SLURM_CPUS_ON_NODE / processes : 1))
exec torchrun --nnodes="$nodes" --nproc-per-node="$processes" --rdzv-backend=c10d --rdzv-endpoint="$endpoint" "$@"
