#!/usr/bin/env bash
# Run the quick tests (3 minutes on 2 cores): every script trains for one epoch on the CPU and learns, stops and
# resumes, explains mistakes; where there are GPUs, it also trains on them. With --all, run all tests (15 minutes):
# also random kills, damaged checkpoints, a real Slurm of several nodes, images, pods, setting up, the benchmark.
# What this machine cannot run is listed at the end, with the command that enables it.
#
# usage: [VENV=DIR] bash tests/run.sh [--all] [pytest arguments]     e.g. bash tests/run.sh --all -x -k cifar10
#
# Without VENV, slurm/create-venv.sh makes or updates .venv first.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [[ -z ${VENV:-} ]]; then
    VENV=.venv
    bash slurm/create-venv.sh
fi
if [[ ${1:-} == --all ]]; then
    shift
else
    set -- tests/test_{smoke,scripts,gpu}.py "$@"
fi
exec "$VENV/bin/python" -m pytest -rs "$@"
