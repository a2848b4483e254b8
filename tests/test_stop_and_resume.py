"""A run that is stopped by a signal saves, and the same command ends with the same weights."""

import errno
import functools
import os
import re
import shutil
import signal
import sys
import time
import weakref
from argparse import Namespace

import pytest
import torch.distributed as dist
from checkpoints import assert_equal, progress
from copies import make_copy
from forked import at_step, signal_after, train_forked, train_to_end, watch
from launchers import start, wait_until_gone
from recorder import record_small_model, use_small_model
from scripts import CHECKPOINT_SCRIPTS, DDP_SCRIPTS, ROOT, SCRIPTS, STEP_SCRIPTS, load_script
from torch.multiprocessing import ProcessExitedException, start_processes

TEST_SCRIPTS = [script for script in CHECKPOINT_SCRIPTS if SCRIPTS[script].has_test_set]
# A model and data of a copy that draw random numbers
RANDOM = """
def build_model(args):
    return nn.Sequential(nn.Linear(10, 5), nn.Dropout(0.2), nn.Linear(5, 3))


class Noisy(TensorDataset):
    def __getitem__(self, index):
        inputs, label = super().__getitem__(index)
        return inputs + 0.1 * torch.randn(10), label


load_tensors = load_data


def load_data(args):
    train_set, test_set = load_tensors(args)
    return Noisy(*train_set.tensors), test_set
"""
MORE_FLAGS = {"cifar10_ddp": ("--model", "mnasnet0_5", "--image-size", 32)}  # BatchNorm, dropout


def train_two(script, checkpoint, *flags, disturb=lambda module, rank: None, check_every=1):
    """Train two processes for three epochs of six steps, after disturb(module, rank).

    Return their End, with their numbers of steps.
    """
    def setup(module, rank):
        steps = []
        module.CHECK_EVERY = check_every
        if rank == 1:
            sys.argv[-1] += "-of-rank-1"  # the checkpoint: that of rank 0 is used
        disturb(module, rank)
        at_step(steps.append)
        return steps

    more = ("--log-every", 3600) if script in STEP_SCRIPTS else ()
    end = train_forked(script, SCRIPTS[script].data_flag, 72, *MORE_FLAGS.get(script, ()),
                       *SCRIPTS[script].no_children, "--batch-size", 6, "--epochs", 3, *more,
                       *flags, "--checkpoint", checkpoint, nproc=2, setup=setup)
    return Namespace(**end._asdict(), steps=[len(steps) for steps in end.results])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A function that returns the checkpoint of a script's undisturbed run: it trains once."""
    @functools.cache
    def checkpoint_of(script):
        path = tmp_path_factory.mktemp("undisturbed") / "run.pt"
        end = train_two(script, path)
        assert end.statuses == [0, 0], f"{script} ends with {end.statuses}\n{end.text}"
        return path

    return checkpoint_of


def assert_stopped(script, life, path, what, at_most):
    """Fail unless both processes have stopped after one step, saved it, and the first one says so.

    A small script stops at the end of the epoch, which has 6 steps.
    """
    assert path.exists(), f"{what}: nothing is saved, it ends with {life.statuses}\n{life.text}"
    at_most = at_most if script in STEP_SCRIPTS else 6
    expected = [f"stopped by a signal after {progress(path)}", 1]
    assert life.statuses == expected, (
        f"{what}: the exit statuses must be {expected}, not {life.statuses}\n{life.text}")
    assert life.steps[0] == life.steps[1] <= at_most, (
        f"{what}: both must stop after at most {at_most} steps, not {life.steps}\n{life.text}")


def assert_resumes(script, checkpoint, undisturbed, what):
    """Fail unless the run of a checkpoint ends with the weights of the undisturbed one."""
    end = train_two(script, checkpoint)
    assert end.statuses == [0, 0], f"{what}: the resume ends with {end.statuses}\n{end.text}"
    assert_equal(checkpoint, undisturbed(script), f"{what}, and resumed: the checkpoint")


# --- stops ---
@pytest.mark.parametrize("script, name", [
    ("cpu_ddp", "SIGHUP"), ("synthetic_ddp", "SIGTERM"), ("cifar10_ddp", "SIGTERM"),
    ("fashionmnist_ddp", "SIGINT")])
def test_a_signal_to_one_process_stops_all(script, name, undisturbed, tmp_path):
    """However far apart the log lines are: here, an hour. Saving takes a second longer.

    A launcher ends the others when one process exits: all must wait until rank 0 has saved.
    """
    def disturb(module, rank):
        os.fsync = lambda descriptor: time.sleep(1)
        watch(sys, "exit", lambda *_: path.exists() or print("it is too early to exit"))
        if rank == 1:
            signal_after(2, signal.Signals[name])

    path = tmp_path / "run.pt"
    check_every = getattr(load_script(script), "CHECK_EVERY", 1)
    life = train_two(script, path, disturb=disturb, check_every=check_every)
    what = f"{name} to one process of {script} after step 2"
    assert_stopped(script, life, path, what, at_most=2 + check_every)
    assert "too early" not in life.text, (
        f"{what}: a process exited before rank 0 had saved\n{life.text}")
    assert_resumes(script, path, undisturbed, what)


@pytest.mark.parametrize("script", CHECKPOINT_SCRIPTS)
def test_a_run_whose_terminal_is_closed_stops_and_saves(script, tmp_path):
    """The exchange of signals may take as long as a process does not wait for it."""
    def fail_to_write(text):
        raise OSError(errno.EIO, "the terminal is closed")

    def close_terminal(count):
        sys.stdout = Namespace(write=fail_to_write)

    def disturb(module, rank):
        all_reduce = dist.all_reduce

        def late_all_reduce(*arguments, async_op=False, **options):
            if not async_op:
                return all_reduce(*arguments, **options)
            return Namespace(wait=lambda: all_reduce(*arguments, **options))

        dist.all_reduce = late_all_reduce
        at_step(close_terminal)
        if rank == 1:
            signal_after(1, signal.SIGHUP)

    life = train_two(script, tmp_path / "run.pt", disturb=disturb)
    what = f"SIGHUP to {script}, whose terminal is closed"
    assert_stopped(script, life, tmp_path / "run.pt", what, at_most=2)


def test_a_run_under_nohup_ignores_sighup(undisturbed, tmp_path):
    def disturb(module, rank):
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal_after(2, signal.SIGHUP)

    life = train_two("cpu_ddp", tmp_path / "run.pt", disturb=disturb)
    assert life.statuses == [0, 0], (
        f"SIGHUP to a run under nohup, which ignores it, ends it with {life.statuses}\n{life.text}")


@pytest.mark.parametrize("script", STEP_SCRIPTS)
def test_a_run_that_was_killed_while_it_evaluated_evaluates_again(script, undisturbed, tmp_path):
    def disturb(module, rank):
        watch(module, "evaluate", lambda *_: os.kill(os.getpid(), signal.SIGKILL))

    path = tmp_path / "run.pt"
    life = train_two(script, path, disturb=disturb)
    what = f"{script} is killed while it evaluates its first epoch"
    saved = progress(path)
    assert saved == "step 6", f"{what}, and {saved} is saved, not the last of 6\n{life.text}"
    end = train_two(script, path)
    count = end.text.count("epoch 1/3  test loss")
    assert count == 1, f"{what}: a resume must evaluate epoch 1, not {count} times\n{end.text}"
    assert_equal(path, undisturbed(script), f"{what}, and resumed: the checkpoint")


@pytest.mark.parametrize("script", TEST_SCRIPTS)
def test_a_signal_during_an_evaluation_is_noticed_at_once_and_the_run_stops(script, undisturbed,
                                                                           tmp_path):
    """Who presses Ctrl-C sees a line, and need not press again. Here, it is pressed again."""
    def interrupt(module, rank):
        def during_evaluation(*_):
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            print("evaluation goes on")

        if rank == 0:
            watch(module, "evaluate", during_evaluation)

    path = tmp_path / "run.pt"
    life = train_two(script, path, disturb=interrupt)
    what = f"SIGINT to {script} during its first evaluation"
    assert_stopped(script, life, path, what, at_most=7)
    before, _, after = life.text.partition("evaluation goes on")
    assert "signal" in before.splitlines()[-1], f"{what}: nothing is printed\n{life.text}"
    assert re.search("epoch 1/3 .*test loss", after), (
        f"{what}: the evaluation ends early\n{life.text}")
    assert_resumes(script, path, undisturbed, what)


@pytest.mark.parametrize("script", CHECKPOINT_SCRIPTS)
def test_a_signal_in_the_last_step_does_not_make_a_complete_run_a_failure(script, tmp_path):
    """A job that ends with status 1 is requeued."""
    path = tmp_path / "run.pt"
    step = 18 if script == "fashionmnist_ddp" else 17  # the others ask for signals before a step
    life = train_two(script, path, disturb=lambda module, rank: rank == 0 and signal_after(step))
    assert life.statuses == [0, 0], (
        f"{script}: SIGTERM in the last step: a complete run ends as {life.statuses}\n{life.text}")
    lines = 2 if script in STEP_SCRIPTS else 1
    assert life.text.count("epoch 3/3  ") == lines, (
        f"{script}: SIGTERM in the last step: the last epoch ends without its means\n{life.text}")


# --- small scripts ---
def test_a_resume_repeats_dropout_and_random_transforms(tmp_path):
    """A copy of synthetic_ddp, which loads its data in processes, is stopped in its first epoch."""
    copy = make_copy("synthetic_ddp", tmp_path / "train.py", (None, RANDOM))

    def run(path, setup=lambda module, rank: None):
        train_forked(copy, "--samples", 72, "--batch-size", 6, "--epochs", 3, "--workers", 2,
                     "--checkpoint", path, nproc=2, setup=setup)
        return path

    run(tmp_path / "stopped.pt", lambda module, rank: signal_after(2))
    run(tmp_path / "stopped.pt")
    assert_equal(tmp_path / "stopped.pt", run(tmp_path / "whole.pt"), "the resumed checkpoint")


# --- killed, and finished ---


@pytest.mark.parametrize("script", CHECKPOINT_SCRIPTS)
def test_a_finished_run_trains_no_more(script, undisturbed, tmp_path):
    path = shutil.copy(undisturbed(script), tmp_path)
    life = train_two(script, path)
    assert (life.steps, life.statuses) == ([0, 0], [0, 0]), (
        f"{script}, started again after its end, trains {life.steps} steps and ends with "
        f"{life.statuses}\n{life.text}")


@pytest.mark.parametrize("script", STEP_SCRIPTS)
def test_a_resumed_run_does_not_keep_the_checkpoint_in_memory(script, tmp_path):
    """It would be a second copy of the model and the optimizer in each process."""
    def setup(module, rank):
        use_small_model(module)
        tensors, counts = [], []
        watch(module, "restore", lambda checkpoint, *_: tensors.extend(
            weakref.ref(tensor) for tensor in checkpoint.get("model", {}).values()))
        at_step(lambda _: counts.append(sum(tensor() is not None for tensor in tensors)))
        return counts

    flags = (SCRIPTS[script].data_flag, 24, "--batch-size", 6, *SCRIPTS[script].no_children,
             "--checkpoint", tmp_path / "run.pt", "--epochs")
    train_to_end(script, *flags, 1, nproc=2, setup=setup)
    ranks = train_to_end(script, *flags, 2, nproc=2, setup=setup).results
    for rank, counts in enumerate(ranks):
        assert set(counts) == {0}, f"{script}: rank {rank} keeps {counts} tensors of its checkpoint"


# --- several processes ---
@pytest.mark.parametrize("script", DDP_SCRIPTS)
def test_all_ranks_use_the_flags_of_rank_0(script):
    """Their launchers may be given others: one for each machine."""
    def gradients(*flags_of_rank_1):
        def setup(module, rank):
            sys.argv += flags_of_rank_1 if rank == 1 else ()
            return record_small_model(module, rank)

        end = train_to_end(script, SCRIPTS[script].data_flag, 64, "--batch-size", 8, "--epochs", 2,
                           "--lr", 0.01, *SCRIPTS[script].no_children, nproc=2, setup=setup)
        return [recorder.gradients for recorder in end.results]

    expected = gradients()
    assert_equal(gradients(), expected, f"{script}, twice with one seed: gradients [rank][step]")
    assert_equal(gradients("--lr", "0.5", "--seed", "7", "--epochs", "1"), expected,
                 f"{script}, whose rank 1 was given other flags: gradients [rank][step]")


@pytest.mark.parametrize("script", ["cifar10_ddp", "fashionmnist_ddp"])
def test_data_is_prepared_by_rank_0_and_then_once_on_each_machine(script):
    """Two machines of two processes: rank 0 is the first to look for the data, rank 2 is next."""
    def setup(module, rank):
        def prepare_data(args):
            print(rank, "prepares")
            time.sleep(0.5)
            print(rank, "has prepared")

        os.environ["LOCAL_RANK"] = str(rank % 2)
        module.prepare_data = prepare_data
        watch(module, "load_data", lambda *_: print(rank, "loads"))
        use_small_model(module)

    text = train_to_end(script, "--fake-data", 16, "--epochs", 1, *SCRIPTS[script].no_children,
                        nproc=4, setup=setup).text
    assert text.startswith("0 prepares\n0 has prepared\n2 prepares\n2 has prepared\n"), (
        f"{script}: rank 0 prepares the data, then rank 2, and then they load it:\n{text}")


@pytest.mark.parametrize("script, flags", [
    *[(script, (SCRIPTS[script].data_flag, 64, *SCRIPTS[script].no_children))
      for script in DDP_SCRIPTS],
    (ROOT / "tests/measure_exchange.py", ("--model", "squeezenet1_1", "--image-size", 32))])
def test_a_process_that_hangs_ends_the_others_within_timeout(script, flags):
    def hang(count):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # for the end of the test
        time.sleep(1000)

    def setup(module, rank):
        use_small_model(module)
        if rank == 0:
            at_step(hang)

    end = train_forked(script, *flags, "--batch-size", 8, "--timeout", 4, nproc=2, setup=setup)
    assert "Process 1 terminated" in end.text, (
        f"{script}: rank 0 hangs: rank 1 must end with an error after --timeout 4\n{end.text}")


# --- mp.spawn: python train.py --nproc 2 ---
def start_spawn(checkpoint):
    """Start a run of two processes that ends only if it is stopped."""
    return start("fashionmnist_ddp", "--fake-data", 8192, "--batch-size", 4, "--epochs", 1000,
                 "--log-every", 0.1, "--checkpoint", checkpoint, launcher="spawn", nproc=2)


@pytest.mark.parametrize("name, words", [
    ("SIGTERM", "stopped by a signal after step"),  # kill PID
    ("SIGINT", "stopped by a signal after step"),  # Ctrl-C: the terminal's, to all processes
    ("SIGKILL", "error: .*SIGKILL"),  # to a worker, by the kernel, where memory is short
])
def test_a_signal_to_mp_spawn_ends_all_processes_with_status_1(name, words, tmp_path):
    with start_spawn(tmp_path / "run.pt") as job:
        job.wait_for(r" step \d+/")
        if name == "SIGINT":
            os.killpg(job.launcher.pid, signal.SIGINT)
        else:
            pid = job.workers()[1] if name == "SIGKILL" else job.launcher.pid
            os.kill(pid, signal.Signals[name])
        result = job.result(timeout=90)
        wait_until_gone(job, f"{name} to mp.spawn")
    count = len(re.findall(words, result.text))
    assert count == 1, f"{name}: must print one line {words!r}, not {count}\n{result.text}"
    expected = [] if name == "SIGKILL" else ["run.pt"]
    assert os.listdir(tmp_path) == expected, f"{name}: must leave {expected}\n{result.text}"
    assert result.status == 1, f"{name}: status {result.status}, not 1\n{result.text}"


def test_ctrl_c_before_training_is_no_success():
    """mp.spawn takes a worker that ends by KeyboardInterrupt for one that has finished."""
    module = load_script("fashionmnist_ddp")
    module.train = lambda args: signal.raise_signal(signal.SIGINT)

    def work(rank):
        signal.signal(signal.SIGINT, signal.default_int_handler)
        module.run_worker(rank, None)

    with pytest.raises(ProcessExitedException, match="SIGINT"):
        start_processes(work, start_method="fork")
        pytest.fail("Ctrl-C, while a worker of mp.spawn starts, is taken for success")
