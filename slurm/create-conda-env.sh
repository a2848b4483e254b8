#!/usr/bin/env bash
# Make a conda environment that the scripts run in, or bring it up to date with requirements.txt.
#
# usage: bash slurm/create-conda-env.sh [--install-miniconda INSTALLER] [NAME or PATH]
#
# Without a name it is the folder .conda beside slurm/; a word is a name, what has a slash is a path.
# It takes conda, mamba or micromamba, whichever is there. Only where none is: download the Linux installer
# of Miniconda or Miniforge from its own site and give the file, or its address, as INSTALLER: it is
# installed into .miniconda3 beside slurm/. Run it as often as you like.
#
# Python comes from the channel conda-forge, PyTorch from pip (PyTorch left conda with version 2.6).
set -euo pipefail

die() { echo "create-conda-env.sh: $*" >&2; exit 1; }
usage="usage: bash slurm/create-conda-env.sh [--install-miniconda INSTALLER] [NAME or PATH]"

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
top=$(dirname "$here")
installer=
if [[ ${1:-} == --install-miniconda ]]; then
    installer=${2:-}
    [[ -n $installer ]] || die "$usage"
    shift 2
fi
[[ $# -le 1 && ${1:-} != -* ]] || die "$usage"
environment=${1:-$top/.conda}
case $environment in
    */*) where=(--prefix "$(realpath -m "$environment")") ;;
    *) where=(--name "$environment") ;;
esac

find_conda() {
    local tool
    for tool in conda mamba micromamba "${CONDA_EXE:-}" "${MAMBA_EXE:-}" "$top/.miniconda3/bin/conda"; do
        type -P "$tool" && return
    done
    return 1
}
if ! conda=$(find_conda); then
    [[ -n $installer ]] ||
        die "no conda, mamba or micromamba here: load your cluster's module, give --install-miniconda INSTALLER, or use create-venv.sh"
    if [[ $installer == *://* ]]; then
        file=$(mktemp --suffix=.sh)
        trap 'rm -f "$file"' EXIT
        curl --fail --silent --show-error --location --retry 3 --output "$file" "$installer" ||
            die "cannot download $installer: check the address and the network, or give a file"
    else
        file=$installer
    fi
    bash "$file" -b -u -p "$top/.miniconda3" || die "$installer failed: is it the Miniconda installer for $(uname -sm)?"
    conda=$(find_conda) || die "$installer installed no conda into $top/.miniconda3"
fi

# The folder of the environment; fails where there is none yet.
prefix() { "$conda" run "${where[@]}" printenv CONDA_PREFIX 2>/dev/null; }

action=
if ! folder=$(prefix); then
    action=create
elif [[ ! -x $folder/bin/python ]]; then
    action=install
fi
if [[ -n $action ]]; then
    "$conda" "$action" --yes "${where[@]}" --override-channels --channel conda-forge python=3.12 pip ||
        die "'$conda $action ${where[*]}' failed: check the network and the space (df -h), or choose another NAME or PATH"
    folder=$(prefix) || die "'$conda run ${where[*]}' fails: remove that environment and run this again"
fi

"$folder/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    die "$folder has an old Python, PyTorch needs 3.10 or newer: choose another NAME or PATH"
# Without PYTHONNOUSERSITE pip would leave out what happens to be in ~/.local.
PYTHONNOUSERSITE=1 "$folder/bin/python" -m pip install --quiet --disable-pip-version-check -r "$here/requirements.txt" ||
    die "pip could not install $here/requirements.txt: check the network (PIP_INDEX_URL, PIP_PROXY) and the space (df -h), then run this again"
echo "$folder is ready: CONDA_ENV=$folder"
