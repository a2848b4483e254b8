"""The sbatch files and the two-terminal scripts, on a real Slurm of three nodes (slurm_lab.py).

A job's result is compared, bit for bit, with the same training outside Slurm. Where a test needs time to disturb a
run, it runs a copy of the script that sleeps after every step.
"""

import os
import re
import shlex
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from threading import Lock

import pytest
from conftest import ROOT
from helpers import SCRIPTS, differences, load_snapshot, run
from slurm_lab import Lab, running

SBATCH = {path.stem: path for path in sorted((ROOT / "slurm").glob("*.sbatch"))}
THREADS = 1         # of each worker, in Slurm and outside
PREEMPTIONS = 10
STARTING = Lock()   # one cluster after the other: a new one removes the remains of others


# --- the files ---

def test_shared_blocks_are_equal():
    files = [*SBATCH.values(), ROOT / "slurm/ddp-master-node.sh", ROOT / "slurm/ddp-worker-node.sh"]
    blocks = {}
    for path in files:
        text = path.read_text()
        assert text.count("# --- shared:") == text.count("# --- end ---"), path
        for name, block in re.findall(r"# --- shared: (.*?) ---\n(.*?)# --- end ---", text, re.DOTALL):
            blocks.setdefault(name, {})[path.name] = block
    assert {"start", "environment", "workers", "meeting point", "run"} <= blocks.keys()
    for name, copies in blocks.items():
        assert len(copies) > 1, f"only {list(copies)} has {name}"
        assert len(set(copies.values())) == 1, f"{name} differs between {', '.join(copies)}"
    for name in "start", "workers", "run":
        assert len(blocks[name]) == len(SBATCH)


def test_every_script_has_its_sbatch_files():
    assert set(SBATCH) == {"cpu", "cpu-container", "mnist", "cifar10", "cifar10-srun", "fashionmnist", "synthetic"}
    assert {re.search(r"^folder=(\w+)$", path.read_text(), re.MULTILINE)[1] for path in SBATCH.values()} == set(SCRIPTS)


@pytest.mark.parametrize("path", SBATCH.values(), ids=SBATCH)
def test_options_are_read(path):
    """#SBATCH lines after the first command, or misspelt ones, would be ignored silently; a gres line would not do on CPUs."""
    lines = path.read_text().splitlines()
    first = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    options = [line for line in lines if re.match(r"#\s*SBATCH", line)]
    assert options == [line for line in lines[:first] if line.startswith("#SBATCH --")]
    assert {"#SBATCH --requeue", "#SBATCH --open-mode=append", "#SBATCH --output=%x-%j.out"} <= set(options)
    assert not re.search("gres|gpus|partition|account", " ".join(options))


@pytest.mark.parametrize("path", SBATCH.values(), ids=SBATCH)
def test_sbatch_takes_it(slurm_lab, path):
    assert "to start at" in slurm_lab.sh(f"sbatch --test-only --nodes=2 {shlex.quote(str(path))}")


# --- what the tests use ---

@pytest.fixture(scope="module")
def project(slurm_lab):
    """A clone on the shared disk, in a folder with a space, its environment where the sbatch files look for it."""
    top = slurm_lab.folder / "a project"
    for name in (*SCRIPTS, "slurm"):
        shutil.copytree(ROOT / name, top / name)
    (top / ".venv").symlink_to(sys.prefix)
    return top


@pytest.fixture(scope="module")
def stories(project, request):
    """What takes long runs beside the other tests, each story in a cluster of its own."""
    wanted = [name for name in STORIES if any(name in item.name for item in request.session.items)]
    with ThreadPoolExecutor(len(STORIES)) as pool:
        yield {name: pool.submit(tell, name, project) for name in wanted}


def tell(name, project):
    here = project.parent / name
    here.mkdir()
    with ExitStack() as stack:
        with STARTING:
            lab = stack.enter_context(running(Lab))
        return STORIES[name](lab, project, here)


@pytest.fixture(scope="module")
def lab(slurm_lab, stories):
    return slurm_lab


@pytest.fixture
def here(slurm_lab, request):
    """An empty folder of the shared disk, to submit from."""
    folder = slurm_lab.folder / re.sub(r"\W+", "-", request.node.name)
    folder.mkdir()
    return folder


def changed(project, script, old, new):
    """A copy of a script with a change, for SCRIPT=."""
    text = (project / script / "train.py").read_text()
    assert text.count(old) == 1, f"{script} has not one {old!r}"
    path = project / f"{script}-{abs(hash(new))}.py"
    path.write_text(text.replace(old, new))
    return path


def slow(project, script="cpu_ddp", seconds=0.5, lives=1):
    """A copy that sleeps after every step of its first lives, so that there is time to disturb them."""
    nap = f"time.sleep({seconds} * (int(os.environ.get('SLURM_RESTART_COUNT') or 0) < {lives}))"
    return changed(project, script, "            step += 1\n", f"            step += 1\n            {nap}\n")


def submit(lab, project, here, name, *args, options=(), **env):
    """sbatch OPTIONS slurm/NAME.sbatch ARGS. The nodes have GPUs, so CPU=1 is said, unless env says CPU=None."""
    env = {"CPU": 1, "OMP_NUM_THREADS": THREADS, **env}
    path = Path(name) if "/" in str(name) else project / f"slurm/{name}.sbatch"
    return lab.sbatch(*options, path, *args, cwd=here, env={key: value for key, value in env.items() if value is not None})


def output(lab, job):
    path = Path(lab.show(job)["StdOut"])
    return path.read_text(errors="replace") if path.exists() else ""


def wait_for(lab, job, condition, timeout=120):
    """Until condition() holds."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, lab.report(job)
        time.sleep(0.1)


def wait_for_epoch(lab, job, life=1):
    """Until the job, in its first life or a later one, has trained an epoch."""
    wait_for(lab, job, lambda: len(hosts(lab, job)) == life and "\nepoch " in output(lab, job).split(" | steps ")[-1])


def restarts(lab, job):
    return int(lab.show(job)["Restarts"])


def hosts(lab, job):
    """What each life's first line tells of the workers: [(4, ["c1", "c2"])]."""
    found = re.findall(r"^\w+_d\w+: (\d+) workers? on ([^|]*) \|", output(lab, job), re.MULTILINE)
    return [(int(workers), names.split(", ")) for workers, names in found]


def preempt(lab, nodes, *jobs):
    """By a job of a higher partition that wants all of these nodes."""
    before = [restarts(lab, job) for job in jobs]
    lab.sbatch("--partition=high", f"--nodelist={nodes}", "--exclusive", "--output=/dev/null", "--wrap=true")
    for job, count in zip(jobs, before):
        wait_for(lab, job, lambda: restarts(lab, job) == count + 1, timeout=60)


@pytest.fixture(scope="module")
def outside(tmp_path_factory):
    """outside(script, flags, workers) is the snapshot of the same training outside Slurm, without disturbance."""
    folder, known = tmp_path_factory.mktemp("outside"), {}

    def train(script, *flags, workers=1):
        key = (script, *map(str, flags), workers)
        if key not in known:
            known[key] = folder / f"{len(known)}.pt"
            result = run(script, *flags, "--checkpoint", known[key], launcher="torchrun" if workers > 1 else "python",
                         workers=workers, timeout=300, env={"OMP_NUM_THREADS": THREADS})
            assert result.status == 0, result.stderr
        return known[key]

    return train


def assert_same(text, path, other):
    different = differences(load_snapshot(path), load_snapshot(other))
    assert not different, f"{path} differs from {other} in {different}\n{text}"


def completed(lab, here, job, timeout=240):
    """Wait for the job's good end; return the path of its snapshot."""
    lab.wait(job, "COMPLETED", timeout=timeout)
    return here / f"{lab.show(job)['JobName']}-{job}.pt"


# --- every file runs, and what it trains is what is trained outside Slurm ---

LINEAR = ["--epochs", 4, "--samples", 256]
IMAGES = ["--epochs", 1, "--fake-data", 64, "--batch-size", 16]


def test_cpu_on_two_nodes(lab, project, here, outside):
    job = submit(lab, project, here, "cpu", *LINEAR, options=["--nodes=2"])
    snapshot = completed(lab, here, job)
    assert hosts(lab, job) == [(2, ["c1", "c2"])]
    assert_same(output(lab, job), snapshot, outside("cpu_ddp", *LINEAR, workers=2))


def test_cifar10_copied_to_an_empty_folder_on_two_nodes(lab, project, here, outside):
    shutil.copy(project / "slurm/cifar10.sbatch", here)
    shutil.copy(project / "cifar10_ddp/train.py", here)
    job = submit(lab, project, here, here / "cifar10.sbatch", *IMAGES,
                 options=["--nodes=2", "--cpus-per-task=2"], VENV=sys.prefix)
    snapshot = completed(lab, here, job)
    assert hosts(lab, job) == [(4, ["c1", "c2"])]
    assert_same(output(lab, job), snapshot, outside("cifar10_ddp", *IMAGES, workers=4))


def test_cifar10_srun_starts_a_worker_per_gpu(lab, project, here, outside):
    """The GPUs are granted by Slurm but are no GPUs: what is shown is only how many workers start."""
    job = submit(lab, project, here, "cifar10-srun", *IMAGES, options=["--gpus-per-node=2"], CPU=None)
    snapshot = completed(lab, here, job)
    assert [workers for workers, _ in hosts(lab, job)] == [2]
    assert_same(output(lab, job), snapshot, outside("cifar10_ddp", *IMAGES, workers=2))


def test_fashionmnist_and_its_log_of_gpus(lab, project, here, outside):
    """nvidia-smi is a stand-in that knows dmon."""
    tools = here / "bin"
    tools.mkdir()
    (tools / "nvidia-smi").write_text("#!/bin/sh\necho \"$*\"; [ \"$*\" != 'dmon -s pucm -d 5' ] || exec sleep 1000\n")
    (tools / "nvidia-smi").chmod(0o755)
    job = submit(lab, project, here, "fashionmnist", *IMAGES, options=["--cpus-per-task=2"],
                 PATH=f"{tools}:{os.environ['PATH']}")
    snapshot = completed(lab, here, job)
    assert [workers for workers, _ in hosts(lab, job)] == [2]
    assert_same(output(lab, job), snapshot, outside("fashionmnist_ddp", *IMAGES, workers=2))
    assert (here / f"fashionmnist-{job}-gpu.log").read_text() == "dmon -s pucm -d 5\n"


def test_mnist_named_environment(lab, project, here, outside):
    """CONDA_ENV=NAME asks conda, here a stand-in, for the folder; MODULES are loaded, here by a stand-in, before."""
    tools = here / "bin"
    tools.mkdir()
    (tools / "conda").write_text(f"#!/bin/sh\n[ \"$*\" != 'run --name mine printenv CONDA_PREFIX' ] || echo {sys.prefix}\n")
    (tools / "conda").chmod(0o755)
    job = submit(lab, project, here, "mnist", *IMAGES, CONDA_ENV="mine", MODULES="cuda/12 python", CONDA_EXE=tools / "conda",
                 **{"BASH_FUNC_module%%": '() { echo "module: $*"; }'})
    snapshot = completed(lab, here, job)
    assert "module: load cuda/12 python\n" in output(lab, job)
    assert_same(output(lab, job), snapshot, outside("mnist_dp", *IMAGES))


def test_synthetic_with_a_checkpoint_of_its_own(lab, project, here, outside):
    mine = here / "of synthetic.sbatch" / "mine.pt"     # nor is the sbatch file looked for there
    job = submit(lab, project, here, "synthetic", *LINEAR, "--checkpoint", mine, options=["--cpus-per-task=2"])
    completed(lab, here, job)
    assert [workers for workers, _ in hosts(lab, job)] == [2]
    assert_same(output(lab, job), mine, outside("synthetic_ddp", *LINEAR, workers=2))
    assert not list(here.glob("synthetic-*.pt"))


def test_synthetic_measures(lab, project, here):
    job = submit(lab, project, here, "synthetic", "--model", "squeezenet1_1", "--image-size", 32, "--steps", 2)
    completed(lab, here, job)
    speed, step = map(float, re.search(r"([\d.]+) images/s \| step ([\d.]+) ms", output(lab, job).replace(",", "")).groups())
    assert speed == pytest.approx(32 * 1000 / step, rel=0.02)  # one worker's batch


def test_container(lab, project, here, outside):
    """There is no pyxis here: an srun that stands in writes the container's options down and does without them."""
    tools, real = here / "bin", shutil.which("srun")
    tools.mkdir()
    (tools / "srun").write_text(f"""#!/bin/bash
case $1 in --help) echo --container-image; exit ;; esac
printf '%s\\n' "$@" >{shlex.quote(str(here))}/words
for word; do
    case $word in --container-*) echo "$word" >>{shlex.quote(str(here))}/options ;; *) rest+=("$word") ;; esac
done
PATH={sys.prefix}/bin:$PATH exec {real} "${{rest[@]}}"
""")
    (tools / "srun").chmod(0o755)
    (here / "mine.sqsh").touch()
    kept = here.parent / "disk/snapshots"  # which is not there yet
    kept.parent.mkdir()
    (here.parent / "link").symlink_to("disk")  # which the container does not have
    snapshot = here.parent / "link/snapshots/run.pt"
    job = submit(lab, project, here, "cpu-container", *LINEAR, "--checkpoint", snapshot, options=["--nodes=2"],
                 PATH=f"{tools}:{os.environ['PATH']}", IMAGE="mine.sqsh")  # which pyxis would ask a registry for
    completed(lab, here, job)
    image, mounts, workdir = (here / "options").read_text().splitlines()
    assert (image, workdir) == (f"--container-image={here}/mine.sqsh", f"--container-workdir={here}")
    assert sorted(mounts.removeprefix("--container-mounts=").split(",")) == sorted(
        f"{folder}:{folder}" for folder in (here, kept, project / "cpu_ddp"))
    words = (here / "words").read_text().splitlines()
    assert [after for word, after in zip(words, words[1:]) if word == "--checkpoint"][-1] == str(kept / "run.pt")
    assert_same(output(lab, job), kept / "run.pt", outside("cpu_ddp", *LINEAR, workers=2))


# --- mistakes: one line, and an end ---

def fails(lab, project, here, name, *args, **how):
    """Submit, wait for the failure, and return the one line that the job printed."""
    job = submit(lab, project, here, name, *args, **how)
    lab.wait(job, "FAILED", timeout=60)
    assert restarts(lab, job) == 0
    line = re.fullmatch(r"error: ([^\n]+)\n", output(lab, job))
    assert line, output(lab, job)
    return line[1]


def test_no_environment(lab, project, here):
    shutil.copy(project / "slurm/cifar10.sbatch", here)
    (here / "train.py").touch()
    line = fails(lab, project, here, here / "cifar10.sbatch", PATH="/usr/bin:/bin")
    assert "create-venv.sh" in line and "VENV=" in line and "CONDA_ENV=" in line
    (here / "empty").mkdir()
    line = fails(lab, project, here, "cifar10", VENV=here / "empty", PATH="/usr/bin:/bin")
    assert f"no PyTorch in {here}/empty" in line


def test_no_script(lab, project, here):
    shutil.copy(project / "slurm/cifar10.sbatch", here)
    assert f"{here}/train.py" in (line := fails(lab, project, here, here / "cifar10.sbatch")) and "SCRIPT=" in line
    assert "mine.py" in fails(lab, project, here, "cifar10", SCRIPT="mine.py")


def test_gpus_forgotten(lab, project, here):
    line = fails(lab, project, here, "cifar10", CPU=None)
    assert "--gpus-per-node=" in line and "CPU=1" in line


def test_more_workers_than_gpus(lab, project, here):
    line = fails(lab, project, here, "cifar10", options=["--gpus-per-node=1"], CPU=None, WORKERS_PER_NODE=2)
    assert "WORKERS_PER_NODE=2" in line and "--gpus-per-node=2" in line


def test_unequal_shares(lab, project, here):
    line = fails(lab, project, here, "cifar10", options=["--nodes=2", "--gpus=3"], CPU=None)
    assert "unequal" in line and "--gpus-per-node" in line


@pytest.mark.parametrize("name", ["mnist", "fashionmnist"])
def test_one_node_only(lab, project, here, name):
    assert "cifar10.sbatch" in fails(lab, project, here, name, options=["--nodes=2"])


def test_container_without_image_or_pyxis(lab, project, here):
    assert "create-enroot-image.sh" in fails(lab, project, here, "cpu-container")
    assert "pyxis" in fails(lab, project, here, "cpu-container", IMAGE="docker://pytorch/pytorch:1")


def test_wrong_flag_of_the_script(lab, project, here):
    """It is the script that refuses; the job fails at once and stays down."""
    job = submit(lab, project, here, "cpu", "--epoch-count", 3)
    lab.wait(job, "FAILED", timeout=60)
    assert restarts(lab, job) == 0
    assert "--epoch-count" in output(lab, job) and output(lab, job).endswith("not started again\n")


# --- coming back ---

def test_preempted_jobs_come_back(lab, project, here, outside):
    """Four at once, one for each way to start workers; two of them on the same two nodes, where ports could clash."""
    linear, images = ["--epochs", 40, "--samples", 256], ["--epochs", 25, "--fake-data", 64, "--batch-size", 16]
    two_nodes = ["--nodelist=c1,c2", "--cpus-per-task=1"]
    jobs = {
        ("cpu_ddp", *linear): submit(lab, project, here, "cpu", *linear, options=two_nodes, SCRIPT=slow(project)),
        ("cpu_ddp", *linear, "--seed", 1): submit(
            lab, project, here, "cifar10-srun", *linear, "--seed", 1, options=two_nodes, SCRIPT=slow(project)),
        ("fashionmnist_ddp", *images): submit(lab, project, here, "fashionmnist", *images,
                                              options=["--nodelist=c1", "--cpus-per-task=2"],
                                              SCRIPT=slow(project, "fashionmnist_ddp", 1)),
        ("mnist_dp", *images): submit(lab, project, here, "mnist", *images, options=["--nodelist=c2"],
                                      SCRIPT=slow(project, "mnist_dp")),
    }
    for job in jobs.values():
        wait_for_epoch(lab, job)
    preempt(lab, "c1,c2", *jobs.values())
    for (script, *flags), job in jobs.items():
        snapshot = completed(lab, here, job)
        assert restarts(lab, job) == 1 and len(hosts(lab, job)) == 2
        assert "preempted: requeued" in output(lab, job) and "\nerror" not in output(lab, job)
        assert_same(output(lab, job), snapshot, outside(script, *flags, workers=1 if script == "mnist_dp" else 2))


def test_other_ways_to_be_stopped(lab, project, here, outside):
    """By an administrator, a minute before the time limit, at the time limit, and while the workers still start."""
    flags = ["--epochs", 40, "--samples", 256]
    jobs = [submit(lab, project, here, "cpu", *flags, "--seed", seed, options=[f"--nodelist={node}"], SCRIPT=slow(project))
            for seed, node in enumerate(["c1", "c1", "c2", "c2"])]
    requeued, noticed, timed_out, starting = jobs
    wait_for(lab, starting, lambda: "JobState=RUNNING" in lab.sh(f"scontrol show job {starting}"))
    lab.sh(f"scontrol requeue {starting}")
    wait_for_epoch(lab, requeued)
    lab.sh(f"scontrol requeue {requeued}")
    wait_for_epoch(lab, timed_out)
    lab.sh(f"scontrol update job={timed_out} EndTime=now+1")        # Slurm looks every 30 s; it lets the next life have a minute
    wait_for_epoch(lab, noticed)
    lab.sh(f"scancel --batch --signal=USR1 {noticed}")              # what --signal=B:USR1@60 does
    for seed, job in enumerate(jobs):
        snapshot = completed(lab, here, job)
        assert restarts(lab, job) == 1 or job == timed_out      # a slow machine needs another minute, and so on
        assert_same(output(lab, job), snapshot, outside("cpu_ddp", *flags, "--seed", seed))
    assert "preempted: requeued" in output(lab, noticed) and "time limit: requeued" in output(lab, timed_out)
    assert not any("\nerror" in output(lab, job) for job in jobs)


def test_preempted_while_the_workers_start(lab, project, here, outside):
    """TERM kills Python before it can obey; that is no crash."""
    job = submit(lab, project, here, "cpu", *LINEAR, options=["--nodelist=c1"],
                 SCRIPT=changed(project, "cpu_ddp", "import torch\n", "import time; time.sleep(4)\nimport torch\n"))
    wait_for(lab, job, lambda: f"StepId={job}.0" in lab.sh("scontrol show steps"))
    time.sleep(3)
    preempt(lab, "c1", job)
    snapshot = completed(lab, here, job)
    assert len(hosts(lab, job)) == 1 and "preempted: requeued" in output(lab, job)
    assert_same(output(lab, job), snapshot, outside("cpu_ddp", *LINEAR))


def test_no_requeue(lab, project, here):
    """Stopped, it stays down, and says how to go on."""
    job = submit(lab, project, here, "cpu", "--epochs", 1000, "--samples", 256, options=["--no-requeue"], SCRIPT=slow(project))
    wait_for_epoch(lab, job)
    lab.sh(f"scancel --batch --signal=USR1 {job}")
    lab.wait(job, "FAILED", timeout=90)
    assert restarts(lab, job) == 0 and (here / f"cpu-{job}.pt.status").read_text() == "preempted\n"
    assert output(lab, job).splitlines()[-1].endswith(f"sbatch … --checkpoint {here}/cpu-{job}.pt goes on")


def test_scancel_ends_a_job(lab, project, here):
    jobs = [submit(lab, project, here, name, "--epochs", 1000, "--samples", 256, SCRIPT=slow(project))
            for name in ("cpu", "cifar10-srun")]
    for job in jobs:
        wait_for_epoch(lab, job)
    lab.sh(f"scancel {jobs[0]} {jobs[1]}")
    for job in jobs:
        lab.wait(job, "CANCELLED", timeout=60)
    time.sleep(2)
    for job in jobs:
        assert lab.state(job) == "CANCELLED" and restarts(lab, job) == 0
        assert (here / f"{lab.show(job)['JobName']}-{job}.pt.status").read_text() == "preempted\n"      # it has saved


def test_crash_is_final(lab, project, here):
    bug = changed(project, "cpu_ddp", "            step += 1\n", "            step += 1\n            assert step < 9, 'a bug'\n")
    jobs = [submit(lab, project, here, name, *LINEAR, options=["--nodes=2"], SCRIPT=bug) for name in ("cpu", "cifar10-srun")]
    for job in jobs:
        lab.wait(job, "FAILED", timeout=180)
        assert restarts(lab, job) == 0
        text = output(lab, job)
        assert "AssertionError: a bug" in text and text.endswith("training failed with status 1 (above); not started again\n"), text


def test_finished_is_finished(lab, project, here, outside):
    """The signal comes between the last step and the end: there is nothing left to do, nor to undo."""
    late = changed(project, "cpu_ddp", "    error = torch.cat(", "    time.sleep(8)\n    error = torch.cat(")
    preempted, requeued = jobs = [
        submit(lab, project, here, "cpu", *LINEAR, options=[f"--nodelist={node}"], SCRIPT=late) for node in ("c1", "c2")]
    for job in jobs:
        status = here / f"cpu-{job}.pt.status"
        wait_for(lab, job, lambda: status.exists() and status.read_text() == "finished\n")
    lab.sbatch("--partition=high", "--nodelist=c1", "--exclusive", "--output=/dev/null", "--wrap=true")
    lab.sh(f"scontrol requeue {requeued}")
    for job in jobs:
        assert_same(output(lab, job), completed(lab, here, job), outside("cpu_ddp", *LINEAR))
    assert restarts(lab, preempted) == 0 and len(hosts(lab, preempted)) == 1
    assert restarts(lab, requeued) == 1 and len(hosts(lab, requeued)) == 2
    assert len(re.findall("^already finished: ", output(lab, requeued), re.MULTILINE)) == 1


def test_limit_of_restarts(lab, project, here):
    job = submit(lab, project, here, "cpu", "--epochs", 1000, MAX_RESTARTS=0, SCRIPT=slow(project))
    wait_for_epoch(lab, job)
    lab.sh(f"scontrol requeue {job}")
    wait_for(lab, job, lambda: restarts(lab, job) == 1)
    lab.wait(job, "FAILED", timeout=60)
    assert "MAX_RESTARTS is 0" in output(lab, job).splitlines()[-1]


# --- the network ---

def test_hostname_means_loopback(lab, project, here, outside):
    """As Debian's installer sets it up. (All other tests: the hostname means the node's address.)"""
    lab.loopback_hostnames(True)
    try:
        assert "127.0.1.1" in lab.node("c1").exec("getent ahosts c1")
        jobs = [submit(lab, project, here, name, *LINEAR, options=["--nodes=2"],
                       **({"SCRIPT": project / "cpu_ddp/train.py"} if name == "cifar10-srun" else {})) for name in ("cpu", "cifar10-srun")]
        for job in jobs:
            snapshot = completed(lab, here, job)
            assert hosts(lab, job) == [(2, ["c1", "c2"])]
            assert_same(output(lab, job), snapshot, outside("cpu_ddp", *LINEAR, workers=2))
        tools = here / "bin"                     # everything but ip, which finds the interface
        tools.mkdir()
        for folder in ("/usr/bin", "/bin"):
            for tool in Path(folder).iterdir():
                if tool.name != "ip" and not (tools / tool.name).is_symlink():
                    (tools / tool.name).symlink_to(tool)
        line = fails(lab, project, here, "cpu", options=["--nodes=2"], PATH=tools)
        assert "127.*" in line and "GLOO_SOCKET_IFNAME=" in line
    finally:
        lab.loopback_hostnames(False)


def test_two_terminals(lab, project, here, outside):
    """The master prints a line; pasted on another node, it joins."""
    flags = shlex.join(map(str, [*LINEAR, "--checkpoint", here / "two.pt"]))
    lab.sh(f"srun --nodelist=c1 env WORKERS_PER_NODE=1 bash {shlex.quote(str(project))}/slurm/ddp-master-node.sh "
           f"{shlex.quote(str(project))}/cpu_ddp/train.py {flags} >master.log 2>&1 &", cwd=here)
    log, deadline = here / "master.log", time.monotonic() + 20
    while not (line := re.search(r"^    (cd .*ddp-worker-node.sh.*)$", log.read_text() if log.exists() else "", re.MULTILINE)):
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)
    lab.sh(f"srun --nodelist=c2 bash -c {shlex.quote(line[1])}", cwd=here, timeout=180)
    deadline = time.monotonic() + 60
    while "learned weights" not in log.read_text() or (here / "two.pt.status").read_text() != "finished\n":
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)
    assert "2 workers on c1, c2" in log.read_text()
    assert_same(log.read_text(), here / "two.pt", outside("cpu_ddp", *LINEAR, workers=2))


def test_two_terminals_say_what_is_wrong(lab, project, here):
    for command, words in {"ddp-master-node.sh no.py": "no.py", "ddp-worker-node.sh": "ddp-master-node.sh prints",
                           "ddp-worker-node.sh c1:12345 1 2 no.py": "no.py"}.items():
        out = lab.sh(f"! bash {shlex.quote(str(project))}/slurm/{command}", cwd=here)
        assert re.fullmatch(r"ddp-\w+-node.sh: [^\n]+\n", out) and words in out


def test_hyperpod_resumes_by_itself(lab, project, here):
    """An srun that stands in for HyperPod's, which knows --auto-resume."""
    tools = here / "bin"
    tools.mkdir()
    (tools / "srun").write_text(f"#!/bin/sh\necho \"$*\" >>{shlex.quote(str(here))}/arguments\n")
    (tools / "srun").chmod(0o755)
    (here / "opt/sagemaker_cluster").mkdir(parents=True)
    try:
        for hyperpod in False, True:
            if hyperpod:        # seen by this node alone, laid over its /opt
                lab.node("c1").exec(f"mount -t overlay -o lowerdir={here}/opt:/opt overlay /opt")
            job = submit(lab, project, here, "cpu", *LINEAR, options=["--nodelist=c1"], PATH=f"{tools}:{os.environ['PATH']}")
            lab.wait(job, "COMPLETED", timeout=60)
    finally:
        lab.node("c1").exec("umount /opt", check=False)
    without, with_hyperpod = (here / "arguments").read_text().splitlines()
    assert "--auto-resume" not in without and " --auto-resume=1 " in with_hyperpod


def test_three_nodes(lab, project, here, outside):
    flags = ["--epochs", 4, "--samples", 288, "--batch-size", 24]
    job = submit(lab, project, here, "cpu", *flags, options=["--nodes=3"])
    snapshot = completed(lab, here, job)
    assert hosts(lab, job) == [(3, ["c1", "c2", "c3"])]
    assert_same(output(lab, job), snapshot, outside("cpu_ddp", *flags, workers=3))


# --- the stories that take long ---

def preempt_again_and_again(lab, project, here):
    flags = ["--epochs", 100, "--samples", 256, "--save-every", 1000]
    job = submit(lab, project, here, "cpu", *flags, options=["--nodelist=c1"], SCRIPT=slow(project, lives=PREEMPTIONS))
    for life in range(1, PREEMPTIONS + 1):
        wait_for_epoch(lab, job, life)
        preempt(lab, "c1", job)
    snapshot = completed(lab, here, job)
    return output(lab, job), hosts(lab, job), restarts(lab, job), snapshot, ("cpu_ddp", *flags)


def lose_a_node(accident, node):
    def story(lab, project, here):
        flags = ["--epochs", 24, "--samples", 256]
        job = submit(lab, project, here, "cpu", *flags, options=["--nodes=2"], SCRIPT=slow(project))
        wait_for_epoch(lab, job)
        getattr(lab.node(node), accident)()
        snapshot = completed(lab, here, job, timeout=400)
        return output(lab, job), hosts(lab, job), restarts(lab, job), snapshot, ("cpu_ddp", *flags)
    return story


STORIES = {
    "ten_preemptions": preempt_again_and_again,
    "poweroff": lose_a_node("poweroff", "c1"),
    "cut": lose_a_node("cut", "c2"),
}


@pytest.mark.parametrize("accident, remaining", [("poweroff", ["c2", "c3"]), ("cut", ["c1", "c3"])])
def test_node_lost(lab, stories, outside, accident, remaining):
    """The node of the job's batch shell, and another one: the job runs on other nodes by itself."""
    text, lives, again, snapshot, training = stories[accident].result(timeout=600)
    assert again == 1 and lives == [(2, ["c1", "c2"]), (2, remaining)]
    assert_same(text, snapshot, outside(*training, workers=2))


def test_ten_preemptions(lab, stories, outside):
    text, lives, again, snapshot, training = stories["ten_preemptions"].result(timeout=600)
    assert again == PREEMPTIONS and len(lives) == PREEMPTIONS + 1
    begins = [int(step) for step in re.findall(r"steps (\d+) to", text)]
    assert begins == sorted(set(begins))                    # each life began where the one before had saved
    assert_same(text, snapshot, outside(*training))
