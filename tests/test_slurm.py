"""The sbatch files, srun and the two-terminal scripts, on a real Slurm (slurm_lab.py).

A story submits a job, disturbs it, and looks at what it left behind. All stories run side by side.
The final weights are compared bit for bit with those of the same training outside Slurm.
"""

import re
import shlex
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest
from checkpoints import difference, load_checkpoint
from launchers import run
from scripts import ROOT, SCRIPTS
from slurm_lab import Lab, running, why_not, write_program

RESUMED = ("cifar10", "cifar10-srun", "cpu", "cpu-container", "fashionmnist")
PLAIN = ("mnist", "synthetic")
LINEAR = "--epochs 4 --samples 256"
IMAGES = "--epochs 1 --fake-data 32 --batch-size 8"
# 160 steps of 2 processes, a log line each, and no checkpoint but when the run is stopped.
LONG = "--epochs 40 --samples 256 --save-every 1000 --log-every 0"

# What a process of a job sees. One write a process, since they share the output.
PROBE = """
import os
cores = len(os.sched_getaffinity(0))
gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "none")
threads = os.environ["OMP_NUM_THREADS"]
os.write(1, f"process: cores {cores} threads {threads} GPUs {gpus}\\n".encode())
"""

# Copies of cpu_ddp for jobs that are disturbed: a text, and what is put in front of it.
DUE = "            due = step == total_steps"
SLOW = """\
            lives = os.environ.get("LIVES") or os.environ["SLURM_ARRAY_TASK_ID"]
            if int(os.environ.get("SLURM_RESTART_COUNT") or 0) < int(lives):
                time.sleep(float(os.environ.get("STOP_SECONDS") or 0) if stop else 0.5)
"""
LATE = """\
print("importing", flush=True)
if "SLURM_RESTART_COUNT" not in os.environ:
    time.sleep(60)
"""
COPIES = {
    "slow.py": (DUE, SLOW),
    "late.py": ("import torch\n", LATE),
    "bug.py": (DUE, "            assert step < 70\n"),
}


# --- the files ---
def parts(name):
    """Return the parts of an sbatch file: options, set-up, launch and, if any, requeueing."""
    return (ROOT / f"slurm/{name}.sbatch").read_text().split("\n\n")


@pytest.mark.parametrize("name", RESUMED)
def test_files_differ_only_in_name_script_and_launch(name):
    common = []
    for file in (name, "cifar10"):
        options, set_up, launch, requeue = parts(file)
        options = re.findall(r"^#SBATCH --(?!job-name|cpus-per-task).*", options, re.MULTILINE)
        command = re.search(r"^srun .*?(?= --ntasks)", launch, re.MULTILINE).group()
        common.append([*options, *set_up.splitlines(), command, *requeue.splitlines()])
    assert common[0] == common[1], f"{name}.sbatch and cifar10.sbatch: copy the change to all"


ENVIRONMENT, OTHERS = re.search(r"(# The active.*?done\n)cores=.*?\n(# sbatch typed.*)",
                                parts("cifar10")[1], re.DOTALL).groups()


@pytest.mark.parametrize("file, lines", [
    *[(f"{name}.sbatch", lines) for name in PLAIN for lines in (ENVIRONMENT, OTHERS)],
    ("ddp-worker-node.sh", ENVIRONMENT),
])
def test_set_up_of_other_files_is_the_same(file, lines):
    text = (ROOT / "slurm" / file).read_text()
    assert lines in text, f"{file} has not these lines of cifar10.sbatch:\n{lines}"


@pytest.mark.parametrize("used, variables, others", [
    ("home", {}, []),
    (".conda", {}, []),
    (".venv", {}, [".conda"]),
    ("conda", {"CONDA_PREFIX": "conda"}, [".venv"]),
    (".venv", {"CONDA_PREFIX": "base"}, []),  # which has no torchrun
    ("venv", {"CONDA_PREFIX": "conda", "VIRTUAL_ENV": "venv"}, [".venv", "conda"]),
    ("module", {"LOADEDMODULES": "pytorch", "PATH": "module/bin"}, [".venv"]),
    (".venv", {"LOADEDMODULES": "gcc"}, []),
], ids=str)
def test_environment_of_a_job(tmp_path, used, variables, others):
    """Each environment has a torchrun that shows its name. One is in the home and on PATH."""
    for folder in {used, *others, "home"}:
        write_program(tmp_path / folder / "bin/torchrun",
                      f'echo "{folder}, user site off: ${{PYTHONNOUSERSITE:-}}"')
    env = {"HOME": "home", "PATH": "home/bin", **variables}
    env = {variable: f"{tmp_path}/{value}" for variable, value in env.items()}
    env["PATH"] += ":/usr/bin:/bin"
    done = subprocess.run(["bash", "-euc", f"{ENVIRONMENT}torchrun"], cwd=tmp_path, env=env,
                          capture_output=True, text=True, timeout=30)
    expected = f"{used}, user site off: {'' if used in ('home', 'module') else 1}\n"
    assert done.stdout == expected, f"not {expected!r}:\n{done.stdout}{done.stderr}"


# --- the lab ---
@pytest.fixture(scope="module")
def lab():
    """A cluster whose nodes share this repository and its environment. No network, no data."""
    if reason := why_not():
        pytest.skip(reason)
    with running(lambda folder: Lab(folder, 12)) as lab:
        for name in (*SCRIPTS, "slurm"):
            shutil.copytree(ROOT / name, lab.folder / name)
        text = (ROOT / "cpu_ddp/train.py").read_text()
        for name, (place, code) in COPIES.items():
            assert text.count(place) == 1, f"cpu_ddp/train.py has no place for {name}: {place}"
            (lab.folder / name).write_text(text.replace(place, code + place))
        (lab.folder / "probe.py").write_text(PROBE)
        (lab.folder / ".venv").symlink_to(sys.prefix)
        (lab.folder / "link.pt").symlink_to(lab.root / "scratch disk.pt")
        yield lab


def test_key_of_the_cluster_is_private(lab):
    mode = (lab.root / "my cluster/munge.key").stat().st_mode & 0o777
    assert mode == 0o600, f"munge.key has the permissions {mode:o}"


def wait_for_steps(lab, job, life=0):
    """Wait until the job has logged steps since it was requeued for the life-th time."""
    def logged():
        lives = lab.output(job).split(" | steps ")[1:]
        return len(lives) == life + 1 and "  step " in lives[life]

    lab.wait_for(job, f"training after {life} restarts", logged)


def preempt(lab, node, job):
    """Submit a job of a higher partition that requires the whole node."""
    number = lab.restarts(job) + 1
    lab.sbatch("--partition=high --exclusive --output=/dev/null --wrap=true", nodes=node)
    lab.wait_for(job, f"requeued {number} times", lambda: lab.restarts(job) == number)


def assert_resumed(lab, job, restarts, checkpoint=None):
    """The job completes, was requeued so often, resumed where it was, and has the same weights."""
    lab.wait(job, "COMPLETED")
    output = lab.output(job)
    number = lab.restarts(job)
    assert number == restarts, f"job {job} was requeued {number} times, not {restarts}:\n{output}"
    begins = [int(step) for step in re.findall(r" \| steps (\d+) to", output)]
    assert begins == sorted(set(begins)), f"job {job} trained from the steps {begins}:\n{output}"
    checkpoint = checkpoint or f"{lab.show(job, 'JobName')}-{lab.show(job, 'JobId')}.pt"
    change = difference(lab.folder / checkpoint, lab.long_run)
    assert change == 0, (
        f"weights of job {job} differ by {change} from those of training outside Slurm:\n{output}")


# --- jobs that come back: the longest stories first ---
def lost_nodes(lab):
    """One job loses the node of its batch script, another one its other node."""
    jobs = [lab.sbatch(f"--nodes=2 slurm/cifar10.sbatch {LONG} --save-every 0", nodes,
                       SCRIPT="slow.py", LIVES=1) for nodes in ("c5,c6,c9", "c7,c8,c9")]
    for job in jobs:
        wait_for_steps(lab, job)
    time.sleep(3)  # until there is a checkpoint
    lab.machines[lab.show(jobs[0], "BatchHost")].kill()
    lab.machines["head"].ip("link set c8 down")  # the cable: no other machine is notified
    for job in jobs:
        assert_resumed(lab, job, 1)


def time_limit(lab):
    """Stops 35 s after the signal (torchrun's own limit is 30). The checkpoint is a link."""
    job = lab.sbatch(f"slurm/cpu.sbatch {LONG}", "c10", SCRIPT="slow.py", LIVES=1, STOP_SECONDS=35,
                     CHECKPOINT="link.pt")
    wait_for_steps(lab, job)
    lab.sh(f"scontrol update job={job} EndTime=now+2minutes")
    lab.wait_for(job, "requeued", lambda: lab.restarts(job) == 1)
    lab.sh(f"scontrol update job={job} TimeLimit=30")
    assert_resumed(lab, job, 1, "link.pt")


def preempted(lab):
    """With a GraceTime, then without one."""
    job = lab.sbatch(f"--nodes=2 --partition=low slurm/cifar10.sbatch {LONG}", "c3,c4",
                     SCRIPT="slow.py", LIVES=2)
    lab.sh("scontrol update partition=low GraceTime=60")
    wait_for_steps(lab, job)
    preempt(lab, "c3", job)
    lab.sh("scontrol update partition=low GraceTime=0")
    wait_for_steps(lab, job, life=1)
    preempt(lab, "c3", job)
    assert_resumed(lab, job, 2)


def array(lab):
    """Two tasks. Task 1 is stopped when task 0 has completed, and its job id is the array's."""
    array = lab.sbatch(f"--nodes=2 --array=0-1 slurm/cifar10.sbatch {LONG}", SCRIPT="slow.py")
    wait_for_steps(lab, f"{array}_1")
    lab.wait(f"{array}_0", "COMPLETED")
    lab.sh(f"scancel --signal=TERM {array}_1")
    for task, restarts in (f"{array}_1", 1), (f"{array}_0", 0):
        assert_resumed(lab, task, restarts)


def preempted_before_training(lab):
    """Preempted while it imports, with a format of times that hides the year."""
    job = lab.sbatch(f"slurm/cifar10-srun.sbatch {LONG}", "c12", NPROC=2, SCRIPT="late.py",
                     SLURM_TIME_FORMAT="%a %T")
    lab.wait_for(job, "importing", lambda: "importing" in lab.output(job))
    preempt(lab, "c12", job)
    assert_resumed(lab, job, 1)


# --- jobs that end for good ---
def bug(lab):
    """A step fails whenever it is reached. The job looks as if a task of an array submitted it."""
    job = lab.sbatch(f"slurm/cifar10-srun.sbatch {LONG} --save-every 0", SCRIPT="bug.py",
                     SLURM_ARRAY_JOB_ID=98765, SLURM_ARRAY_TASK_ID=4)
    lab.wait_for(job, "requeued", lambda: lab.restarts(job) == 1)
    lab.wait_for(job, "failed for good",
                 lambda: lab.show(job, "JobState") == "FAILED" or lab.restarts(job) > 1)
    assert lab.restarts(job) == 1, f"requeued without a new checkpoint:\n{lab.output(job)}"


def cancelled(lab):
    """It was requeued by hand before."""
    job = lab.sbatch(f"--cpus-per-task=2 slurm/cifar10-srun.sbatch {LONG}", "c11",
                     SCRIPT="slow.py", LIVES=2)
    wait_for_steps(lab, job)
    lab.sh(f"scontrol requeue {job}")
    wait_for_steps(lab, job, life=1)
    lab.sh(f"scancel {job}")
    lab.wait(job, "CANCELLED")
    time.sleep(10)  # a requeued job waits for 7 s
    state = lab.show(job, "JobState")
    output = lab.output(job)
    assert state == "CANCELLED", f"a cancelled job is {state}:\n{output}"
    begin = int(re.findall(r" \| steps (\d+) to", output)[-1])
    step = load_checkpoint(lab.folder / f"cifar10-srun-{job}.pt")["step"]
    assert 0 < begin < step < 160, f"resumed at {begin}, checkpoint of step {step}:\n{output}"


STORIES = {function.__name__: function for function in (
    lost_nodes, time_limit, preempted, array, preempted_before_training, bug, cancelled)}


@pytest.fixture(scope="module")
def stories(lab, request):
    """The stories (futures) of the chosen tests, side by side, and the training they refer to."""
    chosen = {item.name for item in request.session.items}
    with ThreadPoolExecutor(len(STORIES)) as pool:
        started = {name: pool.submit(function, lab) for name, function in STORIES.items()
                   if f"test_story[{name}]" in chosen}
        lab.long_run = lab.root / "long_run.pt"
        result = run("cpu_ddp", *LONG.split(), "--checkpoint", lab.long_run, nproc=2,
                     launcher="torchrun", timeout=600, env={"OMP_NUM_THREADS": 1})
        assert result.status == 0, f"the training outside Slurm failed:\n{result.text}"
        yield started


@pytest.mark.parametrize("name", STORIES)
def test_story(stories, name):
    stories[name].result(timeout=900)


# --- jobs that nobody disturbs ---
class Row(NamedTuple):
    """A job, and what it shows."""

    command: str  # sbatch COMMAND
    shown: str  # a regular expression
    number: int = 1  # of lines that show it
    variables: dict = {"SCRIPT": "probe.py", "OMP_PROC_BIND": "true"}
    inside: str = ""  # what sbatch is typed behind
    state: str = "COMPLETED"
    nodes: str = "c1,c2,c3,c4"


def probe(cores, threads, gpus):
    return f"^process: cores {cores} threads {threads} GPUs {gpus}$"


TOOLS = ":/usr/local/bin:/usr/bin:/bin"
FAILED = {"variables": {}, "state": "FAILED"}
ROWS = {
    # processes, cores and GPUs
    "one core": Row("slurm/cifar10.sbatch", "^One core and no GPU|" + probe(1, 1, "none"), 2),
    "gres": Row("--nodes=2 -c2 --gres=gpu:2 slurm/cifar10.sbatch", probe(2, 1, "0,1"), 4),
    "GPUs per task": Row("-N2 -c2 --gpus-per-task=2 slurm/cifar10-srun.sbatch",
                         probe(1, 1, "0,1"), 4),
    "tasks": Row("--ntasks-per-node=2 -c1 slurm/cifar10.sbatch", probe(2, 1, "none"), 2),
    "uneven nodes": Row("--exclusive --nodes=2 slurm/cifar10.sbatch", probe(".", 1, "0,1"), 4,
                        nodes="c10,c12"),
    "in srun": Row("-w c1 slurm/cpu.sbatch", probe(2, 1, "none"), 2,
                   inside="srun -c1 --gpus-per-node=2 --mem-per-cpu=500 -w c1"),
    "in salloc": Row("-c2 --mem=700 slurm/cifar10-srun.sbatch", probe(1, 1, "none"), 2,
                     inside="salloc --mem-per-cpu=500 --gpus-per-node=1 --cpus-per-gpu=1 -n2"),
    "all cores": Row("-c2 slurm/mnist.sbatch", probe(2, 2, "none")),
    # each file, with what is particular to it
    "cpu": Row(f"--nodes=2 --export=NONE slurm/cpu.sbatch {LINEAR}", "^world size 4", 1, {}),
    "mnist": Row(f"-c2 --gpus-per-node=2 slurm/mnist.sbatch {IMAGES}",
                 "^GPUs none, threads 2 |^epoch 1/1 .* test", 2, {}),
    "fashionmnist": Row(f"-c2 ./fashionmnist.sbatch {IMAGES}", "^world size 2 .* threads 1 |"
                        "^saved step 2 in .*/slurm/fashionmnist-", 2, {"PATH": "smi" + TOOLS},
                        inside="cd slurm &&"),
    "cifar10": Row(f"--nodes=2 --gpus-per-node=1 ./cifar10.sbatch {IMAGES}",
                   "^saved step 2 in .*/mine/cifar10-", 1,
                   {"SCRIPT": "my.py", "VIRTUAL_ENV": sys.prefix}, inside="cd mine &&"),
    "synthetic": Row(f"--gpus-per-node=2 slurm/synthetic.sbatch {LINEAR}", "^world size 2", 1, {}),
    "container": Row("slurm/cpu-container.sbatch",
                     r"^--container-(image=.*/shared disk/my.sqsh|mounts=(/.*/shared disk):\2"
                     r"|workdir=/.*/shared disk)$", 3,
                     {"IMAGE": "my.sqsh", "PATH": "pyxis" + TOOLS}),
    # mistakes
    "--checkpoint": Row("slurm/cpu.sbatch --checkpoint my.pt", "^error: .*CHECKPOINT=", **FAILED),
    "behind the file": Row("slurm/cpu.sbatch --cpus-per-task=2", "error: .*--cpus-per-task", 2,
                           **FAILED),
    "fashionmnist on two nodes": Row("-N2 slurm/fashionmnist.sbatch", "^error: one node", **FAILED),
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
    return {name: lab.sbatch(row.command, row.nodes, row.inside, **row.variables)
            for name, row in ROWS.items()}


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
    left = lab.machines[lab.show(job, "NodeList")].exec("pgrep -x nvidia-smi; true")
    assert not left, f"nvidia-smi still runs after the job: pid {left}"


# --- terminals ---
def test_two_terminals_train_together(lab):
    """The first prints a command; run on another node, it joins. NPROC is for both."""
    granted = lab.sh("salloc --no-shell --nodelist=c1,c2 --ntasks-per-node=1 --cpus-per-task=2",
                     timeout=300)
    job = re.search(r"allocation (\d+)", granted)[1]
    terminal = f"srun --jobid={job} --overlap --nodes=1 --ntasks=1 --nodelist="
    lab.sh(f"cd slurm; NPROC=1 {terminal}c1 bash ddp-master-node.sh cpu_ddp/train.py --epochs 4 "
           ">../master.log 2>&1 &")
    shown = lab.sh("until grep '^    cd ' master.log; do sleep 0.1; done", timeout=100)
    lab.sh(f"{terminal}c2 bash -c {shlex.quote(shown.strip())}", timeout=300)
    lab.sh(f"while pgrep -x srun; do sleep 1; done; scancel {job}", timeout=300)
    shown = (lab.folder / "master.log").read_text()
    assert "world size 2" in shown, f"two terminals are not one run:\n{shown}"
    assert "epoch 4/4" in shown, f"two terminals have not trained to the end:\n{shown}"


TRAIN = f".venv/bin/python cpu_ddp/train.py {LINEAR}"


@pytest.mark.parametrize("allocation, command, processes", [
    ("salloc --nodes=2 --ntasks-per-node=2", f"srun {TRAIN}", 4),
    # bash ends at once in the task that has no terminal
    ("srun --ntasks=2 --pty ./shell", f"[[ ! -t 0 ]] || {TRAIN}", 1),
])
def test_python_in_a_terminal_is_one_run(lab, allocation, command, processes):
    """The command is the shell of an allocation."""
    write_program(lab.folder / "shell", command)
    allocation = shlex.quote(f"SHELL=./shell {allocation}")
    shown = lab.sh(f"script --quiet --command {allocation} /dev/null", timeout=200)
    sizes = re.findall(r"world size (\d+)", shown)
    assert sizes == [str(processes)], f"not one run of {processes} processes:\n{shown}"
