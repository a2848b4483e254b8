#!/usr/bin/env bash
# Make a conda environment for the scripts, or update it from requirements.txt beside this file.
#
# usage: bash slurm/create-conda-env.sh [--name NAME | --prefix DIR]     (--prefix .conda, beside slurm/)
#
# Uses conda, mamba or micromamba. Running it again is harmless. Python comes from the channel conda-forge,
# PyTorch from pip: its authors publish no conda packages since version 2.6.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
[[ $# -gt 0 ]] || set -- --prefix "$(dirname "$here")/.conda"

# Where conda is a shell function, which a script does not see, these variables name the program.
conda=$(type -P conda mamba micromamba "${CONDA_EXE:-}" "${MAMBA_EXE:-}" | head -n 1) || true
[[ -n $conda ]] ||
    { echo "error: requires conda: load its module, or install Miniforge or Miniconda from its own site" >&2; exit 1; }

prefix() {  # the folder of the environment; fails where it is not complete
    local folder
    folder=$("$conda" run "$@" printenv CONDA_PREFIX) && [[ -x $folder/bin/python ]] && echo "$folder"
}
if ! folder=$(prefix "$@" 2>/dev/null); then
    "$conda" create --yes "$@" --override-channels --channel conda-forge python=3.12 pip
    folder=$(prefix "$@")
fi
"$folder/bin/python" -m pip install --quiet -r "$here/requirements.txt"
echo "$folder is ready: conda activate $folder"
