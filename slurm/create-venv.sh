#!/usr/bin/env bash
# Make the virtual environment that the scripts run in, or bring it up to date with requirements.txt.
#
# usage: [PYTHON=python3.12] bash slurm/create-venv.sh [DIR]     (DIR: .venv beside slurm/)
#
# Run it as often as you like: a second run takes a second and needs no network, and what an
# interrupted run left half-made is made anew. PYTHON is any Python from 3.10 on (python3).
# pip is steered by its own variables: for the smaller CPU-only wheels, for example, put the address
# that follows --index-url on PyTorch's "Get Started" page into PIP_INDEX_URL.
set -euo pipefail

die() { echo "create-venv.sh: $*" >&2; exit 1; }

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
[[ $# -le 1 && ${1:-} != -* ]] || die "usage: [PYTHON=python3.12] bash slurm/create-venv.sh [DIR]"
venv=${1:-$(dirname "$here")/.venv}
venv=${venv%/}
requirements=$here/requirements.txt
python=${PYTHON:-python3}
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_USER=0

version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) ||
    die "$python does not run: name a Python 3.10 or newer, as in PYTHON=python3.12"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    die "$python is Python $version, PyTorch needs 3.10 or newer: name one, as in PYTHON=python3.12"
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
    die "$python cannot make virtual environments: apt-get install python$version-venv, or name another PYTHON"

# One run at a time; the lock file is not empty while a new environment is unfinished.
{ mkdir -p "$(dirname "$venv")" && exec 9>>"$venv.lock"; } 2>/dev/null || die "cannot write $venv.lock: choose another DIR"
"$python" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX)'
remove_unfinished() { [[ ! -s $venv.lock ]] || { rm -rf "$venv"; true >"$venv.lock"; }; }
remove_unfinished
trap remove_unfinished EXIT

output=--quiet
if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    [[ ! -e $venv ]] || rmdir "$venv" 2>/dev/null ||
        die "$venv is there, but is no working virtual environment: choose another DIR, or remove a broken one"
    echo "making $venv with Python $version; PyTorch is large, this takes some minutes"
    echo unfinished >"$venv.lock"
    "$python" -m venv "$venv" >/dev/null 2>&1 ||
        die "'$python -m venv $venv' failed: look for a full disk (df -h), or choose another DIR"
    output=--progress-bar=on
fi

# pip asks the network only for what is missing.
exec 3>&1
if ! errors=$("$venv/bin/python" -m pip install "$output" -r "$requirements" 2>&1 >&3); then
    reason=$(grep -m 1 '^ERROR' <<<"$errors") || reason=$(tail -n 1 <<<"$errors")
    case $errors in
        *"No space left"* | *"Disk quota"*) remedy="free some 12 GB under $venv and ${TMPDIR:-/tmp}, or set TMPDIR and PIP_CACHE_DIR to a larger disk" ;;
        *) remedy="check the network, or point pip to a mirror (PIP_INDEX_URL, PIP_PROXY), then run this again" ;;
    esac
    die "pip could not install $requirements: $remedy (${reason#ERROR: })"
fi
true >"$venv.lock"
echo "$venv is ready"
