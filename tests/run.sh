#!/usr/bin/env bash
# Run the tests: all of them, or those that pytest's arguments choose. What this machine cannot run
# is listed at the end, with the command that would enable it.
#
# usage: [VENV=DIR] bash tests/run.sh [pytest arguments]     e.g. bash tests/run.sh -x -k cifar10
#
# Without VENV, slurm/create-venv.sh makes .venv first, and keeps it up to date.
set -euo pipefail

top=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [[ -z ${VENV:-} ]]; then
    VENV=$top/.venv
    bash "$top/slurm/create-venv.sh" "$VENV"
fi
if [[ ! -x $VENV/bin/python ]]; then
    echo "run.sh: $VENV is no virtual environment: make it with bash slurm/create-venv.sh $VENV" >&2
    exit 1
fi
VENV=$(cd "$VENV" && pwd)
cd "$top"
exec "$VENV/bin/python" -m pytest -rs "$@"
