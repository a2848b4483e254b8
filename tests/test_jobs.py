"""A job gets what it requests, and comes back when it is stopped: the sbatch files on a real Slurm.

There are three kinds of jobs. In most, a program that takes the place of torchrun and python shows
what it was given. Some train. Others are disturbed, all side by side. The final weights of those
that come back are compared bit for bit with those of the same training outside Slurm. (The cluster:
slurm_lab.py)
"""

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest
import torch
from copies import make_copy
from scripts import BEST_SCRIPTS, ROOT, SCRIPTS, script_path
from slurm_lab import Lab, booted, write_program

slurm = pytest.mark.slurm
FILES = sorted((ROOT / "slurm").glob("*.sbatch"))
JOB = (ROOT / "slurm/job.sh").read_text()

# Cores of each node, and hyperthreads of a core. c12 has one core, c13 one of two hyperthreads.
NODES = [(2, 1)] * 11 + [(1, 1), (1, 2)]
# Jobs that fit the nodes: processes on each are one per GPU, or one per core.
ONE_CORE = "--cpus-per-task=1"
SMALL = "--cpus-per-task=2 --nodes=1"
LINEAR = "--epochs 2 --samples 256"
# 80 epochs of a step of 2 processes, a log line and a checkpoint each.
LONG = "--epochs 80 --samples 64"

# What a notebook leaves in the shell, or a module sets.
LEFT = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_ADDR": "nowhere",
        "OMP_PROC_BIND": "true", "GOMP_CPU_AFFINITY": "0"}
# What is exported for srun.
EXPORTED = {"SLURM_CONSTRAINT": "a100", "SLURM_TIMELIMIT": 5}

# What takes the place of torchrun and python: it writes to a file what its task was given. When all
# tasks have, the last one fails. The others would go on. (Slurm may lose what they print.)
SHOW = """
[[ $* != --version ]] || exit 0
file=$0-$SLURM_JOB_ID-
cores=$(env --unset=OMP_NUM_THREADS nproc)
echo "cores $cores, threads $OMP_NUM_THREADS, GPUs ${CUDA_VISIBLE_DEVICES:-none}," \\
    "rank ${RANK:-}${LOCAL_RANK:-}/${WORLD_SIZE:-} ${MASTER_ADDR:-}," \\
    "left ${OMP_PROC_BIND:-}${SLURM_TIMELIMIT:-}${GOMP_CPU_AFFINITY:-none}," \\
    "started by $(</proc/$PPID/comm): ${0##*/} $*" \\
    >"$file.$SLURM_PROCID"
mv "$file.$SLURM_PROCID" "$file$SLURM_PROCID"
if ((SLURM_PROCID < SLURM_STEP_NUM_TASKS - 1)); then
    sleep 90 && echo "goes on without another task"
fi
for ((task = 0; task < SLURM_STEP_NUM_TASKS; task++)); do
    until [[ -e $file$task ]]; do sleep 0.1; done
done
exit 1
"""
# What takes the place of srun where there is no pyxis: it shows what Enroot is given by variables,
# shows the options of pyxis, and removes them.
PYXIS = """
echo "login shell ${ENROOT_LOGIN_SHELL:-}, GPUs ${NVIDIA_VISIBLE_DEVICES:-}"
for option; do
    shift
    case $option in
        --container-*) echo "$option" ;;
        *) set -- "$@" "$option" ;;
    esac
done
exec /usr/bin/srun "$@"
"""

# torchrun where the clock of the second node is 4 minutes behind.
BEHIND = """
exec .venv/bin/python -c '
import os
from datetime import datetime, timedelta
from types import SimpleNamespace
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.run import main
minutes = timedelta(minutes=4 * int(os.environ["SLURM_NODEID"]))
dynamic_rendezvous.datetime = SimpleNamespace(now=lambda zone: datetime.now(zone) - minutes)
main()' "$@"
"""

# Copies of cpu_ddp for jobs that are disturbed. slow.py takes a second for an epoch until it was
# requeued SLOW_STARTS times (in an array, as often as the number of its task), and with
# STOP_SECONDS, rank 0 takes so long to end when it is told to, at the first start.
SLOW = """
starts = os.environ.get("SLOW_STARTS") or os.environ["SLURM_ARRAY_TASK_ID"]
if int(os.environ.get("SLURM_RESTART_COUNT") or 0) < int(starts):
    time.sleep(1)
"""
STOP = """
import signal

def stop(*_):
    print("told to end", flush=True)
    time.sleep(float(os.environ["STOP_SECONDS"]))
    print("has ended", flush=True)
    sys.exit(1)

if {"STOP_SECONDS", "SLURM_RESTART_COUNT"} & {*os.environ} == {"STOP_SECONDS"}:
    if os.environ["RANK"] == "0":
        signal.signal(signal.SIGTERM, stop)
"""
LATE = """
print("importing", flush=True)
if "SLURM_RESTART_COUNT" not in os.environ:
    time.sleep(600)
"""
BUG = """
def bug(epoch):
    while epoch == 35:
        time.sleep(1)
"""
IMPORTS = 'after "from datetime import timedelta"'
COPIES = {  # file: of which script, and the edits
    "slow.py": ("cpu_ddp", ('after "os.replace("', SLOW), (IMPORTS, STOP)),
    "late.py": ("slow.py", (IMPORTS, LATE)),
    "bug.py": ("cpu_ddp", ("", BUG), ('before "loss = train_epoch"', "if rank: bug(epoch)")),
    "mine/slow.py": ("slow.py", (IMPORTS, "import beside, package")),
    "copied/train.py": ("slow.py", (IMPORTS, LATE)),
}


# --- the lab ---
def prepare(lab):
    """Copy this repository and its environment to the disk that the machines of the lab share."""
    for name in (*SCRIPTS, "slurm"):
        shutil.copytree(ROOT / name, lab.folder / name)
    (lab.folder / "mine/package").mkdir(parents=True)
    (lab.folder / "copied").mkdir()
    for name, (script, *edits) in COPIES.items():
        make_copy(script if script in SCRIPTS else lab.folder / script, lab.folder / name, *edits)
    for name in ("beside.py", "package/__init__.py"):
        (lab.folder / "mine" / name).touch()
    for folder in ("submission", "checkpoint"):
        (lab.folder / folder).mkdir()
        (lab.folder / folder / "beside.py").write_text("raise SystemExit('another module')")
    (lab.folder / "new.py").write_text("print('new code')")
    for folder in (".", "copied"):
        (lab.folder / folder / ".venv").symlink_to(sys.prefix)
    for name in ("torchrun", "python"):
        write_program(lab.folder / "show/bin" / name, SHOW)
    write_program(lab.folder / "pyxis/srun", PYXIS)
    write_program(lab.folder / "behind/bin/torchrun", BEHIND)
    write_program(lab.folder / "behind/bin/python", "")
    write_program(lab.folder / "smi/nvidia-smi", '[[ $# = 0 ]] || { echo "$*"; sleep 1234; }')


@pytest.fixture(scope="module")
def lab():
    """A cluster without network and data."""
    with booted(lambda folder: Lab(folder, NODES)) as lab:
        prepare(lab)
        yield lab


# --- what a task is given ---
class Given(NamedTuple):
    """A job, and the lines that it and its tasks show."""

    command: str  # sbatch COMMAND
    shown: str  # a regular expression
    number: int = 1  # of lines that it matches from their beginning
    variables: dict = {}
    inside: str = ""  # what sbatch is typed behind
    nodes: str = "c1,c2,c3,c4,c5,c6,c7,c8"


def task(cores, threads, gpus, program, rank="/ "):
    """Return the line of a task. What binds all processes to one core, or limits srun, is unset.

    Slurm starts it, without a shell between, which would end first at a signal.
    """
    return (f"cores {cores}, threads {threads}, GPUs {gpus}, rank {rank}, left none, "
            f"started by slurmstepd: {program}(?: |$)")


TORCHRUN = "torchrun --nnodes={} --nproc-per-node={}"
PYTHON = r"python /.*-\d+.code/train.py"
NPROC = {"NPROC": 3, **EXPORTED}  # neither the cores nor the GPUs of a node
PATH = ":/usr/local/bin:/usr/bin:/bin"
IN_PYXIS = {"PATH": f"pyxis:show/bin{PATH}"}


def container(image, gpus):
    """Return the four lines of PYXIS. Without GPUs, those are void that the image requests."""
    return (rf"--container-image={image}$|--container-mounts=(/.*):\1$|--container-workdir=/.*$|"
            f"login shell no, GPUs {gpus}")


GIVEN = {
    "torchrun": Given("--nodes=2 -c2 slurm/synthetic.sbatch",
                      task(2, 1, 0, TORCHRUN.format(2, 3)), 2, NPROC),
    "srun": Given("--nodes=2 -c2 slurm/cifar10-srun.sbatch",
                  task("[12]", 1, 0, PYTHON, r"(?:00|11|22|30|41|52)/6 c[1-8]"), 6, NPROC),
    "python": Given("-c2 slurm/fashionmnist.sbatch --checkpoint 'a disk/run.pt'",
                    task(2, 1, "0,1", f"{PYTHON} --nproc 3 .* --checkpoint /.*/a disk/run.pt"), 1,
                    {"PATH": f"smi{PATH}", **NPROC}),
    "one process": Given("-c2 slurm/mnist.sbatch", task(2, 2, "0,1", PYTHON)),
    "one core": Given("-c1 --gpus-per-node=0 slurm/synthetic.sbatch",
                      task(1, 1, "none", TORCHRUN.format(1, 1)), nodes="c13"),
    "gres": Given("--nodes=2 -c2 --gres=gpu:2 slurm/cifar10.sbatch",
                  f"python: /.*/show/bin/python|{task(2, 1, '0,1', TORCHRUN.format(2, 2))}", 3),
    "uneven nodes": Given("--exclusive --nodes=2 -c1 slurm/cifar10.sbatch",
                          task("[12]", 1, "0,1", TORCHRUN.format(2, 1)), 2, {"NPROC": 1},
                          nodes="c8,c12"),
    "in srun": Given(f"{SMALL} slurm/cpu.sbatch", task(2, 1, "none", TORCHRUN.format(1, 2)),
                     inside="srun -c1 --gpus-per-node=2 --mem-per-cpu=500 -w c9", nodes="c9"),
    "in salloc": Given("-c2 --gpus-per-node=0 --mem=700 slurm/cifar10-srun.sbatch",
                       task(1, 1, "none", PYTHON, "(?:00|11)/2 c10"), 2,
                       inside="salloc --mem-per-cpu=500 --gpus-per-node=1 --cpus-per-gpu=1 -n2 "
                              "-w c10", nodes="c10"),
    "file": Given(f"{SMALL} slurm/cpu-container.sbatch",
                  container("/.*/shared disk/my.img", "void"), 4, IN_PYXIS | {"IMAGE": "my.img"}),
    "name": Given(f"{SMALL} --gpus-per-node=1 slurm/cpu-container.sbatch",
                  container("nvcr.io#nvidia/pytorch:1", "(?!void)"), 4,
                  IN_PYXIS | {"IMAGE": "nvcr.io#nvidia/pytorch:1"}),
    "a copy's own flag": Given("-c2 slurm/cifar10.sbatch --checkpoint-every 5",
                               task(2, 2, 0, "torchrun .* --checkpoint /.*/cifar10-.*.pt")),
    "no such folder": Given(f"{SMALL} slurm/cpu.sbatch --checkpoint none/my.pt", "mkdir: .*/none/"),
    "one file for an array": Given(f"{SMALL} --array=3 slurm/cpu.sbatch --checkpoint=my.pt",
                                   "error: .* my.pt: put %a"),
    "CHECKPOINT=": Given(f"{SMALL} slurm/cpu.sbatch", "error: .* --checkpoint my.pt", 1,
                         {"CHECKPOINT": "my.pt"}),
    "fashionmnist on two nodes": Given("-N2 -c2 slurm/fashionmnist.sbatch", "error: one node"),
}


@pytest.fixture(scope="module")
def given_jobs(lab):
    """The ids of the jobs of GIVEN. A test waits for its own."""
    (lab.folder / "my.img").touch()
    (lab.folder / "a disk").mkdir()
    (lab.folder / "a disk/run-gpu.log").write_text("of the first start\n")
    usual = {"VIRTUAL_ENV": lab.folder / "show", **LEFT}
    return {name: lab.sbatch(row.command, row.nodes, row.inside, **usual, **row.variables)
            for name, row in GIVEN.items()}


def tasks_of(lab, job):
    """Return the lines of SHOW."""
    return "".join(path.read_text() for path in lab.folder.glob(f"show/bin/*-{job}-[0-9]*"))


def assert_failed(lab, job, restarts=0):
    """The job fails for good after so many restarts. Return what it has printed."""
    lab.wait_for(job, "failed",
                 lambda: lab.show(job, "JobState") == "FAILED" or lab.restarts(job) > restarts)
    output = lab.output(job)
    assert lab.restarts(job) == restarts, f"requeued without a new checkpoint:\n{output}"
    return output


def assert_given(lab, job, row):
    output = assert_failed(lab, job) + tasks_of(lab, job)  # SHOW fails, and saves nothing
    found = re.findall(f"^(?:{row.shown})", output, re.MULTILINE)
    assert len(found) == row.number, (
        f"sbatch {row.command}: {len(found)} lines for {row.number} show {row.shown!r}:\n{output}")
    assert "goes on" not in output, f"srun does not end all tasks when one has failed:\n{output}"
    assert "srun: warning" not in output, f"srun warns:\n{output}"


@slurm
@pytest.mark.parametrize("name", GIVEN)
def test_tasks_are_given(lab, given_jobs, name):
    assert_given(lab, given_jobs[name], GIVEN[name])


@slurm
def test_jobs_of_a_node_use_other_ports(lab, given_jobs):
    ports = {}
    for name in ("torchrun", "gres"):
        lab.wait_for_state(given_jobs[name], "FAILED")
        ports[name] = re.search(r"--rdzv-endpoint=\S*:(\d+)", tasks_of(lab, given_jobs[name]))[1]
    assert len(set(ports.values())) == len(ports), f"jobs would meet at the same port: {ports}"


@slurm
def test_a_job_that_requests_no_memory_gets_its_share(lab):
    """As install-slurm.sh has it: otherwise it would get that of the whole node."""
    job = lab.sbatch("--output=/dev/null --wrap=true")
    memory = lab.show(job, r"MinMemory\w+")
    assert memory == "20000M", f"a core gets {memory} of a node with two cores and 40000M"


@slurm
def test_log_of_gpus_is_continued_and_ends_with_the_job(lab, given_jobs):
    job = given_jobs["python"]
    lab.wait_for_state(job, "FAILED")
    log = (lab.folder / "a disk/run-gpu.log").read_text()
    assert log == "of the first start\ndmon -s pucm -d 5\n", f"the log of the GPUs' use is:\n{log}"
    left = lab.machines[lab.show(job, "NodeList")].exec("pgrep -x nvidia-smi; true")
    assert not left, f"nvidia-smi still runs after the job: pid {left}"


# --- unedited, without options ---
ONE_OF_TORCHRUN = (task(r"\d+", 8, 0, TORCHRUN.format(1, 1)), 1)
EIGHT_OF_TORCHRUN = (task(r"\d+", 1, "none", TORCHRUN.format(1, 8)), 1)
TWO_NODES = (task(r"\d+", 1, "none", TORCHRUN.format(2, 4)), 2)
UNEDITED = {  # file: the lines of its tasks, and their number, with two GPUs on a node; without any
    "cifar10": (ONE_OF_TORCHRUN, EIGHT_OF_TORCHRUN),
    "cifar10-srun": ((task(r"\d+", 8, 0, PYTHON, r"00/1 c\d"), 1),
                     (task(r"\d+", 1, "none", PYTHON, r"([0-7])\1/8 c\d"), 8)),
    "cpu": (TWO_NODES, TWO_NODES),
    "cpu-container": (TWO_NODES, TWO_NODES),
    "fashionmnist": ((task(r"\d+", 8, "0,1", f"{PYTHON} --nproc 2"), 1),
                     (task(r"\d+", 1, "none", f"{PYTHON} --nproc 16"), 1)),
    "mnist": ((task(r"\d+", 8, "0,1", PYTHON), 1), (task(r"\d+", 8, "none", PYTHON), 1)),
    "synthetic": (ONE_OF_TORCHRUN, EIGHT_OF_TORCHRUN),
}


@pytest.fixture(scope="module")
def unedited():
    """A cluster with GPUs, and one without, and on each the ids of the jobs of UNEDITED by name."""
    with contextlib.ExitStack() as stack:
        clusters = []
        for gpus in (True, False):
            lab = stack.enter_context(booted(
                lambda folder, gpus=gpus: Lab(folder, [(16, 1)] * 2, gpus, affinity=False)))
            prepare(lab)
            variables = IN_PYXIS | {"VIRTUAL_ENV": lab.folder / "show"}
            if not gpus:
                variables["SBATCH_GPUS_PER_NODE"] = 0
            clusters.append((lab, {name: lab.sbatch(f"slurm/{name}.sbatch", **variables)
                                   for name in UNEDITED}))
        yield clusters


@slurm
@pytest.mark.parametrize("cluster", [0, 1], ids=["two GPUs per node", "no GPUs"])
@pytest.mark.parametrize("name", [file.stem for file in FILES])
def test_an_unedited_file_uses_what_it_requests(unedited, name, cluster):
    assert name in UNEDITED, f"{name}.sbatch has no row in UNEDITED"
    lab, jobs = unedited[cluster]
    assert_given(lab, jobs[name], Given(f"slurm/{name}.sbatch", *UNEDITED[name][cluster]))
    comes_back = (lab.show(jobs[name], "Requeue"), "is not requeued" in lab.output(jobs[name]))
    assert comes_back == (("0", False) if name == "mnist" else ("1", True)), (
        f"{name}.sbatch: --requeue {comes_back[0]}, requeue is called: {comes_back[1]}")


# --- jobs that are disturbed ---
def job_script_of(script):
    """Return the job script in a script's docstring."""
    text = script_path(script).read_text()
    return re.search(r"^#!/bin/bash.*?^exit 1\n", text, re.MULTILINE | re.DOTALL)[0]


def read_checkpoint(path):
    return torch.load(path, map_location="cpu", weights_only=True)


def wait_for_epochs(lab, job, restarts=0):
    """Wait until the job has saved an epoch since it was requeued so often."""
    def saved():
        starts = lab.output(job).split("\npython: /")[1:]  # job.sh logs each start
        return len(starts) == restarts + 1 and starts[-1].count("\nepoch ") > 1

    lab.wait_for(job, f"training after {restarts} restarts", saved)


def wait_for_restart(lab, job, number=1):
    lab.wait_for(job, f"requeued {number} times", lambda: lab.restarts(job) == number)


def preempt(lab, node, job):
    """Submit a job of a higher partition that requires the whole node."""
    number = lab.restarts(job) + 1
    lab.sbatch("--partition=high --exclusive --output=/dev/null --wrap=true", nodes=node)
    wait_for_restart(lab, job, number)


def assert_resumed(lab, job, restarts, checkpoint=None):
    """The job completes, was requeued so often, resumed where it was, and has the same weights."""
    lab.wait_for_state(job, "COMPLETED")
    output = lab.output(job)
    number = lab.restarts(job)
    assert number == restarts, f"job {job} was requeued {number} times, not {restarts}:\n{output}"
    epochs = [re.search(r"^epoch (\d+)/", start, re.M) for start in output.split("\nworld size ")]
    begins = [int(epoch[1]) for epoch in epochs if epoch]
    assert begins[0] == 1 and begins == sorted(set(begins)), (
        f"job {job} has begun with the epochs {begins}:\n{output}")
    checkpoint = checkpoint or f"{lab.show(job, 'JobName')}-{lab.show(job, 'JobId')}.pt"
    processes = int(re.search(r"^world size (\d+)", output, re.MULTILINE)[1])
    found = read_checkpoint(lab.folder / checkpoint)["model"]
    expected = lab.undisturbed[processes]
    assert all(torch.equal(found[name], expected[name]) for name in expected), (
        f"weights of job {job} are {found}, after training outside Slurm {expected}:\n{output}")


# They come back. Those that take longest are first.
def lost_node(lab):
    """One job loses the node of its batch script, another one its other node."""
    jobs = [lab.sbatch(f"--nodes=2 {ONE_CORE} slurm/cifar10-srun.sbatch {LONG}", nodes,
                       SCRIPT="slow.py", SLOW_STARTS=1) for nodes in ("c5,c6,c9", "c7,c8,c9")]
    for job in jobs:
        wait_for_epochs(lab, job)
    lab.machines[lab.show(jobs[0], "BatchHost")].kill()
    lab.machines["head"].ip("link set c8 down")  # the cable: no other machine is notified
    for job in jobs:
        assert_resumed(lab, job, 1)


def time_limit(lab):
    """Two of them. The first time, rank 0 takes 35 s to end (torchrun's limit is 30).

    The checkpoint is a link, and neither it nor the script are in the folder of the submission.
    Meanwhile, script, module and job.sh are edited, which the job does not notice.
    """
    shutil.copytree(ROOT / "slurm", lab.folder / "submission/slurm")
    (lab.folder / "checkpoint/link.pt").symlink_to(lab.root / "scratch disk.pt")
    job = lab.sbatch(
        f"--nodes=1 {ONE_CORE} slurm/cpu.sbatch --checkpoint ../checkpoint/link.pt {LONG}", "c10",
        "cd submission &&", SCRIPT="../mine/slow.py", VIRTUAL_ENV=sys.prefix, SLOW_STARTS=2,
        STOP_SECONDS=35)
    for number in (1, 2):
        wait_for_epochs(lab, job, restarts=number - 1)
        for name in ("slow.py", "beside.py"):
            (lab.folder / "mine" / name).write_text("raise SystemExit('new code')")
        (lab.folder / "submission/slurm/job.sh").write_text(f"{JOB}die 'new job.sh'")
        lab.sh(f"scontrol update job={job} EndTime=now+2minutes")
        wait_for_restart(lab, job, number)
        lab.sh(f"scontrol update job={job} TimeLimit=30")
    assert_resumed(lab, job, 2, "checkpoint/link.pt")
    assert "has ended" in lab.output(job), f"rank 0 was killed before 35 s:\n{lab.output(job)}"


def preempted(lab):
    """With a GraceTime, while it imports; then in training, without one.

    Slurm shows times as "Nov 26".
    """
    job = lab.sbatch(f"--nodes=2 {ONE_CORE} --partition=low slurm/cifar10-srun.sbatch {LONG}",
                     "c3,c4", SCRIPT="late.py", SLOW_STARTS=2, SLURM_TIME_FORMAT="Nov %d", **LEFT)
    lab.sh("scontrol update partition=low GraceTime=60")
    lab.wait_for(job, "importing", lambda: "importing" in lab.output(job))
    preempt(lab, "c3", job)
    lab.sh("scontrol update partition=low GraceTime=0")
    wait_for_epochs(lab, job, restarts=1)
    preempt(lab, "c3", job)
    assert_resumed(lab, job, 2)


def job_script(lab):
    """That of a docstring: preempted with a GraceTime while it imports, then stopped after a save.

    A second job, which is stopped before it saves, is not requeued.
    """
    text = job_script_of("synthetic_ddp")
    for typed, edited in (("--nproc-per-node=4", "--nproc-per-node=1"), ("-task=32", "-task=1"),
                          ("train.py --checkpoint", f"train.py {LONG} --checkpoint")):
        text = text.replace(typed, edited)
    (lab.folder / "copied/my job").write_text(text)
    command = "--nodes=1 --gpus-per-node=0 --mem=500 --partition=grace 'my job'"
    job = lab.sbatch(command, "c13", "cd copied &&", SLOW_STARTS=2, **LEFT)
    lab.wait_for(job, "importing", lambda: "importing" in lab.output(job))
    preempt(lab, "c13", job)
    lab.wait_for(job, "saved", lambda: "\nepoch 2/" in lab.output(job))
    lab.sh(f"scancel --signal=TERM {job}")
    assert_resumed(lab, job, 2, "copied/run.pt")
    (lab.folder / "copied/run.pt").unlink()
    job = lab.sbatch(command, "c13", "cd copied &&", SLOW_STARTS=2, **LEFT)
    lab.wait_for(job, "importing", lambda: "importing" in lab.output(job))
    lab.sh(f"scancel --signal=TERM {job}")
    output = assert_failed(lab, job)
    assert "it is not requeued" in output, f"it does not say why it ends:\n{output}"


def controller_away(lab):
    """The controller is killed while the job stops, and started again when the job has noticed."""
    lab = lab.other_lab  # the jobs beside this one need their controller
    job = lab.sbatch(f"-c1 --gpus-per-node=0 slurm/cifar10-srun.sbatch {LONG}", "c1",
                     SCRIPT="slow.py", SLOW_STARTS=1, STOP_SECONDS=5)
    wait_for_epochs(lab, job)
    log = f"cifar10-srun-{job}.out"
    lab.sh(f"scancel --signal=TERM {job}; "
           f"until grep 'told to end' {log}; do sleep 0.1; done; "
           "pkill -KILL slurmctld; "
           f"until grep 'Unable to contact' {log}; do sleep 0.1; done; "
           "service slurmctld restart", timeout=200)
    assert_resumed(lab, job, 1)


def array(lab):
    """Two tasks. Task 1 is stopped when task 0 has completed, and its job id is the array's.

    The last --checkpoint counts.
    sbatch passes one variable to the job, so that srun would pass no other, as MASTER_ADDR.
    """
    array = lab.sbatch(f"{ONE_CORE} --export=SCRIPT --array=0-1 slurm/cifar10-srun.sbatch {LONG} "
                       "--checkpoint=first.pt --checkpoint task-%a.pt", SCRIPT="slow.py")
    wait_for_epochs(lab, f"{array}_1")
    lab.wait_for_state(f"{array}_0", "COMPLETED")
    lab.sh(f"scancel --signal=TERM {array}_1")
    for number, restarts in (1, 1), (0, 0):
        assert_resumed(lab, f"{array}_{number}", restarts, f"task-{number}.pt")


# They end for good.
def bug(lab):
    """Rank 1 always hangs in the same epoch. An array's task seems to have submitted the job."""
    job = lab.sbatch(f"--nodes=2 {ONE_CORE} slurm/cifar10-srun.sbatch {LONG} --timeout 20",
                     SCRIPT="bug.py", SLURM_ARRAY_JOB_ID=98765, SLURM_ARRAY_TASK_ID=4)
    wait_for_restart(lab, job)
    output = assert_failed(lab, job, restarts=1)
    assert " in bug\n" in output, f"the log shows not where it hung:\n{output}"


def cancelled(lab):
    """cifar10_ddp, which saves after the step that runs. It saves for no other reason in this time.

    Slurm kills it after 30 s (KillWait).
    """
    job = lab.sbatch(f"{ONE_CORE} slurm/cifar10-srun.sbatch --epochs 99 --fake-data 4096 "
                     "--global-batch 4 --save-every 99 --log-every 1", "c11,c12")
    lab.wait_for(job, "training", lambda: re.search("^epoch .* step ", lab.output(job), re.M))
    lab.sh(f"scancel {job}")
    lab.wait_for_state(job, "CANCELLED")
    assert (lab.folder / f"cifar10-srun-{job}.pt").exists(), f"not saved:\n{lab.output(job)}"
    lab.sh("sleep 10")  # a requeued job waits for 7 s
    state = lab.show(job, "JobState")
    assert state == "CANCELLED", f"a cancelled job is {state}:\n{lab.output(job)}"


DISTURBED = {function.__name__: function for function in (
    lost_node, time_limit, preempted, job_script, controller_away, array, bug, cancelled)}


@pytest.fixture(scope="module")
def disturbed(lab, unedited, tmp_path_factory, request):
    """Futures of the disturbed jobs of the chosen tests, side by side."""
    chosen = {item.name for item in request.session.items}
    lab.undisturbed = {}
    for nproc in (1, 2):
        path = tmp_path_factory.mktemp("undisturbed") / "run.pt"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
                   f"--nproc-per-node={nproc}", ROOT / "cpu_ddp/train.py", *LONG.split(),
                   "--checkpoint", path]
        subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        lab.undisturbed[nproc] = read_checkpoint(path)["model"]
    lab.other_lab = unedited[1][0]
    lab.other_lab.undisturbed = lab.undisturbed
    with ThreadPoolExecutor(len(DISTURBED)) as pool:
        yield {name: pool.submit(function, lab) for name, function in DISTURBED.items()
               if f"test_disturbed_job[{name}]" in chosen}


@slurm
@pytest.mark.parametrize("name", DISTURBED)
def test_disturbed_job(disturbed, name):
    disturbed[name].result(timeout=900)


# --- jobs that train to their end ---
@slurm
def test_torchrun_trains_on_two_nodes_whose_clocks_differ(lab):
    job = lab.sbatch(f"{ONE_CORE} slurm/cpu.sbatch {LINEAR}", VIRTUAL_ENV="behind")
    lab.wait_for_state(job, "COMPLETED")
    output = lab.output(job)
    assert "\nworld size 2 " in output, f"two nodes are not one run:\n{output}"
    assert "\nepoch 2/2" in output, f"the job has not trained to its end:\n{output}"


# --- what is left on a disk ---
@slurm
@pytest.mark.parametrize("suffix, state, shown", [
    (".code/new.py", "COMPLETED", "new code"),
    (".pt", "FAILED", "error: .* add --checkpoint"),
])
def test_files_of_another_cluster_are_not_taken(lab, suffix, state, shown):
    """Its jobs had the same numbers. With its checkpoint, nothing would be trained."""
    job = lab.sbatch(f"--hold {ONE_CORE} slurm/cifar10-srun.sbatch", SCRIPT="new.py")
    old = lab.folder / f"cifar10-srun-{job}{suffix}"
    old.parent.mkdir(exist_ok=True)
    old.write_text("print('old code')")
    lab.sh(f"scontrol release {job}")
    lab.wait_for_state(job, state)
    output = lab.output(job)
    assert re.search(shown, output), f"with an old cifar10-srun-{job}{suffix}:\n{output}"


@slurm
def test_requeued_after_a_full_disk_it_runs(lab):
    """At the first start, the disk has no room for the code."""
    (lab.folder / "small").mkdir()
    mount = f"mount -t tmpfs -o size=4k tmpfs '{lab.folder}/small'"
    lab.machines["c1"].exec(mount)
    job = lab.sbatch(f"--output=full.out {ONE_CORE} slurm/cifar10-srun.sbatch "
                     "--checkpoint small/run.pt", "c1", SCRIPT="new.py")
    lab.wait_for_state(job, "FAILED")
    assert "No space left" in lab.output(job), f"the disk is not full:\n{lab.output(job)}"
    lab.machines["c1"].exec(f"{mount} -o remount,size=10m")
    lab.sh(f"scontrol requeue {job}")
    lab.wait_for(job, "run", lambda: "new code" in lab.output(job))


# --- terminals ---
@slurm
def test_two_terminals_train_together(lab):
    """The first prints a command; run on another node, it joins. NPROC is for both."""
    granted = lab.sh("salloc --no-shell --nodelist=c1,c2 --ntasks-per-node=1 --cpus-per-task=2",
                     timeout=300)
    job = re.search(r"allocation (\d+)", granted)[1]
    terminal = f"srun --jobid={job} --overlap --nodes=1 --ntasks=1 --nodelist="
    lab.sh(f"(NPROC=1 {terminal}c1 bash slurm/ddp-master-node.sh cpu_ddp/train.py {LINEAR} "
           ">master.log 2>&1 &)")
    shown = lab.sh("until grep '^    cd ' master.log; do sleep 0.1; done", timeout=100)
    lab.sh(f"{terminal}c2 bash -c {shlex.quote(shown.strip())}", timeout=300)
    lab.sh(f"while pgrep -x srun; do sleep 0.2; done; scancel {job}", timeout=300)
    shown = (lab.folder / "master.log").read_text()
    assert "world size 2" in shown, f"two terminals are not one run:\n{shown}"
    assert "epoch 2/2" in shown, f"two terminals have not trained to the end:\n{shown}"


# --- the files, without Slurm ---
ENVIRONMENT = re.search(r"^for folder in.*?^done\n", JOB, re.MULTILINE | re.DOTALL)[0]


def name_of(file):
    return file.name


def bash(script, folder, **variables):
    """Run a script of bash in a folder, with these variables alone."""
    return subprocess.run(["bash", "-euc", script], cwd=folder, capture_output=True, text=True,
                          env={"PATH": "/usr/bin:/bin"} | variables, timeout=30)


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_submitted_in_another_folder_an_error_line_names_the_right_one(tmp_path, file):
    done = bash(f"source {file}", tmp_path)
    assert done.returncode != 0, f"the job goes on:\n{done.stdout}"
    assert re.fullmatch(f"error: .* above slurm/, not in {tmp_path}\n", done.stdout), (
        f"no error line that names the folder:\n{done.stdout}{done.stderr}")


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_torchrun_waits_for_a_save_and_ends_before_the_time_limit(file):
    """It kills its processes when its own limit is over, Slurm when the time limit is."""
    text = file.read_text()
    notice = re.search(r"^#SBATCH --signal=TERM@(\d+)", text, re.MULTILINE)
    assert bool(notice) == ("requeue" in text.splitlines()[-1]), (
        f"{file.name}: --signal is for jobs that come back, and they need it")
    assert bool(notice) == ("\n#SBATCH --open-mode=append " in text), (
        f"{file.name}: a requeued job must not empty its log")
    wait = int(re.search(r"SHUTDOWN_TIMEOUT=(\d+)", JOB)[1])
    assert not notice or wait + 5 <= int(notice[1]) <= wait + 60, (
        f"{file.name} says {notice[0]}, and torchrun waits for {wait} s of them")


def test_torchrun_is_launched_in_the_same_way_by_all_files():
    """Above, cpu.sbatch trains."""
    texts = [file.read_text() for file in FILES]
    launches = {text[text.index("    torchrun "):] for text in texts if "    torchrun " in text}
    assert len(launches) == 1, "torchrun is launched in different ways:\n" + "\n".join(launches)


def test_job_scripts_of_docstrings_are_equal_but_for_the_seconds_to_save():
    """Above, one of them is preempted and stopped."""
    found = set()
    for script in BEST_SCRIPTS:
        text = job_script_of(script)
        (notice,) = re.findall(r"--signal=TERM@(\d+)", text)
        wait = re.findall(r"SHUTDOWN_TIMEOUT=(\d+)", text) or ["30"]
        assert int(wait[0]) + 5 <= int(notice), f"{script}: TERM@{notice}, torchrun waits {wait[0]}"
        text = re.sub(r"^# Slurm (?:.*\n# )*?job\. |^export .*\n", "", text, flags=re.M)
        text = re.sub(r"TERM@\d+|--mem=\w+", "", text)
        found.add(re.sub(r"train\.py (?:.|\n)*?--checkpoint", "train.py --checkpoint", text))
    assert len(found) == 1, "job scripts differ:\n" + "\n".join(found)


def test_a_terminal_finds_the_environment_as_a_job_does():
    text = (ROOT / "slurm/ddp-worker-node.sh").read_text()
    lines = ENVIRONMENT.replace(" && ! ${image:-}", "")
    assert lines in text, f"ddp-worker-node.sh has not these lines of job.sh:\n{lines}"


@pytest.mark.parametrize("used, variables, others", [
    ("home", {}, []),
    (".conda", {}, []),
    (".venv", {}, [".conda"]),
    ("conda", {"CONDA_PREFIX": "conda"}, [".venv"]),
    (".venv", {"CONDA_PREFIX": "base"}, []),  # which has no torchrun
    ("venv", {"CONDA_PREFIX": "conda", "VIRTUAL_ENV": "venv"}, [".venv", "conda"]),
], ids=str)
def test_environment_of_a_job(tmp_path, used, variables, others):
    """Each environment has a torchrun that shows its name. One is in the home and on PATH."""
    for folder in {used, *others, "home"}:
        write_program(tmp_path / folder / "bin/torchrun",
                      f'echo "{folder}, user site off: ${{PYTHONNOUSERSITE:-}}"')
        write_program(tmp_path / folder / "bin/python", "")
    variables = {name: str(tmp_path / value) for name, value in variables.items()}
    done = bash(f"{ENVIRONMENT}torchrun", tmp_path, **variables,
                PATH=f"{tmp_path}/home/bin:/usr/bin:/bin")
    expected = f"{used}, user site off: {'' if used == 'home' else 1}\n"
    assert done.stdout == expected, f"not {expected!r}:\n{done.stdout}{done.stderr}"


def test_a_node_without_the_python_of_the_environment_ends_the_job(tmp_path):
    """Another python on PATH would train."""
    write_program(tmp_path / ".venv/bin/torchrun", "")
    (tmp_path / ".venv/bin/python").symlink_to("missing")
    done = bash(f"{ENVIRONMENT}python3 --version", tmp_path)
    assert done.returncode != 0, f"the job goes on, with {done.stdout}"
    assert ".venv/bin/python: " in done.stderr, f"the error names no file:\n{done.stderr}"
