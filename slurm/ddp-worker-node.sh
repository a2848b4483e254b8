#!/usr/bin/env bash
# The second of two terminals: ddp-master-node.sh, in the first, prints the line that starts this one.
#
# usage: [WORKERS_PER_NODE=4] [VENV=DIR] bash ddp-worker-node.sh ADDRESS:PORT RANK NODES train.py [arguments]
set -euo pipefail

die() { echo "ddp-worker-node.sh: $*" >&2; exit 1; }
[[ $# -ge 4 && $1 =~ ^(.+):([0-9]+)$ ]] ||
    die "usage: bash ddp-worker-node.sh ADDRESS:PORT RANK NODES train.py [arguments]; paste what ddp-master-node.sh prints"
address=${BASH_REMATCH[1]} port=${BASH_REMATCH[2]} rank=$2 nodes=$3 script=$4
shift 4
[[ -f $script ]] || die "there is no $script on $(hostname): the nodes must share the folder, or each have its copy"
script=$(realpath "$script")

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

# gloo needs the interface, where the node's name does not tell it.
export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$(ip -oneline route get "$address" | sed -n 's/.* dev \([^ ]*\).*/\1/p')}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > workers ? cores / workers : 1))}
exec torchrun --nnodes="$nodes" --nproc-per-node="$workers" --node-rank="$rank" --master-addr="$address" --master-port="$port" \
    "$script" "$@"
