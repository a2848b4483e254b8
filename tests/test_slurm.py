"""The sbatch files and the two-terminal scripts, on a real Slurm of nine nodes (slurm_lab.py).

The checkpoint of a job is compared bit for bit with that of the same training outside Slurm. All jobs run side by side.
Those that are disturbed run a copy of cpu_ddp that sleeps in each step, so that there is time to disturb them.
"""

import os
import re
import shlex
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers import ROOT, SCRIPTS, assert_equal, load_checkpoint, run
from slurm_lab import Lab, running, why_not

LINEAR = ("--epochs", 4, "--samples", 256)
IMAGES = ("--epochs", 1, "--fake-data", 32, "--batch-size", 8)
LONG = ("--epochs", 40, "--samples", 256, "--save-every", 1000, "--log-every", 0)  # 160 steps of 2 processes
FILES = {  # file: script, its flags, options of sbatch, processes
    "cpu": ("cpu_ddp", LINEAR, ["--nodes=2", "--export=NONE"], 2),
    "cpu-container": ("cpu_ddp", LINEAR, ["--gpus-per-node=2"], 2),
    "mnist": ("mnist_dp", IMAGES, ["--gpus-per-node=2"], 1),
    "cifar10": ("cifar10_ddp", IMAGES, ["--nodes=2", "--gpus-per-node=1"], 2),
    "cifar10-srun": ("cifar10_ddp", IMAGES, ["--gpus-per-node=2"], 2),
    "fashionmnist": ("fashionmnist_ddp", IMAGES, [], 2),
    "synthetic": ("synthetic_ddp", LINEAR, ["--gpus-per-node=2", "--ntasks-per-node=2"], 2),
}


def test_files_differ_only_in_their_names_and_launch():
    shared = {}
    for path in (ROOT / "slurm").glob("*.sbatch"):
        head, *parts = path.read_text().replace(f"--job-name={path.stem}\n", "").split("\n\n")
        options = re.findall("^#+SBATCH.*|^set.*", head, re.MULTILINE)
        launch = re.findall(r"^srun \S+ \S+", parts[-2], re.MULTILINE)
        shared[path.stem] = (*options, parts[0], *launch, parts[-1])
    assert shared.keys() == FILES.keys() and len(set(shared.values())) == 1


# --- what the stories use ---
def submit(lab, name, *args, options=(), nodes="c1,c2", cwd=None, **env):
    """sbatch OPTIONS slurm/NAME.sbatch ARGS, on some of the nodes; return the job's id."""
    path = name if "/" in name else f"slurm/{name}.sbatch"
    others = set(lab.nodes) - set(nodes.split(","))
    return lab.sbatch(f"--exclude={','.join(others)}", *options, path, *args, env=env, cwd=cwd)


def changed(lab, old, new):
    """A copy of cpu_ddp with a change, for SCRIPT=."""
    text = (ROOT / "cpu_ddp/train.py").read_text()
    assert text.count(old) == 1
    path = lab.folder / f"changed-{abs(hash(new))}.py"
    path.write_text(text.replace(old, new))
    return path


def slow(lab, lives=1, then=""):
    """A copy of cpu_ddp that takes a second per step, until the job has been requeued `lives` times."""
    nap = f"time.sleep(int(os.environ.get('SLURM_RESTART_COUNT') or 0) < {lives})\n            {then}"
    return changed(lab, "            step += 1\n", f"            step += 1\n            {nap}\n")


def wait_for_steps(lab, job, life=0, steps=1):
    """Wait until the job has logged this many steps since it was requeued for the life-th time."""
    def logged():
        lives = lab.output(job).split(" | steps ")[1:]
        return len(lives) == life + 1 and lives[life].count("  step ") >= steps
    lab.wait_for(job, logged)


def restarts(lab, job):
    return int(lab.show(job, "Restarts"))


def preempt(lab, node, job):
    """Submit a job of a higher partition that requires the whole node."""
    before = restarts(lab, job)
    lab.sbatch("--partition=high", f"--nodelist={node}", "--exclusive", "--output=/dev/null", "--wrap=true")
    lab.wait_for(job, lambda: restarts(lab, job) == before + 1)


def tool(lab, name, text):
    """Write a program; return a PATH on which it comes first."""
    path = lab.folder / f"tools of {name}" / name
    path.parent.mkdir()
    path.write_text(f"#!/bin/bash\n{text}")
    path.chmod(0o755)
    return f"{path.parent}:{os.environ['PATH']}"


# --- stories: each submits a job, disturbs it, and returns its id ---
def three_restarts(lab):
    """Preempted with a GraceTime, and without one, then requeued by hand."""
    job = submit(lab, "cifar10", *LONG, options=["--nodes=2", "--partition=low"], nodes="c3,c4",
                 SCRIPT=slow(lab, lives=3))
    for life, grace in enumerate((60, 0)):
        lab.sh(f"scontrol update partition=low GraceTime={grace}")
        wait_for_steps(lab, job, life)
        preempt(lab, "c3", job)
    wait_for_steps(lab, job, life=2)
    lab.sh(f"scontrol requeue {job}")
    lab.wait(job, "COMPLETED")
    assert restarts(lab, job) == 3
    return job


def two_lost_nodes(lab):
    """First the node of the batch script, then, after the job was requeued, another one."""
    job = submit(lab, "cifar10", *LONG, "--save-every", 1, options=["--nodes=2"], nodes="c5,c6,c7,c8",
                 SCRIPT=slow(lab, lives=2))
    wait_for_steps(lab, job, steps=6)
    batch_host = lab.node(lab.show(job, "BatchHost"))
    batch_host.cut()
    batch_host.kill()
    wait_for_steps(lab, job, life=1, steps=6)
    nodes = lab.sh(f"scontrol show hostnames {lab.show(job, 'NodeList')}").split()
    lab.node(next(name for name in nodes if name != lab.show(job, "BatchHost"))).cut()
    lab.wait(job, "COMPLETED")
    assert restarts(lab, job) == 2
    return job


def time_limit(lab):
    """Log lines are 5 seconds apart, and the run stops 35 to 75 s after the signal: torchrun's default is 30."""
    job = submit(lab, "cpu", *LONG[:-2], options=["--cpus-per-task=2"], SCRIPT=slow(lab, then="""if step == 2:
                handler = signal.signal(signal.SIGTERM, lambda *args: (handler(*args), time.sleep(35)))"""))
    wait_for_steps(lab, job)
    lab.sh(f"scontrol update job={job} EndTime=now+3minutes")
    lab.wait_for(job, lambda: restarts(lab, job) == 1)
    lab.sh(f"scontrol update job={job} TimeLimit=30")
    lab.wait(job, "COMPLETED")
    assert restarts(lab, job) == 1
    return job


def array(lab):
    """Two tasks: one is stopped when the other has completed, and is the one whose id is the array's."""
    array = submit(lab, "cifar10", *LONG, options=["--nodes=2", "--array=0-1"],
                   SCRIPT=slow(lab, lives="int(os.environ['SLURM_ARRAY_TASK_ID'])"))
    wait_for_steps(lab, f"{array}_1")
    lab.wait(f"{array}_0", "COMPLETED")
    lab.sh(f"scancel --signal=TERM {array}_1")
    lab.wait_for(f"{array}_1", lambda: restarts(lab, f"{array}_1") == 1)
    lab.wait(f"{array}_1", "COMPLETED")
    assert restarts(lab, f"{array}_0") == 0
    return f"{array}_1"


def preempted_before_training(lab):
    nap = "print('importing', flush=True)\nif 'SLURM_RESTART_COUNT' not in os.environ:\n    time.sleep(60)\n"
    job = submit(lab, "cifar10-srun", *LONG, nodes="c9", SLURM_TIME_FORMAT="%a %T",
                 SCRIPT=changed(lab, "import torch\n", f"{nap}import torch\n"))
    lab.wait_for(job, lambda: "importing" in lab.output(job))
    preempt(lab, "c9", job)
    lab.wait(job, "COMPLETED")
    assert restarts(lab, job) == 1
    return job


def bug(lab):
    script = changed(lab, "            step += 1\n", "            step += 1\n            assert step < 70\n")
    job = submit(lab, "cifar10-srun", *LONG, "--save-every", 1, SCRIPT=script,
                 SLURM_ARRAY_JOB_ID=98765, SLURM_ARRAY_TASK_ID=4)  # as if a task of an array had submitted it
    lab.wait_for(job, lambda: restarts(lab, job) == 1)
    lab.wait(job, "FAILED")
    assert restarts(lab, job) == 1
    return job


def mistakes(lab):
    jobs = {submit(lab, file, *args, options=options): remedy for file, options, args, remedy in (
        ("cifar10-srun", [], ["--epochs", 0], "--epochs"), ("cifar10", [], [], "--fake-data"),
        ("cpu", [], ["--check", "my.pt"], "CHECKPOINT="), ("cpu", ["--export=ALL,NPROC=abc"], [], "NPROC"),
        ("fashionmnist", ["--nodes=2"], [], "one node"),
        ("mnist", ["--nodes=2"], [], "one node"))}
    for job, remedy in jobs.items():
        lab.wait(job, "FAILED")
        errors = re.findall("^(?:train.py: )?error: .*", lab.output(job), re.MULTILINE)
        assert restarts(lab, job) == 0 and len(errors) == 1 and remedy in errors[0], lab.output(job)


def cancelled(lab):
    job = submit(lab, "cifar10-srun", *LONG, SCRIPT=slow(lab))
    wait_for_steps(lab, job)
    lab.sh(f"scancel {job}")
    lab.wait(job, "CANCELLED")
    time.sleep(10)  # a requeued job waits for 7 s
    assert lab.show(job, "JobState") == "CANCELLED" and restarts(lab, job) == 0
    assert load_checkpoint(lab.folder / f"cifar10-srun-{job}.pt")["step"] < 320
    return job


def train(name):
    """The story of an undisturbed job."""
    def story(lab):
        script, flags, options, *_ = FILES[name]
        how, file = {}, name
        if name == "cpu-container":  # without pyxis: this srun writes the container's options down, and drops them
            how = {"IMAGE": "ddp.sqsh", "PATH": tool(lab, "srun", f"""for word; do
                if [[ $word == --container-* ]]; then echo "$word" >>options; else rest+=("$word"); fi
                done
                PATH={sys.prefix}/bin:$PATH exec {shutil.which("srun")} "${{rest[@]}}" """)}
        elif name == "fashionmnist":
            how = {"NPROC": 2, "PATH": tool(lab, "nvidia-smi", '[ $# = 0 ] || { echo "$*"; exec sleep 1234; }')}
            how["cwd"], file = lab.folder / "slurm", "./fashionmnist.sbatch"
        elif name == "cifar10":  # copied beside a script, with an active environment
            how |= {"cwd": lab.folder / "mine", "SCRIPT": "my.py", "PATH": f"{sys.prefix}/bin:{os.environ['PATH']}"}
            (lab.folder / "mine").mkdir()
            shutil.copy(ROOT / "cifar10_ddp/train.py", lab.folder / "mine/my.py")
            file = shutil.copy(ROOT / "slurm/cifar10.sbatch", lab.folder / "mine")
        job = submit(lab, str(file), *flags, options=options, **how)
        lab.wait(job, "COMPLETED")
        return job
    return story


RETURNS = [three_restarts, two_lost_nodes, time_limit, array, preempted_before_training]
ENDS = [bug, mistakes, cancelled]
STORIES = {story.__name__: story for story in RETURNS + ENDS} | {name: train(name) for name in FILES}


@pytest.fixture(scope="module")
def lab():
    """A cluster whose nodes share a clone of this repository, with its environment. No network, no data."""
    if reason := why_not():
        pytest.skip(reason)
    with running(Lab, 9) as lab:
        for name in (*SCRIPTS, "slurm"):
            shutil.copytree(ROOT / name, lab.folder / name)
        (lab.folder / ".venv").symlink_to(sys.prefix)
        yield lab


@pytest.fixture(scope="module")
def jobs(lab, request):
    """The stories' jobs (futures), side by side, those that take long first."""
    chosen = {item.callspec.params.get("name") for item in request.session.items if hasattr(item, "callspec")}
    with ThreadPoolExecutor(6) as pool:
        yield {name: pool.submit(story, lab) for name, story in STORIES.items() if name in chosen}


@pytest.fixture(scope="module")
def outside(tmp_path_factory):
    """outside(script, flags, nproc) is the checkpoint of that training outside Slurm."""
    folder, known = tmp_path_factory.mktemp("outside"), {}

    def train(script, flags, nproc):
        key = script, flags, nproc
        if key not in known:
            known[key] = folder / f"{len(known)}.pt"
            result = run(script, *flags, "--checkpoint", known[key], launcher="srun", nproc=nproc, timeout=600,
                         env={"OMP_NUM_THREADS": 1})
            assert result.status == 0, result.text
        return known[key]
    return train


# --- the tests ---
@pytest.mark.parametrize("name", FILES)
def test_trains(lab, jobs, outside, name):
    script, flags, _, nproc = FILES[name]
    reference = outside(script, flags, nproc)
    job = jobs[name].result(timeout=1800)
    folder = lab.folder / {"cifar10": "mine", "fashionmnist": "slurm"}.get(name, ".")
    assert_equal(folder / f"{name}-{job}.pt", reference)
    if name == "cpu-container":
        assert (lab.folder / "options").read_text().splitlines() == [
            f"--container-image={lab.folder}/ddp.sqsh", f"--container-mounts={lab.folder}:{lab.folder}",
            f"--container-workdir={lab.folder}"]
    if name == "fashionmnist":
        assert (folder / f"fashionmnist-{job}-gpu.log").read_text() == "dmon -s pucm -d 5\n"
        assert not any(lab.node(node).exec("pgrep -fx 'sleep 1234'; true") for node in ("c1", "c2"))


@pytest.mark.parametrize("name", [story.__name__ for story in RETURNS])
def test_comes_back_and_ends_with_the_same_weights(lab, jobs, outside, name):
    reference = outside("cpu_ddp", LONG, 1 if name == "preempted_before_training" else 2)
    job = jobs[name].result(timeout=1800)
    assert_equal(lab.folder / f"{lab.show(job, 'JobName')}-{lab.show(job, 'JobId')}.pt", reference)
    if name != "preempted_before_training":
        begins = [int(step) for step in re.findall(r" \| steps (\d+) to", lab.output(job))]
        assert len(begins) == restarts(lab, job) + 1 and begins == sorted(set(begins))  # each life made progress


@pytest.mark.parametrize("name", [story.__name__ for story in ENDS])
def test_ends_for_good(jobs, name):
    jobs[name].result(timeout=1800)


def test_two_terminals(lab, outside):
    """The first prints a command; run on another node, it joins. NPROC is for both."""
    granted = lab.sh("salloc --no-shell --nodelist=c1,c2 --ntasks-per-node=1 --cpus-per-task=2 2>&1", 600)
    job = re.search(r"allocation (\d+)", granted)[1]
    terminal = f"srun --jobid={job} --overlap --nodes=1 --ntasks=1 --nodelist="
    flags = shlex.join(map(str, [*LINEAR, "--checkpoint", "two.pt"]))
    lab.sh(f"cd slurm; NPROC=1 {terminal}c1 bash ddp-master-node.sh cpu_ddp/train.py {flags} >../master.log 2>&1 &")
    log, deadline = lab.folder / "master.log", time.monotonic() + 300
    while not (line := re.search(r"^    (cd .*)$", log.read_text() if log.exists() else "", re.MULTILINE)):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    lab.sh(f"{terminal}c2 bash -c {shlex.quote(line[1])}; while pgrep -x srun; do sleep 1; done; scancel {job}", 600)
    assert_equal(lab.folder / "two.pt", outside("cpu_ddp", LINEAR, 2))


def test_processes_have_their_cores_and_gpus():
    """Slurm binds tasks to cores here. (In the other tests several nodes share the two cores of a machine.)"""
    class Bound(Lab):
        cores = {"c1": 2, "c2": 1}
        settings = Lab.settings | {"TaskPlugin": "task/affinity"}

    if reason := why_not():
        pytest.skip(reason)
    with running(Bound, 2) as lab:
        (lab.folder / ".venv").symlink_to(sys.prefix)
        (lab.folder / "probe.py").write_text(  # one write: processes share the output
            "import os; os.write(1, b'cores %s gpus %s\\n' % (' '.join(map(str, os.sched_getaffinity(0))).encode(), "
            "os.environb.get(b'CUDA_VISIBLE_DEVICES', b'none')))")
        two = "--cpus-per-task=2"
        for name, options, cores, gpus in (
                ("cpu", [two], [2, 2], "none"), ("cifar10-srun", [two], [1, 1], "none"), ("mnist", [two], [2], "none"),
                ("fashionmnist", [two], [2], "none"), ("cifar10-srun", [two, "--gpus-per-task=2"], [1, 1], "0,1"),
                ("cpu", ["--exclusive", "--nodes=2"], [1, 1, 1, 1], "0,1")):
            job = lab.sbatch(*options, ROOT / f"slurm/{name}.sbatch", env={"SCRIPT": "probe.py"})
            lab.wait(job, "COMPLETED")
            seen = [(set(some.split()), gpu) for some, gpu in re.findall("cores (.*) gpus (.*)", lab.output(job))]
            assert [(len(some), gpu) for some, gpu in seen] == [(some, gpus) for some in cores], lab.output(job)
            assert len(set.union(*(some for some, _ in seen))) == 2 or len(cores) == 4, (name, lab.output(job))
