#!/usr/bin/env bash
# Fill in a template from exported variables, which ../README.md explains. ARGS may be unset.
#
# usage: bash render.sh TEMPLATE > job.yaml          e.g. bash render.sh pytorchjob.yaml-template > cpu-ddp.yaml
#
# Requires envsubst (Debian: gettext-base, Homebrew: gettext).
set -euo pipefail

template=$(<"${1:?usage: bash render.sh TEMPLATE}")
RDZV_ID=${JOB_NAME:-}-$(date +%s) # etcd does not accept the id of a finished rendezvous
BACKOFF_LIMIT=$((20 * ${NUM_NODES:-0})) # counts the restarts of all pods together
export RDZV_ID BACKOFF_LIMIT
for name in $(envsubst --variables "$template"); do
    [[ ${!name:-} || $name == ARGS ]] || { echo "error: export $name, see containers/README.md" >&2; exit 1; }
done
envsubst <<<"$template"
