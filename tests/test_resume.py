"""Second guarantee: after any kill, the same command resumes, bit for bit.

FILE is complete at any moment. Another run's file, FILE.best and a damaged file are refused, and
nothing starts over by itself.

bash tests/run.sh -s -k killed_at_random --kills 200      # prints what it did
"""

import functools
import os
import random
import re
import shutil
import signal
import sys
import time
import weakref
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import torch.multiprocessing as mp
from checkpoints import assert_equal, difference, load_checkpoint, progress
from copies import make_copy
from forked import (End, at_step, kill_after, kill_at_call, train_and_kill, train_forked,
                    train_to_end, watch)
from launchers import start, wait_until_gone
from recorder import FewPixels, change_sets, first_samples, use_small_model, with_numbers
from scripts import BEST_SCRIPTS, DDP_SCRIPTS, SCRIPTS, STEP_SCRIPTS, load_script, script_path

# Above train(): a small model of images
SMALL = """
def build_model(args):
    return nn.Sequential(nn.AdaptiveAvgPool3d((1, 4, 4)), nn.Flatten(), nn.Linear(16, 10))
"""
# Dropout, in evaluations, too, BatchNorm, and, for a Dataset, a random transform (of images in
# memory, fashionmnist_ddp has its own). Then a copy draws random numbers wherever it can.
RANDOM = """
from torch.utils.data import Dataset as AnyDataset

plain_model, plain_data = build_model, load_data


class AlwaysDropout(nn.Module):
    def forward(self, inputs):
        return F.dropout(inputs, 0.2)


def build_model(args):
    model = plain_model(args)
    outputs = list(model.parameters())[-1].numel()
    return nn.Sequential(model, nn.BatchNorm1d(outputs), AlwaysDropout(),
                         nn.Linear(outputs, outputs))


class Noisy(AnyDataset):
    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        inputs, label = self.data[index]
        return inputs + (3 * torch.rand(1)).to(inputs.dtype), label


def load_data(args):
    return [Noisy(data) if isinstance(data, AnyDataset) else data for data in plain_data(args)]
"""


def random_copy(script, path, *edits):
    """Write a copy of a script with a small model that draws random numbers to path."""
    small = SMALL if "fake_images" in script_path(script).read_text() else ""
    return make_copy(script, path, (None, small + RANDOM), *edits)


def flags_of(script, path, *more):
    """Return flags for 3 epochs of 6 steps. Without more, a process has a loader process."""
    details = SCRIPTS[script]
    return [details.data_flag, 96 if script == "synthetic_ddp" else 72, "--epochs", 3,
            "--global-batch", 12, *(["--workers", 1] if details.no_children else []),
            "--checkpoint", path, *more]


def short_flags_of(script, path, *more):
    """Return the same flags without loader processes."""
    return flags_of(script, path, *SCRIPTS[script].no_children, *more)


class Runs(NamedTuple):
    """Two runs of a copy that draws random numbers."""
    copy: Path
    whole: Path  # FILE of an undisturbed run
    stopped: Path  # FILE of a run that was killed after step 8
    resumed: Path  # FILE of this run at its end
    end: End  # of the resumed run: for each rank, after each step, how many tensors of FILE it has


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A function of a script and a number of processes, which returns Runs."""
    def count_tensors(module, rank):
        tensors, counts = [], []
        watch(module, "resume", lambda checkpoint, *_: tensors.extend(
            weakref.ref(tensor) for tensor in checkpoint["model"].values()))
        at_step(lambda _: counts.append(sum(tensor() is not None for tensor in tensors)))
        return counts

    @functools.cache
    def run(script, nproc=2):
        folder = tmp_path_factory.mktemp("runs")
        whole, stopped, resumed = (folder / name for name in ("whole.pt", "stopped.pt", "run.pt"))
        copy = random_copy(script, folder / "train.py")
        train_to_end(copy, *flags_of(script, whole), nproc=nproc)
        train_and_kill(copy, *flags_of(script, stopped), nproc=nproc,
                       setup=lambda module, rank: rank == 0 and kill_after(8))
        for file in folder.glob("stopped.pt*"):
            shutil.copy(file, folder / file.name.replace("stopped", "run"))
        end = train_to_end(copy, *flags_of(script, resumed), nproc=nproc, setup=count_tensors)
        return Runs(copy, whole, stopped, resumed, end)

    return run


def assert_same_end(path, whole, what):
    """Fail unless both files of a run are those of the undisturbed one."""
    assert_equal(path, whole, f"{what}, and resumed: FILE")
    best, expected = (Path(f"{file}.best") for file in (path, whole))
    assert best.exists() == expected.exists(), f"{what}: is there FILE.best? {best.exists()}"
    if best.exists():
        assert_equal(best, expected, f"{what}, and resumed: FILE.best")


# ---- killed at any place ----
@pytest.mark.parametrize("nproc", [1, 2])
@pytest.mark.parametrize("script", DDP_SCRIPTS)
def test_killed_in_a_step_and_resumed_exactly(script, nproc, runs):
    """With dropout, BatchNorm and random transforms, in loader processes."""
    found = runs(script, nproc)
    assert "resumed after" in found.end.text, f"{script}, killed, starts over\n{found.end.text}"
    assert_same_end(found.resumed, found.whole, f"{script} is killed in a step")


PLACES = {  # what kills rank 0
    "before the first save": lambda module: kill_at_call(module, "save", 1),
    "in a save": lambda module: kill_at_call(os, "fsync", 3),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("script", DDP_SCRIPTS)
def test_killed_beside_a_save_and_resumed_exactly(script, place, runs, tmp_path):
    """On two processes. What was written of the new file is left, and does not disturb."""
    flags = flags_of(script, tmp_path / "run.pt")
    train_and_kill(runs(script).copy, *flags, nproc=2,
                   setup=lambda module, rank: rank == 0 and PLACES[place](module))
    train_to_end(runs(script).copy, *flags, nproc=2)
    assert_same_end(tmp_path / "run.pt", runs(script).whole, f"{script} is killed {place}")


@pytest.mark.parametrize("script", DDP_SCRIPTS)
def test_resumed_on_other_numbers_of_processes(script, tmp_path):
    """Killed on 3, resumed on 2. Weights differ by the order of summation alone."""
    def setup(module, rank):
        """Samples that flips and crops do not change. Adam turns rounding into large steps."""
        torch.optim.Adam = lambda parameters, **_: torch.optim.SGD(parameters, lr=0.01)
        change_sets(module, with_numbers)
        use_small_model(module)

    def setup_and_kill(module, rank):
        setup(module, rank)
        if rank == 0:
            kill_after(8)

    whole, path = tmp_path / "whole.pt", tmp_path / "run.pt"
    train_to_end(script, *short_flags_of(script, whole), setup=setup)
    train_and_kill(script, *short_flags_of(script, path), nproc=3, setup=setup_and_kill)
    train_to_end(script, *short_flags_of(script, path), nproc=2, setup=setup)
    assert progress(path) == progress(whole), f"{script}: the resumed run has other steps"
    found = difference(path, whole)
    assert found < 1e-5, f"{script} on 3, then 2 processes: weights differ by {found:.1e}"


@pytest.mark.parametrize("script", DDP_SCRIPTS)
def test_a_finished_run_trains_no_more(script, runs, tmp_path):
    for file in runs(script).whole.parent.glob("whole.pt*"):
        shutil.copy(file, tmp_path)

    def count(module, rank):
        steps = []
        at_step(steps.append)
        return steps

    end = train_to_end(runs(script).copy, *flags_of(script, tmp_path / "whole.pt"), nproc=2,
                       setup=count)
    assert end.results == [[], []], f"{script}, started again after its end, trains\n{end.text}"
    assert_same_end(tmp_path / "whole.pt", runs(script).whole, f"{script} is started after its end")


# ---- a run whose state is the step ----
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
@pytest.mark.parametrize("script", STEP_SCRIPTS)
def test_a_signal_to_one_process_stops_all_after_the_same_step(script, name, runs, tmp_path):
    """They save, wait until rank 0 has saved (a second longer here), and end with status 1."""
    def setup(module, rank):
        steps = []
        at_step(steps.append)
        os.fsync = lambda descriptor: time.sleep(1)
        watch(sys, "exit", lambda *_: path.exists() or print("it is too early to exit"))
        if rank == 1:
            kill_after(2, signal.Signals[name])
        return steps

    path = tmp_path / "run.pt"
    copy, whole, *_ = runs(script)
    end = train_forked(copy, *flags_of(script, path), nproc=2, setup=setup)
    what = f"{script}: {name} to one process after step 2"
    assert [len(steps) for steps in end.results] in ([2, 2], [3, 3]), (
        f"{what}: the ranks stop after {end.results}\n{end.text}")
    assert end.statuses == [f"stopped by a signal after step {progress(path)}", 1], (
        f"{what}: statuses {end.statuses}\n{end.text}")
    assert "too early" not in end.text, f"{what}: it exits before rank 0 has saved\n{end.text}"
    train_to_end(copy, *flags_of(script, path), nproc=2)
    assert_same_end(path, whole, what)


@pytest.mark.parametrize("script", STEP_SCRIPTS)
def test_a_signal_in_the_last_step_does_not_make_a_complete_run_a_failure(script, tmp_path):
    """A job that ends with status 1 is requeued."""
    flags = short_flags_of(script, tmp_path / "run.pt")
    for step in (17, 18):  # it is noticed in this step, or in the next one
        (tmp_path / "run.pt").unlink(missing_ok=True)
        end = train_forked(script, *flags, nproc=2, setup=lambda module, rank: (
            use_small_model(module), rank == 0 and kill_after(step, signal.SIGTERM)))
        finished = progress(tmp_path / "run.pt") == 18
        assert (end.statuses == [0, 0]) == finished, (
            f"{script}: SIGTERM after step {step} of 18: {end.statuses}\n{end.text}")


@pytest.mark.parametrize("script", STEP_SCRIPTS)
def test_a_run_under_nohup_ignores_sighup(script, tmp_path):
    def setup(module, rank):
        use_small_model(module)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        kill_after(2, signal.SIGHUP)

    train_to_end(script, *short_flags_of(script, tmp_path / "run.pt"), setup=setup)


@pytest.mark.parametrize("script", STEP_SCRIPTS)
def test_loader_processes_ignore_the_signals_that_stop_a_run(script, tmp_path):
    """Slurm sends them to all. Here, in an evaluation of more batches than are read ahead."""
    def setup(module, rank):
        def send_to_all(args, model, *_):
            if not model.training and not sent:
                sent.append(True)
                for process in mp.active_children():
                    for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
                        os.kill(process.pid, signum)
                signal.raise_signal(signal.SIGTERM)

        sent = []
        use_small_model(module)
        watch(module, "loss_and_counts", send_to_all)

    end = train_forked(script, *flags_of(script, tmp_path / "run.pt", "--batch-size", 2),
                       setup=setup)
    assert end.statuses == ["stopped by a signal after step 7"], (
        f"{script}: signals to all processes in the first evaluation: {end.statuses}\n{end.text}")


@pytest.mark.parametrize("script", STEP_SCRIPTS)
def test_it_saves_every_few_minutes(script, tmp_path):
    """By the clock of any rank: on that of rank 1, a step takes a minute."""
    def setup(module, rank):
        steps, saves = [], []
        at_step(steps.append)
        now = time.monotonic
        if rank == 1:
            module.time = SimpleNamespace(**{**vars(time),
                                             "monotonic": lambda: now() + 60 * len(steps)})
        use_small_model(module)
        watch(module, "check_model", lambda *_: saves.append(len(steps)))
        return saves

    flags = short_flags_of(script, tmp_path / "run.pt", "--epochs", 1, "--save-every", 2)
    saves = train_to_end(script, *flags, nproc=2, setup=setup).results
    assert saves == [[3, 6], [3, 6]], (
        f"{script}, a step of which takes a minute, with --save-every 2, saves after {saves}")


@pytest.mark.parametrize("script", STEP_SCRIPTS)
def test_a_kill_in_an_evaluation_loses_no_training(script, runs, tmp_path):
    """The file is saved before it. A resumed run begins with the evaluation that is missing."""
    path = tmp_path / "run.pt"
    copy, flags = runs(script).copy, flags_of(script, path)
    for evaluation in (1, 3):
        train_and_kill(copy, *flags, nproc=2, setup=lambda module, rank: (
            kill_at_call(module, "evaluate", evaluation)))
        found = progress(path)
        assert found == 6 * evaluation, (
            f"{script}, killed in evaluation {evaluation}, has saved {found}")
    end = train_to_end(copy, *flags, nproc=2)
    expected, found = (re.findall(r"^epoch 3/3 .*(val_loss \S+)", text, re.MULTILINE)
                       for text in (runs(script).end.text, end.text))
    assert found == expected, f"{script}: the missing evaluation has {found}, not {expected}"
    assert_same_end(path, runs(script).whole, f"{script}, killed in two evaluations")


# ---- the best weights ----
@pytest.mark.parametrize("script", BEST_SCRIPTS)
def test_the_best_weights_are_those_of_the_best_evaluation(script, tmp_path):
    """Accuracies of 5 epochs: 0.2, 0.6, 0.6, 0.1, 0.6. The first of equal ones stays.

    It is killed after epoch 3. Model and best score are those that were evaluated.
    """
    accuracies = [0.2, 0.6, 0.6, 0.1, 0.6]

    def setup(module, rank):
        def build_model(*_):
            model = FewPixels() if hasattr(module, "fake_images") else plain_model(*_)
            model.register_buffer("steps", torch.zeros(()))
            return model

        def evaluate(args, model, batches):
            accuracy = accuracies[round(model.steps.item() / 6) - 1]
            return {"val_loss": 1.0, "val_accuracy": accuracy}

        plain_model = module.build_model
        module.build_model = build_model
        module.evaluate = evaluate
        watch(module, "loss_and_counts", lambda args, model, *_: model.steps.add_(1))
        if not path.exists():
            kill_after(20)

    path = tmp_path / "run.pt"
    flags = short_flags_of(script, path, "--epochs", 5)
    train_and_kill(script, *flags, setup=setup)
    train_to_end(script, *flags, setup=setup)
    best = load_checkpoint(f"{path}.best")
    assert best["steps"] == 12, f"{script}: the best weights are those after step {best['steps']}"
    checkpoint = load_checkpoint(path)
    assert checkpoint["progress"]["best_score"] == 0.6, (
        f"{script}: the best score is saved as {checkpoint['progress']}")
    assert best.keys() == checkpoint["model"].keys(), (
        f"{script}: FILE.best is no state_dict of the model: {list(best)}")


# ---- the file ----
@pytest.mark.parametrize("script", DDP_SCRIPTS)
def test_file_is_complete_at_any_moment(script, tmp_path, monkeypatch):
    """It is the old one until the new one is written and on the disk (fsync)."""
    module = load_script(script)
    path = tmp_path / "run.pt"
    module.save({"step": 1}, str(path))
    states = []

    def see(*_):
        files = sorted(tmp_path.iterdir())
        states.append([load_checkpoint(path)["step"], load_checkpoint(files[-1])["step"]])

    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: (see(), fsync(descriptor)))
    monkeypatch.setattr(os, "replace", lambda *paths: (see(), replace(*paths)))
    module.save({"step": 2}, str(path))
    assert states == [[1, 2], [1, 2]], (
        f"{script}: at fsync, and when it is renamed, FILE and the new file must have the steps 1 "
        f"and 2: {states}")
    assert load_checkpoint(path) == {"step": 2}, f"{script}: FILE is not the new one"
    assert os.listdir(tmp_path) == ["run.pt"], f"{script} leaves {os.listdir(tmp_path)}"


@pytest.mark.parametrize("script", DDP_SCRIPTS)
def test_a_checkpoint_that_is_a_link_stays_one(script, tmp_path):
    """To a scratch disk: what it points to is replaced."""
    (tmp_path / "run.pt").symlink_to(tmp_path / "scratch.pt")
    args = load_script(script).parse_args(["--checkpoint", str(tmp_path / "run.pt")])
    assert args.checkpoint == str(tmp_path / "scratch.pt"), (
        f"{script} replaces the link by a file: it saves to {args.checkpoint}")


@pytest.mark.parametrize("script", DDP_SCRIPTS)
def test_a_resumed_run_does_not_keep_the_checkpoint_in_memory(script, runs):
    """It would be a second copy of the model and the optimizer in each process."""
    for rank, counts in enumerate(runs(script).end.results):
        assert set(counts) == {0}, f"{script}: rank {rank} keeps {counts} tensors of its checkpoint"


# ---- files that are refused ----
DAMAGES = {
    "half of it": lambda path: path.write_bytes(path.read_bytes()[:path.stat().st_size // 2]),
    # As FILE.best, which would be overwritten
    "weights alone": lambda path: torch.save(load_checkpoint(path)["model"], path),
    "code": lambda path: torch.save({**load_checkpoint(path), "code": Code()}, path),
}


class Code:
    """Creates a file when it is unpickled."""

    def __reduce__(self):
        return open, ("code-has-run", "w")


@pytest.mark.parametrize("kind", DAMAGES)
@pytest.mark.parametrize("script", DDP_SCRIPTS)
def test_a_file_that_cannot_be_used_ends_the_run_and_is_left(
        script, kind, runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = shutil.copy(runs(script).stopped, tmp_path / "run.pt")
    DAMAGES[kind](path)
    before = path.read_bytes()
    end = train_forked(runs(script).copy, *short_flags_of(script, path))
    assert "epoch " not in end.text, f"{script}: FILE has {kind}, and it trains\n{end.text}"
    if kind == "weights alone":
        assert "error: " in str(end.statuses) and "run.pt" in str(end.statuses), (
            f"{script}: FILE has weights alone, and no error line says so: {end.statuses}")
    assert path.read_bytes() == before, f"{script}: FILE had {kind}, and has been changed"
    assert not Path("code-has-run").exists(), f"{script} runs code that a checkpoint has"


@pytest.mark.parametrize("script", DDP_SCRIPTS)
def test_any_other_value_of_a_flag_is_another_run(script, runs):
    """But for those of MAY_CHANGE. Also --epochs: a scheduler would go on with another total."""
    module = load_script(script)
    flags = vars(module.parse_args([])).keys()
    free = flags & {"checkpoint", "timeout", "workers", "nproc", "bf16", "compile", "data_dir",
                    "image_folder", "batch_size", "save_every", "log_every"}
    assert set(module.MAY_CHANGE) == free, (
        f"{script} must resume with other values of {free} alone, not of {module.MAY_CHANGE}")
    checkpoint = load_checkpoint(runs(script).stopped)
    run = checkpoint["run"]
    assert run.keys() >= flags - free, f"{script}: FILE lacks flags: it has {run}"
    for name in run:
        with pytest.raises(SystemExit, match=re.escape(f"{name} was {run[name]}, is other")):
            module.resume(checkpoint, {**run, name: "other"}, {}, {})
            pytest.fail(f"{script} resumes with another {name}")


@pytest.mark.parametrize("script", DDP_SCRIPTS)
def test_another_number_of_samples_is_another_run(script, runs, tmp_path):
    """As of a data set that has grown since."""
    path = shutil.copy(runs(script).stopped, tmp_path / "run.pt")
    (status,) = train_forked(
        runs(script).copy, *short_flags_of(script, path), setup=lambda module, rank: change_sets(
            module, lambda data, train_set: first_samples(data, -1))).statuses
    assert "error: " in str(status) and "samples" in str(status), (
        f"{script} resumes with a sample less: {status!r}")
    assert_equal(path, runs(script).stopped, f"{script}: a FILE that was refused")


@pytest.mark.parametrize("script", DDP_SCRIPTS)
def test_a_new_flag_of_a_copy_is_compared_without_being_named_anywhere(script, tmp_path):
    """Of any type. A file that lacks it is still good, if its default is None."""
    copy = make_copy(script, tmp_path / "copy.py", ('before "import sys"', "import pathlib"), (
        'before "--seed"', 'parser.add_argument("--new", type=pathlib.Path)'))
    flags = short_flags_of(script, tmp_path / "run.pt", "--epochs", 1)
    train_to_end(script, *flags, setup=use_small_model)
    train_to_end(copy, *flags, setup=use_small_model)
    (status,) = train_forked(copy, *flags, "--new", "a", setup=use_small_model).statuses
    assert "new was None, is a" in str(status), f"{script} resumes with a new flag: {status!r}"


@pytest.mark.parametrize("script", DDP_SCRIPTS)
def test_flags_that_may_change(script, runs, tmp_path):
    """Those of rank 0 alone need the file: the other rank looks for another one."""
    path = tmp_path / "run.pt"
    for file in runs(script).stopped.parent.glob("stopped.pt*"):
        shutil.copy(file, tmp_path / file.name.replace("stopped", "run"))

    def setup(module, rank):
        if rank == 1:
            sys.argv += ["--checkpoint", str(tmp_path / "not-here.pt")]

    more = {"timeout": 77, "save_every": 1, "log_every": 1, "data_dir": "elsewhere"}
    if script in STEP_SCRIPTS:
        more["workers"] = 2
    changed = [word for name, value in more.items()
               if name in vars(load_script(script).parse_args([]))
               for word in (f"--{name.replace('_', '-')}", value)]
    train_to_end(runs(script).copy, *flags_of(script, path, *changed), nproc=2, setup=setup)
    assert_same_end(path, runs(script).whole, f"{script} is resumed with {changed}")


# ---- kills of every kind, at random moments, by the real command ----
WAYS = ["SIGKILL of all", "SIGKILL of one process", "SIGKILL of a loader process",
        "SIGKILL of the launcher", "SIGTERM to the launcher", "Ctrl-C",
        "SIGKILL of all while it starts"]


def disturb(job, way, chance):
    """Disturb a job in this way, at a random moment, unless it has ended."""
    if way.endswith("while it starts"):
        time.sleep(5 * chance.random())
        job.kill()
        return
    try:
        job.wait_for(r"^world size ")
        time.sleep(3 * chance.random())
        workers = job.workers()
        if way == "SIGKILL of one process":
            os.kill(chance.choice(workers), signal.SIGKILL)
        elif way == "SIGKILL of a loader process":
            os.kill(chance.choice(job.loaders() or workers), signal.SIGKILL)
        elif way == "SIGKILL of the launcher":
            job.send(signal.SIGKILL)
        elif way == "SIGTERM to the launcher":
            job.send(signal.SIGTERM)
        elif way == "Ctrl-C":
            os.killpg(job.launcher.pid, signal.SIGINT)
        else:
            job.kill()
    except (AssertionError, OSError):  # it has ended
        return


@pytest.mark.slow
@pytest.mark.parametrize("script", DDP_SCRIPTS)
def test_killed_at_random_and_resumed_exactly(script, request, runs, tmp_path):
    """On two processes."""
    launcher, nproc = SCRIPTS[script].start
    kills = -(-request.config.getoption("--kills") // len(DDP_SCRIPTS))
    seed = request.config.getoption("--kill-seed")
    name = f"{script} by {launcher}, --kill-seed {seed}"
    chance = random.Random(name)
    slow_copy = random_copy(script, tmp_path / "slow.py", (
        'before "optimizer.zero_grad()"', "time.sleep(0.05)"))  # 3 seconds of training
    whole, path = tmp_path / "whole.pt", tmp_path / "run.pt"
    flags = flags_of(script, path, "--epochs", 10)
    train_to_end(runs(script).copy, *flags, "--checkpoint", whole, nproc=nproc)
    if script in STEP_SCRIPTS:
        flags += ["--save-every", 0.01]
    first = kills * DDP_SCRIPTS.index(script)
    order = random.Random(seed).sample(WAYS, len(WAYS))  # other cases use the other ways
    ways = [order[number % len(WAYS)] for number in range(first, first + kills)]
    counts = Counter()
    status = None
    while status != 0 or ways:
        if status == 0:  # it has ended before it was disturbed as often as it should
            assert_same_end(path, whole, f"{name} after {dict(counts)}")
            path.unlink()
        with start(slow_copy, *flags, launcher=launcher, nproc=nproc,
                   env={"OMP_NUM_THREADS": 1}) as job:
            way = ways.pop(0) if ways else ""
            if way:
                disturb(job, way, chance)
            status, text = job.result()
            if way != "SIGKILL of the launcher":
                wait_until_gone(job, f"{name}, {way}")
        assert way or status == 0, f"{name} was not disturbed, but failed\n{text}"
        counts[way if status != 0 else "ended"] += 1
        counts["resumed"] += "resumed after" in text
        if path.exists():
            load_checkpoint(path)  # complete, whenever it was killed
    assert_same_end(path, whole, f"{name} after {dict(counts)}")
    print(f"{name}: equal files after {dict(counts)}")
