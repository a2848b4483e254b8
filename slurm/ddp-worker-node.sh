#!/bin/bash
# Join a training run on several nodes, with one process per GPU, or per CPU core, of this node. ddp-master-node.sh
# prints the command.
#
# usage: [NPROC=processes per node] bash slurm/ddp-worker-node.sh HOST:PORT NODES train.py [arguments]
set -euo pipefail

[[ $# -ge 3 ]] || { sed -n 's/^# usage/usage/p' "$0" >&2; exit 1; }
[[ ${SLURM_CPUS_ON_NODE:-} ]] || { echo "error: requires a terminal of srun: srun ... --pty bash" >&2; exit 1; }
endpoint=$1 nodes=$2
shift 2

command -v torchrun >/dev/null || export PATH=$PWD/.venv/bin:$PATH
processes=${NPROC:-${SLURM_GPUS_ON_NODE:-$SLURM_CPUS_ON_NODE}}
export OMP_NUM_THREADS=$((SLURM_CPUS_ON_NODE > processes ? SLURM_CPUS_ON_NODE / processes : 1))
exec torchrun --nnodes="$nodes" --nproc-per-node="$processes" --rdzv-backend=c10d --rdzv-endpoint="$endpoint" "$@"
