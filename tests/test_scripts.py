"""What every copy of the scripts must do: use each sample once, stop, resume, explain mistakes, stay equal.

Most of it is seen in forked processes (helpers.train), which start at once.
"""

import argparse
import ast
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple

import pytest
import torch
import torch.nn as nn
from helpers import (ROOT, SCRIPTS, assert_equal, difference, fork, load_checkpoint, load_script, run, script_path,
                     start, train)
from torch.multiprocessing import ProcessExitedException

# --- training, step by step: of 72 samples, 3 epochs of 4 steps use 16 in each step, and 8 are left over ---
Step = namedtuple("Step", "seed rate samples")  # of a process
RATES = {script: [1, 0.75, 0.5, 0.25] for script in SCRIPTS}  # of steps 0, 3, 6 and 9, as factors of the peak
RATES["fashionmnist_ddp"] = RATES["cifar10_ddp"] = [1 / 2.4, 0.9375, 0.625, 0.3125]


def train_watched(script, checkpoint, nproc, stop=None):
    """Train; return for each rank its list of Steps, the argument of sys.exit and the time of the end.

    Without what depends on the number of processes: augmentation, dropout and BatchNorm. Saving takes a second longer.
    stop is a tuple (rank, step, signal): the process sends itself that signal in that step.
    """
    def setup(module, rank):
        steps, restore, save_checkpoint = [], module.restore, module.save_checkpoint
        nn.Dropout.forward = lambda self, x: x
        module.augment = lambda images: images
        module.build_model = lambda name: (nn.Sequential(nn.Flatten(), nn.Linear(3072, 10)), 32)
        module.save_checkpoint = lambda *arguments, **numbers: (time.sleep(1), save_checkpoint(*arguments, **numbers))

        def restore_and_watch(checkpoint, settings, state, total_steps):
            def see(model, inputs):
                if model.training and len(inputs[0]) > 2:  # wrap_ddp passes 2
                    steps.append(Step(torch.initial_seed(), state["optimizer"].param_groups[0]["lr"],
                                      [sample.numpy().tobytes() for sample in inputs[0].flatten(1)]))
                    if stop and stop[:2] == (rank, len(steps)):
                        if stop[2] == signal.SIGHUP:  # the terminal is closed
                            sys.stdout = argparse.Namespace(write=close)
                        os.kill(os.getpid(), stop[2])
            state["model"].register_forward_pre_hook(see)
            return restore(checkpoint, settings, state, total_steps)

        module.restore = restore_and_watch
        return steps

    data = "--samples" if script in ("cpu_ddp", "synthetic_ddp") else "--fake-data"
    flags = (data, 72, "--batch-size", 16 if script == "mnist_dp" else 4, "--epochs", 3, "--lr", 0.001,
             "--save-every", 3, "--log-every", 0, "--checkpoint", checkpoint)
    if script == "cifar10_ddp":
        flags += "--lr", 0.001 * 256 / 16  # it scales --lr by the global batch
    return train(script, *flags, nproc=1 if script == "mnist_dp" else nproc, setup=setup)


def close(text):
    raise BrokenPipeError


def batches(ranks):
    """The samples of each step, of all ranks."""
    return [sorted(sample for step in steps for sample in step.samples) for steps in zip(*(rank[0] for rank in ranks))]


@pytest.fixture(scope="module", params=SCRIPTS)
def whole(request, tmp_path_factory):
    """A script, the checkpoint of its run on 4 processes, and what was seen."""
    path = tmp_path_factory.mktemp("whole") / "run.pt"
    return request.param, path, train_watched(request.param, path, 4)


def test_each_step(whole):
    """Each epoch uses each sample at most once, in another order; no two steps have the same randomness."""
    script, _, ranks = whole
    steps = batches(ranks)
    assert [len(batch) for batch in steps] == [16] * 12 and all(code == 0 for _, code, _ in ranks)
    for epoch in 0, 4, 8:
        assert len(set(sum(steps[epoch:epoch + 4], []))) == 64
    assert steps[0] != steps[4] != steps[8] != steps[0]
    assert [step.rate / 0.001 for step in ranks[0][0][::3]] == pytest.approx(RATES[script])
    seeds = [step.seed for steps, *_ in ranks for step in steps]
    assert script in ("cpu_ddp", "synthetic_ddp") or len(set(seeds)) == len(seeds)  # these have no randomness


def test_stopped_and_resumed_on_other_numbers_of_processes(whole, tmp_path, capfd):
    """One process gets a signal: all stop after the same step, and exit when rank 0 has saved. 3 does not divide 16."""
    script, path, undisturbed = whole
    seen, lives = [], ((4, signal.SIGINT, True, 3), (3, signal.SIGTERM, False, 7), (5, signal.SIGTERM, True, 9),
                       (2, signal.SIGHUP, False, 10))
    for nproc, signum, last, step in lives:
        stop = ((nproc - 1) * (last and script != "mnist_dp"), step - len(seen), signum)
        ranks = train_watched(script, tmp_path / "run.pt", nproc, stop)
        seen += batches(ranks)
        assert all(code not in (0, None) for _, code, _ in ranks) and f"step {step}" in ranks[0][1]
        assert {len(steps) for steps, *_ in ranks} == {stop[1]} and load_checkpoint(tmp_path / "run.pt")["step"] == step
        assert min(end for *_, end in ranks) > (tmp_path / "run.pt").stat().st_mtime - 0.1
    assert load_checkpoint(tmp_path / "run.pt.previous")["step"] == lives[-2][-1]
    ((_, code, _),) = ranks = train_watched(script, tmp_path / "run.pt", 1)
    assert code == 0 and seen + batches(ranks) == batches(undisturbed)
    assert difference(tmp_path / "run.pt", path) < 1e-5
    capfd.readouterr()
    assert all(result[:2] == ([], 0) for result in train_watched(script, path, 3))  # a finished run is evaluated again
    assert script == "cpu_ddp" or capfd.readouterr().out.count("test accuracy") == 1


def test_resume_is_exact(tmp_path):
    """Stopped in mid-epoch, killed later: the run ends with the weights of an uninterrupted one.

    On three processes: the sum of two gradients does not depend on the order, which DDP changes after its first step.
    """
    def run_until(path, step=None, signum=None):
        def setup(module, rank):
            calls, augment = [], module.augment
            module.augment = lambda images: (calls.append(len(calls) + 1 == step and os.kill(os.getpid(), signum)),
                                             augment(images))[1]
        return train("fashionmnist_ddp", "--fake-data", 320, "--batch-size", 16, "--epochs", 3, "--log-every", 0,
                     "--checkpoint", path, nproc=3, setup=setup)

    run_until(tmp_path / "whole")
    assert all(code for _, code, _ in run_until(tmp_path / "parts", 3, signal.SIGTERM))
    with pytest.raises(ProcessExitedException):
        run_until(tmp_path / "parts", 12, signal.SIGKILL)
    assert load_checkpoint(tmp_path / "parts")["step"] == 12 and load_checkpoint(tmp_path / "whole")["step"] == 18
    run_until(tmp_path / "parts")
    assert_equal(tmp_path / "parts", tmp_path / "whole")


# --- functions ---
def test_evaluation_counts_each_sample_once_with_the_statistics_of_rank_0():
    inputs = torch.randn(10, 4, generator=torch.Generator().manual_seed(0))
    labels = inputs.argmax(1)
    labels[9] = 3 - labels[9]  # one is wrong
    cifar10_ddp, args = load_script("cifar10_ddp"), argparse.Namespace(batch_size=2, bf16=False)

    def evaluate(rank):
        cifar10_ddp.init_group(rank, 3, torch.device("cpu"), 60)
        model = nn.BatchNorm1d(4, affine=False)
        model.running_mean += 1000 * rank * torch.arange(4)
        return cifar10_ddp.evaluate(model, nn.Identity(), inputs, labels, args), model.training

    assert fork(3, evaluate) == [([9, 10], True)] * 3  # 10 = 4 + 3 + 3


@pytest.mark.parametrize("script, places", [("fashionmnist_ddp", 1), ("cifar10_ddp", 81)])
def test_augmentation(script, places):
    """About half of the images are flipped, and all places are cropped. The pixels are numbered."""
    torch.manual_seed(0)
    images = load_script(script).augment(torch.arange(1024).view(1, 1, 32, 32).expand(2000, 3, 32, 32))
    flipped = images[:, 2, 16, 16] > images[:, 2, 16, 17]
    assert images.shape == (2000, 3, 32, 32) and 900 < flipped.sum() < 1100
    assert len(set(images[~flipped, 2, 16, 16].tolist())) == len(set(images[flipped, 2, 16, 16].tolist())) == places


@pytest.mark.parametrize("script, flags", [("cpu_ddp", ("--checkpoint", "run.pt")), ("mnist_dp", ("--fake-data", 32))])
def test_weights_that_are_not_finite_end_the_run(script, flags, tmp_path, monkeypatch):
    """On all ranks, also without a checkpoint; nothing is saved."""
    monkeypatch.chdir(tmp_path)
    ranks = train(script, "--lr", 1e18, "--epochs", 20, "--batch-size", 16, *flags, nproc=1 + (script == "cpu_ddp"))
    assert all("error: " in code and "finite" in code for _, code, _ in ranks) and not os.path.exists("run.pt")


@pytest.mark.parametrize("gpus, usable, local_world_size, local_rank, outcome", [
    (2, True, 2, 1, "cuda:1"), (1, True, 1, 3, "cuda:0"), (0, False, 4, 3, "cpu"),  # srun may show each process one GPU
    (2, False, 2, 0, "cannot use"), (2, True, 3, 0, "more processes"), (2, True, 1, 2, "more processes")])
def test_device(gpus, usable, local_world_size, local_rank, outcome, monkeypatch):
    script = load_script("fashionmnist_ddp")
    monkeypatch.setattr(os, "environ", {"LOCAL_WORLD_SIZE": local_world_size})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: usable)
    monkeypatch.setattr(torch, "set_float32_matmul_precision", str)
    if " " not in outcome:
        assert str(script.pick_device(local_rank)) == outcome
        return
    for function, *arguments in (script.pick_device, local_rank), (script.spawn, 3, None):
        with pytest.raises(SystemExit, match=f"error: .*{outcome}.*CUDA_VISIBLE_DEVICES="):
            function(*arguments)


def test_edited_model_is_an_error_line_and_a_link_is_followed(tmp_path):
    """The remedy is another --checkpoint. A buffer of -inf, as of a causal mask, is saved."""
    def edit(hidden):
        def setup(module, rank):
            model = nn.Sequential(nn.Flatten(), nn.Linear(784, hidden), nn.Linear(hidden, 10))
            model.register_buffer("mask", torch.full((2,), -torch.inf))
            module.CNN = lambda: model
        return setup

    (tmp_path / "link").symlink_to("run.pt")
    command = ("fashionmnist_ddp", "--fake-data", 32, "--epochs", 1, "--checkpoint", tmp_path / "link")
    assert [code for _, code, _ in train(*command, nproc=2, setup=edit(8))] == [0, 0]
    assert (tmp_path / "link").is_symlink() and load_checkpoint(tmp_path / "run.pt")["step"] == 1
    for _, code, _ in train(*command, nproc=2, setup=edit(9)):
        assert code.startswith("error: ") and "run.pt" in code and "--checkpoint" in code and "\n" not in code


# --- launchers ---
def test_mp_spawn_forwards_signals_and_reports_a_killed_process(tmp_path):
    flags = ("--fake-data", 512, "--batch-size", 8, "--log-every", 0, "--checkpoint", tmp_path / "run.pt")
    with start("fashionmnist_ddp", *flags, launcher="spawn", nproc=2) as job:
        job.wait_for("step 5/")
        job.send(signal.SIGTERM)  # to the parent alone
        assert job.finish().status == 1 and not job.workers()
    stopped = load_checkpoint(tmp_path / "run.pt")["step"]
    with start("fashionmnist_ddp", *flags, launcher="spawn", nproc=2) as job:
        job.wait_for(f"steps {stopped} to")
        os.kill(job.workers()[1], signal.SIGKILL)
        result = job.finish()
    assert stopped >= 5 and result.status == 1, result.text
    assert len(result.errors) == 1 and "SIGKILL" in result.errors[0], result.text


@pytest.mark.parametrize("script, flags, launcher", [("cpu_ddp", ("--checkpoint", "run.pt"), "torchrun"),
                                                     ("fashionmnist_ddp", ("--data-dir", "absent"), "spawn")])
def test_what_fails_on_rank_0_ends_all_processes(script, flags, launcher, tmp_path):
    """A checkpoint that cannot be loaded, no data: one error line, soon; only torchrun's own report follows it."""
    for name in "run.pt", "run.pt.previous":
        (tmp_path / name).write_text("not a checkpoint")
    result = run(script, *flags, launcher=launcher, nproc=2, cwd=tmp_path, timeout=60)
    assert result.status != 0 and len(result.errors) == 1 and flags[1] in result.errors[0], result.text
    assert "Traceback" not in result.text.split(" failed (exitcode")[0], result.text


# --- mistakes: script, flags, number of processes, a word of the error line of each ---
MISTAKES = {
    "zero": ("cpu_ddp", "--epochs 0", 1, "--epochs"),
    "no such model": ("cifar10_ddp", "--model resnet19", 1, "resnet18"),
    "no data": ("mnist_dp", "--data-dir absent", 1, "--fake-data"),
    "no such GPU": ("mnist_dp", "--device-ids 0 --fake-data", 1, "--device-ids"),
    "not a GPU": ("mnist_dp", "--device-ids a", 1, "--device-ids"),
    "several processes": ("mnist_dp", "--fake-data", 2, "cifar10_ddp"),
    "processes twice": ("fashionmnist_ddp", "--nproc 2 --fake-data", 1, "--nproc"),
    "more processes than samples": ("cpu_ddp", "--samples 2", 3, "fewer"),
    "damaged data": ("mnist_dp", "--data-dir {folder}", 1, "delete"),
    "negative seed": ("cpu_ddp", "--seed -1", 1, "--seed"),
    "checkpoint is a folder": ("cpu_ddp", "--checkpoint {folder}", 1, "--checkpoint"),
    "no checkpoint file": ("cpu_ddp", "--checkpoint=", 1, "--checkpoint"),
    "no folder of the checkpoint": ("cpu_ddp", "--checkpoint {folder}/absent/run", 1, "mkdir -p"),
    "checkpoint of another run": ("cpu_ddp", "--seed 1 --checkpoint {folder}/run", 2, "(seed 0, not 1)"),
    "fewer epochs": ("cpu_ddp", "--epochs 1 --checkpoint {folder}/run", 1, "--epochs"),
    "unusable GPUs": ("mnist_dp", "--fake-data", 1, "CUDA_VISIBLE_DEVICES="),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mistakes")
    train("cpu_ddp", "--epochs", 2, "--checkpoint", folder / "run")
    (folder / "MNIST/raw").mkdir(parents=True)
    for name in (f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")):
        (folder / "MNIST/raw" / name).touch()
    return folder


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_is_an_error_line(name, folder, capfd):
    script, flags, nproc, word = MISTAKES[name]
    ranks = train(script, *flags.format(folder=folder).split(), nproc=nproc, setup=lambda module, rank: setattr(
        torch.cuda, "device_count", lambda: 2 * (name == "unusable GPUs")))
    errors = [capfd.readouterr().err if code == 2 else str(code) for _, code, _ in ranks]  # argparse prints, exits 2
    assert len(errors) == nproc and all("error: " in error and word in error for error in errors), errors


# --- copies ---
BLOCK = re.compile(r"^# --- shared: ([\w ]+) ---\n(.*?)^# --- end ---$", re.MULTILINE | re.DOTALL)


def test_shared_blocks_are_equal():
    copies = {}
    for script in SCRIPTS:
        text = script_path(script).read_text()
        blocks = BLOCK.findall(text)
        assert 2 * len(blocks) == len(re.findall("^# --- ", text, re.MULTILINE)) == 2 * len(dict(blocks))
        for name, block in blocks:
            copies.setdefault(name, []).append(block)
    assert {name: len(blocks) for name, blocks in copies.items()} == {
        "helpers": 5, "processes": 4, "images": 3, "GPUs and evaluation": 3}
    assert all(len(set(blocks)) == 1 for blocks in copies.values())


@pytest.mark.parametrize("path", [script_path(script) for script in SCRIPTS] + sorted((ROOT / "tests").glob("*.py")),
                         ids=lambda path: str(path.relative_to(ROOT)))
def test_imports(path):
    """The standard library, torch and torchvision; in tests also pytest and each other."""
    allowed = sys.stdlib_module_names | {"torch", "torchvision"}
    if path.parent.name == "tests":
        allowed |= {"pytest", *(other.stem for other in path.parent.glob("*.py"))}
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, (ast.Import, ast.ImportFrom))]
    modules = {name.split(".")[0] for node in nodes
               for name in ([node.module or "."] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names])}
    assert modules <= allowed, modules - allowed


# --- the other files ---
def tracked(*patterns):
    """The files under git that match one of the patterns."""
    git = ["git", "-c", "safe.directory=*", "ls-files", "-z", "--", *patterns]
    names = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=True, timeout=30).stdout.split("\0")
    return [ROOT / name for name in names if name and (ROOT / name).exists()]


def test_top_level():
    names = {path.relative_to(ROOT).parts[0] for path in tracked()}
    assert {name for name in names if name[0] != "."} == {*SCRIPTS, "slurm", "containers", "tests", "README.md"}


@pytest.mark.parametrize("path", tracked("*.sh", "*.sbatch", ".ci/run"), ids=lambda path: str(path.relative_to(ROOT)))
def test_shell_file(path):
    assert subprocess.run(["bash", "-n", path], capture_output=True, text=True, timeout=30).stderr == ""
    assert re.search(r"^set -euo pipefail$", path.read_text(), re.MULTILINE)
    if shutil.which("shellcheck"):
        lint = subprocess.run(["shellcheck", path], capture_output=True, text=True, timeout=60)
        assert lint.returncode == 0, lint.stdout


def test_no_file_names_a_package_registry():
    """Where packages come from is the user's choice. The pattern does not match itself."""
    hosts = r"(pypi|pythonhosted|download\.pytorch|anaconda|deb\.debian)\.(org|com)|archive\.ubuntu\.com"
    assert not [path for path in tracked() if re.search(hosts, path.read_text(errors="replace"))]
