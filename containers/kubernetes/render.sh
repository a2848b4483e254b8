#!/usr/bin/env bash
# Fill in a template from the environment; nothing is written if a variable is missing or empty (ARGS may be empty).
#
# usage: bash render.sh TEMPLATE > job.yaml          e.g. bash render.sh pytorchjob.yaml-template > cpu-ddp.yaml
set -euo pipefail

die() { echo "render.sh: $*" >&2; exit 1; }

[ $# -eq 1 ] || die "usage: bash render.sh TEMPLATE > job.yaml"
template=$1
[ -r "$template" ] || die "$template cannot be read: name one of $(dirname "${BASH_SOURCE[0]}")/*.yaml-template"
command -v envsubst >/dev/null || die "envsubst is missing: apt-get install gettext-base, or brew install gettext"

# etcd remembers a finished rendezvous: every rendering gets its own.
RDZV_ID=${JOB_NAME:-}-$(date +%Y%m%d-%H%M%S)
export RDZV_ID

variables=$(grep -o '[$][A-Z_]*' "$template" | sort -u) || die "$template has no variables: is it a template?"
missing=
for variable in $variables; do
    name=${variable#$}
    if [ -z "${!name+set}" ] || { [ -z "${!name}" ] && [ "$name" != ARGS ]; }; then
        missing+=" $name"
    fi
done
[[ " ${ARGS:-} " != *" --fresh "* ]] || die "--fresh in ARGS would start over whenever a pod comes back: take another JOB_NAME"
[ -z "$missing" ] || die "set and export$missing (README.md explains them)"

envsubst "$variables" <"$template"
