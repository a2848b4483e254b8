# shellcheck shell=bash disable=SC2034,SC2154
# SPDX-License-Identifier: MIT-0
# What the sbatch files have in common: they source this file before they launch a script. A job may
# be stopped at any moment, and comes back.
#
#   $checkpoint     the file that the script saves to, and resumes from
#   $code           a copy of $script, made when the job first starts: a requeued job runs the same
#   $processes      on each node: one per GPU, or per core
#   $cores, $gpus   of each node ($gpus is empty if there are none)
#   $port           of the first node, for the processes to meet: another one for each job
#   requeue         is called when srun has failed: it requeues the job, if that makes progress
set -euo pipefail
die() { echo "error: $*" >&2; exit 1; }

# The checkpoint: FILE of --checkpoint FILE or --checkpoint=FILE, else a file of this job.
restarts=${SLURM_RESTART_COUNT:-0}
file=
previous=
for argument in "$@"; do
    [[ $previous != --checkpoint ]] || file=$argument
    [[ $argument != --checkpoint=* ]] || file=${argument#*=}
    previous=$argument
done
[[ ! ${CHECKPOINT:-} ]] ||
    die "not CHECKPOINT=$CHECKPOINT sbatch ..., but sbatch ... --checkpoint $CHECKPOINT, as by hand"
if [[ $file && ${SLURM_ARRAY_TASK_ID:-} ]]; then
    [[ $file == *%a* ]] ||
        die "all tasks of the array would save to $file: put %a, a task's number, into the name"
    file=${file//%a/$SLURM_ARRAY_TASK_ID}
fi
checkpoint=$(realpath -s "${file:-$SLURM_JOB_NAME-$SLURM_JOB_ID.pt}")
# A reinstalled cluster numbers its jobs from 1 again, so an older job may have left this file.
[[ $file || $restarts != 0 || ! -e $checkpoint ]] ||
    die "$checkpoint is another job's: move it and the .code away, or add --checkpoint $checkpoint"
saved() { stat -Lc %y "$checkpoint" 2>&1; }     # when, or the error that there is no such file
before=$(saved) || true

# The code: copies of the script, of the modules (*.py) beside it, and of this file, made when the
# job first starts.
folder=$(dirname "$checkpoint")/$SLURM_JOB_NAME-$SLURM_JOB_ID.code
code=$folder/${script##*/}
if [[ $restarts = 0 || ! -e $folder/job.sh ]]; then
    [[ -d $folder ]] || mkdir "$folder"
    cp "$script" "$folder"
    cp "$(dirname "$script")"/*.py "$folder"
    cp slurm/job.sh "$folder/.tmp"          # last, and as a whole or not at all
    mv "$folder/.tmp" "$folder/job.sh"
fi
if [[ $restarts != 0 && ${BASH_SOURCE[0]} != "$folder/job.sh" ]]; then
    # shellcheck source=/dev/null
    source "$folder/job.sh"
    return
fi
PYTHONPATH=$(dirname "$(realpath "$script")")${PYTHONPATH:+:$PYTHONPATH}    # for its packages
export PYTHONPATH

# The environment: the active one, .venv or .conda, the first that has torchrun. Otherwise PATH.
# (A container has its own.)
for folder in "${VIRTUAL_ENV:-none}" "${CONDA_PREFIX:-none}" "$PWD"/.{venv,conda}; do
    if [[ -x $folder/bin/torchrun && ! ${image:-} ]]; then
        "$folder/bin/python" --version      # the job ends here if the node lacks this Python
        export PATH=$folder/bin:$PATH PYTHONNOUSERSITE=1
        break
    fi
done
[[ ${image:-} ]] || echo "python: $(type -P python)"

# Processes on each node: one per GPU, or per core of the smallest node. They share its cores.
cores=$(tr , '\n' <<<"$SLURM_JOB_CPUS_PER_NODE" | sort -n | sed 's/(.*//; q')
gpus=${SLURM_GPUS_ON_NODE:-}
processes=${NPROC:-${gpus:-$cores}}
port=$((10000 + SLURM_JOB_ID % 20000))
export OMP_NUM_THREADS=$((cores > processes ? cores / processes : 1))

# torchrun: of the 120 s of --signal, processes have 110 s to save (30 s with torch before 2.13).
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=110
# It takes a node for lost if its clock is 3 x 5 s behind. Slurm's own limit is 5 minutes: 60 x 5 s.
export PET_RDZV_CONF=keep_alive_max_attempt=60

# srun: it would take options from the shell or the job that has submitted this one. OMP_PROC_BIND,
# OMP_PLACES and GOMP_CPU_AFFINITY would bind all processes to one core. A notebook may leave RANK
# and what follows it.
unset "${!SLURM_CPU@}" "${!SLURM_GPU@}" "${!SLURM_MEM@}" "${!SLURM_NTASKS@}" "${!SLURM_TRES@}" \
    "${!PMI@}" SLURM_CONSTRAINT SLURM_DISTRIBUTION SLURM_HINT SLURM_NPROCS SLURM_PTY_PORT \
    SLURM_TIMELIMIT OMP_PROC_BIND OMP_PLACES GOMP_CPU_AFFINITY \
    RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR MASTER_PORT
export SLURM_EXPORT_ENV=ALL     # srun --export: all variables, also after sbatch --export=NONE
export SLURM_KILL_BAD_EXIT=1    # srun --kill-on-bad-exit: if a task fails, all end
[[ ! $gpus ]] || export SLURM_GPUS_PER_NODE=$gpus   # srun --gpus-per-node

# Requeue the job if it was preempted, or has saved since it started. Otherwise end it: it would
# fail again before its next checkpoint.
requeue() {
    local id=$SLURM_JOB_ID preempted
    [[ ${SLURM_ARRAY_JOB_ID:-} != "$id" ]] || id+=_$SLURM_ARRAY_TASK_ID     # not the whole array
    preempted=$(timeout 600 bash -c "until squeue -ahj $id -O PreemptTime; do sleep 5; done") ||
        preempted=N/A       # Slurm has not answered
    [[ $(saved) != "$before" || $preempted != N/A* ]] ||
        die "the job has saved nothing since it started: it is not requeued"
    scontrol requeue "$id"
    exit 1
}
