#!/bin/bash
# SPDX-License-Identifier: MIT-0
# Join a training run on several nodes, with one process per GPU, or per core, of this node.
# ddp-master-node.sh prints the command.
#
# usage: [NPROC=processes] bash slurm/ddp-worker-node.sh HOST:PORT NODES train.py [arguments]
set -euo pipefail

die() { echo "$*" >&2; exit 1; }
[[ $# -ge 3 ]] || die "$(sed -n 's/^# usage/usage/p' "$0")"
[[ ${SLURM_CPUS_ON_NODE:-} ]] || die "error: requires a terminal of srun: srun ... --pty bash"
endpoint=$1
nodes=$2
shift 2

# The environment: the active one, .venv or .conda, the first that has torchrun. Otherwise PATH.
for folder in "${VIRTUAL_ENV:-none}" "${CONDA_PREFIX:-none}" "$PWD"/.{venv,conda}; do
    if [[ -x $folder/bin/torchrun ]]; then
        "$folder/bin/python" --version      # the job ends here if the node lacks this Python
        export PATH=$folder/bin:$PATH PYTHONNOUSERSITE=1
        break
    fi
done

cores=$SLURM_CPUS_ON_NODE
processes=${NPROC:-${SLURM_GPUS_ON_NODE:-$cores}}
export OMP_NUM_THREADS=$((cores > processes ? cores / processes : 1))
unset OMP_PROC_BIND OMP_PLACES GOMP_CPU_AFFINITY    # they bind all processes to one core
echo "torchrun: $(type -P torchrun)"
exec torchrun --nnodes="$nodes" --nproc-per-node="$processes" \
    --rdzv-backend=c10d --rdzv-endpoint="$endpoint" "$@"
