#!/bin/bash
# SPDX-License-Identifier: MIT-0
# Train on several nodes from a terminal on each. Run this on the first node: it prints the command
# for the others, and waits 10 minutes for them.
#
# usage: [NODES=2] [NPROC=processes per node] bash slurm/ddp-master-node.sh [train.py [arguments]]
#
# Without NPROC, there is a process per GPU, or per core. With --checkpoint FILE, the run saves.
#
#   salloc --nodes=2 --ntasks-per-node=1 --gpus-per-node=4 --cpus-per-task=32
#   squeue --me     # prints JOB and NODEs
#   srun --jobid=JOB --overlap --nodes=1 --ntasks=1 --nodelist=NODE --pty bash     # for each node
#   scancel JOB     # at the end: the allocation costs until then. exit ends only a terminal,
#                   # but in the shell of salloc the allocation, too
set -euo pipefail

if [[ $# = 0 ]]; then
    set -- cifar10_ddp/train.py
fi
worker=$(realpath -s "$(dirname "$0")/ddp-worker-node.sh")
endpoint=$(hostname):$((10000 + RANDOM % 20000))
command=(env NPROC="${NPROC:-}" bash "$worker" "$endpoint" "${NODES:-2}" "$@")

echo "On each other node, run:"
printf '    cd %q &&' "$PWD"
printf ' %q' "${command[@]}"
echo
exec "${command[@]}"
