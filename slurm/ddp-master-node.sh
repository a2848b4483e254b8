#!/usr/bin/env bash
# Two terminals on two nodes, without a batch job: start this on the first, and on the second what it prints.
#
# usage: [NODES=2] [WORKERS_PER_NODE=4] [VENV=DIR] bash ddp-master-node.sh [train.py [arguments]]
#
# train.py is cifar10_ddp/train.py by default. A terminal on a node: srun --gpus-per-node=4 --cpus-per-task=8 --pty bash.
# ADDRESS=IP: the address by which the others reach this node, where it has several.
set -euo pipefail

die() { echo "ddp-master-node.sh: $*" >&2; exit 1; }
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
script=${1:-$here/../cifar10_ddp/train.py}
shift $(($# > 0))
[[ -f $script ]] || die "there is no $script: bash ddp-master-node.sh FILE [arguments]"
script=$(realpath "$script")
nodes=${NODES:-2}

# --- shared: environment ---
if [[ ${MODULES:-} ]]; then
    set +eu     # site scripts are not written for it
    # shellcheck disable=SC1091
    declare -F module >/dev/null || source /etc/profile
    # shellcheck disable=SC2086  # several words
    module load $MODULES || die "module load $MODULES fails: see module avail, then MODULES=\"NAME …\" sbatch …"
    set -eu
fi
environment=${VENV:-}
if [[ ! $environment && ${CONDA_ENV:-} ]]; then
    environment=$CONDA_ENV
    [[ $CONDA_ENV == */* ]] || environment=$("${CONDA_EXE:-conda}" run --name "$CONDA_ENV" printenv CONDA_PREFIX) ||
        die "conda knows no environment $CONDA_ENV: see conda env list, or give its folder, CONDA_ENV=/…/$CONDA_ENV"
fi
for place in "${script%/*}"/{.,..}/.{venv,conda} "$PWD"/.{venv,conda}; do
    [[ $environment || ! -d $place/bin ]] || environment=$(realpath "$place")
done
PATH=${environment:+$environment/bin:}$PATH     # without one: the submitter's, or the modules'
python -c 'import importlib.util, sys; sys.exit(not importlib.util.find_spec("torch"))' 2>/dev/null ||
    die "no PyTorch in ${environment:-the PATH}: bash slurm/create-venv.sh makes an environment, VENV=DIR or CONDA_ENV=NAME before sbatch names one"
# --- end ---

gpus=${SLURM_GPUS_ON_NODE:-$(nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU' || true)}
cores=$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc)      # which obeys them
workers=${WORKERS_PER_NODE:-$((gpus ? gpus : cores))}
address=${ADDRESS:-$(getent ahostsv4 "$(hostname)" | sed -n '/^127/!{s/ .*//p;q}' || true)}
address=${address:-$(hostname -I | cut -d ' ' -f 1)}   # the name is unknown or a loopback's, as Debian's installer has it
port=$((10000 + RANDOM % 20000))
while (: <>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; do port=$((port + 1)); done     # in use

echo "On the other node (the numbers are its rank, and the number of nodes), paste:"
for ((rank = 1; rank < nodes; rank++)); do
    printf '\n    cd %q && WORKERS_PER_NODE=%q VENV=%q MODULES=%q bash' "$PWD" "$workers" "$environment" "${MODULES:-}"
    printf ' %q' "$here/ddp-worker-node.sh" "$address:$port" "$rank" "$nodes" "$script" "$@"
    echo
done
echo

# gloo needs the interface, where the node's name does not tell it.
export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$(ip -oneline address | sed -n "s/^[0-9]*: *\([^ ]*\) .* ${address//./\\.}\/.*/\1/p")}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > workers ? cores / workers : 1))}
exec torchrun --nnodes="$nodes" --nproc-per-node="$workers" --node-rank=0 --master-addr="$address" --master-port="$port" \
    "$script" "$@"
