#!/usr/bin/env bash
# SPDX-License-Identifier: MIT-0
# Make a conda environment for the scripts, or update it from requirements.txt beside this file.
#
# usage: bash slurm/create-conda-env.sh [--name NAME | --prefix DIR]     (--prefix .conda)
#
# The default, .conda beside slurm/, is what the sbatch files use where no environment is active.
# Uses conda, mamba or micromamba. Running it again is harmless. Python comes from the channel
# conda-forge, PyTorch from pip: its authors publish no conda packages since version 2.6.
set -euo pipefail

unset CDPATH    # cd prints where it finds a folder by that
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if [[ $# = 0 ]]; then
    set -- --prefix "$(dirname "$here")/.conda"
fi

# Where conda is a shell function, which a script does not see, these variables name the program.
programs=(conda mamba micromamba "${CONDA_EXE:-}" "${MAMBA_EXE:-}" ~/miniforge3/bin/conda)
conda=$(type -P "${programs[@]}" | head -n 1) || true
if [[ -z $conda ]]; then
    url=https://github.com/conda-forge/miniforge/releases/latest/download
    installer=Miniforge3-$(uname)-$(uname -m).sh
    cat >&2 <<END
error: requires conda: load its module, or install Miniforge in your home by these two commands:
    curl -fLO $url/$installer
    bash $installer -b
END
    exit 1
fi

prefix() {  # the folder of the environment; fails where it is not complete
    local folder
    folder=$("$conda" run "$@" printenv CONDA_PREFIX) || return
    [[ -x $folder/bin/python ]] && echo "$folder"
}
if ! folder=$(prefix "$@" 2>/dev/null); then
    "$conda" create --yes "$@" --override-channels --channel conda-forge python=3.12 pip
    folder=$(prefix "$@")
fi
folder=$(cd "$folder" && pwd -P)
# What is in ~/.local does not count, and nothing is installed there.
export PYTHONNOUSERSITE=1 PIP_USER=0
"$folder/bin/python" -m pip install --quiet -r "$here/requirements.txt"
# After a move or a copy, torchrun's first line names another Python. PYTHONPATH may hold PyTorch.
if ! grep -qF "$folder/bin/python" "$folder/bin/torchrun" ||
        ! "$folder/bin/torchrun" --help >/dev/null; then
    echo "error: torchrun of $folder does not start, or not with its Python:" \
        "delete $folder, unset PYTHONPATH if it is set, and run this again" >&2
    exit 1
fi
echo "$folder is ready: conda activate $folder"
