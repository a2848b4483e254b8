"""The sbatch files and the two-terminal scripts, on a real Slurm of ten nodes (slurm_lab.py).

A story is a function that submits a job, disturbs it, and returns its id. All stories run side by
side; the tests look at what they left behind. The checkpoint of a job is compared bit for bit with
that of the same training outside Slurm. Some stories are such a training, and return its
checkpoint.

Jobs that are disturbed run a copy of cpu_ddp that sleeps in each step, so that there is time to do
it.
"""

import difflib
import os
import random
import re
import shlex
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest
from checkpoints import assert_equal, load_checkpoint
from processes import run
from scripts import ROOT, SCRIPTS
from slurm_lab import Lab, running, why_not

FILES = (
    "cifar10",
    "cifar10-srun",
    "cpu",
    "cpu-container",
    "fashionmnist",
    "mnist",
    "synthetic",
)
TWO_CORES = ("cpu", "cpu-container", "synthetic")  # requested by the file
LINEAR = ("--epochs", 4, "--samples", 256)
IMAGES = ("--epochs", 1, "--fake-data", 32, "--batch-size", 8)
# 160 steps of 2 processes, a log line each, and no checkpoint but when the run is stopped.
LONG = ("--epochs", 40, "--samples", 256, "--save-every", 1000, "--log-every", 0)

# What a process of a job sees. One write a process, since they share the output.
PROBE = """
import os, sys
cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
threads = os.environ["OMP_NUM_THREADS"]
gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "none")
text = f"a process with cores {cores} threads {threads} GPUs {gpus} of {sys.prefix}\\n"
os.write(1, text.encode())
"""


# --- the files ---
def test_every_file_is_tested():
    names = sorted(path.stem for path in (ROOT / "slurm").glob("*.sbatch"))
    assert names == sorted(FILES), "slurm/*.sbatch and FILES of this test name other files"


def twin(name):
    """Return the lines of an sbatch file that it shares with all others."""
    text = (ROOT / f"slurm/{name}.sbatch").read_text()
    text = text.replace(f"{name}.sbatch", "FILE.sbatch")
    options, set_up, launch, requeue = text.split("\n\n")
    lines = []
    for line in options.splitlines():
        own = "--job-name=" in line or "--cpus-per-task=" in line
        if not own and line.startswith(("#SBATCH", "##SBATCH", "set ")):
            lines.append(line)
    lines += set_up.splitlines()
    lines += re.findall(r"^srun \S+ \S+", launch, re.MULTILINE)
    lines += requeue.splitlines()
    return lines


@pytest.mark.parametrize("name", FILES)
def test_files_differ_only_in_name_script_and_launch(name):
    lines, others = twin(name), twin("cifar10")
    difference = "\n".join(difflib.unified_diff(others, lines, "cifar10.sbatch", f"{name}.sbatch"))
    assert lines == others, f"copy the change to all sbatch files:\n{difference}"


@pytest.mark.parametrize("name", FILES)
def test_requests_cores_or_shows_how(name):
    text = (ROOT / f"slurm/{name}.sbatch").read_text()
    requests = re.findall(r"^(#+SBATCH.*--cpus-per-task=\d+)", text, re.MULTILINE)
    if name in TWO_CORES:
        expected = ["#SBATCH --cpus-per-task=2"]
    else:
        expected = ["##SBATCH --gpus-per-node=4 --cpus-per-task=32"]
    assert requests == expected, f"{name}.sbatch requests {requests}, not {expected}"


@pytest.mark.parametrize("name", FILES)
def test_length(name):
    lines = (ROOT / f"slurm/{name}.sbatch").read_text().count("\n")
    assert lines <= 55, f"{name}.sbatch has {lines} lines; 55 are allowed"


# --- the lab ---
@pytest.fixture(scope="module")
def lab():
    """A cluster whose nodes share this repository and its environment. No network, no data."""
    if reason := why_not():
        pytest.skip(reason)
    with running(Lab, 10) as lab:
        for name in (*SCRIPTS, "slurm"):
            shutil.copytree(ROOT / name, lab.folder / name)
        (lab.folder / "probe.py").write_text(PROBE)
        (lab.folder / ".venv").symlink_to(sys.prefix)
        # .venv comes first: what is in .conda here fails.
        for name in ("torchrun", "python"):
            write_program(lab.folder / ".conda/bin" / name, "exit 9")
        yield lab


STORIES = {}


def story(function):
    """Make a story a fixture: what it returned, when it has ended."""
    name = function.__name__
    STORIES[name] = function

    @pytest.fixture(scope="module", name=name)
    def wait_for_its_end(stories):
        return stories[name].result(timeout=1800)

    return wait_for_its_end


@pytest.fixture(scope="module")
def stories(lab, request):
    """The stories (futures) that the chosen tests name, side by side, in the order of this file."""
    named = set()
    for item in request.session.items:
        named.update(item.fixturenames)
    with ThreadPoolExecutor(7) as pool:
        started = {}
        for name, function in STORIES.items():
            if name in named:
                started[name] = pool.submit(function, lab)
        yield started


# --- what stories use ---
def submit(lab, file, *args, options=(), nodes="c1,c2", cwd=None, **variables):
    """sbatch OPTIONS FILE ARGS, on some of the nodes; return the job's id.

    file is the name of a file in slurm/, or a path.
    """
    if file in FILES:
        file = f"slurm/{file}.sbatch"
    others = sorted(set(lab.nodes) - set(nodes.split(",")))
    exclude = f"--exclude={','.join(others)}"
    return lab.sbatch(exclude, *options, file, *args, env=variables, cwd=cwd)


def train_outside(lab, script, flags, nproc, name):
    """Train without Slurm, and return the path of the checkpoint."""
    path = lab.root / f"{name}.pt"
    result = run(lab.folder / script / "train.py", *flags, "--checkpoint", path, launcher="srun",
                 nproc=nproc, timeout=900, env={"OMP_NUM_THREADS": 1})
    assert result.status == 0, f"the training outside Slurm failed:\n{result.text}"
    return path


def changed(lab, name, old, new, script="cpu_ddp"):
    """Write a copy of a script with a change, and return its path, for SCRIPT=."""
    text = (lab.folder / script / "train.py").read_text()
    assert text.count(old) == 1, f"{script}/train.py has {text.count(old)} times {old!r}, not once"
    path = lab.folder / f"changed_for_{name}.py"
    path.write_text(text.replace(old, new))
    return path


def slow(lab, name, lives="1", then="", script="cpu_ddp"):
    """A copy of a script whose steps take a second, until the job was requeued `lives` times."""
    step = f"""\
            step += 1
            if int(os.environ.get("SLURM_RESTART_COUNT") or 0) < {lives}:
                time.sleep(1)
{then}"""
    return changed(lab, name, "            step += 1\n", step, script)


def wait_for_steps(lab, job, life=0, steps=1):
    """Wait until the job has logged this many steps since it was requeued for the life-th time."""
    def logged():
        lives = lab.output(job).split(" | steps ")[1:]
        return len(lives) == life + 1 and lives[life].count("  step ") >= steps

    lab.wait_for(job, f"{steps} steps were logged after {life} restarts", logged)


def wait_for_restart(lab, job, number):
    lab.wait_for(job, f"requeue {number}", lambda: lab.restarts(job) == number)


def preempt(lab, node, job):
    """Submit a job of a higher partition that requires the whole node."""
    before = lab.restarts(job)
    lab.sbatch("--partition=high", f"--nodelist={node}", "--exclusive", "--output=/dev/null",
               "--wrap=true")
    wait_for_restart(lab, job, before + 1)


def write_program(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


def path_with(lab, name, text):
    """Write a program, and return a PATH on which it comes first."""
    folder = lab.folder / f"tools of {name}"
    write_program(folder / name, text)
    return f"{folder}:{os.environ['PATH']}"


# --- what tests use ---
def assert_same_weights(lab, job, reference, folder="."):
    """The job's checkpoint is that of the training outside Slurm, bit for bit."""
    path = lab.folder / folder / f"{lab.show(job, 'JobName')}-{lab.show(job, 'JobId')}.pt"
    assert path.exists(), f"job {job} left no checkpoint {path.name}:\n{lab.output(job)}"
    try:
        assert_equal(path, reference)
    except AssertionError as error:
        raise AssertionError(
            f"job {job} ended with other weights or another state than the same training "
            f"outside Slurm: {error}\n{lab.output(job)}") from None


def assert_restarts(lab, job, number):
    restarts = lab.restarts(job)
    assert restarts == number, (
        f"job {job} was requeued {restarts} times, not {number}:\n{lab.output(job)}")


def assert_each_life_made_progress(lab, job):
    begins = [int(step) for step in re.findall(r" \| steps (\d+) to", lab.output(job))]
    assert len(begins) == lab.restarts(job) + 1, (
        f"job {job} was requeued {lab.restarts(job)} times, and trained from the steps {begins}:"
        f"\n{lab.output(job)}")
    assert begins == sorted(set(begins)), (
        f"job {job} did not resume where it was: it trained from the steps {begins}:"
        f"\n{lab.output(job)}")


class Process(NamedTuple):
    """What a process of a job that ran the probe has printed."""

    cores: str
    threads: int
    gpus: str


def processes(lab, job):
    """Wait for a job that runs the probe, and return its processes."""
    lab.wait(job, "COMPLETED")
    found = []
    pattern = r"a process with cores (\S+) threads (\d+) GPUs (\S+)"
    for cores, threads, gpus in re.findall(pattern, lab.output(job)):
        found.append(Process(cores, int(threads), gpus))
    return found


# --- jobs that come back: the longest stories first ---
@story
def lost_nodes(lab):
    """First the node of the batch script, then, after the job was requeued, another one."""
    job = submit(lab, "cifar10", *LONG, "--save-every", 1, options=["--nodes=2"],
                 nodes="c5,c6,c7,c8", SCRIPT=slow(lab, "lost_nodes", lives="2"))
    wait_for_steps(lab, job, steps=6)
    batch_host = lab.node(lab.show(job, "BatchHost"))
    batch_host.cut()
    batch_host.kill()
    wait_for_steps(lab, job, life=1, steps=6)
    names = lab.sh(f"scontrol show hostnames {lab.show(job, 'NodeList')}").split()
    names.remove(lab.show(job, "BatchHost"))
    lab.node(names[0]).cut()
    lab.wait(job, "COMPLETED")
    return job


@story
def long_run(lab):
    return train_outside(lab, "cpu_ddp", LONG, 2, "long_run")


def test_job_whose_nodes_are_lost_resumes_on_others(lab, lost_nodes):
    assert_restarts(lab, lost_nodes, 2)
    assert_each_life_made_progress(lab, lost_nodes)


def test_job_whose_nodes_were_lost_has_the_same_weights(lab, lost_nodes, long_run):
    assert_same_weights(lab, lost_nodes, long_run)


@story
def time_limit(lab):
    """The run stops 35 to 75 s after the signal: torchrun's own limit is 30.

    A handler in this copy takes 35 s.
    """
    then = """\
            if step == 2:
                handler = signal.getsignal(signal.SIGTERM)

                def slow_handler(*args):
                    handler(*args)
                    time.sleep(35)

                signal.signal(signal.SIGTERM, slow_handler)
"""
    flags = LONG[:LONG.index("--log-every")]  # log lines, and checks for signals, are 5 s apart
    job = submit(lab, "cpu", *flags, SCRIPT=slow(lab, "time_limit", then=then))
    wait_for_steps(lab, job)
    lab.sh(f"scontrol update job={job} EndTime=now+3minutes")
    wait_for_restart(lab, job, 1)
    lab.sh(f"scontrol update job={job} TimeLimit=30")
    lab.wait(job, "COMPLETED")
    return job


def test_job_at_its_time_limit_is_requeued_and_resumes(lab, time_limit):
    assert_restarts(lab, time_limit, 1)
    assert_each_life_made_progress(lab, time_limit)


def test_job_that_reached_its_time_limit_has_the_same_weights(lab, time_limit, long_run):
    assert_same_weights(lab, time_limit, long_run)


@story
def preempted(lab):
    """Preempted with a GraceTime, and without one, then requeued by hand."""
    job = submit(lab, "cifar10", *LONG, options=["--nodes=2", "--partition=low"], nodes="c3,c4",
                 SCRIPT=slow(lab, "preempted", lives="3"))
    lab.sh("scontrol update partition=low GraceTime=60")
    wait_for_steps(lab, job)
    preempt(lab, "c3", job)
    lab.sh("scontrol update partition=low GraceTime=0")
    wait_for_steps(lab, job, life=1)
    preempt(lab, "c3", job)
    wait_for_steps(lab, job, life=2)
    lab.sh(f"scontrol requeue {job}")
    lab.wait(job, "COMPLETED")
    return job


def test_preempted_job_is_requeued_and_resumes(lab, preempted):
    assert_restarts(lab, preempted, 3)
    assert_each_life_made_progress(lab, preempted)


def test_preempted_job_has_the_same_weights(lab, preempted, long_run):
    assert_same_weights(lab, preempted, long_run)


@story
def array(lab):
    """Two tasks. Task 1 is stopped when task 0 has completed, and its job id is the array's."""
    array = submit(lab, "cifar10", *LONG, options=["--nodes=2", "--array=0-1"],
                   SCRIPT=slow(lab, "array", lives='int(os.environ["SLURM_ARRAY_TASK_ID"])'))
    wait_for_steps(lab, f"{array}_1")
    lab.wait(f"{array}_0", "COMPLETED")
    lab.sh(f"scancel --signal=TERM {array}_1")
    wait_for_restart(lab, f"{array}_1", 1)
    lab.wait(f"{array}_1", "COMPLETED")
    return array


def test_stopped_task_of_an_array_resumes(lab, array):
    assert_restarts(lab, f"{array}_1", 1)
    assert_each_life_made_progress(lab, f"{array}_1")


def test_completed_task_of_an_array_is_not_started_again(lab, array):
    assert_restarts(lab, f"{array}_0", 0)


def test_stopped_task_of_an_array_has_the_same_weights(lab, array, long_run):
    assert_same_weights(lab, f"{array}_1", long_run)


@story
def preempted_before_training(lab):
    """Preempted while it imports, with a format of times that hides the year."""
    pause = """\
print("importing", flush=True)
if "SLURM_RESTART_COUNT" not in os.environ:
    time.sleep(60)
import torch
"""
    script = changed(lab, "preempted_before_training", "import torch\n", pause)
    job = submit(lab, "cifar10-srun", *LONG, nodes="c9", SLURM_TIME_FORMAT="%a %T", SCRIPT=script)
    lab.wait_for(job, "it imported", lambda: "importing" in lab.output(job))
    preempt(lab, "c9", job)
    lab.wait(job, "COMPLETED")
    return job


@story
def long_run_of_one(lab):
    return train_outside(lab, "cpu_ddp", LONG, 1, "long_run_of_one")


def test_job_preempted_before_training_is_requeued(lab, preempted_before_training, long_run_of_one):
    assert_restarts(lab, preempted_before_training, 1)
    assert_same_weights(lab, preempted_before_training, long_run_of_one)


@story
def image_folder(lab):
    """A folder of images, read by processes of a DataLoader, and preempted once."""
    write_images(lab.folder / "images")
    script = slow(lab, "image_folder", script="cifar10_ddp")
    flags = (*image_flags(lab.folder / "images"), "--workers", 2)
    job = submit(lab, "cifar10", *flags, nodes="c10", options=["--cpus-per-task=2"], SCRIPT=script)
    wait_for_steps(lab, job, steps=3)
    preempt(lab, "c10", job)
    lab.wait(job, "COMPLETED")
    return job


@story
def image_folder_run(lab):
    """It loads its images without other processes."""
    write_images(lab.root / "images")
    flags = (*image_flags(lab.root / "images"), "--workers", 0)
    return train_outside(lab, "cifar10_ddp", flags, 2, "image_folder_run")


def image_flags(folder):
    return ("--image-folder", folder, "--image-size", 32, "--batch-size", 4, "--epochs", 4,
            "--save-every", 1000, "--log-every", 0)


def write_images(folder):
    """Write 48 images of two classes for training, and 16 for the test."""
    noise = random.Random(0)
    for part, number in (("train", 24), ("val", 8)):
        for label in ("cat", "dog"):
            (folder / part / label).mkdir(parents=True)
            for index in range(number):
                pixels = noise.randbytes(40 * 40 * 3)
                (folder / part / label / f"{index}.ppm").write_bytes(b"P6 40 40 255\n" + pixels)


def test_preempted_job_on_images_resumes(lab, image_folder):
    assert_restarts(lab, image_folder, 1)
    assert_each_life_made_progress(lab, image_folder)


def test_preempted_job_on_images_has_the_same_weights(lab, image_folder, image_folder_run):
    assert_same_weights(lab, image_folder, image_folder_run)


# --- jobs that end for good ---
@story
def bug(lab):
    """A step fails whenever it is reached. The job looks as if a task of an array submitted it."""
    step = "            step += 1\n            assert step < 70\n"
    script = changed(lab, "bug", "            step += 1\n", step)
    job = submit(lab, "cifar10-srun", *LONG, "--save-every", 1, SCRIPT=script,
                 SLURM_ARRAY_JOB_ID=98765, SLURM_ARRAY_TASK_ID=4)
    wait_for_restart(lab, job, 1)
    lab.wait(job, "FAILED")
    return job


def test_job_with_a_bug_is_requeued_only_while_it_makes_progress(lab, bug):
    assert_restarts(lab, bug, 1)


@story
def cancelled(lab):
    job = submit(lab, "cifar10-srun", *LONG, SCRIPT=slow(lab, "cancelled"))
    wait_for_steps(lab, job)
    lab.sh(f"scancel {job}")
    lab.wait(job, "CANCELLED")
    time.sleep(10)  # a requeued job waits for 7 s
    return job


def test_cancelled_job_is_not_started_again(lab, cancelled):
    state = lab.state(cancelled)
    assert state == "CANCELLED", f"a cancelled job is {state}:\n{lab.report(cancelled)}"
    assert_restarts(lab, cancelled, 0)


def test_cancelled_job_has_saved(lab, cancelled):
    path = lab.folder / f"cifar10-srun-{cancelled}.pt"
    assert path.exists(), f"scancel: no checkpoint was saved:\n{lab.output(cancelled)}"
    step = load_checkpoint(path)["step"]
    assert step < 320, f"the cancelled job had completed: its checkpoint is of step {step}"


# What is wrong, and what the error line names.
MISTAKES = {
    "number of epochs": "--epochs",
    "no data": "--fake-data",
    "--checkpoint": "CHECKPOINT=",
    "NPROC=abc": "NPROC",
    "fashionmnist on two nodes": "one node",
    "mnist on two nodes": "one node",
}


@pytest.fixture(scope="module")
def mistakes(lab):
    """The ids of the jobs of MISTAKES. A test waits for its own."""
    two_nodes = ["--nodes=2"]
    return {
        "number of epochs": submit(lab, "cifar10-srun", "--epochs", 0),
        "no data": submit(lab, "cifar10"),
        "--checkpoint": submit(lab, "cpu", "--check", "my.pt"),
        "NPROC=abc": submit(lab, "cpu", options=["--export=ALL,NPROC=abc"]),
        "fashionmnist on two nodes": submit(lab, "fashionmnist", options=two_nodes),
        "mnist on two nodes": submit(lab, "mnist", options=two_nodes),
    }


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_ends_the_job_in_one_error_line(lab, mistakes, mistake):
    lab.wait(mistakes[mistake], "FAILED")
    output = lab.output(mistakes[mistake])
    errors = re.findall("^(?:train.py: )?error: .*", output, re.MULTILINE)
    assert len(errors) == 1, f"{mistake}: {len(errors)} error lines, not one:\n{output}"
    named = MISTAKES[mistake]
    assert named in errors[0], f"{mistake}: the error line does not name {named}:\n{output}"


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_is_never_requeued(lab, mistakes, mistake):
    lab.wait(mistakes[mistake], "FAILED")
    assert_restarts(lab, mistakes[mistake], 0)


# --- each file, undisturbed, with what is particular to it ---
@story
def cpu(lab):
    """Two nodes; nothing of the login environment."""
    job = submit(lab, "cpu", *LINEAR, options=["--nodes=2", "--export=NONE"])
    lab.wait(job, "COMPLETED")
    return job


@story
def linear_run_of_four(lab):
    return train_outside(lab, "cpu_ddp", LINEAR, 4, "linear_run_of_four")


def test_cpu(lab, cpu, linear_run_of_four):
    """Two cores on each of two nodes are four processes."""
    assert_same_weights(lab, cpu, linear_run_of_four)


@story
def cpu_container(lab):
    """Without pyxis: this srun writes the container's options down, and drops them."""
    srun = path_with(lab, "srun", f"""\
for word; do
    if [[ $word == --container-* ]]; then
        echo "$word" >>options
    else
        rest+=("$word")
    fi
done
PATH={sys.prefix}/bin:$PATH exec {shutil.which("srun")} "${{rest[@]}}" """)
    job = submit(lab, "cpu-container", *LINEAR, options=["--gpus-per-node=2"],
                 IMAGE="ddp.sqsh", PATH=srun)
    lab.wait(job, "COMPLETED")
    return job


@story
def linear_run(lab):
    return train_outside(lab, "cpu_ddp", LINEAR, 2, "linear_run")


def test_cpu_container(lab, cpu_container, linear_run):
    assert_same_weights(lab, cpu_container, linear_run)


def test_container_has_the_image_and_the_current_folder(lab, cpu_container):
    options = (lab.folder / "options").read_text().splitlines()
    assert options == [
        f"--container-image={lab.folder}/ddp.sqsh",
        f"--container-mounts={lab.folder}:{lab.folder}",
        f"--container-workdir={lab.folder}",
    ], f"srun got other options of a container: {options}\n{lab.output(cpu_container)}"


@story
def mnist(lab):
    job = submit(lab, "mnist", *IMAGES, options=["--gpus-per-node=2"])
    lab.wait(job, "COMPLETED")
    return job


@story
def mnist_run(lab):
    return train_outside(lab, "mnist_dp", IMAGES, 1, "mnist_run")


def test_mnist(lab, mnist, mnist_run):
    assert_same_weights(lab, mnist, mnist_run)


@story
def cifar10(lab):
    """The sbatch file beside a script, in a folder of the user's, with an active environment."""
    (lab.folder / "mine").mkdir()
    shutil.copy(lab.folder / "cifar10_ddp/train.py", lab.folder / "mine/my.py")
    file = shutil.copy(lab.folder / "slurm/cifar10.sbatch", lab.folder / "mine")
    job = submit(lab, file, *IMAGES, options=["--nodes=2", "--gpus-per-node=1"],
                 cwd=lab.folder / "mine", SCRIPT="my.py",
                 PATH=f"{sys.prefix}/bin:{os.environ['PATH']}")
    lab.wait(job, "COMPLETED")
    return job


@story
def cifar10_run(lab):
    return train_outside(lab, "cifar10_ddp", IMAGES, 2, "cifar10_run")


def test_cifar10(lab, cifar10, cifar10_run):
    assert_same_weights(lab, cifar10, cifar10_run, folder="mine")


@story
def cifar10_srun(lab):
    job = submit(lab, "cifar10-srun", *IMAGES, options=["--gpus-per-node=2"])
    lab.wait(job, "COMPLETED")
    return job


def test_cifar10_srun(lab, cifar10_srun, cifar10_run):
    assert_same_weights(lab, cifar10_srun, cifar10_run)


@story
def fashionmnist(lab):
    """Submitted in slurm/, with an nvidia-smi that writes its arguments down."""
    nvidia_smi = path_with(lab, "nvidia-smi", """\
if [[ $# -gt 0 ]]; then
    echo "$*"
    exec sleep 1234
fi""")
    job = submit(lab, "./fashionmnist.sbatch", *IMAGES, cwd=lab.folder / "slurm",
                 NPROC=2, PATH=nvidia_smi)
    lab.wait(job, "COMPLETED")
    return job


@story
def fashionmnist_run(lab):
    return train_outside(lab, "fashionmnist_ddp", IMAGES, 2, "fashionmnist_run")


def test_fashionmnist(lab, fashionmnist, fashionmnist_run):
    assert_same_weights(lab, fashionmnist, fashionmnist_run, folder="slurm")


def test_fashionmnist_logs_the_use_of_gpus(lab, fashionmnist):
    log = (lab.folder / f"slurm/fashionmnist-{fashionmnist}-gpu.log").read_text()
    assert log == "dmon -s pucm -d 5\n", f"the log of the GPUs' use has other content:\n{log}"


def test_log_of_gpus_ends_with_the_job(lab, fashionmnist):
    for name in ("c1", "c2"):
        left = lab.node(name).exec("pgrep -fx 'sleep 1234'; true")
        assert not left, f"nvidia-smi still runs on {name} after the job: pid {left}"


@story
def synthetic(lab):
    job = submit(lab, "synthetic", *LINEAR, options=["--gpus-per-node=2"])
    lab.wait(job, "COMPLETED")
    return job


@story
def synthetic_run(lab):
    return train_outside(lab, "synthetic_ddp", LINEAR, 2, "synthetic_run")


def test_synthetic(lab, synthetic, synthetic_run):
    assert_same_weights(lab, synthetic, synthetic_run)


# --- requests for processes, GPUs and environments: jobs that run the probe ---
@pytest.fixture(scope="module")
def probes(lab):
    """The ids of jobs that run the probe, by what they request. A test waits for its own."""
    conda = lab.folder / "project with .conda"
    conda.mkdir()
    (conda / ".conda").symlink_to(sys.prefix)
    in_conda = {"cwd": conda, "SCRIPT": "../probe.py"}
    two_nodes = ("--nodes=2", "--cpus-per-task=4")
    return {
        "nothing": probe(lab, "cifar10"),
        "nothing, cpu": probe(lab, "cpu"),
        "one GPU": probe(lab, "cifar10", "--gpus-per-node=1"),
        "--gres": probe(lab, "cifar10", *two_nodes, "--gres=gpu:2"),
        "--gres, srun": probe(lab, "cifar10-srun", *two_nodes, "--gres=gpu:2"),
        "--gpus": probe(lab, "cifar10", *two_nodes, "--gpus=4"),
        ".conda": submit(lab, lab.folder / "slurm/cifar10.sbatch", **in_conda),
        ".conda, srun": submit(lab, lab.folder / "slurm/cifar10-srun.sbatch", **in_conda),
    }


def probe(lab, file, *options):
    return submit(lab, file, options=options, SCRIPT="probe.py")


def assert_processes(lab, job, number, threads, gpus):
    """The job had this many processes, each with these threads and GPUs."""
    found = [(process.threads, process.gpus) for process in processes(lab, job)]
    assert found == [(threads, gpus)] * number, (
        f"not {number} processes with {threads} threads and GPUs {gpus} each:\n{lab.output(job)}")


def test_without_options_one_process(lab, probes):
    assert_processes(lab, probes["nothing"], 1, threads=1, gpus="none")


def test_job_with_one_core_and_no_gpu_says_how_to_request_more(lab, probes):
    job = probes["nothing"]
    lab.wait(job, "COMPLETED")
    output = lab.output(job)
    first = output.split("\n")[0]
    assert "sbatch --gpus-per-node=4 --cpus-per-task=32 slurm/cifar10.sbatch" in first, (
        f"the first line of a job with one core does not show the command for more:\n{output}")


@pytest.mark.parametrize("name", ["one GPU", "nothing, cpu"])
def test_job_with_a_gpu_or_two_cores_gives_no_advice(lab, probes, name):
    lab.wait(probes[name], "COMPLETED")
    output = lab.output(probes[name])
    assert "To request more" not in output, f"{name}: advice that is not needed:\n{output}"


def test_cpu_without_options_has_two_processes(lab, probes):
    assert_processes(lab, probes["nothing, cpu"], 2, threads=1, gpus="none")


def test_gres_is_one_process_per_gpu(lab, probes):
    assert_processes(lab, probes["--gres"], 4, threads=2, gpus="0,1")


def test_gres_without_torchrun_is_one_process_per_gpu(lab, probes):
    assert_processes(lab, probes["--gres, srun"], 4, threads=2, gpus="0,1")


def test_gpus_of_all_nodes_are_one_process_per_gpu(lab, probes):
    assert_processes(lab, probes["--gpus"], 4, threads=2, gpus="0,1")


def test_conda_environment_is_used_where_there_is_no_venv(lab, probes):
    assert_processes(lab, probes[".conda"], 1, threads=1, gpus="none")


def test_conda_environment_is_used_without_torchrun(lab, probes):
    assert_processes(lab, probes[".conda, srun"], 1, threads=1, gpus="none")
    output = lab.output(probes[".conda, srun"])
    assert ".conda\n" in output, f"srun started another Python than that of .conda:\n{output}"


# --- two terminals ---
@pytest.fixture(scope="module")
def two_terminals(lab):
    """The first prints a command; run on another node, it joins. NPROC is for both."""
    allocation = "--nodelist=c1,c2 --ntasks-per-node=1 --cpus-per-task=2"
    granted = lab.sh(f"salloc --no-shell {allocation} 2>&1", timeout=600)
    job = re.search(r"allocation (\d+)", granted)[1]
    terminal = f"srun --jobid={job} --overlap --nodes=1 --ntasks=1 --nodelist="
    flags = shlex.join(map(str, [*LINEAR, "--checkpoint", "two.pt"]))
    lab.sh(f"cd slurm; NPROC=1 {terminal}c1 bash ddp-master-node.sh cpu_ddp/train.py {flags} "
           ">../master.log 2>&1 &")
    log = lab.folder / "master.log"
    deadline = time.monotonic() + 300
    command = None
    while command is None:
        text = log.read_text() if log.exists() else ""
        assert time.monotonic() < deadline, f"ddp-master-node.sh printed no command:\n{text}"
        time.sleep(0.1)
        command = re.search(r"^    (cd .*)$", text, re.MULTILINE)
    lab.sh(f"{terminal}c2 bash -c {shlex.quote(command[1])}", timeout=600)
    lab.sh(f"while pgrep -x srun; do sleep 1; done; scancel {job}", timeout=600)
    return log.read_text()


def test_two_terminals_train_together(lab, two_terminals, linear_run):
    try:
        assert_equal(lab.folder / "two.pt", linear_run)
    except AssertionError as error:
        raise AssertionError(f"two terminals ended with other weights than two processes of one "
                             f"machine: {error}\n{two_terminals}") from None


# --- cores ---
class Bound(Lab):
    """Slurm binds tasks to cores here.

    In the other tests, several nodes share the two cores of a machine.
    """

    cores = {"c1": 2, "c2": 1}
    settings = Lab.settings | {"TaskPlugin": "task/affinity"}


@pytest.fixture(scope="module")
def bound_lab():
    if reason := why_not():
        pytest.skip(reason)
    with running(Bound, 2) as lab:
        (lab.folder / ".venv").symlink_to(sys.prefix)
        (lab.folder / "probe.py").write_text(PROBE)
        yield lab


@pytest.fixture(scope="module")
def bound(bound_lab):
    """The ids of jobs that run the probe, by what they request. A test waits for its own."""
    two_cores = ["--cpus-per-task=2"]
    two_tasks = ["--ntasks-per-node=2", "--cpus-per-task=1"]  # as the tutorials write it
    return {
        "torchrun": bound_probe(bound_lab, "cpu"),
        "srun": bound_probe(bound_lab, "cifar10-srun", *two_cores),
        "mnist": bound_probe(bound_lab, "mnist", *two_cores),
        "fashionmnist": bound_probe(bound_lab, "fashionmnist", *two_cores),
        "GPUs per task": bound_probe(bound_lab, "cifar10-srun", *two_cores, "--gpus-per-task=2"),
        "exclusive": bound_probe(bound_lab, "cifar10", "--exclusive", "--nodes=2"),
        "tasks, torchrun": bound_probe(bound_lab, "cifar10", *two_tasks),
        "tasks, srun": bound_probe(bound_lab, "cifar10-srun", *two_tasks, "--gres=gpu:2"),
    }


def bound_probe(lab, file, *options):
    return lab.sbatch(*options, ROOT / f"slurm/{file}.sbatch", env={"SCRIPT": "probe.py"})


def assert_share_two_cores(lab, job, number):
    """Each of the job's processes may use both cores of the node."""
    cores = [process.cores for process in processes(lab, job)]
    assert cores == ["0,1"] * number, (
        f"not {number} processes that may use both cores:\n{lab.output(job)}")


def assert_have_a_core_each(lab, job):
    """Two processes have a core of their own."""
    cores = sorted(process.cores for process in processes(lab, job))
    assert cores == ["0", "1"], f"not two processes with a core of their own:\n{lab.output(job)}"


def test_processes_of_torchrun_may_use_all_cores(bound_lab, bound):
    assert_share_two_cores(bound_lab, bound["torchrun"], 2)


def test_processes_of_srun_have_their_own_cores(bound_lab, bound):
    assert_have_a_core_each(bound_lab, bound["srun"])


def test_mnist_may_use_all_cores(bound_lab, bound):
    assert_share_two_cores(bound_lab, bound["mnist"], 1)


def test_fashionmnist_may_use_all_cores(bound_lab, bound):
    assert_share_two_cores(bound_lab, bound["fashionmnist"], 1)


def test_processes_of_srun_see_all_gpus_of_their_node(bound_lab, bound):
    assert_have_a_core_each(bound_lab, bound["GPUs per task"])
    assert_processes(bound_lab, bound["GPUs per task"], 2, threads=1, gpus="0,1")


def test_exclusive_nodes_give_all_their_gpus(bound_lab, bound):
    """One node has two cores, the other one: each process has one thread."""
    assert_processes(bound_lab, bound["exclusive"], 4, threads=1, gpus="0,1")


def test_tasks_of_torchrun_may_use_all_cores(bound_lab, bound):
    assert_share_two_cores(bound_lab, bound["tasks, torchrun"], 2)


def test_tasks_of_srun_have_their_own_cores(bound_lab, bound):
    assert_have_a_core_each(bound_lab, bound["tasks, srun"])


def test_tasks_of_srun_see_all_gpus_of_their_node(bound_lab, bound):
    assert_processes(bound_lab, bound["tasks, srun"], 2, threads=1, gpus="0,1")


@pytest.mark.parametrize("name", ["tasks, torchrun", "tasks, srun"])
def test_slurm_does_not_warn_of_tasks(bound_lab, bound, name):
    bound_lab.wait(bound[name], "COMPLETED")
    output = bound_lab.output(bound[name])
    assert "srun:" not in output, f"{name}: srun warns:\n{output}"
