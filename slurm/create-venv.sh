#!/usr/bin/env bash
# SPDX-License-Identifier: MIT-0
# Make the virtual environment of the scripts, or update it from requirements.txt beside this file.
#
# usage: [PYTHON=python3.12] bash slurm/create-venv.sh [DIR]     (DIR: .venv beside slurm/)
#
# Running it again is harmless, and completes an interrupted run. pip reads its own variables. For
# the smaller CPU-only wheels, set PIP_EXTRA_INDEX_URL to the index that is named on PyTorch's page
# "Get Started".
set -euo pipefail

unset CDPATH    # cd prints where it finds a folder by that
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-python3}
venv=${1:-$(dirname "$here")/.venv}

die() { echo "error: $*" >&2; exit 1; }
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    die "requires Python 3.10 or newer: install one and name it, as in PYTHON=python3.12"
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
    die "requires Python's venv module: apt-get install python3-venv"

echo "installing $here/requirements.txt in $venv: the first time takes some minutes"
if [[ ! -e $venv/bin/activate ]]; then      # which venv writes last
    "$python" -m venv "$venv"
fi
venv=$(cd "$venv" && pwd -P)
export PIP_USER=0       # some sites set it, and pip refuses it in a venv
remedy="delete $venv, unset PYTHONPATH if it is set, and run this again"
"$venv/bin/python" -m pip --version >/dev/null || die "$venv has no pip that works: $remedy"
"$venv/bin/python" -m pip install -r "$here/requirements.txt"
# After a move or a copy, torchrun's first line names another Python. PYTHONPATH may hold PyTorch.
if ! grep -qF "$venv/bin/python" "$venv/bin/torchrun" || ! "$venv/bin/torchrun" --help >/dev/null
then
    die "torchrun of $venv does not start, or not with its Python: $remedy"
fi
echo "$venv is ready: source $venv/bin/activate"
