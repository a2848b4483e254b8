"""The sbatch files, srun and the two-terminal scripts, on a real Slurm of ten nodes (slurm_lab.py).

A story submits a job and disturbs it. All stories run side by side; the tests look at what they
left behind. The final weights are compared bit for bit with those of the same training outside
Slurm. Jobs that are disturbed run a copy of a script that sleeps in each step, so that there is
time to do it.
"""

import re
import shlex
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor

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


def test_every_file_is_tested():
    names = sorted(path.stem for path in (ROOT / "slurm").glob("*.sbatch"))
    assert names == sorted(RESUMED + PLAIN), "slurm/*.sbatch and this test name other files"


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


def test_container_starts_the_same_processes():
    launch = [line for line in sections("cpu-container")[2] if "--container-" not in line]
    for line in sections("cpu")[2][1:]:
        assert line in launch, f"cpu-container.sbatch lacks what cpu.sbatch has:\n{line}"


@pytest.mark.parametrize("name", PLAIN)
def test_set_up_of_plain_files_is_that_of_the_others(name):
    other = set(sections(name)[1]) - set(sections("cifar10")[1])
    assert other <= {"export OMP_NUM_THREADS=$cores"}, f"{name}.sbatch has other lines: {other}"


def test_terminals_choose_their_environment_as_jobs_do():
    worker = (ROOT / "slurm/ddp-worker-node.sh").read_text()
    choice = "\n".join(sections("cifar10")[1]).partition("# The active")[2].partition("cores=")[0]
    assert choice in worker, f"ddp-worker-node.sh has not the lines of cifar10.sbatch:\n{choice}"


@pytest.mark.parametrize("name", RESUMED + PLAIN)
def test_length(name):
    lines = sum(map(len, sections(name))) + len(sections(name)) - 1
    assert lines <= (36 if name in PLAIN else 55), f"{name}.sbatch has {lines} lines"


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


STORIES = {}


def story(function):
    """Make a story a fixture: what it returned, when it has ended."""
    name = function.__name__
    STORIES[name] = function

    @pytest.fixture(scope="module", name=name)
    def wait_for_its_end(stories):
        return stories[name].result(timeout=900)

    return wait_for_its_end


@pytest.fixture(scope="module")
def stories(lab, request):
    """The stories (futures) that the chosen tests name, side by side, in the order of this file."""
    named = set()
    for item in request.session.items:
        named.update(item.fixturenames)
    with ThreadPoolExecutor(8) as pool:
        started = {}
        for name, function in STORIES.items():
            if name in named:
                started[name] = pool.submit(function, lab)
        yield started


def submit(lab, file, *args, options=(), nodes="c1,c2", cwd=None, inside="", **variables):
    """sbatch OPTIONS FILE ARGS, on some of the nodes; return the job's id."""
    if file in RESUMED + PLAIN:
        file = f"slurm/{file}.sbatch"
    exclude = f"--exclude={','.join(sorted(set(lab.nodes) - set(nodes.split(','))))}"
    return lab.sbatch(exclude, *options, file, *args, env=variables, cwd=cwd, inside=inside)


def train_outside(lab, script, flags, nproc, name):
    """Train without Slurm, and return the path of the checkpoint."""
    path = lab.root / f"{name}.pt"
    result = run(lab.folder / script / "train.py", *flags, "--checkpoint", path, nproc=nproc,
                 launcher="torchrun", timeout=600, env={"OMP_NUM_THREADS": 1})
    assert result.status == 0, f"the training outside Slurm failed:\n{result.text}"
    return path


def changed(lab, name, old, new, script="cpu_ddp"):
    """Write a copy of a script with a change, and return its path, for SCRIPT=."""
    text = (lab.folder / script / "train.py").read_text()
    assert text.count(old) == 1, f"{script}/train.py has {text.count(old)} times {old!r}, not once"
    path = lab.folder / f"changed_for_{name}.py"
    path.write_text(text.replace(old, new))
    return path


def slow(lab, name, lives="1", seconds=0.5, then="", script="cpu_ddp"):
    """A copy of a script whose steps take longer, until the job was requeued `lives` times."""
    step = f"""\
            step += 1
            if int(os.environ.get("SLURM_RESTART_COUNT") or 0) < {lives}:
                time.sleep({seconds})
{then}"""
    return changed(lab, name, "            step += 1\n", step, script)


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


def assert_resumed(lab, job, restarts, path, reference):
    """The job was requeued so often, went on where it was, and its weights are the reference's."""
    output = lab.output(job)
    number = lab.restarts(job)
    assert number == restarts, f"job {job} was requeued {number} times, not {restarts}:\n{output}"
    begins = [int(step) for step in re.findall(r" \| steps (\d+) to", output)]
    assert begins == sorted(set(begins)), f"job {job} trained from the steps {begins}:\n{output}"
    try:
        assert_equal(path, reference)
    except (AssertionError, OSError) as error:
        raise AssertionError(f"job {job} ended with another checkpoint than the same training "
                             f"outside Slurm: {error}\n{output}") from None


# --- jobs that come back: the longest stories first ---
@story
def long_run(lab):
    return train_outside(lab, "cpu_ddp", LONG, 2, "long_run")


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
    lab.wait(job, "COMPLETED")
    return job


def test_job_whose_nodes_are_lost_resumes_on_others(lab, lost_nodes, long_run):
    assert_resumed(lab, lost_nodes, 2, lab.folder / f"cifar10-{lost_nodes}.pt", long_run)


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
    lab.wait(job, "COMPLETED")
    return job


def test_job_at_its_time_limit_resumes(lab, time_limit, long_run):
    assert_resumed(lab, time_limit, 1, lab.folder / "scratch/time_limit.pt", long_run)


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
    lab.wait(job, "COMPLETED")
    return job


def test_preempted_job_resumes(lab, preempted, long_run):
    assert_resumed(lab, preempted, 3, lab.folder / "scratch/preempted.pt", long_run)


@story
def array(lab):
    """Two tasks. Task 1 is stopped when task 0 has completed, and its job id is the array's."""
    array = submit(lab, "cifar10", *LONG, options=["--nodes=2", "--cpus-per-task=1", "--array=0-1"],
                   SCRIPT=slow(lab, "array", lives='int(os.environ["SLURM_ARRAY_TASK_ID"])'))
    wait_for_steps(lab, f"{array}_1")
    lab.wait(f"{array}_0", "COMPLETED")
    lab.sh(f"scancel --signal=TERM {array}_1")
    wait_for_restart(lab, f"{array}_1", 1)
    lab.wait(f"{array}_1", "COMPLETED")
    return array


@pytest.mark.parametrize("task, restarts", [(0, 0), (1, 1)])
def test_only_the_stopped_task_of_an_array_is_requeued(lab, array, long_run, task, restarts):
    job = f"{array}_{task}"
    path = lab.folder / f"cifar10-{lab.show(job, 'JobId')}.pt"
    assert_resumed(lab, job, restarts, path, long_run)


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
    lab.wait(job, "COMPLETED")
    return job


def test_job_preempted_before_training_is_requeued(lab, preempted_before_training, long_run):
    job = preempted_before_training
    assert_resumed(lab, job, 1, lab.folder / f"cifar10-srun-{job}.pt", long_run)


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
    return job


def test_job_with_a_bug_is_requeued_only_while_it_makes_progress(lab, bug):
    assert lab.restarts(bug) == 1, f"requeued without a new checkpoint:\n{lab.output(bug)}"


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
    return job


def test_only_sigterm_requeues_a_job(lab, cancelled):
    restarts = lab.restarts(cancelled)
    assert restarts == 1, f"after SIGTERM and scancel, requeued {restarts} times, not once"
    state = lab.show(cancelled, "JobState")
    assert state == "CANCELLED", f"a cancelled job is {state}:\n{lab.report(cancelled)}"


def test_cancelled_job_has_saved(lab, cancelled):
    output = lab.output(cancelled)
    begin = int(re.findall(r" \| steps (\d+) to", output)[-1])
    step = load_checkpoint(lab.folder / "scratch/cancelled.pt")["step"]
    assert 0 < begin < step < 160, f"resumed at {begin}, checkpoint of step {step}:\n{output}"


# What is wrong: options, file, arguments; and what the error line names.
MISTAKES = {
    "epochs": ([], "cifar10-srun", ["--epochs", 0], "at least 1"),
    "checkpoint": ([], "cpu", ["--checkpoint", "my.pt"], "CHECKPOINT="),
    "option of sbatch": ([], "cpu", ["--cpus-per-task=2"], "--cpus-per-task"),
    "two nodes": (["--nodes=2"], "fashionmnist", [], "one node"),
}


@pytest.fixture(scope="module")
def mistakes(lab):
    """The ids of the jobs of MISTAKES. A test waits for its own."""
    jobs = {}
    for mistake, (options, file, args, _) in MISTAKES.items():
        jobs[mistake] = submit(lab, file, *args, options=options)
    return jobs


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_ends_the_job_in_an_error_line(lab, mistakes, mistake):
    lab.wait(mistakes[mistake], "FAILED")
    output = lab.output(mistakes[mistake])
    errors = re.findall("^(?:.*train.py: )?error: .*", output, re.MULTILINE)
    assert errors, f"{mistake}: no error line:\n{output}"
    assert MISTAKES[mistake][-1] in errors[0], f"{mistake}: another error line:\n{output}"
    assert lab.restarts(mistakes[mistake]) == 0, f"{mistake} is requeued:\n{output}"


# --- each file, undisturbed, with what is particular to it ---
def write_program(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


@pytest.fixture(scope="module")
def undisturbed(lab):
    """The ids of jobs, by the name of their file."""
    # nvidia-smi, and srun where there is no pyxis, show their options
    write_program(lab.folder / "tools/nvidia-smi", '[[ $# = 0 ]] || { echo "$*"; sleep 1234; }')
    write_program(lab.folder / "pyxis/srun", 'printf "%s\\n" "$@"')
    mine = lab.folder / "mine"
    mine.mkdir()
    shutil.copy(lab.folder / "cifar10_ddp/train.py", mine / "my.py")
    shutil.copy(lab.folder / "slurm/cifar10.sbatch", mine)
    path = ":/usr/local/bin:/usr/bin:/bin"
    return {
        "cpu": submit(lab, "cpu", *LINEAR, options=["--nodes=2", "--export=NONE"]),
        "cpu-container": submit(lab, "cpu-container", IMAGE="my.sqsh",
                                PATH=f"{lab.folder}/pyxis{path}"),
        "mnist": submit(lab, "mnist", *IMAGES, options=["--gpus-per-node=2"]),
        "cifar10": submit(lab, mine / "cifar10.sbatch", *IMAGES, cwd=mine, SCRIPT="my.py",
                          options=["--nodes=2", "--gpus-per-node=1"], VIRTUAL_ENV=sys.prefix),
        "fashionmnist": submit(lab, "./fashionmnist.sbatch", *IMAGES, cwd=lab.folder / "slurm",
                               NPROC=2, PATH=f"{lab.folder}/tools{path}"),
        "synthetic": submit(lab, "synthetic", *LINEAR, options=["--gpus-per-node=2"]),
    }


@pytest.mark.parametrize("name, shown, checkpoint", [
    ("cpu", "world size 4", "cpu-JOB.pt"),
    ("mnist", "epoch 1/1", None),
    ("cifar10", "world size 2", "mine/cifar10-JOB.pt"),
    ("fashionmnist", "world size 2", "slurm/fashionmnist-JOB.pt"),
    ("synthetic", "world size 2", None),
])
def test_job_completes(lab, undisturbed, name, shown, checkpoint):
    job = undisturbed[name]
    lab.wait(job, "COMPLETED")
    output = lab.output(job)
    assert shown in output, f"{name}.sbatch: not {shown}:\n{output}"
    if checkpoint:
        path = lab.folder / checkpoint.replace("JOB", str(job))
        assert path.exists(), f"{name}.sbatch has not saved where it was submitted:\n{output}"


def test_container_has_the_image_and_the_current_folder(lab, undisturbed):
    lab.wait(undisturbed["cpu-container"], "COMPLETED")
    options = re.findall("^--container.*", lab.output(undisturbed["cpu-container"]), re.MULTILINE)
    assert options == [
        f"--container-image={lab.folder}/my.sqsh",
        f"--container-mounts={lab.folder}:{lab.folder}",
        f"--container-workdir={lab.folder}",
    ], f"srun got other options of a container: {options}"


def test_log_of_gpus_is_written_and_ends_with_the_job(lab, undisturbed):
    job = undisturbed["fashionmnist"]
    lab.wait(job, "COMPLETED")
    log = (lab.folder / f"slurm/fashionmnist-{job}-gpu.log").read_text()
    assert log == "dmon -s pucm -d 5\n", f"the log of the GPUs' use has other content:\n{log}"
    left = lab.node(lab.show(job, "NodeList")).exec("pgrep -x nvidia-smi; true")
    assert not left, f"nvidia-smi still runs after the job: pid {left}"


# --- processes, cores and GPUs: jobs that run the probe ---
OUTER_GPU = "srun -c1 --gpus-per-node=2 --mem-per-cpu=500"
# File, options, number of processes, what each has; and where sbatch is typed.
PROBES = {
    "nothing": ("cifar10", "", 1, "cores 1 threads 1 GPUs none", ""),
    "cpu": ("cpu", "", 2, "cores 2 threads 1 GPUs none", ""),
    "gres": ("cifar10", "--nodes=2 -c2 --gres=gpu:2", 4, "cores 2 threads 1 GPUs 0,1", ""),
    "gres, srun": ("cifar10-srun", "--nodes=2 -c2 --gres=gpu:2", 4,
                   "cores 1 threads 1 GPUs 0,1", ""),
    "gpus": ("cifar10", "--nodes=2 --gpus=4", 4, "cores 1 threads 1 GPUs 0,1", ""),
    "GPUs per task": ("cifar10-srun", "-c2 --gpus-per-task=2", 2, "cores 1 threads 1 GPUs 0,1", ""),
    "tasks": ("cifar10", "--ntasks-per-node=2 -c1", 2, "cores 2 threads 1 GPUs none", ""),
    "tasks, srun": ("cifar10-srun", "--ntasks-per-node=2 -c1 --gres=gpu:2", 2,
                    "cores 1 threads 1 GPUs 0,1", ""),
    "mnist": ("mnist", "-c2", 1, "cores 2 threads 2 GPUs none", ""),
    "fashionmnist": ("fashionmnist", "-c2", 1, "cores 2 threads 1 GPUs none", ""),
    "in srun": ("cpu", "-w c1", 2, "cores 2 threads 1 GPUs none", OUTER_GPU + " -w c1"),
    "in salloc": ("cpu", "", 2, "cores 2 threads 1 GPUs none",
                  "salloc --mem-per-cpu=500 --gpus-per-node=1 --cpus-per-gpu=1"),
    "in salloc, srun": ("cifar10-srun", "-c2 --mem=700", 2, "cores 1 threads 1 GPUs none",
                        "salloc --mem-per-cpu=500 --gpus-per-node=1 -n2"),
}


@pytest.fixture(scope="module")
def probes(lab):
    """The ids of jobs that run the probe. A test waits for its own."""
    jobs = {}
    for name, (file, options, *_, inside) in PROBES.items():
        jobs[name] = submit(lab, file, options=options.split(), SCRIPT="probe.py", inside=inside,
                            OMP_PROC_BIND="true")
    uneven = ["--exclusive", "--nodes=2"]
    jobs["exclusive"] = submit(lab, "cifar10", options=uneven, nodes="c9,c10", SCRIPT="probe.py")
    return jobs


@pytest.mark.parametrize("name", PROBES)
def test_processes_of_a_job(lab, probes, name):
    lab.wait(probes[name], "COMPLETED")
    output = lab.output(probes[name])
    *_, number, expected, _ = PROBES[name]
    found = re.findall("^process: (.*)", output, re.MULTILINE)
    assert found == [expected] * number, f"{name}: not {number} times {expected!r}:\n{output}"
    assert "srun:" not in output, f"{name}: srun warns:\n{output}"


def test_exclusive_nodes_give_all_their_gpus(lab, probes):
    """One node has two cores, the other one: each process has one thread."""
    lab.wait(probes["exclusive"], "COMPLETED")
    output = lab.output(probes["exclusive"])
    assert output.count("threads 1 GPUs 0,1\n") == 4, f"not 4 processes with 2 GPUs:\n{output}"


@pytest.mark.parametrize("name, advice", [("nothing", True), ("cpu", False), ("gpus", False)])
def test_only_a_job_with_one_core_and_no_gpu_says_how_to_request_more(lab, probes, name, advice):
    lab.wait(probes[name], "COMPLETED")
    output = lab.output(probes[name])
    assert output.startswith("One core and no GPU.") == advice, f"{name}: advice:\n{output}"


# --- environments: each has a torchrun that prints its name ---
# What is there beside a torchrun in the home and on PATH, and the one that is used
ENVIRONMENTS = {
    "home": ({}, []),
    ".conda": ({}, [".conda"]),
    ".venv": ({}, [".conda", ".venv"]),
    "conda": ({"CONDA_PREFIX": "conda"}, [".venv", "conda"]),
    "base, without torchrun": ({"CONDA_PREFIX": "base"}, [".venv"]),
    "venv": ({"CONDA_PREFIX": "conda", "VIRTUAL_ENV": "venv"}, [".venv", "conda", "venv"]),
    "module": ({"LOADEDMODULES": "pytorch", "PATH": "module/bin"}, [".venv", "module"]),
    "another module": ({"LOADEDMODULES": "gcc"}, [".venv"]),
}
USED = {"base, without torchrun": ".venv", "another module": ".venv"}


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_environment_of_a_job(lab, tmp_path, name):
    variables, folders = ENVIRONMENTS[name]
    project = lab.folder / f"with {name}"
    for folder in [*folders, "home"]:
        write_program(project / folder / "bin/torchrun", f'echo "used: {folder}"')
    env = {"HOME": project / "home", "PATH": f"{project}/home/bin:/usr/bin:/bin"}
    for variable, value in variables.items():
        env[variable] = f"{project}/{value}"
    if "PATH" in variables:
        env["PATH"] += ":/usr/bin:/bin"
    (project / "train.py").touch()
    job = submit(lab, lab.folder / "slurm/cifar10.sbatch", cwd=project, SCRIPT="train.py", **env)
    lab.wait(job, "COMPLETED")
    output = lab.output(job)
    assert f"used: {USED.get(name, name)}\n" in output, f"not {USED.get(name, name)}:\n{output}"


# --- terminals ---
@pytest.fixture(scope="module")
def two_terminals(lab):
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
    return log.read_text()


def test_two_terminals_train_together(lab, two_terminals):
    assert "world size 2" in two_terminals, f"two terminals are not one run:\n{two_terminals}"
    step = load_checkpoint(lab.folder / "two.pt")["step"]
    assert step == 16, f"two terminals have trained {step} steps, not 16:\n{two_terminals}"


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
    shown = in_terminal(lab, "srun --ntasks=2 --pty ./shell", TRAIN)
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
