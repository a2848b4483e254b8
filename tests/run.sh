#!/usr/bin/env bash
# SPDX-License-Identifier: MIT-0
# Run the quick tests, which have no marker: about three minutes on two cores. Every script trains
# for one epoch on the CPU and learns; on one, two and three processes, runs are equal; killed at
# any place, they resume exactly; mistakes and other runs' checkpoints are refused.
#
# With --all, run all tests. The markers are slow (kills at random moments, launchers by the real
# command), slurm, pods, images, gpu. The end of the output lists what this machine cannot run, with
# the command that enables it.
#
# With a test file, -k EXPRESSION or -m EXPRESSION, run the tests that it names, with any marker.
#
# usage: [VENV=DIR] bash tests/run.sh [--all] [pytest arguments]
#        bash tests/run.sh tests/test_smoke.py -k cifar10
#        bash tests/run.sh -m slow -k 'killed and cpu_ddp'
#
# Without VENV, slurm/create-venv.sh makes or updates .venv first.
set -euo pipefail
unset CDPATH    # cd could find another tests/..
cd "$(dirname "${BASH_SOURCE[0]}")/.."

select=(-m "not slow and not slurm and not pods and not images and not gpu")
for argument in "$@"; do
    case $argument in
        --all | -k* | -m* | *.py | *.py::*) select=() ;;
    esac
done
if [[ ${1:-} == --all ]]; then
    shift
fi

if [[ -z ${VENV:-} ]]; then
    VENV=.venv
    bash slurm/create-venv.sh
fi
export CI="${CI:-true}"  # pytest then does not cut off the reasons at the end of its output
# bash 3.2 of macOS takes an empty array for an unset variable
exec "$VENV/bin/python" -m pytest -rfEs --strict-markers ${select[@]+"${select[@]}"} "$@"
