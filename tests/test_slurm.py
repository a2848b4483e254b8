"""The sbatch files, srun and the two-terminal scripts, on a real Slurm of ten nodes (slurm_lab.py).

A story submits a job, disturbs it, and looks at what it left behind. All stories run side by side.
The final weights are compared bit for bit with those of the same training outside Slurm. Jobs that
are disturbed run a copy of a script that sleeps in each step, so that there is time to do it.
"""

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

RESUMED = ("cifar10", "cifar10-srun", "cpu", "cpu-container", "fashionmnist")
PLAIN = ("mnist", "synthetic")
LINEAR = ("--epochs", 4, "--samples", 256)
IMAGES = ("--epochs", 1, "--fake-data", 32, "--batch-size", 8)
# 160 steps of 2 processes, a log line each, and no checkpoint but when the run is stopped.
LONG = ("--epochs", 40, "--samples", 256, "--save-every", 1000, "--log-every", 0)

# What a process of a job sees. One write a process, since they share the output.
PROBE = """
import os
cores = len(os.sched_getaffinity(0))
gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "none")
threads = os.environ["OMP_NUM_THREADS"]
os.write(1, f"process: cores {cores} threads {threads} GPUs {gpus}\\n".encode())
"""


# --- the files ---
def sections(name):
    """Return the lines of an sbatch file: options, set-up, launch and, if any, requeueing."""
    text = (ROOT / f"slurm/{name}.sbatch").read_text()
    return [part.splitlines() for part in text.split("\n\n")]


@pytest.mark.parametrize("name", RESUMED)
def test_files_differ_only_in_name_script_and_launch(name):
    common = []
    for file in (name, "cifar10"):
        options, set_up, launch, requeue = sections(file)
        own = ("--job-name=", "--cpus-per-task=")
        options = [line for line in options if line.startswith(("#SBATCH", "##SBATCH", "set "))]
        options = [line for line in options if not any(word in line for word in own)]
        command = [line for line in launch if line.startswith("srun ")]
        common.append([*options, *set_up, command[0].split(" --ntasks")[0], *requeue])
    assert common[0] == common[1], f"{name}.sbatch and cifar10.sbatch: copy the change to all"
    lines = (ROOT / f"slurm/{name}.sbatch").read_text().count("\n")
    assert lines <= 55, f"{name}.sbatch has {lines} lines"


@pytest.mark.parametrize("name", PLAIN)
def test_set_up_of_plain_files_is_that_of_the_others(name):
    other = set(sections(name)[1]) - set(sections("cifar10")[1])
    assert other <= {"export OMP_NUM_THREADS=$cores"}, f"{name}.sbatch has other lines: {other}"


def test_terminals_choose_their_environment_as_jobs_do():
    worker = (ROOT / "slurm/ddp-worker-node.sh").read_text()
    choice = "\n".join(sections("cifar10")[1]).partition("# The active")[2].partition("cores=")[0]
    assert choice in worker, f"ddp-worker-node.sh has not the lines of cifar10.sbatch:\n{choice}"


# --- the lab ---
@pytest.fixture(scope="module")
def lab():
    """A cluster whose nodes share this repository and its environment. No network, no data."""
    if reason := why_not():
        pytest.skip(reason)
    with running(lambda folder: Lab(folder, 10)) as lab:
        for name in (*SCRIPTS, "slurm"):
            shutil.copytree(ROOT / name, lab.folder / name)
        (lab.folder / "probe.py").write_text(PROBE)
        (lab.folder / ".venv").symlink_to(sys.prefix)
        yield lab


def test_key_of_the_cluster_is_private(lab):
    mode = (lab.root / "my cluster/munge.key").stat().st_mode & 0o777
    assert mode == 0o600, f"munge.key has the permissions {mode:o}"


STORIES = {}


def story(function):
    STORIES[function.__name__] = function
    return function


@pytest.fixture(scope="module")
def stories(lab, request):
    """The stories (futures) of the chosen tests, side by side, and the training they refer to."""
    chosen = {item.name for item in request.session.items}
    started = {}
    with ThreadPoolExecutor(8) as pool:
        for name, function in STORIES.items():
            if f"test_story[{name}]" in chosen:
                started[name] = pool.submit(function, lab)
        lab.long_run = train_outside(lab)
        yield started


def submit(lab, file, *args, options=(), nodes="c1,c2", cwd=None, inside="", **variables):
    """sbatch OPTIONS FILE ARGS, on some of the nodes; return the job's id."""
    if file in RESUMED + PLAIN:
        file = f"slurm/{file}.sbatch"
    exclude = f"--exclude={','.join(sorted(set(lab.nodes) - set(nodes.split(','))))}"
    return lab.sbatch(exclude, *options, file, *args, env=variables, cwd=cwd, inside=inside)


def train_outside(lab):
    """Train without Slurm, and return the path of the checkpoint."""
    path = lab.root / "long_run.pt"
    result = run("cpu_ddp", *LONG, "--checkpoint", path, nproc=2, launcher="torchrun",
                 timeout=600, env={"OMP_NUM_THREADS": 1})
    assert result.status == 0, f"the training outside Slurm failed:\n{result.text}"
    return path


def changed(lab, name, old, new):
    """Write a copy of cpu_ddp with a change, and return its path, for SCRIPT=."""
    text = (lab.folder / "cpu_ddp/train.py").read_text()
    assert text.count(old) == 1, f"cpu_ddp/train.py has {text.count(old)} times {old!r}, not once"
    path = lab.folder / f"changed_for_{name}.py"
    path.write_text(text.replace(old, new))
    return path


def slow(lab, name, lives="1", seconds=0.5, then=""):
    """A copy of cpu_ddp whose steps take longer, until the job was requeued `lives` times."""
    step = f"""\
            step += 1
            if int(os.environ.get("SLURM_RESTART_COUNT") or 0) < {lives}:
                time.sleep({seconds})
{then}"""
    return changed(lab, name, "            step += 1\n", step)


def link(lab, name):
    """Make a link to another folder, as to a scratch disk, for CHECKPOINT=."""
    scratch = lab.folder / "scratch"
    scratch.mkdir(exist_ok=True)
    (lab.folder / name).symlink_to(scratch / name)
    return name


def wait_for_steps(lab, job, life=0, steps=1):
    """Wait until the job has logged this many steps since it was requeued for the life-th time."""
    def logged():
        lives = lab.output(job).split(" | steps ")[1:]
        return len(lives) == life + 1 and lives[life].count("  step ") >= steps

    lab.wait_for(job, f"at step {steps} after {life} restarts", logged)


def wait_for_restart(lab, job, number):
    lab.wait_for(job, f"requeued {number} times", lambda: lab.restarts(job) == number)


def preempt(lab, node, job):
    """Submit a job of a higher partition that requires the whole node."""
    before = lab.restarts(job)
    lab.sbatch("--partition=high", f"--nodelist={node}", "--exclusive", "--output=/dev/null",
               "--wrap=true")
    wait_for_restart(lab, job, before + 1)


def assert_resumed(lab, job, restarts, path):
    """The job completes, was requeued so often, resumed where it was, and has the same weights."""
    lab.wait(job, "COMPLETED")
    output = lab.output(job)
    number = lab.restarts(job)
    assert number == restarts, f"job {job} was requeued {number} times, not {restarts}:\n{output}"
    begins = [int(step) for step in re.findall(r" \| steps (\d+) to", output)]
    assert begins == sorted(set(begins)), f"job {job} trained from the steps {begins}:\n{output}"
    try:
        assert_equal(lab.folder / path, lab.long_run)
    except (AssertionError, OSError) as error:
        raise AssertionError(f"job {job} ended with another checkpoint than the same training "
                             f"outside Slurm: {error}\n{output}") from None


# --- jobs that come back: the longest stories first ---
@story
def lost_nodes(lab):
    """First the node of the batch script, then, after the job was requeued, another one."""
    job = submit(lab, "cifar10", *LONG, "--save-every", 0, options=["--nodes=2"],
                 nodes="c5,c6,c7,c8", SCRIPT=slow(lab, "lost_nodes", lives="2"))
    wait_for_steps(lab, job, steps=6)
    batch_host = lab.node(lab.show(job, "BatchHost"))
    batch_host.cut()
    batch_host.kill()
    wait_for_steps(lab, job, life=1, steps=6)
    names = lab.sh(f"scontrol show hostnames {lab.show(job, 'NodeList')}").split()
    names.remove(lab.show(job, "BatchHost"))
    lab.node(names[0]).cut()
    assert_resumed(lab, job, 2, f"cifar10-{job}.pt")


@story
def time_limit(lab):
    """The run stops 35 s after the signal or later: torchrun's own limit is 30."""
    then = """\
            if step == 2:
                handler = signal.getsignal(signal.SIGTERM)

                def slow_handler(*args):
                    handler(*args)
                    time.sleep(35)

                signal.signal(signal.SIGTERM, slow_handler)
"""
    job = submit(lab, "cpu", *LONG, SCRIPT=slow(lab, "time_limit", seconds=1, then=then),
                 CHECKPOINT=link(lab, "time_limit.pt"))
    wait_for_steps(lab, job)
    lab.sh(f"scontrol update job={job} EndTime=now+3minutes")
    wait_for_restart(lab, job, 1)
    lab.sh(f"scontrol update job={job} TimeLimit=30")
    assert_resumed(lab, job, 1, "scratch/time_limit.pt")


@story
def preempted(lab):
    """Preempted with a GraceTime, and without one, then requeued by hand."""
    job = submit(lab, "cifar10", *LONG, options=["--nodes=2", "--cpus-per-task=1",
                                                 "--partition=low"], nodes="c3,c4",
                 SCRIPT=slow(lab, "preempted", lives="3"), CHECKPOINT=link(lab, "preempted.pt"))
    lab.sh("scontrol update partition=low GraceTime=60")
    wait_for_steps(lab, job)
    preempt(lab, "c3", job)
    lab.sh("scontrol update partition=low GraceTime=0")
    wait_for_steps(lab, job, life=1)
    preempt(lab, "c3", job)
    wait_for_steps(lab, job, life=2)
    lab.sh(f"scontrol requeue {job}")
    assert_resumed(lab, job, 3, "scratch/preempted.pt")


@story
def array(lab):
    """Two tasks. Task 1 is stopped when task 0 has completed, and its job id is the array's."""
    array = submit(lab, "cifar10", *LONG, options=["--nodes=2", "--cpus-per-task=1", "--array=0-1"],
                   SCRIPT=slow(lab, "array", lives='int(os.environ["SLURM_ARRAY_TASK_ID"])'))
    wait_for_steps(lab, f"{array}_1")
    lab.wait(f"{array}_0", "COMPLETED")
    lab.sh(f"scancel --signal=TERM {array}_1")
    wait_for_restart(lab, f"{array}_1", 1)
    assert_resumed(lab, f"{array}_1", 1, f"cifar10-{lab.show(f'{array}_1', 'JobId')}.pt")
    assert_resumed(lab, f"{array}_0", 0, f"cifar10-{lab.show(f'{array}_0', 'JobId')}.pt")


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
    job = submit(lab, "cifar10-srun", *LONG, nodes="c10", options=["--cpus-per-task=1"],
                 NPROC=2, SLURM_TIME_FORMAT="%a %T", SCRIPT=script)
    lab.wait_for(job, "importing", lambda: "importing" in lab.output(job))
    preempt(lab, "c10", job)
    assert_resumed(lab, job, 1, f"cifar10-srun-{job}.pt")


# --- jobs that end for good ---
@story
def bug(lab):
    """A step fails whenever it is reached. The job looks as if a task of an array submitted it."""
    step = "            step += 1\n            assert step < 70\n"
    job = submit(lab, "cifar10-srun", *LONG, "--save-every", 0,
                 SCRIPT=changed(lab, "bug", "            step += 1\n", step),
                 SLURM_ARRAY_JOB_ID=98765, SLURM_ARRAY_TASK_ID=4)
    wait_for_restart(lab, job, 1)
    lab.wait(job, "FAILED")
    assert lab.restarts(job) == 1, f"requeued without a new checkpoint:\n{lab.output(job)}"


@story
def cancelled(lab):
    """It got SIGTERM before."""
    job = submit(lab, "cifar10-srun", *LONG, options=["--cpus-per-task=2"],
                 SCRIPT=slow(lab, "cancelled", lives="2"), CHECKPOINT=link(lab, "cancelled.pt"))
    wait_for_steps(lab, job)
    lab.sh(f"scancel --signal=TERM {job}")
    wait_for_steps(lab, job, life=1)
    lab.sh(f"scancel {job}")
    lab.wait(job, "CANCELLED")
    time.sleep(10)  # a requeued job waits for 7 s
    state = lab.show(job, "JobState")
    assert state == "CANCELLED", f"a cancelled job is {state}:\n{lab.report(job)}"
    output = lab.output(job)
    begin = int(re.findall(r" \| steps (\d+) to", output)[-1])
    step = load_checkpoint(lab.folder / "scratch/cancelled.pt")["step"]
    assert 0 < begin < step < 160, f"resumed at {begin}, checkpoint of step {step}:\n{output}"


@pytest.mark.parametrize("name", STORIES)
def test_story(stories, name):
    stories[name].result(timeout=900)


# --- jobs that nobody disturbs ---
def write_program(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


class Row(NamedTuple):
    """A job, and what it shows."""

    file: str
    shown: str  # a regular expression
    number: int = 1  # of lines that show it
    options: str = ""
    args: tuple = ()
    variables: dict = {"SCRIPT": "probe.py", "OMP_PROC_BIND": "true"}
    inside: str = ""  # where sbatch is typed
    state: str = "COMPLETED"
    cwd: str = "."
    nodes: str = "c1,c2,c3,c4"


def probe(cores, threads, gpus):
    return f"^process: cores {cores} threads {threads} GPUs {gpus}$"


TOOLS = ":/usr/local/bin:/usr/bin:/bin"
FAILED = {"variables": {}, "state": "FAILED"}
TRAINS = {"variables": {}}
ROWS = {
    # processes, cores and GPUs
    "one core": Row("cifar10", "^One core and no GPU|" + probe(1, 1, "none"), 2),
    "two cores": Row("cpu", "^One core and no GPU|" + probe(2, 1, "none"), 2),
    "gres": Row("cifar10", probe(2, 1, "0,1"), 4, "--nodes=2 -c2 --gres=gpu:2"),
    "gres, srun": Row("cifar10-srun", probe(1, 1, "0,1"), 4, "--nodes=2 -c2 --gres=gpu:2"),
    "gpus": Row("cifar10", probe(1, 1, "0,1"), 4, "--nodes=2 --gpus=4"),
    "GPUs per task": Row("cifar10-srun", probe(1, 1, "0,1"), 2, "-c2 --gpus-per-task=2"),
    "tasks": Row("cifar10", probe(2, 1, "none"), 2, "--ntasks-per-node=2 -c1"),
    "tasks, srun": Row("cifar10-srun", probe(1, 1, "0,1"), 2,
                       "--ntasks-per-node=2 -c1 --gres=gpu:2"),
    "uneven nodes": Row("cifar10", r"^process: cores . threads 1 GPUs 0,1$", 4,
                        "--exclusive --nodes=2", nodes="c9,c10"),
    "mnist, cores": Row("mnist", probe(2, 2, "none"), 1, "-c2"),
    "fashionmnist, cores": Row("fashionmnist", probe(2, 1, "none"), 1, "-c2"),
    "in srun": Row("cpu", probe(2, 1, "none"), 2, "-w c1",
                   inside="srun -c1 --gpus-per-node=2 --mem-per-cpu=500 -w c1"),
    "in salloc": Row("cpu", probe(2, 1, "none"), 2,
                     inside="salloc --mem-per-cpu=500 --gpus-per-node=1 --cpus-per-gpu=1"),
    "in salloc, srun": Row("cifar10-srun", probe(1, 1, "none"), 2, "-c2 --mem=700",
                           inside="salloc --mem-per-cpu=500 --gpus-per-node=1 -n2"),
    # each file, with what is particular to it
    "cpu": Row("cpu", "^world size 4", 1, "--nodes=2 --export=NONE", LINEAR, **TRAINS),
    "mnist": Row("mnist", "^epoch 1/1 .* test", 1, "--gpus-per-node=2", IMAGES, **TRAINS),
    "cifar10": Row("./cifar10.sbatch", "^saved step 2 in .*/mine/cifar10-", 1,
                   "--nodes=2 --gpus-per-node=1", IMAGES,
                   {"SCRIPT": "my.py", "VIRTUAL_ENV": sys.prefix}, cwd="mine"),
    "fashionmnist": Row("./fashionmnist.sbatch", "^saved step 2 in .*/slurm/fashionmnist-", 1, "",
                        IMAGES, {"NPROC": 2, "PATH": "LAB/smi" + TOOLS}, cwd="slurm"),
    "synthetic": Row("synthetic", "^world size 2", 1, "--gpus-per-node=2", LINEAR, **TRAINS),
    "container": Row("cpu-container",
                     r"^--container-(image=.*/shared disk/my.sqsh|mounts=(/.*/shared disk):\2"
                     r"|workdir=/.*/shared disk)$", 3,
                     variables={"IMAGE": "my.sqsh", "PATH": "LAB/pyxis" + TOOLS}),
    # mistakes
    "epochs": Row("cifar10-srun", "error: .*at least 1", 1, "", ("--epochs", 0), **FAILED),
    "--checkpoint": Row("cpu", "^error: .*CHECKPOINT=", 1, "", ("--checkpoint", "my.pt"), **FAILED),
    "behind the file": Row("cpu", "error: .*--cpus-per-task", 2, "", ("--cpus-per-task=2",),
                           **FAILED),
    "fashionmnist on two nodes": Row("fashionmnist", "^error: one node", 1, "--nodes=2", **FAILED),
}


@pytest.fixture(scope="module")
def jobs(lab):
    """The ids of the jobs of ROWS. A test waits for its own."""
    # nvidia-smi, and srun where there is no pyxis, show their options.
    write_program(lab.folder / "smi/nvidia-smi", '[[ $# = 0 ]] || { echo "$*"; sleep 1234; }')
    write_program(lab.folder / "pyxis/srun", 'printf "%s\\n" "$@"')
    (lab.folder / "mine").mkdir()
    shutil.copy(lab.folder / "cifar10_ddp/train.py", lab.folder / "mine/my.py")
    shutil.copy(lab.folder / "slurm/cifar10.sbatch", lab.folder / "mine")
    ids = {}
    for name, row in ROWS.items():
        variables = {variable: str(value).replace("LAB", str(lab.folder))
                     for variable, value in row.variables.items()}
        ids[name] = submit(lab, row.file, *row.args, options=row.options.split(), nodes=row.nodes,
                           cwd=lab.folder / row.cwd, inside=row.inside, **variables)
    return ids


@pytest.mark.parametrize("name", ROWS)
def test_job(lab, jobs, name):
    row = ROWS[name]
    lab.wait(jobs[name], row.state)
    output = lab.output(jobs[name])
    found = re.findall(row.shown, output, re.MULTILINE)
    assert len(found) == row.number, (
        f"{name}: {len(found)} lines for {row.number} show {row.shown!r}:\n{output}")
    restarts = lab.restarts(jobs[name])
    assert restarts == 0, f"{name}: the job was requeued {restarts} times"
    assert "srun: warning" not in output, f"{name}: srun warns:\n{output}"


def test_log_of_gpus_is_written_and_ends_with_the_job(lab, jobs):
    job = jobs["fashionmnist"]
    lab.wait(job, "COMPLETED")
    log = (lab.folder / f"slurm/fashionmnist-{job}-gpu.log").read_text()
    assert log == "dmon -s pucm -d 5\n", f"the log of the GPUs' use has other content:\n{log}"
    left = lab.node(lab.show(job, "NodeList")).exec("pgrep -x nvidia-smi; true")
    assert not left, f"nvidia-smi still runs after the job: pid {left}"


# --- environments: each has a torchrun that shows its name ---
# Variables, the environments beside one in the home and on PATH, and the one that is used.
ENVIRONMENTS = {
    "PATH": ({}, [], "home"),
    ".conda": ({}, [".conda"], ".conda"),
    ".venv": ({}, [".conda", ".venv"], ".venv"),
    "conda": ({"CONDA_PREFIX": "conda"}, [".venv", "conda"], "conda"),
    "base without torchrun": ({"CONDA_PREFIX": "base"}, [".venv"], ".venv"),
    "venv": ({"CONDA_PREFIX": "conda", "VIRTUAL_ENV": "venv"}, [".venv", "conda", "venv"], "venv"),
    "module": ({"LOADEDMODULES": "pytorch", "PATH": "module/bin"}, [".venv", "module"], "module"),
    "another module": ({"LOADEDMODULES": "gcc"}, [".venv"], ".venv"),
}


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_environment_of_a_job(lab, name):
    variables, folders, used = ENVIRONMENTS[name]
    project = lab.folder / f"with {name}"
    for folder in [*folders, "home"]:
        write_program(project / folder / "bin/torchrun",
                      f'echo "used: {folder}, user site off: $PYTHONNOUSERSITE"')
    env = {"HOME": project / "home", "PATH": f"{project}/home/bin:/usr/bin:/bin"}
    for variable, value in variables.items():
        env[variable] = f"{project}/{value}"
    if "PATH" in variables:
        env["PATH"] += ":/usr/bin:/bin"
    (project / "train.py").touch()
    job = submit(lab, lab.folder / "slurm/cifar10.sbatch", cwd=project, SCRIPT="train.py", **env)
    lab.wait(job, "COMPLETED")
    output = lab.output(job)
    off = "" if used in ("home", "module") else "1"
    expected = f"used: {used}, user site off: {off}\n"
    assert expected in output, f"not {expected!r}:\n{output}"


# --- terminals ---
def test_two_terminals_train_together(lab):
    """The first prints a command; run on another node, it joins. NPROC is for both."""
    granted = lab.sh("salloc --no-shell --nodelist=c1,c2 --ntasks-per-node=1 --cpus-per-task=2",
                     timeout=300)
    job = re.search(r"allocation (\d+)", granted)[1]
    terminal = f"srun --jobid={job} --overlap --nodes=1 --ntasks=1 --nodelist="
    flags = shlex.join(map(str, [*LINEAR, "--checkpoint", "two.pt"]))
    lab.sh(f"cd slurm; NPROC=1 {terminal}c1 bash ddp-master-node.sh cpu_ddp/train.py {flags} "
           ">../master.log 2>&1 &")
    lab.sh("until grep -q '^    cd ' master.log; do sleep 0.1; done", timeout=100)
    log = lab.folder / "master.log"
    command = re.search(r"^    (cd .*)$", log.read_text(), re.MULTILINE)[1]
    lab.sh(f"{terminal}c2 bash -c {shlex.quote(command)}", timeout=300)
    lab.sh(f"while pgrep -x srun; do sleep 1; done; scancel {job}", timeout=300)
    shown = log.read_text()
    assert "world size 2" in shown, f"two terminals are not one run:\n{shown}"
    step = load_checkpoint(lab.folder / "two.pt")["step"]
    assert step == 16, f"two terminals have trained {step} steps, not 16:\n{shown}"


TRAIN = ".venv/bin/python cpu_ddp/train.py --epochs 4 --samples 256"


def in_terminal(lab, allocation, command):
    """Run a command as the shell of an allocation, in a terminal; return what is shown."""
    write_program(lab.folder / "shell", command)
    allocation = shlex.quote(f"SHELL=./shell {allocation}")
    return lab.sh(f"script --quiet --command {allocation} /dev/null", timeout=200)


def test_srun_in_an_interactive_job_is_one_run(lab):
    shown = in_terminal(lab, "salloc --nodes=2 --ntasks-per-node=2", f"srun {TRAIN}")
    assert shown.count("world size 4") == 1, f"not one run of four processes:\n{shown}"


def test_python_in_a_shell_of_srun_trains_alone(lab):
    """bash ends at once in the task that has no terminal."""
    shown = in_terminal(lab, "srun --ntasks=2 --pty ./shell", f"[[ ! -t 0 ]] || {TRAIN}")
    assert "world size 1" in shown, f"a process in a terminal does not train alone:\n{shown}"


def test_two_steps_at_once_are_two_runs(lab):
    step = f"srun --overlap --ntasks=2 {TRAIN} --checkpoint step"
    both = f"{step}1.pt --seed 1 & {step}2.pt --seed 2 & wait"
    shown = lab.sh(f"salloc --ntasks=2 --nodes=1 bash -c {shlex.quote(both)}", timeout=200)
    assert shown.count("world size 2") == 2, f"two steps of a job are not two runs:\n{shown}"
    for seed in (1, 2):
        found = load_checkpoint(lab.folder / f"step{seed}.pt")
        assert found["settings"]["seed"] == seed, f"step{seed}.pt is of another run:\n{shown}"
        assert found["step"] == 16, f"step{seed}.pt is of step {found['step']}, not 16:\n{shown}"
