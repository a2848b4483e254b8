#!/bin/bash
# Train on several nodes from a terminal on each. Run this on the first node; it prints the command for the others.
#
# usage: [NODES=2] [NPROC=processes per node] bash slurm/ddp-master-node.sh [train.py [arguments]]
#
#   salloc --nodes=2 --ntasks-per-node=1 --gpus-per-node=4 --cpus-per-task=32
#   srun --jobid=JOB --overlap --nodes=1 --ntasks=1 --nodelist=NODE --pty bash     # in a terminal for each node
set -euo pipefail

[[ $# -gt 0 ]] || set -- cifar10_ddp/train.py
worker=$(realpath -s "$(dirname "$0")/ddp-worker-node.sh")
[[ -e $1 || ! -e ../$1 ]] || cd ..      # run in slurm/
command=(env NPROC="${NPROC:-}" bash "$worker" "$(hostname):$((10000 + RANDOM % 20000))" "${NODES:-2}" "$@")

echo "On each other node, run:"
printf '    cd %q &&' "$PWD"
printf ' %q' "${command[@]}"
echo
exec "${command[@]}"
