"""Every script trains for an epoch on the CPU under every launcher, learns, and comes to the same result."""

import contextlib
import io
import os
import re
import shutil
import signal
import socket
import threading

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from helpers import (DDP_SCRIPTS, PEAK, SCRIPTS, free_port, load_script, load_snapshot, peak_gigabytes, run, script_path,
                     slurm_step, start, weights_equal)
from torch.nn.parallel import DistributedDataParallel

LEARNABLE = {  # one epoch that is enough to learn: batch of each of two workers, flags, accuracy to be exceeded
    "cpu_ddp": (16, ["--lr", "0.05"], None),
    "mnist_dp": (8, ["--fake-data"], 0.7),
    "cifar10_ddp": (4, ["--fake-data", "192", "--lr", "0.6"], 0.3),
    "fashionmnist_ddp": (8, ["--fake-data", "--lr", "2e-3"], 0.5),
    "synthetic_ddp": (16, ["--lr", "0.05"], 0.85),
}
LAUNCHERS = {
    "torchrun": {"launcher": "torchrun", "workers": 2},
    "two agents": {"launcher": "torchrun", "workers": 2, "agents": 2},
    "srun": {"launcher": "srun", "workers": 2},
    "mp.spawn": {},
}
NOISE_FLOOR = 0.01  # of cpu_ddp's data


def last(pattern, text):
    return float(re.findall(pattern, text)[-1])


def assert_learned(script, result):
    assert result.status == 0 and not result.errors and "Traceback" not in result.stderr, result
    if script == "cpu_ddp":  # far below the targets' variance of about 20
        assert last(r"within ([\d.]+) of the true", result.stdout) < 0.1
    else:
        assert last(r"test accuracy ([\d.]+)", result.stdout) > LEARNABLE[script][2]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A function that trains a script once under a launcher, and returns the Result and the snapshot."""
    done = {}

    def train(script, launcher):
        if (script, launcher) not in done:
            snapshot = tmp_path_factory.mktemp(script) / "snapshot.pt"
            batch, flags, _ = LEARNABLE[script]
            result = run(script, "--epochs", "1", "--batch-size", batch, *flags, *(["--nproc=2"] if launcher == "mp.spawn" else []),
                         "--checkpoint", snapshot, timeout=400, **LAUNCHERS[launcher])
            done[script, launcher] = result, snapshot
        return done[script, launcher]
    return train


@pytest.mark.parametrize("script", SCRIPTS)
def test_copied_alone(script, tmp_path):
    """One file in an empty folder is all that a script needs, and all that it leaves there."""
    shutil.copy(script_path(script), tmp_path / "mine.py")
    batch, flags, _ = LEARNABLE[script]
    result = run(tmp_path / "mine.py", "--epochs", "1", "--batch-size", 2 * batch, *flags, cwd=tmp_path, timeout=400, env={"PYTHONPATH": None})
    assert_learned(script, result)
    assert re.match(rf"{script}: 1 worker on {re.escape(socket.gethostname())} ", result.stdout), result.stdout
    assert os.listdir(tmp_path) == ["mine.py"]


def test_more_epochs(tmp_path):
    """A finished run goes on with more --epochs, at the learning rate that the longer schedule has there."""
    snapshots = []
    for epochs in 1, 2:
        result = run("cpu_ddp", "--epochs", epochs, "--checkpoint", tmp_path / "it", timeout=60)
        assert result.status == 0, result
        snapshots.append(load_snapshot(tmp_path / "it"))
    assert "steps 64 to 128" in result.stdout
    moved = [(one["model"]["weight"], one["step"]) for one in snapshots]
    assert moved[1][1] == 128 and (moved[0][0] - moved[1][0]).abs().max() > 1e-3
    result = run("cpu_ddp", "--epochs", 2, "--checkpoint", tmp_path / "it", timeout=60)
    assert result.status == 0 and "already finished" in result.stdout


@pytest.mark.parametrize("name", ["vit_h_14", "vit_b_16", "swin_t", "efficientnet_b0"])
def test_models_take_the_size_that_the_images_get(name):
    with torch.device("meta"):  # shapes without numbers
        model, size = load_script("cifar10_ddp").build_model(name)
        assert model.eval()(torch.zeros(2, 3, size, size)).shape == (2, 10)


def average_as_ddp(rank, workers, store):
    """One worker of test_small_models_are_averaged_as_by_ddp."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=workers)
    script = load_script("cpu_ddp")
    for kind, value in ((torch.float32, 0.1), (torch.float64, 0.1), (torch.float16, 40_000), ("sparse", 0.1)):
        gradients = []
        for wrap in lambda model, _: DistributedDataParallel(model), script.wrap:
            torch.manual_seed(0)
            model = torch.nn.Embedding(5, 3, sparse=True) if kind == "sparse" else torch.nn.Linear(5, 3).to(kind)
            x = torch.tensor([0, 2 + rank]) if kind == "sparse" else torch.full((1, 5), value * (1 if value > 1 else rank + 1), dtype=kind)
            ddp_model = wrap(model, x)  # held: without it nothing is exchanged
            ddp_model(x).sum().backward()
            gradients.append(model.weight.grad.to_dense())
        assert gradients[0].isfinite().all() and gradients[0].abs().sum() > 0
        assert torch.allclose(*gradients, rtol=1e-3 if kind == torch.float16 else 1e-6), (kind, gradients)
        everyones = [torch.empty_like(gradients[1]) for _ in range(workers)]
        dist.all_gather(everyones, gradients[1])
        assert all(other.equal(gradients[1]) for other in everyones), kind


@pytest.mark.parametrize("workers", (2, 3))
def test_small_models_are_averaged_as_by_ddp(workers, tmp_path):
    """Whatever the type of the gradients: their one round of messages comes to what DDP's own exchange does, everywhere."""
    mp.spawn(average_as_ddp, (workers, tmp_path / "store"), workers)


@pytest.mark.parametrize("flag", ("--bf16", "--compress"))
def test_bfloat16(flag, tmp_path):
    """Computing or exchanging with 8 bits of mantissa moves the weights, but not far."""
    for name, flags in (("float32", ()), ("bfloat16", (flag,))):
        assert run("cpu_ddp", "--checkpoint", tmp_path / name, *flags, launcher="torchrun", workers=2, timeout=100).status == 0
    assert not weights_equal(tmp_path / "float32", tmp_path / "bfloat16")
    assert weights_equal(tmp_path / "float32", tmp_path / "bfloat16", tolerance=0.02)


def test_bfloat16_in_the_threads_of_data_parallel():
    """They know that autocast is on, and take its default for GPUs, float16, where the model does not say otherwise."""
    model = load_script("mnist_dp").CNN()
    types = []

    def thread():
        torch.set_autocast_dtype("cpu", torch.float16)  # stands for a GPU's
        for enabled in True, False:
            with torch.autocast("cpu", enabled=enabled):
                types.append(model(torch.zeros(1, 1, 28, 28)).dtype)

    worker = threading.Thread(target=thread)
    worker.start()
    worker.join()
    assert types == [torch.bfloat16, torch.float32]


def test_own_data_set(tmp_path):
    """The README's way to a data set of one's own: a sample for an index, read by DataLoader's own processes.

    torchrun sends SIGTERM to these, too, and the run is saved all the same.
    """
    text = script_path("fashionmnist_ddp").read_text()
    for line, own in (("class CNN(", "class Mine(TensorDataset):\n    def __getitem__(self, index):\n"
                                     "        assert isinstance(index, int)\n        return super().__getitem__(index)\n\n\nclass CNN("),
                      ("dataset = InMemory(images, labels)", "dataset = Mine(images, labels)"),
                      ("DataLoader(dataset, sampler=batches, batch_size=None)",
                       "DataLoader(dataset, batch_sampler=batches, num_workers=2, worker_init_fn=StopSignal.ignore)")):
        assert text.count(line) == 1, line
        text = text.replace(line, own)
    (tmp_path / "mine.py").write_text(text)
    flags = "--fake-data", 128, "--batch-size", 16, "--epochs", 2
    for script, name in ((tmp_path / "mine.py", "own"), (script_path("fashionmnist_ddp"), "ours")):
        result = run(script, *flags, "--checkpoint", tmp_path / name, cwd=tmp_path, timeout=200)
        assert result.status == 0 and (tmp_path / f"{name}.status").read_text() == "finished\n", result
    assert weights_equal(tmp_path / "own", tmp_path / "ours")
    flags = "--fake-data", 512, "--batch-size", 16, "--epochs", 500, "--log-every", 1, "--checkpoint", tmp_path / "stopped"
    for step in 19, 39:  # in mid-epoch
        with start(tmp_path / "mine.py", *flags, launcher="torchrun", workers=2, cwd=tmp_path) as job:
            job.wait_for(f"\nstep {step}/")
            job.send(signal.SIGTERM)
            result = job.finish(60)
        assert "stopped by a signal" in result.stdout and "Traceback" not in result.stderr, result
        assert (tmp_path / "stopped.status").read_text() == "preempted\n"


@pytest.mark.parametrize("script, launcher", [
    *((script, launcher) for script in DDP_SCRIPTS for launcher in ("torchrun", "two agents", "srun")),
    ("fashionmnist_ddp", "mp.spawn")])
def test_launcher(script, launcher, trained):
    """Two workers learn, however they are started, and come to the same bits."""
    result, snapshot = trained(script, launcher)
    assert_learned(script, result)
    assert re.match(rf"{script}: 2 workers on {re.escape(socket.gethostname())} ", result.stdout), result.stdout
    assert snapshot.with_name("snapshot.pt.status").read_text() == "finished\n"
    assert weights_equal(trained(script, "torchrun")[1], snapshot)


@pytest.mark.parametrize("script, flags", [("cpu_ddp", []), ("mnist_dp", ["--fake-data", "16", "--batch-size", "8"])])
def test_one_task_of_srun(script, flags):
    """A step of one task trains as plain python does; mnist_dp too."""
    result = run(script, "--epochs", "1", *flags, launcher="srun", timeout=200)
    assert result.status == 0 and f"{script}: 1 worker " in result.stdout, result


def test_cpu_ddp_reaches_the_noise_floor():
    """As the tutorial starts it: 50 epochs, batch 32 per worker."""
    result = run("cpu_ddp", launcher="torchrun", workers=2, timeout=200)
    assert_learned("cpu_ddp", result)
    assert NOISE_FLOOR * 0.9 < last(r"train loss ([\d.]+)", result.stdout) < NOISE_FLOOR * 1.1
    assert last(r"within ([\d.]+) of the true", result.stdout) < 0.01


@pytest.mark.parametrize("script", ["cpu_ddp", "synthetic_ddp"])
def test_same_weights_on_1_2_and_4_workers(script, tmp_path):
    """The global batch is what counts, not over how many workers it is split."""
    for workers in 1, 2, 4:
        result = run(script, "--epochs", "2", "--batch-size", 64 // workers, "--checkpoint", tmp_path / f"{workers}.pt",
                     launcher="torchrun", workers=workers, timeout=300)
        assert result.status == 0, result
        assert weights_equal(tmp_path / "1.pt", tmp_path / f"{workers}.pt", tolerance=1e-5)
    run(script, "--epochs", "2", "--batch-size", "64", "--seed", "1", "--checkpoint", tmp_path / "seed1.pt", timeout=200)
    assert not weights_equal(tmp_path / "1.pt", tmp_path / "seed1.pt", tolerance=1e-3)


@pytest.mark.parametrize("script, flags, tested", [
    ("fashionmnist_ddp", ["--fake-data", "520", "--batch-size", "24", "--lr", "2e-3"], 130),  # 130 = 44 + 43 + 43
    ("synthetic_ddp", ["--samples", "2044", "--batch-size", "24", "--lr", "0.02"], 511),  # 511 = 171 + 170 + 170
])
def test_evaluation_on_3_workers(script, flags, tested, tmp_path):
    """Each test sample counts once, and the same weights score the same as on one worker.

    A trained snapshot is set back to step 0 with a learning rate that moves nothing, and resumed on 3 workers.
    """
    made = run(script, "--epochs", "1", *flags, "--checkpoint", tmp_path / "a.pt", timeout=200)
    score = re.findall(r"\((\d+)/(\d+)\)", made.stdout)
    assert int(score[-1][1]) == tested and int(score[-1][0]) > tested / 2, made
    state = load_snapshot(tmp_path / "a.pt")
    state["step"], state["scheduler"]["last_epoch"], state["run"]["lr"] = 0, 0, 1e-9
    state["scheduler"]["base_lrs"] = [1e-9]
    state["optimizer"]["param_groups"][0].update(lr=1e-9, initial_lr=1e-9)
    torch.save(state, tmp_path / "b.pt")
    flags[-1], flags[flags.index("--batch-size") + 1] = "1e-9", "8"
    again = run(script, "--epochs", "1", *flags, "--checkpoint", tmp_path / "b.pt", launcher="torchrun", workers=3, timeout=200)
    assert re.findall(r"\((\d+)/(\d+)\)", again.stdout) == score, (made, again)


def test_yardstick():
    """synthetic_ddp --model measures: numbers that fit together, whatever the machine's speed."""
    result = run("synthetic_ddp", "--model", "squeezenet1_1", "--image-size", "64", "--batch-size", "2", "--steps", "3",
                 launcher="torchrun", workers=2, timeout=200)
    assert result.status == 0, result
    line = result.stdout.splitlines()[-1].replace(",", "")
    speed, step, alone, efficiency, gradients, memory = map(float, re.search(
        r"([\d.]+) images/s .* step ([\d.]+) ms.* ([\d.]+) ms.* efficiency ([\d.]+) .* ([\d.]+) MB .* ([\d.]+) MiB", line).groups())
    assert speed == pytest.approx(2 * 2 * 1000 / step, rel=0.02)  # 2 workers, 2 images each
    assert efficiency == pytest.approx(alone / step, rel=0.02)
    assert gradients == pytest.approx(1_235_496 * 4 / 1e6, rel=0.02)  # squeezenet1_1's parameters, 4 bytes each
    assert 100 < memory < 2000


# --- memory ---
@pytest.mark.parametrize("script, flags, gigabytes", [
    ("fashionmnist_ddp", ["--fake-data", "2048"], 1.2),
    ("cifar10_ddp", ["--fake-data", "256"], 1.8),
])
def test_peak_memory(script, flags, gigabytes):
    """At the default batch size."""
    result = run(script, "--epochs", "1", *flags, prefix=PEAK, timeout=400)
    assert result.status == 0, result
    assert 0.3 < peak_gigabytes(result) < gigabytes


# --- threads ---
@pytest.mark.parametrize("env, workers, limit, threads", [
    pytest.param({}, 1, None, 6, id="all cores"),
    pytest.param({}, 2, None, 3, id="half of them"),
    pytest.param({}, 12, None, 1, id="at least one"),
    pytest.param({}, 2, "400000 100000", 2, id="a container's limit"),
    pytest.param({}, 2, "max 100000", 3, id="a container without limit"),
    pytest.param({"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "x"}, 2, None, 3, id="torchrun's 1 is not the user's"),
    pytest.param({"OMP_NUM_THREADS": "5", "TORCHELASTIC_RUN_ID": "x"}, 2, None, None, id="the user's under torchrun"),
    pytest.param({"OMP_NUM_THREADS": "1"}, 2, None, None, id="the user's 1"),
])
def test_share_of_the_cores(env, workers, limit, threads, monkeypatch):
    """On a machine of 6 cores; None: what torch made of OMP_NUM_THREADS stays."""
    script = load_script("cpu_ddp")

    def cpu_max(*_):
        if limit is None:
            raise FileNotFoundError
        return io.StringIO(limit)

    chosen = []
    monkeypatch.setattr(script, "open", cpu_max, raising=False)
    monkeypatch.setattr(script.torch, "set_num_threads", chosen.append)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)), raising=False)
    monkeypatch.setattr(os, "environ", env)
    script.set_threads(script.Worker(0, 0, workers, workers))
    assert chosen == ([] if threads is None else [threads])


@pytest.mark.parametrize("env, threads", [
    pytest.param({"OMP_NUM_THREADS": 1}, 1, id="the user's"),
    pytest.param({**slurm_step(1, 0, free_port()), "SLURM_CPUS_PER_TASK": 5}, 5, id="the Slurm step's"),
    pytest.param({}, None, id="the machine's"),
])
def test_threads_of_a_worker(env, threads):
    """As the first line of the log says."""
    if threads is None:
        threads = len(os.sched_getaffinity(0))
        with contextlib.suppress(OSError, ValueError), open("/sys/fs/cgroup/cpu.max") as limit:
            quota, period = map(int, limit.read().split())
            threads = min(threads, max(1, quota // period))
    result = run("cpu_ddp", "--epochs", "1", env=env, timeout=100)
    assert f", {threads} thread" in result.stdout.splitlines()[0], result


# --- who am I ---
@pytest.mark.parametrize("nodes, host", [
    ("n1", "n1"), ("n[1-2]", "n1"), ("n[07-09],m1", "n07"), ("n[3,5-9]", "n3"), ("gpu-a,gpu-b", "gpu-a"),
    ("rack1-node[001-128]", "rack1-node001"), ("node.cluster.example", "node.cluster.example")])
def test_a_slurm_step_knows_its_first_host(nodes, host, monkeypatch):
    script, ports = load_script("cpu_ddp"), set()
    for job, step, restarts in (4711, 0, None), (4711, 1, None), (4711, 0, 1), (4712, 0, None):
        env = {name: str(value) for name, value in slurm_step(8, 5, 0, nodes=2).items() if not name.startswith("MASTER")}
        env.update(SLURM_STEP_NODELIST=nodes, SLURM_JOB_ID=str(job), SLURM_STEP_ID=str(step))
        if restarts:
            env["SLURM_RESTART_COUNT"] = str(restarts)
        monkeypatch.setattr(os, "environ", env)
        assert script.find_worker()[:4] == (5, 1, 8, 4)
        assert env["MASTER_ADDR"] == host
        ports.add(int(env["MASTER_PORT"]))
    assert len(ports) == 4, "another job, step or restart takes another port"
    assert all(1024 < port < 32768 for port in ports), "below the ephemeral ports"
