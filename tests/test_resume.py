"""Second guarantee: after any kill, the same command resumes, bit for bit.

FILE is complete at any moment. Another run's file, FILE.best and a damaged file are refused, and
nothing starts over by itself.

bash tests/run.sh -s -k killed_at_random --kills 200      # prints what it did
"""

import contextlib
import functools
import os
import random
import re
import shutil
import signal
import sys
import time
import weakref
from argparse import Namespace
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.multiprocessing as mp
from copies import make_copy
from harness import (EPOCHS, STEPS, TRAIN, VAL, flags_of, keep_samples, kill_at, kill_in_step,
                     own_flags, run, run_to_end, text_of, unequal, wrap)
from launchers import start, wait_until_gone
from scripts import BEST_SCRIPTS, DDP_SCRIPTS, SCRIPTS, load_script

scripts = pytest.mark.parametrize("script", DDP_SCRIPTS)
scripts_with_best = pytest.mark.parametrize("script", BEST_SCRIPTS)
CIFAR = "cifar10_ddp"  # whose state is the step: it can stop, and save, after any one
MORE = {"synthetic_ddp": ("--workers", 1), CIFAR: ("--workers", 1, "--save-every", 0)}


def noisy(script, path, *more):
    """Return flags of a run that draws random numbers wherever it can, in loader processes, too."""
    return (*flags_of(script), *MORE.get(script, ()), "--checkpoint", path, *more)


def kill(script, *flags, at, nproc=2, problem="noisy"):
    """Train until rank 0 is killed by at(module)."""
    def change(module, rank, seen):
        if rank == 0:
            at(module)

    ranks = run(script, *flags, nproc=nproc, problem=problem, change=change)
    assert ranks[0].code == -signal.SIGKILL, f"{script} was not killed:\n{text_of(ranks)}"


def in_a_step(module):
    kill_in_step(2 + 2 * STEPS)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A function of a script, which returns FILE of an undisturbed run on two processes."""
    @functools.cache
    def train(script):
        path = tmp_path_factory.mktemp("whole") / "run.pt"
        ranks = run_to_end(script, *noisy(script, path), problem="noisy")
        path.with_suffix(".log").write_text(ranks[0].text)
        return path

    return train


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A function of a script, which returns FILE of a run on two processes, killed in a step."""
    @functools.cache
    def train(script):
        path = tmp_path_factory.mktemp("stopped") / "run.pt"
        kill(script, *noisy(script, path), at=in_a_step)
        return path

    return train


def copy_files(path, folder):
    """Copy FILE, and FILE.best, to a folder. Return the path of FILE there."""
    for file in path.parent.glob("run.pt*"):
        shutil.copy(file, folder)
    return folder / "run.pt"


def assert_same_files(path, expected, what):
    """Fail unless FILE and FILE.best are equal to those of another run."""
    for found, other in ((path, expected), (Path(f"{path}.best"), Path(f"{expected}.best"))):
        assert found.exists() == other.exists(), f"{what}: is there {found.name}? {found.exists()}"
        different = unequal(found, other) if found.exists() else []
        assert not different, (
            f"{what}, and resumed: {found.name} is not that of a whole run, in {len(different)} "
            f"places: {different[0]}")
    best = Path(f"{path}.best")
    if best.exists():
        names = torch.load(best).keys()
        assert names == torch.load(path)["model"].keys(), f"{what}: the best weights are {names}"


# ---- killed at any place ----
def test_killed_in_the_first_write_and_started_again(whole, tmp_path):
    """What was not renamed yet does not disturb. save() is the same in all scripts."""
    path = tmp_path / "run.pt"
    kill("cpu_ddp", *noisy("cpu_ddp", path), at=lambda module: kill_at(os, "fsync", 1))
    files = [file.name for file in tmp_path.iterdir()]
    assert files == ["run.pt.tmp"], f"killed in the first write: {files} are there too early"
    run_to_end("cpu_ddp", *noisy("cpu_ddp", path), problem="noisy")
    assert_same_files(path, whole("cpu_ddp"), "cpu_ddp is killed in the first write")


@scripts
def test_killed_in_a_step_and_resumed_with_other_flags_that_may_change(script, whole, stopped,
                                                                       tmp_path):
    """With dropout, BatchNorm and random transforms, bit for bit.

    Rank 0 alone needs the file. A new flag, whose default is None, may be missing there.
    """
    def change(module, rank, seen):
        wrap(module, "parse_args", lambda plain: Namespace(**vars(plain()), new=None))
        if rank == 1:
            sys.argv += ["--checkpoint", "/proc/not-here.pt"]

    more = {"timeout": 77, "save_every": 1, "log_every": 1, "data_dir": "elsewhere"}
    if script == CIFAR:
        more["workers"] = 2
    changed = [word for name, value in more.items()
               if name in vars(load_script(script).parse_args([]))
               for word in (f"--{name.replace('_', '-')}", value)]
    path = copy_files(stopped(script), tmp_path)
    ranks = run_to_end(script, *noisy(script, path), *changed, problem="noisy", change=change)
    assert "resumed after" in ranks[0].text, f"{script} starts over\n{ranks[0].text}"
    found = torch.load(path)
    del found["run"]["new"]
    torch.save(found, path)
    assert_same_files(path, whole(script), f"{script} is killed in a step, {changed}")


@scripts
def test_its_own_data_and_model_resume_bit_for_bit(script, tmp_path):
    flags = (*own_flags(script), "--checkpoint")
    path, other = tmp_path / "run.pt", tmp_path / "whole.pt"
    run_to_end(script, *flags, other, problem="own", nproc=1)
    kill(script, *flags, path, problem="own", nproc=1, at=lambda module: kill_in_step(STEPS + 2))
    (rank,) = run_to_end(script, *flags, path, problem="own", nproc=1)
    assert "resumed after" in rank.text, f"{script} starts over\n{rank.text}"
    assert_same_files(path, other, f"{script} with its own data, killed in a step")


@scripts_with_best
def test_an_epoch_is_saved_before_its_results_are_written(script, tmp_path):
    """At a stop, W&B may be gone. Here, log_results() ends the run."""
    path = tmp_path / "run.pt"
    kill(script, *flags_of(script), "--checkpoint", path, nproc=1, problem="plain",
         at=lambda module: kill_at(module, "log_results", 1))
    assert path.exists() and Path(f"{path}.best").exists(), (
        f"{script}: log_results() fails, and the epoch is not saved")


@scripts
def test_resumed_on_other_numbers_of_processes(script, tmp_path):
    """Killed on 3, resumed on 1. Weights differ by the order of summation alone."""
    one, path = tmp_path / "one.pt", tmp_path / "run.pt"
    flags = (*flags_of(script), "--checkpoint")
    run_to_end(script, *flags, one, nproc=1)
    kill(script, *flags, path, at=in_a_step, nproc=3, problem="plain")
    (rank,) = run_to_end(script, *flags, path, nproc=1)
    assert "resumed after" in rank.text, f"{script} starts over\n{rank.text}"
    one, path = torch.load(one), torch.load(path)
    progress, expected = ({**file["progress"], "best_score": 0} for file in (path, one))
    assert progress == expected, f"{script}: the resumed run ends after {progress}"
    error = max((one["model"][name] - path["model"][name]).abs().max() for name in one["model"])
    assert error < 1e-5, f"{script} on 3 processes, then 1: weights differ by {error:.1e}"


@scripts
def test_a_finished_run_trains_no_more_and_keeps_no_checkpoint_in_memory(script, whole, tmp_path):
    """FILE would be a second copy of the model and the optimizer in each process."""
    def change(module, rank, seen):
        def resume(plain, checkpoint, *arguments):
            tensors.extend(map(weakref.ref, checkpoint["model"].values()))
            plain(checkpoint, *arguments)

        def close_group(plain):
            print("kept:", sum(tensor() is not None for tensor in tensors), "of", len(tensors))
            plain()

        tensors = []
        wrap(module, "resume", resume)
        wrap(module, "close_group", close_group)

    path = copy_files(whole(script), tmp_path)
    for rank in run_to_end(script, *noisy(script, path), problem="noisy", change=change):
        steps = [event for event in rank.seen if event[0] == "step"]
        assert not steps, f"{script}, started again after its end, trains\n{rank.text}"
        assert re.search("kept: 0 of [1-9]", rank.text), (
            f"{script} keeps tensors of its checkpoint:\n{rank.text}")
    assert_same_files(path, whole(script), f"{script} is started after its end")


# ---- a run whose state is the step ----
def test_killed_in_an_evaluation_and_resumed_bit_for_bit(whole, tmp_path):
    """That of epoch 2. The other scripts train this epoch again, as if killed in its last step."""
    path, what = tmp_path / "run.pt", f"{CIFAR} is killed in an evaluation"
    kill(CIFAR, *noisy(CIFAR, path), at=lambda module: kill_at(module, "evaluate", 2))
    step = torch.load(path)["progress"]["step"]
    assert step == 2 * STEPS, f"{what} of epoch 2, has saved step {step}: training is lost"
    ranks = run_to_end(CIFAR, *noisy(CIFAR, path), problem="noisy")
    assert "resumed after" in ranks[0].text, f"{what}, and starts over\n{ranks[0].text}"
    assert_same_files(path, whole(CIFAR), what)
    texts = (ranks[0].text, whole(CIFAR).with_suffix(".log").read_text())
    found, expected = (re.findall(r"\bval_loss \S+", text)[-1:] for text in texts)
    assert found == expected, f"{what}: the last result is {found}, not {expected}"


def test_a_signal_to_one_process_stops_all_after_the_same_step(whole, tmp_path):
    """They save, wait until rank 0 has saved (a moment longer here), and end with status 1.

    SIGTERM: for the others, see test_a_signal_is_saved_and_said_also_if_nobody_reads_the_log.
    """
    def change(module, rank, seen):
        def save(plain, *arguments):
            time.sleep(0.3)
            plain(*arguments)

        def leave(plain, status):
            print("saved" if path.exists() else "it is too early to exit")
            plain(status)

        wrap(module, "save", save)
        wrap(sys, "exit", leave)
        if rank == 1:
            kill_in_step(2, signal.SIGTERM)

    path = tmp_path / "run.pt"
    ranks = run(CIFAR, *noisy(CIFAR, path, "--save-every", 5), problem="noisy", change=change)
    text = text_of(ranks)
    steps = [sum(event[0] == "step" for event in rank.seen) for rank in ranks]
    assert steps in ([2, 2], [3, 3]), f"SIGTERM in step 2: the ranks stop after {steps}\n{text}"
    assert [rank.code for rank in ranks] == [1, 1], f"SIGTERM: they must end with 1\n{text}"
    assert f"stopped by a signal after step {steps[0]}" in ranks[0].text, f"SIGTERM:\n{text}"
    assert "too early" not in text, f"SIGTERM: a rank exits before rank 0 has saved\n{text}"
    run_to_end(CIFAR, *noisy(CIFAR, path), problem="noisy")
    assert_same_files(path, whole(CIFAR), f"{CIFAR} is stopped by SIGTERM")


@pytest.mark.parametrize("step", [EPOCHS * STEPS - 1, EPOCHS * STEPS])
def test_a_signal_in_the_last_step_does_not_make_a_complete_run_a_failure(step, tmp_path):
    """A job that ends with status 1 is requeued. It is noticed in this step, or in the next one."""
    def change(module, rank, seen):
        if rank == 0:
            kill_in_step(step, signal.SIGTERM)

    path = tmp_path / "run.pt"
    ranks = run(CIFAR, *flags_of(CIFAR), "--checkpoint", path, change=change)
    finished = torch.load(path)["progress"]["step"] == EPOCHS * STEPS
    assert [rank.code for rank in ranks] == 2 * [int(not finished)], (
        f"SIGTERM in step {step} of {EPOCHS * STEPS}: finished: {finished}\n{text_of(ranks)}")


def test_a_run_under_nohup_ignores_sighup():
    def change(module, rank, seen):
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        kill_in_step(2, signal.SIGHUP)

    run_to_end(CIFAR, *flags_of(CIFAR), change=change, nproc=1)


@pytest.mark.parametrize("training, step", [(True, 1), (False, STEPS + 1)])
def test_loader_processes_ignore_the_signals_that_stop_a_run(training, step, tmp_path):
    """Slurm and Ctrl-C send them to all.

    In the first step, while the second loader process starts, and in an evaluation of more batches
    than are read ahead.
    """
    def change(module, rank, seen):
        def ignore_signals(plain, worker):
            time.sleep(worker * training)
            plain(worker)

        def loss_and_counts(plain, args, model, *batch):
            if model.training == training and ("sent",) not in seen:
                seen.append(("sent",))
                for process in mp.active_children():
                    for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)[:3 - training]:
                        os.kill(process.pid, signum)
                signal.raise_signal(signal.SIGTERM)
            return plain(args, model, *batch)

        wrap(module, "ignore_signals", ignore_signals)
        wrap(module, "loss_and_counts", loss_and_counts)

    (rank,) = run(CIFAR, *noisy(CIFAR, tmp_path / "run.pt"), "--batch-size", 1, "--workers",
                  1 + training, "--timeout", 20, nproc=1, change=change)
    assert re.search(f"stopped by a signal after step ({step}|{step + 1})$", rank.text, re.M), (
        f"{CIFAR}: signals to all processes (in training: {training})\n{rank.text}")


def test_it_saves_every_few_minutes(tmp_path):
    """By the clock of any rank: on that of rank 1, a step takes a minute."""
    def change(module, rank, seen):
        def monotonic(plain):
            return plain() + 60 * sum(event[0] == "step" for event in seen)

        def check_model(plain, model):
            seen.append(("save",))
            plain(model)

        module.time = SimpleNamespace(**vars(time))  # for this module alone
        if rank == 1:
            wrap(module.time, "monotonic", monotonic)
        wrap(module, "check_model", check_model)

    ranks = run_to_end(CIFAR, *flags_of(CIFAR), "--checkpoint", tmp_path / "run.pt", "--epochs", 1,
                       "--global-batch", 7, "--save-every", 2, "--timeout", 60, change=change)
    for rank in ranks:
        kinds = [event[0] for event in rank.seen if event[0] in ("step", "save")]
        steps = [kinds[:place].count("step") for place, kind in enumerate(kinds) if kind == "save"]
        assert steps == [3, 6, 8], (
            f"{CIFAR}, a step of which takes a minute, with --save-every 2: it saves after {steps}")


# ---- the best weights ----
@scripts_with_best
def test_the_best_weights_are_those_of_the_best_evaluation(script, tmp_path):
    """Accuracies of 4 epochs: 0.2, 0.6, 0.6, 0.1. The first of equal ones stays.

    A run is killed between the two saves of the best epoch, and once after it. Without loader
    processes (harness.py sets --workers 0), transforms draw this process's random numbers.
    """
    def change(module, rename=0):
        def build_optimizer(plain, *arguments):
            made.extend(plain(*arguments))
            return made

        def evaluate(plain, *_):
            epoch = made[1].last_epoch // STEPS  # of the schedule
            return {"val_loss": 1.0, "val_accuracy": [0.2, 0.6, 0.6, 0.1][epoch - 1]}

        made = []
        wrap(module, "build_optimizer", build_optimizer)
        wrap(module, "evaluate", evaluate)
        kill_at(os, "replace", rename)

    def train(path):
        return run_to_end(script, *flags, path, nproc=1, problem="noisy",
                          change=lambda module, rank, seen: change(module))

    flags = (*flags_of(script), "--epochs", 4, "--checkpoint")
    one, path = tmp_path / "one.pt", tmp_path / "run.pt"
    (rank,) = train(one)
    weights = torch.load(f"{one}.best")["0.weight"].flatten()  # of the first layer
    steps = [event[1][:len(weights)] for event in rank.seen if event[0] == "step"]
    found = [number for number, step in enumerate(steps, 1) if torch.equal(step, weights)]
    assert found == [2 * STEPS], f"{script}: the best weights are those after the steps {found}"
    kill(script, *flags, path, at=lambda module: change(module, rename=4), nproc=1)
    kill(script, *flags, path, at=lambda module: change(module, rename=3), nproc=1)
    train(path)
    assert_same_files(path, one, f"{script} is killed between two saves, and after them")


# ---- the file ----
@scripts
def test_a_checkpoint_that_is_a_link_stays_one(script, tmp_path):
    """To a scratch disk: what it points to is replaced."""
    (tmp_path / "run.pt").symlink_to(tmp_path / "scratch.pt")
    args = load_script(script).parse_args(["--checkpoint", str(tmp_path / "run.pt")])
    assert args.checkpoint == str(tmp_path / "scratch.pt"), (
        f"{script} replaces the link by a file: it saves to {args.checkpoint}")


# ---- files that are refused ----
class Code:
    """Creates a file when it is unpickled."""

    def __reduce__(self):
        return open, ("code-has-run", "w")


DAMAGES = {
    "half of it": lambda path: path.write_bytes(path.read_bytes()[:path.stat().st_size // 2]),
    # As FILE.best, which would be overwritten
    "weights alone": lambda path: torch.save(torch.load(path)["model"], path),
    "code": lambda path: torch.save({**torch.load(path), "code": Code()}, path),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_file_that_cannot_be_used_ends_the_run_and_is_left(kind, stopped, tmp_path, monkeypatch):
    """load_checkpoint() is the same in all scripts."""
    monkeypatch.chdir(tmp_path)
    path = copy_files(stopped("cpu_ddp"), tmp_path)
    DAMAGES[kind](path)
    before = path.read_bytes()
    (rank,) = run("cpu_ddp", *noisy("cpu_ddp", path), nproc=1, problem="noisy")
    assert rank.code == 1, f"FILE has {kind}, and it trains\n{rank.text}"
    if kind == "weights alone":
        assert re.search("^error: .*run.pt", rank.text, re.M), (
            f"FILE has weights alone, and no error line says so: {rank.text}")
    assert path.read_bytes() == before, f"FILE had {kind}, and has been changed"
    assert not Path("code-has-run").exists(), "code that a checkpoint has is run"


def refused(script, path, what, change=lambda module, rank, seen: None):
    """Resume from FILE on one process. Return what it prints: FILE must be refused."""
    (rank,) = run(script, *noisy(script, path), nproc=1, problem="noisy", change=change)
    assert rank.code == 1 and "error: the checkpoint is of another run" in rank.text, (
        f"{script} resumes {what}:\n{rank.text}")
    return rank.text


@scripts
def test_any_other_value_of_a_flag_is_another_run(script, stopped, tmp_path):
    """But for those of MAY_CHANGE, which are named here, too.

    Also --epochs: a scheduler would go on with another total. A copy may remove a flag, or add one
    of any type.
    """
    module = load_script(script)
    flags = vars(module.parse_args([])).keys()
    free = flags & {"checkpoint", "timeout", "workers", "nproc", "bf16", "compile", "data_dir",
                    "image_folder", "batch_size", "save_every", "log_every"}
    assert set(module.MAY_CHANGE) == free, (
        f"{script} must resume with other values of {free} alone, not of {module.MAY_CHANGE}")
    path = copy_files(stopped(script), tmp_path)
    checkpoint = torch.load(path)
    assert checkpoint["run"].keys() >= flags - free, f"{script}: FILE has {checkpoint['run']}"
    run_of = dict.fromkeys([*checkpoint["run"], "removed"], "other")
    torch.save({**checkpoint, "run": run_of}, path)
    text = refused(script, path, "a run with other flags", lambda module, rank, seen: wrap(
        module, "parse_args", lambda plain: Namespace(**vars(plain()), added=Path("a"))))
    for words in ("added was None, is a", *[f"{name} was other, is" for name in run_of]):
        assert words in text, f"{script} must say {words!r}:\n{text}"


@pytest.mark.parametrize("script, part, numbers, named", [
    *[(script, 0, range(TRAIN - 1), "training_samples was 59, is 58") for script in DDP_SCRIPTS],
    *[(script, 1, range(VAL - 1), "validation_samples was 19, is 18") for script in BEST_SCRIPTS],
    ("fashionmnist_ddp", 0, range(TRAIN - 1, -1, -1), "labels_checksum was ")])
def test_other_samples_are_another_run(script, part, numbers, named, stopped, tmp_path):
    """As of a data set that has grown since, or of files that are listed in another order."""
    path = copy_files(stopped(script), tmp_path)
    text = refused(script, path, "with other samples", lambda module, rank, seen: keep_samples(
        module, script, part, numbers))
    assert named in text, f"{script} must say {named!r}:\n{text}"
    assert not unequal(path, stopped(script)), f"{script} changes a file that it refuses"


# ---- kills of every kind, at random moments, by the real command ----
WAYS = ["SIGKILL of all", "SIGKILL of one process", "SIGKILL of a loader process",
        "SIGKILL of the launcher", "SIGTERM to the launcher", "Ctrl-C",
        "SIGKILL of all while it starts"]


def disturb(job, way, chance):
    """Disturb a job in this way, at a random moment, unless it has ended."""
    starting = way.endswith("while it starts")
    with contextlib.suppress(AssertionError, OSError):  # it has ended
        if not starting:
            job.wait_for(r"^world size ")
        time.sleep(chance.uniform(0, 5 if starting else 3))
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


@pytest.mark.slow
@scripts
def test_killed_at_random_and_resumed_exactly(script, request, tmp_path):
    """On two processes, with the script's own data and model: a step is only longer."""
    launcher, nproc = SCRIPTS[script].start
    kills = -(-request.config.getoption("--kills") // len(DDP_SCRIPTS))
    seed = request.config.getoption("--kill-seed")
    name = f"{script} by {launcher}, --kill-seed {seed}"
    chance = random.Random(name)
    copy = make_copy(script, tmp_path / "slow.py", (
        'before "optimizer.zero_grad()"', "time.sleep(0.05)"))  # 2 seconds of training
    other, path = tmp_path / "whole.pt", tmp_path / "run.pt"
    flags = [*own_flags(script), "--epochs", 10, "--checkpoint"]
    run_to_end(script, *flags, other, nproc=nproc, problem="own")
    if script == CIFAR:
        flags[:0] = ["--save-every", 0.01]
    first = kills * DDP_SCRIPTS.index(script)
    order = random.Random(seed).sample(WAYS, len(WAYS))  # other cases use the other ways
    ways = [order[number % len(WAYS)] for number in range(first, first + kills)]
    counts = Counter()
    status = None
    while status != 0 or ways:
        if status == 0:  # it has ended before it was disturbed as often as it should
            assert_same_files(path, other, f"{name} after {dict(counts)}")
            path.unlink()
        with start(copy, *flags, path, launcher=launcher, nproc=nproc,
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
            torch.load(path)  # complete, whenever it was killed
    assert_same_files(path, other, f"{name} after {dict(counts)}")
    print(f"{name}: equal files after {dict(counts)}")
