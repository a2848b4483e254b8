#!/usr/bin/env bash
# SPDX-License-Identifier: MIT-0
# Run the quick tests: about 3 minutes on 2 cores. Every script trains for one epoch on the CPU and
# learns; shared functions are equal; each sample is used once; what is printed is true; mistakes
# and other runs' checkpoints are refused; a stopped run resumes exactly. Where there are GPUs, it
# trains on them.
#
# With --all, run all tests: 14 minutes in .ci/run. Also kills, launchers, a Slurm of several nodes,
# images, pods, setting up. The end of the output lists what this machine cannot run, with the
# command that enables it.
#
# With a test file or -k EXPRESSION, run the tests of that file, or those of all files that match.
#
# usage: [VENV=DIR] bash tests/run.sh [--all] [pytest arguments]
#        bash tests/run.sh tests/test_smoke.py -k cifar10
#        bash tests/run.sh -k 'settings and cpu_ddp'
#        bash tests/run.sh tests/test_kills.py::test_workers_of_a_killed_torchrun_save_and_end
#
# Without VENV, slurm/create-venv.sh makes or updates .venv first.
set -euo pipefail
unset CDPATH    # cd could find another tests/..
cd "$(dirname "${BASH_SOURCE[0]}")/.."

quick=(
    tests/test_smoke.py
    tests/test_flags.py
    --deselect=tests/test_flags.py::test_torchrun_names_the_rank_that_failed_and_its_error
    --deselect=tests/test_flags.py::test_an_error_of_rank_0_is_printed_once_and_ends_all_processes
    tests/test_real_data.py::test_images_are_downloaded_and_train_or_test
    tests/test_real_data.py::test_generated_test_samples_are_no_training_samples
    tests/test_repository.py
    tests/test_batches.py
    --deselect=tests/test_batches.py::test_resumed_on_fewer_processes
    tests/test_recipes.py
    tests/test_log_lines.py
    tests/test_checkpoints.py
    tests/test_environment_variables.py
    tests/test_gpu.py
    tests/test_kubernetes.py
    --deselect=tests/test_kubernetes.py::test_story
    tests/test_sbatch_files.py
    tests/test_check_copy.py::test_a_script_as_it_is_passes
    'tests/test_check_copy.py::test_a_wrong_edit_is_noticed[fashionmnist_ddp-no stop]'
    'tests/test_check_copy.py::test_a_wrong_edit_is_noticed[fashionmnist_ddp-model.module]'
    'tests/test_check_copy.py::test_a_wrong_edit_is_noticed[fashionmnist_ddp-a counter]'
    'tests/test_check_copy.py::test_a_wrong_edit_is_noticed[fashionmnist_ddp-a random evaluation]'
    "tests/test_check_copy.py::test_a_wrong_edit_is_noticed[cifar10_ddp-numpy's split]"
    tests/test_own_data.py::test_the_first_weights_do_not_depend_on_what_load_data_draws
    tests/test_own_data.py::test_gradients_that_are_not_exchanged_are_an_error
    tests/test_loader.py::test_by_default_a_process_has_a_loader_process_for_each_of_its_cores
    tests/test_containers.py::test_one_official_image_is_imported_and_is_what_a_job_starts
    tests/test_own_images.py::test_a_large_photograph_is_decoded_at_a_size_that_is_enough
    'tests/test_stop_and_resume.py::test_a_signal_to_one_process_stops_all[synthetic_ddp-SIGTERM]'
    tests/test_stop_and_resume.py::test_all_ranks_use_the_flags_of_rank_0
)
for argument in "$@"; do
    case $argument in
        --all | -k* | *.py | *.py::*) quick=() ;;
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
exec "$VENV/bin/python" -m pytest -rfE ${quick[@]+"${quick[@]}"} "$@"
