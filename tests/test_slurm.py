"""The sbatch files, srun and the two-terminal scripts, on a real Slurm (slurm_lab.py).

There are three kinds of jobs. In most, a program that takes the place of torchrun and python shows
what it was given. Some train. Others are disturbed, all side by side, and their final weights are
compared bit for bit with those of the same training outside Slurm.
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
from copies import make_copy
from launchers import run
from scripts import ROOT, SCRIPTS
from slurm_lab import Lab, booted, reason_to_skip, write_program

RESUMED = ("cifar10", "cifar10-srun", "cpu", "cpu-container", "fashionmnist", "synthetic")
PLAIN = ("mnist",)
LINEAR = "--epochs 4 --samples 256"
IMAGES = "--epochs 1 --fake-data 32 --batch-size 8"
# 80 epochs of a step of 2 processes, a log line and a checkpoint each.
LONG = "--epochs 80 --samples 64"

# What a notebook leaves in the shell.
LEFT = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0}
# What a module may set.
BINDING = {"OMP_PROC_BIND": "true", "GOMP_CPU_AFFINITY": "0"}
# What is exported for srun.
EXPORTED = {"SLURM_CONSTRAINT": "a100", "SLURM_TIMELIMIT": 5}

# What takes the place of torchrun and python: it writes to a file what its task was given. When all
# tasks have, the last one fails. The others would go on. (Slurm may lose what they print.)
SHOW = """
[[ $* != --version ]] || exit 0
file=$0-$SLURM_JOB_ID-
cores=$(env --unset=OMP_NUM_THREADS nproc)
echo "cores $cores, threads $OMP_NUM_THREADS, GPUs ${CUDA_VISIBLE_DEVICES:-none}," \\
    "left ${OMP_PROC_BIND:-}${SLURM_TIMELIMIT:-}${GOMP_CPU_AFFINITY:-none}: ${0##*/} $*" \\
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
# What takes the place of srun where there is no pyxis: it shows and removes the options of pyxis.
PYXIS = """
echo "ENROOT_LOGIN_SHELL=${ENROOT_LOGIN_SHELL:-}"
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

# Copies for jobs that are disturbed.
SLOW = """
starts = os.environ.get("SLOW_STARTS") or os.environ["SLURM_ARRAY_TASK_ID"]
restarts = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
if restarts < int(starts):
    time.sleep(1)
if stop and restarts == 0:
    time.sleep(float(os.environ.get("STOP_SECONDS") or 0))
"""
LATE = """
print("importing", flush=True)
if "SLURM_RESTART_COUNT" not in os.environ:
    time.sleep(60)
"""
COPIES = {  # file: of which script, and the edit
    "slow.py": ("cpu_ddp", 'before "if rank == 0 and args.checkpoint"', SLOW),
    "late.py": ("cpu_ddp", 'after "from datetime import timedelta"', LATE),
    "bug.py": ("cpu_ddp", 'before "if rank == 0 and args.checkpoint"', "assert epoch < 35"),
    "mine/slow.py": ("slow.py", 'after "from datetime import timedelta"', "import beside"),
}


# --- the files ---
def text_of(file):
    """Return the text of a file of slurm/ without blank lines."""
    return re.sub(r"\n\n+", "\n", (ROOT / "slurm" / file).read_text())


def part(text, first, last):
    """Return the part of a text from the line that begins with first to the end of last."""
    found = re.search(f"^{re.escape(first)}.*?{re.escape(last)}\n", text, re.MULTILINE | re.DOTALL)
    assert found, f"no part from {first!r} to {last!r} in:\n{text}"
    return found[0]


UNSET = "OMP_PROC_BIND OMP_PLACES GOMP_CPU_AFFINITY"
ENVIRONMENT = part(text_of("cifar10.sbatch"), "# The environment", "\ndone")
OTHERS = part(text_of("cifar10.sbatch"), "# Options that srun would take", UNSET)
CORES = part(text_of("synthetic.sbatch"), "cores=", "processes=${NPROC:-${gpus:-$cores}}")


@pytest.mark.parametrize("name", RESUMED)
def test_files_differ_only_in_name_script_and_launch(name):
    common = []
    for file in (name, "cifar10"):
        text = text_of(f"{file}.sbatch")
        options = re.findall(r"^#SBATCH --(?!job-name|cpus-per-task).*", text, re.MULTILINE)
        set_up = part(text, "# The checkpoint", UNSET).replace(ENVIRONMENT, "")
        command = part(text, "srun ", "").split(" --ntasks")[0]
        requeue = part(text, "# srun was stopped", "\nexit 1")
        common.append([*options, *set_up.splitlines(), command, *requeue.splitlines()])
    assert common[0] == common[1], f"{name}.sbatch and cifar10.sbatch: copy the change to all"


@pytest.mark.parametrize("file, lines", [
    *[(f"{name}.sbatch", ENVIRONMENT) for name in RESUMED if name != "cpu-container"],
    *[(f"{name}.sbatch", lines) for name in PLAIN for lines in (ENVIRONMENT, OTHERS)],
    ("cifar10.sbatch", CORES),
    ("ddp-worker-node.sh", ENVIRONMENT),
])
def test_set_up_of_other_files_is_the_same(file, lines):
    assert lines in text_of(file), f"{file} has not these lines of other files:\n{lines}"


@pytest.mark.parametrize("name", RESUMED)
def test_torchrun_waits_for_a_save_and_ends_before_the_time_limit(name):
    """It kills its processes when its own limit is over, Slurm when the time limit is."""
    text = text_of(f"{name}.sbatch")
    notice = int(re.search(r"^#SBATCH --signal=TERM@(\d+)", text, re.MULTILINE)[1])
    waits = [int(limit) for limit in re.findall(r"SHUTDOWN_TIMEOUT=(\d+)", text)]
    assert len(waits) == text.count(" torchrun --nnodes"), (
        f"{name}.sbatch: torchrun kills after 30 s what saves")
    for wait in waits:
        assert notice - 60 <= wait < notice, (
            f"{name}.sbatch: a run has {notice} s to save, and torchrun waits for {wait} s of them")


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
    env = {"HOME": "home", "PATH": "home/bin", **variables}
    env = {variable: f"{tmp_path}/{value}" for variable, value in env.items()}
    env["PATH"] += ":/usr/bin:/bin"
    done = subprocess.run(["bash", "-euc", f"{ENVIRONMENT}torchrun"], cwd=tmp_path, env=env,
                          capture_output=True, text=True, timeout=30)
    expected = f"{used}, user site off: {'' if used == 'home' else 1}\n"
    assert done.stdout == expected, f"not {expected!r}:\n{done.stdout}{done.stderr}"


def test_a_node_without_the_python_of_the_environment_ends_the_job(tmp_path):
    """Another python on PATH would train."""
    write_program(tmp_path / ".venv/bin/torchrun", "")
    (tmp_path / ".venv/bin/python").symlink_to("missing")
    done = subprocess.run(["bash", "-euc", f"{ENVIRONMENT}python3 --version"], cwd=tmp_path,
                          env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, timeout=30)
    assert done.returncode != 0, f"the job goes on, with {done.stdout}"
    assert ".venv/bin/python: " in done.stderr, f"the error names no file:\n{done.stderr}"


@pytest.mark.parametrize("saved, shown", [(True, "requeue 7\n"), (False, "")])
def test_only_a_job_that_has_saved_is_requeued_while_squeue_fails(tmp_path, saved, shown):
    write_program(tmp_path / "squeue", "exit 1")
    write_program(tmp_path / "timeout", 'exec /usr/bin/timeout 1 "${@:2}"')  # not 10 minutes
    write_program(tmp_path / "scontrol", 'echo "$@"')
    (tmp_path / "my.pt").touch()
    before = "none" if saved else "$(stat -Lc %y my.pt)"
    requeue = part(text_of("cifar10.sbatch"), "# srun was stopped", "\nexit 1")
    done = subprocess.run(["bash", "-euc", f"checkpoint=my.pt\nbefore={before}\n{requeue}"],
                          cwd=tmp_path, env={"PATH": f"{tmp_path}:/usr/bin:/bin",
                                             "SLURM_JOB_ID": "7"},
                          capture_output=True, text=True, timeout=30)
    assert done.stdout == shown, (
        f"squeue fails, the job has {'' if saved else 'not '}saved, and its file runs scontrol "
        f"{done.stdout!r}, not {shown!r}:\n{done.stderr}")


# --- the lab ---
def prepare(lab):
    """Copy this repository and its environment to the disk that the machines of the lab share."""
    for name in (*SCRIPTS, "slurm"):
        shutil.copytree(ROOT / name, lab.folder / name)
    (lab.folder / "mine").mkdir()
    for name, (script, *edit) in COPIES.items():
        make_copy(script if script in SCRIPTS else lab.folder / script, lab.folder / name, edit)
    (lab.folder / "mine/beside.py").touch()
    (lab.folder / "others").mkdir()
    for folder in (".", "others"):  # of the submission, of the checkpoint
        (lab.folder / folder / "beside.py").write_text("raise SystemExit('another module')")
    (lab.folder / ".venv").symlink_to(sys.prefix)
    for name in ("torchrun", "python"):
        write_program(lab.folder / "show/bin" / name, SHOW)
    write_program(lab.folder / "pyxis/srun", PYXIS)
    write_program(lab.folder / "behind/bin/torchrun", BEHIND)
    write_program(lab.folder / "behind/bin/python", "")
    write_program(lab.folder / "smi/nvidia-smi", '[[ $# = 0 ]] || { echo "$*"; sleep 1234; }')


@pytest.fixture(scope="module")
def lab():
    """A cluster without network and data."""
    if reason := reason_to_skip():
        pytest.skip(reason)
    with booted(lambda folder: Lab(folder, 13)) as lab:
        prepare(lab)
        yield lab


def test_key_of_the_cluster_is_private(lab):
    mode = (lab.root / "my cluster/munge.key").stat().st_mode & 0o777
    assert mode == 0o600, f"munge.key has the permissions {mode:o}"


# --- what a task is given ---
class Given(NamedTuple):
    """A job, and the lines that it and its tasks show."""

    command: str  # sbatch COMMAND
    shown: str  # a regular expression
    number: int = 1  # of lines that it matches from their beginning
    variables: dict = {}
    inside: str = ""  # what sbatch is typed behind
    nodes: str = "c1,c2,c3,c4,c5,c6,c7,c8"


def task(cores, threads, gpus, program):
    """Return the line of a task. What binds all processes to one core, or limits srun, is unset."""
    return f"cores {cores}, threads {threads}, GPUs {gpus}, left none: {program} "


TORCHRUN = "torchrun --nnodes={} --nproc-per-node={}"
ONE_GPU = "--cpus-per-task=2 --gpus-per-node=1"  # and two cores
NPROC = {"NPROC": 3, **EXPORTED}  # neither the cores nor the GPUs of a node
PATH = ":/usr/local/bin:/usr/bin:/bin"
ONE_CORE = "c13"  # of two hyperthreads
CONTAINER = r"--container-mounts=(/.*):\1$|--container-workdir=/.*$|ENROOT_LOGIN_SHELL=no$"


def image(name):
    return f"--container-image={name}$|{CONTAINER}"


GIVEN = {
    # each file
    **{name: Given(f"--nodes=2 {ONE_GPU} slurm/{name}.sbatch",
                   task(2, 1, 0, TORCHRUN.format(2, 3)), 2, NPROC)
       for name in ("cifar10", "cpu", "synthetic")},
    "cifar10-srun": Given(f"--nodes=2 {ONE_GPU} slurm/cifar10-srun.sbatch",
                          task("[12]", 1, 0, r"python /.*-srun-\d+.code/train.py"), 6, NPROC),
    "cpu-container": Given(f"--nodes=2 {ONE_GPU} slurm/cpu-container.sbatch",
                           task(2, 1, 0, TORCHRUN.format(2, 3)), 2,
                           {"PATH": f"pyxis:show/bin{PATH}", **NPROC}),
    "fashionmnist": Given(f"{ONE_GPU} slurm/fashionmnist.sbatch",
                          task(2, 1, 0, r"python /.*/fashionmnist-\d+.code/train.py --nproc 3"), 1,
                          {"PATH": f"smi{PATH}", "CHECKPOINT": "watched.pt", **NPROC}),
    "mnist": Given("--exclusive slurm/mnist.sbatch --epochs 3",
                   task(2, 2, "0,1", "python mnist_dp/train.py --epochs 3").strip(), 1, EXPORTED),
    # other options
    **{f"{name} without options": Given(f"slurm/{name}.sbatch", task(2, 1, "none", program),
                                        nodes="c1,c2", variables=variables)
       for name, program, variables in (("synthetic", TORCHRUN.format(1, 2), {}),
                                        ("cpu-container", TORCHRUN.format(1, 2),
                                         {"PATH": f"pyxis:show/bin{PATH}"}))},
    "two cores for one process": Given(
        f"{ONE_GPU} slurm/cifar10.sbatch",
        f"torchrun: /.*/show/bin/torchrun$|{task(2, 2, 0, TORCHRUN.format(1, 1))}", 2),
    "one core": Given("slurm/cifar10.sbatch", "One core and no GPU|" +
                      task(1, 1, "none", TORCHRUN.format(1, 1)), 2, nodes=ONE_CORE),
    **{f"{name} on one core": Given(f"-c1 slurm/{name}.sbatch", task(1, 1, "none", program),
                                    nodes=ONE_CORE)
       for name, program in (("mnist", "python"), ("synthetic", TORCHRUN.format(1, 1)))},
    "gres": Given("--nodes=2 -c2 --gres=gpu:2 slurm/cifar10.sbatch",
                  task(2, 1, "0,1", TORCHRUN.format(2, 2)), 2),
    "GPUs per task": Given("-N2 -c2 --gpus-per-task=2 slurm/cifar10-srun.sbatch",
                           task(1, 1, "0,1", "python"), 4),
    "tasks": Given("--ntasks-per-node=2 -c1 slurm/cifar10.sbatch",
                   task(2, 1, "none", TORCHRUN.format(1, 2))),
    "uneven nodes": Given("--exclusive --nodes=2 slurm/cifar10.sbatch",
                          task("[12]", 1, "0,1", TORCHRUN.format(2, 2)), 2, nodes="c8,c12"),
    "in srun": Given("slurm/cpu.sbatch", task(2, 1, "none", TORCHRUN.format(1, 2)),
                     inside="srun -c1 --gpus-per-node=2 --mem-per-cpu=500 -w c9", nodes="c9"),
    "in salloc": Given("-c2 --mem=700 slurm/cifar10-srun.sbatch", task(1, 1, "none", "python"), 2,
                       inside="salloc --mem-per-cpu=500 --gpus-per-node=1 --cpus-per-gpu=1 -n2 "
                              "-w c10", nodes="c10"),
    # images
    "file": Given("slurm/cpu-container.sbatch", image("/.*/shared disk/my.img"), 4,
                  {"PATH": f"pyxis:show/bin{PATH}", "IMAGE": "my.img"}),
    "missing file": Given("slurm/cpu-container.sbatch", image("/.*/shared disk/pytorch.sqsh"), 4,
                          {"PATH": f"pyxis:show/bin{PATH}"}),
    "name": Given("slurm/cpu-container.sbatch", image("nvcr.io#nvidia/pytorch:1"), 4,
                  {"PATH": f"pyxis:show/bin{PATH}", "IMAGE": "nvcr.io#nvidia/pytorch:1"}),
    # mistakes
    "--checkpoint": Given("slurm/cpu.sbatch --checkpoint my.pt", "error: .*CHECKPOINT="),
    "fashionmnist on two nodes": Given("-N2 slurm/fashionmnist.sbatch", "error: one node"),
}


@pytest.fixture(scope="module")
def given_jobs(lab):
    """The ids of the jobs of GIVEN. A test waits for its own."""
    (lab.folder / "my.img").touch()
    (lab.folder / "watched-gpu.log").write_text("of the first start\n")
    usual = {"VIRTUAL_ENV": lab.folder / "show", **BINDING}
    return {name: lab.sbatch(row.command, row.nodes, row.inside, **usual, **row.variables)
            for name, row in GIVEN.items()}


def tasks_of(lab, job):
    """Return the lines of SHOW."""
    return "".join(path.read_text() for path in lab.folder.glob(f"show/bin/*-{job}-[0-9]*"))


@pytest.mark.parametrize("name", GIVEN)
def test_tasks_are_given(lab, given_jobs, name):
    job = given_jobs[name]
    lab.wait_for_state(job, "FAILED")  # as SHOW does
    output = lab.output(job) + tasks_of(lab, job)
    row = GIVEN[name]
    found = re.findall(f"^(?:{row.shown})", output, re.MULTILINE)
    assert len(found) == row.number, (
        f"sbatch {row.command}: {len(found)} lines for {row.number} show {row.shown!r}:\n{output}")
    assert "goes on" not in output, f"srun does not end all tasks when one has failed:\n{output}"
    assert "srun: warning" not in output, f"srun warns:\n{output}"
    assert lab.restarts(job) == 0, f"a job that has saved nothing was requeued:\n{output}"


def test_jobs_of_a_node_use_other_ports(lab, given_jobs):
    ports = {}
    for name in ("cifar10", "cpu", "cpu-container", "synthetic"):
        lab.wait_for_state(given_jobs[name], "FAILED")
        ports[name] = re.search(r"--rdzv-endpoint=\S*:(\d+)", tasks_of(lab, given_jobs[name]))[1]
    assert len(set(ports.values())) == len(ports), f"jobs would meet at the same port: {ports}"


def test_a_job_that_requests_no_memory_gets_its_share(lab, given_jobs):
    memory = lab.show(given_jobs["cifar10"], r"MinMemory\w+")
    assert memory == "5000M", f"a core gets {memory} of a node with two cores and 10000M"


def test_log_of_gpus_is_continued_and_ends_with_the_job(lab, given_jobs):
    job = given_jobs["fashionmnist"]
    lab.wait_for_state(job, "FAILED")
    log = (lab.folder / "watched-gpu.log").read_text()
    assert log == "of the first start\ndmon -s pucm -d 5\n", f"the log of the GPUs' use is:\n{log}"
    left = lab.machines[lab.show(job, "NodeList")].exec("pgrep -x nvidia-smi; true")
    assert not left, f"nvidia-smi still runs after the job: pid {left}"


@pytest.mark.parametrize("variables, shown", [
    ("NODES=3 NPROC=8", task(2, 1, "none", TORCHRUN.format(3, 8))),
    ("", task(2, 1, "none", TORCHRUN.format(2, 2))),
])
def test_terminal_is_given(lab, variables, shown):
    output = lab.sh(f"{variables} srun -c2 bash slurm/ddp-master-node.sh || "
                    'cat "$(ls -t show/bin/torchrun-* | head -n 1)"',
                    env={"VIRTUAL_ENV": lab.folder / "show", **BINDING})
    assert re.search(f"^{shown}", output, re.MULTILINE), f"not {shown!r}:\n{output}"


# --- jobs that are disturbed ---
STARTED = r" \| epochs (\d+) to "


def wait_for_epochs(lab, job, restarts=0):
    """Wait until the job has logged epochs since it was requeued so often."""
    def logged():
        starts = lab.output(job).split(" | epochs ")[1:]
        return len(starts) == restarts + 1 and "\nepoch " in starts[restarts]

    lab.wait_for(job, f"training after {restarts} restarts", logged)


def preempt(lab, node, job):
    """Submit a job of a higher partition that requires the whole node."""
    number = lab.restarts(job) + 1
    lab.sbatch("--partition=high --exclusive --output=/dev/null --wrap=true", nodes=node)
    lab.wait_for(job, f"requeued {number} times", lambda: lab.restarts(job) == number)


def assert_resumed(lab, job, restarts, checkpoint=None):
    """The job completes, was requeued so often, resumed where it was, and has the same weights."""
    lab.wait_for_state(job, "COMPLETED")
    output = lab.output(job)
    number = lab.restarts(job)
    assert number == restarts, f"job {job} was requeued {number} times, not {restarts}:\n{output}"
    begins = [int(epoch) for epoch in re.findall(STARTED, output)]
    assert begins == sorted(set(begins)), f"job {job} trained from the epochs {begins}:\n{output}"
    checkpoint = checkpoint or f"{lab.show(job, 'JobName')}-{lab.show(job, 'JobId')}.pt"
    change = difference(lab.folder / checkpoint, lab.long_run)
    assert change == 0, (
        f"weights of job {job} differ by {change} from those of training outside Slurm:\n{output}")


# They come back. Those that take longest are first.
def lost_node(lab):
    """One job loses the node of its batch script, another one its other node."""
    jobs = [lab.sbatch(f"--nodes=2 slurm/cifar10.sbatch {LONG}", nodes,
                       SCRIPT="slow.py", SLOW_STARTS=1) for nodes in ("c5,c6,c9", "c7,c8,c9")]
    for job in jobs:
        wait_for_epochs(lab, job)
    time.sleep(3)  # until there is a checkpoint
    lab.machines[lab.show(jobs[0], "BatchHost")].kill()
    lab.machines["head"].ip("link set c8 down")  # the cable: no other machine is notified
    for job in jobs:
        assert_resumed(lab, job, 1)


def time_limit(lab):
    """Two of them. The first time, the run stops 35 s after the signal (torchrun's limit is 30).

    The checkpoint is a link, and not beside the script. Meanwhile, the script is edited: only a new
    job runs that.
    """
    (lab.folder / "others/link.pt").symlink_to(lab.root / "scratch disk.pt")
    command = f"slurm/cpu.sbatch {LONG}"
    variables = {"SCRIPT": "mine/slow.py", "CHECKPOINT": "others/link.pt", "SLOW_STARTS": 2}
    job = lab.sbatch(command, "c10", STOP_SECONDS=35, **variables)
    for number in (1, 2):
        wait_for_epochs(lab, job, restarts=number - 1)
        (lab.folder / "mine/slow.py").write_text("raise SystemExit('edited')")
        lab.sh(f"scontrol update job={job} EndTime=now+2minutes")
        lab.wait_for(job, f"requeued {number} times", lambda: lab.restarts(job) == number)
        lab.sh(f"scontrol update job={job} TimeLimit=30")
    assert_resumed(lab, job, 2, "others/link.pt")
    job = lab.sbatch(command, "c10", **variables)
    lab.wait_for_state(job, "FAILED")
    assert "edited" in lab.output(job), f"a new job runs the old script:\n{lab.output(job)}"


def controller_away(lab):
    """The controller is killed while the job stops, and started again when the job has noticed."""
    with booted(lambda folder: Lab(folder, 3)) as own_lab:  # others need their controller
        prepare(own_lab)
        job = own_lab.sbatch(f"slurm/cpu.sbatch {LONG}", "c1", SCRIPT="slow.py", SLOW_STARTS=1)
        wait_for_epochs(own_lab, job)
        log = f"cpu-{job}.out"
        own_lab.sh(f"scancel --signal=TERM {job}; "
                   f"until grep 'signal received' {log}; do sleep 0.1; done; "
                   "pkill -KILL slurmctld; "
                   f"until grep 'Unable to contact' {log}; do sleep 0.1; done; "
                   "service slurmctld restart", timeout=200)
        own_lab.long_run = lab.long_run
        assert_resumed(own_lab, job, 1)


def preempted(lab):
    """With a GraceTime, then without one."""
    job = lab.sbatch(f"--nodes=2 --partition=low slurm/cifar10.sbatch {LONG}", "c3,c4",
                     SCRIPT="slow.py", SLOW_STARTS=2)
    lab.sh("scontrol update partition=low GraceTime=60")
    wait_for_epochs(lab, job)
    preempt(lab, "c3", job)
    lab.sh("scontrol update partition=low GraceTime=0")
    wait_for_epochs(lab, job, restarts=1)
    preempt(lab, "c3", job)
    assert_resumed(lab, job, 2)


def array(lab):
    """Two tasks. Task 1 is stopped when task 0 has completed, and its job id is the array's."""
    array = lab.sbatch(f"-c2 --array=0-1 slurm/cifar10-srun.sbatch {LONG}", SCRIPT="slow.py")
    wait_for_epochs(lab, f"{array}_1")
    lab.wait_for_state(f"{array}_0", "COMPLETED")
    lab.sh(f"scancel --signal=TERM {array}_1")
    for task, restarts in (f"{array}_1", 1), (f"{array}_0", 0):
        assert_resumed(lab, task, restarts)


def preempted_before_training(lab):
    """Preempted while it imports. Slurm shows times as "Nov 26"."""
    job = lab.sbatch(f"slurm/cifar10-srun.sbatch {LONG}", "c12", NPROC=2, SCRIPT="late.py",
                     SLURM_TIME_FORMAT="Nov %d", **LEFT)
    lab.wait_for(job, "importing", lambda: "importing" in lab.output(job))
    preempt(lab, "c12", job)
    assert_resumed(lab, job, 1)


# They end for good.
def bug(lab):
    """An epoch fails whenever it is reached. An array's task seems to have submitted the job."""
    job = lab.sbatch(f"slurm/cifar10-srun.sbatch {LONG}", SCRIPT="bug.py",
                     SLURM_ARRAY_JOB_ID=98765, SLURM_ARRAY_TASK_ID=4)
    lab.wait_for(job, "requeued", lambda: lab.restarts(job) == 1)
    lab.wait_for(job, "failed for good",
                 lambda: lab.show(job, "JobState") == "FAILED" or lab.restarts(job) > 1)
    assert lab.restarts(job) == 1, f"requeued without a new checkpoint:\n{lab.output(job)}"


def cancelled(lab):
    """It was requeued by hand before."""
    job = lab.sbatch(f"--cpus-per-task=2 slurm/cifar10-srun.sbatch {LONG}", "c11",
                     SCRIPT="slow.py", SLOW_STARTS=2)
    wait_for_epochs(lab, job)
    lab.sh(f"scontrol requeue {job}")
    wait_for_epochs(lab, job, restarts=1)
    lab.sh(f"scancel {job}")
    lab.wait_for_state(job, "CANCELLED")
    time.sleep(10)  # a requeued job waits for 7 s
    state = lab.show(job, "JobState")
    output = lab.output(job)
    assert state == "CANCELLED", f"a cancelled job is {state}:\n{output}"
    begin = int(re.findall(STARTED, output)[-1])
    end = load_checkpoint(lab.folder / f"cifar10-srun-{job}.pt")["epochs_done"]
    assert 0 < begin < end < 80, f"resumed at {begin}, checkpoint of epoch {end}:\n{output}"


DISTURBED = {function.__name__: function for function in (
    lost_node, time_limit, controller_away, preempted, array, preempted_before_training, bug,
    cancelled)}


@pytest.fixture(scope="module")
def disturbed(lab, request):
    """Futures of the disturbed jobs of the chosen tests, side by side, and their final weights."""
    chosen = {item.name for item in request.session.items}
    with ThreadPoolExecutor(len(DISTURBED)) as pool:
        futures = {name: pool.submit(function, lab) for name, function in DISTURBED.items()
                   if f"test_disturbed_job[{name}]" in chosen}
        lab.long_run = lab.root / "long_run.pt"
        result = run("cpu_ddp", *LONG.split(), "--checkpoint", lab.long_run, nproc=2,
                     launcher="torchrun", timeout=600, env={"OMP_NUM_THREADS": 1})
        assert result.status == 0, f"the training outside Slurm failed:\n{result.text}"
        yield futures


@pytest.mark.parametrize("name", DISTURBED)
def test_disturbed_job(disturbed, name):
    disturbed[name].result(timeout=900)


# --- jobs that train to their end ---
class Trained(NamedTuple):
    """A job, and what it prints."""

    command: str  # sbatch COMMAND
    shown: str  # a regular expression
    number: int = 1  # of lines that match it
    variables: dict = {}
    inside: str = ""  # what sbatch is typed behind
    state: str = "COMPLETED"


TRAINED = {
    "cpu": Trained(f"--nodes=2 --export=NONE slurm/cpu.sbatch {LINEAR}", "^world size 4"),
    "mnist": Trained(f"-c2 --gpus-per-node=2 slurm/mnist.sbatch {IMAGES}",
                     "^GPUs none, threads 2 |^epoch 1/1 .* test", 2),
    "fashionmnist": Trained(f"-c2 slurm/fashionmnist.sbatch {IMAGES}",
                            "^world size 2 .* threads 1 |^saved step 2 in .*/fashionmnist-", 2),
    "cifar10": Trained(f"--nodes=2 --gpus-per-node=1 ./cifar10.sbatch {IMAGES}",
                       "^saved step 2 in .*/mine/cifar10-", 1,
                       {"SCRIPT": "my.py", "VIRTUAL_ENV": sys.prefix}, inside="cd mine &&"),
    "synthetic": Trained(f"--gpus-per-node=2 slurm/synthetic.sbatch {LINEAR}", "^world size 2"),
    "clocks": Trained(f"--nodes=2 -c1 slurm/cpu.sbatch {LINEAR}", "^world size 2|^epoch 4/4", 2,
                      {"VIRTUAL_ENV": "behind"}),
    "behind the file": Trained(  # of one process or both: torchrun may end the second before it
        "slurm/cpu.sbatch --cpus-per-task=2", r"(?s)error: [^\n]*--cpus-per-task.*",
        state="FAILED"),
}


@pytest.fixture(scope="module")
def trained_jobs(lab):
    """The ids of the jobs of TRAINED. A test waits for its own."""
    shutil.copy(lab.folder / "cifar10_ddp/train.py", lab.folder / "mine/my.py")
    shutil.copy(lab.folder / "slurm/cifar10.sbatch", lab.folder / "mine")
    return {name: lab.sbatch(row.command, "c1,c2,c3,c4", row.inside, **row.variables)
            for name, row in TRAINED.items()}


@pytest.mark.parametrize("name", TRAINED)
def test_job_trains(lab, trained_jobs, name):
    row = TRAINED[name]
    job = trained_jobs[name]
    lab.wait_for_state(job, row.state)
    output = lab.output(job)
    found = re.findall(row.shown, output, re.MULTILINE)
    assert len(found) == row.number, (
        f"{name}: {len(found)} lines for {row.number} show {row.shown!r}:\n{output}")
    assert lab.restarts(job) == 0, f"{name}: the job was requeued:\n{output}"


# --- what is left on a disk ---
@pytest.mark.parametrize("suffix, state, shown", [
    (".code/train.py", "COMPLETED", "epoch 4/4"),
    (".pt", "FAILED", "error: .*CHECKPOINT="),
])
def test_files_of_another_cluster_are_not_taken(lab, suffix, state, shown):
    """Its jobs had the same numbers. With its checkpoint, nothing would be trained."""
    job = lab.sbatch(f"--hold slurm/cpu.sbatch {LINEAR}")
    old = lab.folder / f"cpu-{job}{suffix}"
    old.parent.mkdir(exist_ok=True)
    old.write_text("print('old code')")
    lab.sh(f"scontrol release {job}")
    lab.wait_for_state(job, state)
    output = lab.output(job)
    assert re.search(shown, output), f"with an old cpu-{job}{suffix}, no {shown!r}:\n{output}"
    assert "old code" not in output, f"an old cpu-{job}{suffix} was run:\n{output}"


def test_requeued_after_a_full_disk_it_trains(lab):
    """At the first start, the disk has no room for the code."""
    (lab.folder / "small").mkdir()
    mount = f"mount -t tmpfs -o size=4k tmpfs '{lab.folder}/small'"
    lab.machines["c1"].exec(mount)
    command = f"--output=full.out slurm/cpu.sbatch {LINEAR}"
    job = lab.sbatch(command, "c1", CHECKPOINT="small/run.pt")
    lab.wait_for_state(job, "FAILED")
    assert "No space left" in lab.output(job), f"the disk is not full:\n{lab.output(job)}"
    lab.machines["c1"].exec(f"{mount} -o remount,size=10m")
    lab.sh(f"scontrol requeue {job}")
    lab.wait_for(job, "trained", lambda: "epoch 4/4" in lab.output(job))


# --- terminals ---
def test_two_terminals_train_together(lab):
    """The first prints a command; run on another node, it joins. NPROC is for both."""
    granted = lab.sh("salloc --no-shell --nodelist=c1,c2 --ntasks-per-node=1 --cpus-per-task=2",
                     timeout=300)
    job = re.search(r"allocation (\d+)", granted)[1]
    terminal = f"srun --jobid={job} --overlap --nodes=1 --ntasks=1 --nodelist="
    lab.sh(f"(NPROC=1 {terminal}c1 bash slurm/ddp-master-node.sh cpu_ddp/train.py --epochs 4 "
           ">master.log 2>&1 &)")
    shown = lab.sh("until grep '^    cd ' master.log; do sleep 0.1; done", timeout=100)
    lab.sh(f"{terminal}c2 bash -c {shlex.quote(shown.strip())}", timeout=300)
    lab.sh(f"while pgrep -x srun; do sleep 1; done; scancel {job}", timeout=300)
    shown = (lab.folder / "master.log").read_text()
    assert "world size 2" in shown, f"two terminals are not one run:\n{shown}"
    assert "epoch 4/4" in shown, f"two terminals have not trained to the end:\n{shown}"
