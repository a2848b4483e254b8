#!/bin/bash
# Train on several nodes from a terminal on each. Run this on the first node; it prints the command for the others.
#
# usage: [NODES=2] bash slurm/ddp-master-node.sh [train.py [arguments]]
#
# Open a terminal on each node with: srun --gpus-per-node=4 --cpus-per-task=32 --pty bash
set -euo pipefail

[[ $# -gt 0 ]] || set -- cifar10_ddp/train.py
command=(bash "${0%/*}/ddp-worker-node.sh" "$(hostname):$((10000 + RANDOM % 20000))" "${NODES:-2}" "$@")

echo "On each other node, run:"
printf '    cd %q &&' "$PWD"
printf ' %q' "${command[@]}"
echo
exec "${command[@]}"
