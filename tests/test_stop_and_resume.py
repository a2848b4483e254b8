"""A run that is stopped by a signal saves, and the same command ends with the same weights."""

import errno
import os
import re
import signal
import sys
import time
from argparse import Namespace

import pytest
import torch.distributed as dist
from checkpoints import assert_equal, load_checkpoint
from forked import at_step, signal_after, train_forked, train_to_end, watch
from launchers import START, start, wait_until_gone
from recorder import record_small_model, use_small_model
from scripts import CHECKPOINT_SCRIPTS, DDP_SCRIPTS, SCRIPTS, load_script
from torch.multiprocessing import ProcessExitedException, start_processes

MORE_FLAGS = {"cifar10_ddp": ("--model", "mnasnet0_5", "--image-size", 32)}  # BatchNorm, dropout


def live(script, checkpoint, at_start=lambda rank: None, check_every=1):
    """Train two processes for three epochs of six steps, after at_start(rank).

    Return their End, with their numbers of steps, and the step and the time of the checkpoint.
    """
    def setup(module, rank):
        steps = []
        module.CHECK_EVERY = check_every or module.CHECK_EVERY
        if rank == 1:
            sys.argv[-1] += "-of-rank-1"  # the checkpoint: that of rank 0 is used
        at_start(rank)
        at_step(steps.append)
        return steps

    end = train_forked(script, SCRIPTS[script].data_flag, 72, *MORE_FLAGS.get(script, ()),
                       *SCRIPTS[script].no_children, "--batch-size", 6, "--epochs", 3,
                       "--log-every", 3600, "--checkpoint", checkpoint, nproc=2, setup=setup)
    return Namespace(**end._asdict(), steps=[len(steps) for steps in end.results],
                     saved=load_checkpoint(checkpoint)["step"],
                     save_time=checkpoint.stat().st_ctime)


# --- one run in five lives: SIGINT, SIGTERM, SIGHUP, SIGKILL, and to its end ---
@pytest.fixture(scope="module", params=CHECKPOINT_SCRIPTS)
def disturbed(request, tmp_path_factory):
    """Return script, {what ended a life of its run: it}, its checkpoint, an undisturbed one."""
    script = request.param
    folder = tmp_path_factory.mktemp(script)
    checkpoint = folder / "run.pt"
    lives = {}
    live(script, folder / "undisturbed.pt")

    def fail_to_write(text):
        raise OSError(errno.EIO, "the terminal is closed")

    def interrupt_with_slow_disk(rank):
        os.fsync = lambda descriptor: time.sleep(1)
        if rank == 1:
            signal_after(2, signal.SIGINT)

    def terminate_in_the_last_step_of_an_epoch(rank):
        if rank == 0:
            signal_after(6 - lives["SIGINT"].saved % 6 - 1)

    def hang_up(rank):
        def close_terminal(count):
            sys.stdout = Namespace(write=fail_to_write)

        all_reduce = dist.all_reduce  # in the background, it may take until it is waited for
        dist.all_reduce = lambda tensor, async_op=False: (
            Namespace(wait=lambda: all_reduce(tensor)) if async_op else all_reduce(tensor))
        if rank == 0:
            at_step(close_terminal)
        else:
            signal_after(1, signal.SIGHUP)

    def hang_up_with_nohup(rank):
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal_after(2, signal.SIGHUP)

    lives["SIGINT"] = live(script, checkpoint, interrupt_with_slow_disk, check_every=None)
    lives["SIGTERM"] = live(script, checkpoint, terminate_in_the_last_step_of_an_epoch)
    lives["SIGHUP"] = live(script, checkpoint, hang_up)
    live(script, checkpoint, lambda rank: signal_after(3, signal.SIGKILL))
    lives["end"] = live(script, checkpoint, hang_up_with_nohup)
    lives["again"] = live(script, checkpoint)
    return Namespace(script=script, lives=lives, checkpoint=checkpoint,
                     undisturbed=folder / "undisturbed.pt")


def test_a_signal_to_one_process_stops_all_after_the_same_step_which_is_saved(disturbed):
    """However far apart the log lines are: here, an hour."""
    check_every = load_script(disturbed.script).CHECK_EVERY
    most = {"SIGINT": 2 + check_every, "SIGTERM": 6, "SIGHUP": 2}  # steps of this life
    step = 0
    for name, last in most.items():
        life = disturbed.lives[name]
        what = f"{name} to one process of {disturbed.script}"
        assert len(set(life.steps)) == 1, (
            f"{what}: all must stop after the same step, not after {life.steps}\n{life.text}")
        first = life.steps[0]
        step += first
        assert first <= last, (
            f"{what}: it must stop after at most {last} steps, not after {first}\n{life.text}")
        assert life.saved == step, (
            f"{what}: step {step}, the last one, must be saved, not {life.saved}\n{life.text}")
        stopped = [f"stopped by a signal after step {step}", 1]
        assert life.statuses == stopped, (
            f"{what}: the exit statuses must be {stopped}, not {life.statuses}\n{life.text}")


def test_all_processes_wait_until_rank_0_has_saved(disturbed):
    """A launcher ends the others when one process exits. Here, saving takes a second longer."""
    life = disturbed.lives["SIGINT"]
    early = life.save_time - min(life.times)
    assert early <= 0, (
        f"{disturbed.script}: a process exited {early:.2f} s before rank 0 had saved")


def test_a_run_that_stopped_at_the_end_of_an_epoch_evaluates_again(disturbed):
    life = disturbed.lives["SIGTERM"]
    line = f"epoch {life.saved // 6}/3  test loss"
    assert life.saved % 6 == 0, f"SIGTERM came before the last step of an epoch: {life.saved}"
    assert line not in life.text, f"it was stopped before its evaluation\n{life.text}"
    # Nothing is printed after the first step of this life
    resumed = disturbed.lives["SIGHUP"].text
    assert resumed.count(line) == SCRIPTS[disturbed.script].has_test_set, (
        f"{disturbed.script} resumed at the end of an epoch must evaluate again\n{resumed}")


def test_a_resumed_run_has_the_undisturbed_weights(disturbed):
    life = disturbed.lives["end"]
    header = f"steps {disturbed.lives['SIGHUP'].saved} to 18\n"
    assert header in life.text, (
        f"{disturbed.script} was killed and must resume from its last checkpoint\n{life.text}")
    assert life.statuses == [0, 0], (
        f"{disturbed.script}: nohup ignores SIGHUP, but it ends with {life.statuses}\n{life.text}")
    assert_equal(disturbed.checkpoint, disturbed.undisturbed,
                 f"{disturbed.script} stopped 3 times, killed and resumed: the checkpoint")


def test_a_finished_run_trains_no_more(disturbed):
    life = disturbed.lives["again"]
    assert (life.steps, life.statuses) == ([0, 0], [0, 0]), (
        f"{disturbed.script}, started again after its end, trains {life.steps} steps and ends with "
        f"{life.statuses}\n{life.text}")


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

    assert_equal(gradients("--lr", "0.5", "--seed", "7", "--epochs", "1"), gradients(),
                 f"{script}, whose rank 1 was given other flags: the gradients [rank][step]")


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
        if rank > 0:
            watch(module, "load_data", lambda *_: print(rank, "loads"))
        use_small_model(module)

    text = train_to_end(script, "--fake-data", 16, "--epochs", 1, *SCRIPTS[script].no_children,
                        nproc=4, setup=setup).text
    assert text.startswith("0 prepares\n0 has prepared\n2 prepares\n2 has prepared\n"), (
        f"{script}: rank 0 prepares the data, then rank 2, and then they load it:\n{text}")


def test_a_process_that_hangs_ends_the_others_within_timeout():
    def hang(count):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # for the end of the test
        time.sleep(1000)

    end = train_forked("cpu_ddp", "--epochs", 100000, "--timeout", 5, nproc=2,
                       setup=lambda module, rank: rank == 0 and at_step(hang))
    assert "Process 1 terminated" in end.text, (
        f"rank 0 hangs: rank 1 must end with an error after --timeout 5\n{end.text}")


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
        result = job.result()
        wait_until_gone(job, f"{name} to mp.spawn")
    count = len(re.findall(words, result.text))
    assert count == 1, f"{name}: must print one line {words!r}, not {count}\n{result.text}"
    expected = [] if name == "SIGKILL" else ["run.pt"]
    assert os.listdir(tmp_path) == expected, f"{name}: must leave {expected}\n{result.text}"
    assert result.status == 1, f"{name}: status {result.status}, not 1\n{result.text}"


def test_workers_of_a_killed_mp_spawn_end_while_they_import(tmp_path):
    """Before PyTorch has asked the kernel to end them with their parent."""
    with start_spawn(tmp_path / "run.pt") as job:
        end = time.monotonic() + START
        while len(job.workers()) < 2:
            assert time.monotonic() < end, f"mp.spawn starts no two workers\n{job.text}"
            time.sleep(0.01)
        job.send(signal.SIGKILL)
        wait_until_gone(job, "workers of python --nproc 2, which was killed while they import")


def test_ctrl_c_before_training_is_no_success():
    """mp.spawn takes a worker that ends by KeyboardInterrupt for one that has finished."""
    module = load_script("fashionmnist_ddp")
    module.train = lambda args: signal.raise_signal(signal.SIGINT)

    def work(rank):
        signal.signal(signal.SIGINT, signal.default_int_handler)
        module.run_worker(rank, os.getppid(), None)

    with pytest.raises(ProcessExitedException, match="SIGINT"):
        start_processes(work, start_method="fork")
        pytest.fail("Ctrl-C, while a worker of mp.spawn starts, is taken for success")
