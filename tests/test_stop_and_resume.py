"""A run that is stopped by a signal saves, and the same command ends with the same weights.

Most runs are processes forked from this one, which start at once (see functions.py).
"""
import contextlib
import errno
import os
import signal
import sys
import time
from argparse import Namespace
from typing import NamedTuple

import pytest
import torch
import torch.nn as nn
from checkpoints import assert_equal, load_checkpoint
from functions import fork, load_script, train
from processes import start, wait_until_gone
from recorder import use_small_model
from scripts import CHECKPOINT_SCRIPTS, DDP_SCRIPTS, SCRIPTS
from stopped_runs import finish, signal_after, stop
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException
from torch.optim.optimizer import register_optimizer_step_post_hook

MORE_FLAGS = {"cifar10_ddp": ("--model", "mnasnet0_5", "--image-size", 32)}  # BatchNorm, dropout
START = 240  # seconds within which a new interpreter trains, on a machine that is very busy


def flags_of(script, *more):
    """Return the flags of a run of three epochs of six steps, on two processes."""
    return (SCRIPTS[script].data_flag, 72, *MORE_FLAGS.get(script, ()), "--batch-size", 6,
            "--epochs", 3, "--log-every", 3600, *more)


class Life(NamedTuple):
    """What was seen of two processes from one start of a script to their end."""
    statuses: list  # the exit status of each rank, or what sys.exit has printed
    ends: list      # the time at which each rank ended
    steps: list     # how many steps each rank has computed
    saved: int      # the step of the checkpoint
    save_time: float  # when it was complete
    text: str       # stdout of all ranks


def live(script, checkpoint, *more, at_start=None, at_step=None, check_every=1):
    """Train on two processes. Call at_start(rank), and after each step at_step(rank, count)."""
    output = checkpoint.parent / f"{time.monotonic()}.txt"

    def setup(module, rank):
        steps = []

        def after_step(*_):
            steps.append(rank)
            if at_step:
                at_step(rank, len(steps))

        sys.stdout = open(output, "a", buffering=1)
        if check_every:
            module.CHECK_EVERY = check_every
        if at_start:
            at_start(rank)
        register_optimizer_step_post_hook(after_step)
        return steps

    flags = flags_of(script, "--checkpoint", checkpoint, *SCRIPTS[script].no_children, *more)
    ranks = train(script, *flags, nproc=2, setup=setup)
    steps, statuses, ends = zip(*ranks)
    return Life(list(statuses), ends, [len(rank) for rank in steps],
                load_checkpoint(checkpoint)["step"], checkpoint.stat().st_ctime, output.read_text())


# --- one run in five lives: SIGINT, SIGTERM, SIGHUP, SIGKILL, and to its end ---
class Run(NamedTuple):
    script: str
    checkpoint: object  # of the run that was disturbed
    undisturbed: object  # the checkpoint of a run that was not
    lives: dict  # from the signal's name to a Life


class ClosedTerminal:
    def write(self, text):
        raise OSError(errno.EIO, "the terminal is closed")


@pytest.fixture(scope="module", params=CHECKPOINT_SCRIPTS)
def disturbed(request, tmp_path_factory):
    """Run a script without a disturbance, and once in five lives."""
    script = request.param
    folder = tmp_path_factory.mktemp(script)
    checkpoint = folder / "run.pt"
    lives = {"undisturbed": live(script, folder / "undisturbed.pt")}

    def slow_disk(rank):
        os.fsync = lambda descriptor: time.sleep(1)
        if rank == 1:
            signal_after(2, signal.SIGINT)

    def hang_up(rank, count):
        if rank == 0 and count == 1:
            sys.stdout = ClosedTerminal()
        if rank == 1 and count == 1:
            os.kill(os.getpid(), signal.SIGHUP)

    def terminate(rank):
        if rank == 0:
            signal_after(6 - lives["SIGINT"].saved % 6 - 1)

    def kill_all(rank, count):
        if count == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    lives["SIGINT"] = live(script, checkpoint, at_start=slow_disk, check_every=None)
    lives["SIGTERM"] = live(script, checkpoint, at_start=terminate)
    lives["SIGHUP"] = live(script, checkpoint, at_step=hang_up)
    with contextlib.suppress(ProcessExitedException):
        live(script, checkpoint, at_step=kill_all)
    lives["end"] = live(script, checkpoint)
    lives["again"] = live(script, checkpoint)
    return Run(script, checkpoint, folder / "undisturbed.pt", lives)


def test_a_signal_to_one_process_stops_all_after_the_same_step(disturbed):
    """However far apart the log lines are: here, an hour."""
    check_every = load_script(disturbed.script).CHECK_EVERY
    most = {"SIGINT": 2 + check_every, "SIGTERM": 6, "SIGHUP": 2}  # steps of this life
    for name, last in most.items():
        life = disturbed.lives[name]
        first, second = life.steps
        assert first == second, (
            f"{name} to one process of {disturbed.script}: all processes must stop after the same "
            f"step, but they computed {life.steps} steps\n{life.text}")
        assert first <= last, (
            f"{name} must stop {disturbed.script} after at most {last} steps (CHECK_EVERY is "
            f"{check_every}), but it stopped after {first}\n{life.text}")
        stopped = [f"stopped by a signal after step {life.saved}", 1]
        assert life.statuses == stopped, (
            f"{disturbed.script} stopped by {name}: each process must exit with status 1, and rank "
            f"0 say at which step, as it was saved: {life.statuses}, not {stopped}\n{life.text}")


def test_a_stopped_run_has_saved_its_last_step(disturbed):
    step = 0
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        life = disturbed.lives[name]
        step += life.steps[0]
        assert life.saved == step, (
            f"{disturbed.script} stopped by {name} after step {step}: the checkpoint must be of "
            f"this step, but is of step {life.saved}\n{life.text}")


def test_all_processes_wait_until_rank_0_has_saved(disturbed):
    """A launcher ends the others when one process exits. Here, saving takes a second longer."""
    life = disturbed.lives["SIGINT"]
    early = life.save_time - min(life.ends)
    assert early <= 0, (
        f"{disturbed.script}: a process exited {early:.2f} s before rank 0 had saved; its launcher "
        "would kill rank 0 meanwhile (is there a barrier?)")


def test_a_run_that_stopped_at_the_end_of_an_epoch_evaluates_again(disturbed):
    if disturbed.script == "cpu_ddp":
        return  # it has no test set
    life = disturbed.lives["SIGTERM"]
    line = f"epoch {life.saved // 6}/3  test loss"
    assert life.saved % 6 == 0, f"SIGTERM came before the last step of an epoch: {life.saved}"
    assert line not in life.text, f"it was stopped before its evaluation\n{life.text}"
    # ClosedTerminal prints nothing after the first step of this life
    resumed = disturbed.lives["SIGHUP"].text
    assert resumed.count(line) == 1, (
        f"{disturbed.script} resumed at the end of an epoch, whose evaluation was missed: it must "
        f"print one line {line!r}\n{resumed}")


def test_a_resumed_run_has_the_weights_of_an_undisturbed_run(disturbed):
    life = disturbed.lives["end"]
    header = f"steps {disturbed.lives['SIGHUP'].saved} to 18\n"
    assert header in life.text, (
        f"{disturbed.script} was killed and must resume from its last checkpoint: its header must "
        f"end with {header!r}\n{life.text}")
    assert life.statuses == [0, 0], (
        f"{disturbed.script} resumed and finished: the statuses are {life.statuses}\n{life.text}")
    assert disturbed.lives["undisturbed"].saved == 18, "the undisturbed run has not ended"
    assert_equal(load_checkpoint(disturbed.checkpoint), load_checkpoint(disturbed.undisturbed),
                 f"{disturbed.script} stopped 3 times, killed and resumed, beside an undisturbed "
                 "run: the checkpoint")


def test_a_finished_run_is_only_evaluated(disturbed):
    life = disturbed.lives["again"]
    assert (life.steps, life.statuses) == ([0, 0], [0, 0]), (
        f"{disturbed.script}: the same command after the end must not train, and end with status "
        f"0: steps {life.steps}, statuses {life.statuses}\n{life.text}")
    expected = disturbed.script != "cpu_ddp"  # which has no test set
    count = life.text.count("epoch 3/3  test loss")
    assert count == expected, (
        f"{disturbed.script}: the same command after the end must print the test loss once, but "
        f"prints {count} such lines\n{life.text}")


# --- when it saves ---
@pytest.mark.parametrize("seconds, flags, expected", [
    (60, ("--save-every", 2.5), [3, 6, 8, 11, 14, 16]),  # in mid-epoch, and at its end
    (1, (), [8, 16]),
], ids=["every 2.5 minutes", "steps of a second"])
@pytest.mark.parametrize("script", CHECKPOINT_SCRIPTS)
def test_save_every_counts_minutes(script, seconds, flags, expected, tmp_path):
    """By a made-up clock, in two epochs of 8 steps. cpu_ddp has no evaluation to save before."""
    def setup(module, rank):
        use_small_model(module)
        steps = []
        saved = []
        learning_rate = module.learning_rate

        def count_step(*arguments):
            steps.append(seconds)
            return learning_rate(*arguments)

        module.learning_rate = count_step
        module.time = Namespace(perf_counter=lambda: sum(steps), sleep=time.sleep)
        module.save_checkpoint = lambda path, *rest: saved.append(rest[-1])
        return saved

    if script == "cpu_ddp":
        expected = [3, 6, 9, 12, 15, 16] if flags else [16]
    (saved,) = finish(script, SCRIPTS[script].data_flag, 16, "--batch-size", 2, "--epochs", 2,
                      *flags, "--checkpoint", tmp_path / "run", *SCRIPTS[script].no_children,
                      nproc=1, setup=setup)
    assert saved == expected, (
        f"{script} with steps of {seconds} s and {flags or 'the default of 5 minutes'} must save "
        f"after steps {expected}, and has saved after {saved}")


# --- several processes ---
@pytest.mark.parametrize("script", DDP_SCRIPTS)
def test_all_ranks_use_the_flags_of_rank_0(script):
    """Their launchers may be given others: one for each machine."""
    details = SCRIPTS[script]

    def weights(*flags_of_rank_1):
        def setup(module, rank):
            use_small_model(module)
            sys.argv += flags_of_rank_1 if rank == 1 else ()
            parameters = []

            def keep(optimizer, *_):
                parameters[:] = [parameter.detach().clone() for group in optimizer.param_groups
                                 for parameter in group["params"]]

            register_optimizer_step_post_hook(keep)
            return parameters

        return finish(script, details.data_flag, 64, "--batch-size", 8, "--epochs", 2, "--lr", 0.01,
                      *details.no_children, nproc=2, setup=setup)

    alone, _ = weights()
    both = weights("--lr", "0.5", "--seed", "7",
                   *(["--log-every", "0"] if details.has_checkpoint else []))
    for rank, parameters in enumerate(both):
        assert_equal(parameters, alone, f"{script}, whose rank 1 was given another --lr and "
                     f"--seed, beside a run of equal flags: the weights of rank {rank}")


class Auxiliary(nn.Module):
    """A classifier with a second head that only trains, as GoogLeNet's and a detector's."""

    def __init__(self):
        super().__init__()
        self.features = nn.Linear(784, 20)
        self.head = nn.Linear(20, 10)
        self.auxiliary = nn.Linear(20, 10)

    def forward(self, images):
        features = self.features(images.flatten(1)).relu()
        if self.training:
            return self.head(features) + 0.3 * self.auxiliary(features)
        return self.head(features)


def test_a_branch_of_the_model_that_only_trains(tmp_path):
    """On two processes DDP waits for the gradients of all parameters: also after a resume."""
    def setup(module, rank):
        module.CNN = Auxiliary

    flags = ("--fake-data", 64, "--batch-size", 8, "--epochs", 2, "--checkpoint")
    finish("fashionmnist_ddp", *flags, tmp_path / "whole", nproc=2, setup=setup)
    stop("fashionmnist_ddp", *flags, tmp_path / "parts", nproc=2, after=3, setup=setup)
    finish("fashionmnist_ddp", *flags, tmp_path / "parts", nproc=2, setup=setup)
    assert_equal(tmp_path / "parts", tmp_path / "whole")


@pytest.mark.parametrize("script", ["cifar10_ddp", "fashionmnist_ddp"])
def test_data_is_prepared_by_rank_0_and_then_once_on_each_machine(script):
    """Two machines of two processes: rank 0 is the first to look for the data, rank 2 is next."""
    def setup(module, rank):
        os.environ["LOCAL_RANK"] = str(rank % 2)
        events = {}
        prepare_data = module.prepare_data
        load_data = module.load_data

        def slow_prepare_data(args):
            events["prepares"] = time.monotonic()
            prepare_data(args)
            time.sleep(0.5)
            events["has prepared"] = time.monotonic()

        def timed_load_data(*arguments, **options):
            events.setdefault("loads", time.monotonic())
            return load_data(*arguments, **options)

        module.prepare_data = slow_prepare_data
        module.load_data = timed_load_data
        use_small_model(module)
        return events

    flags = (SCRIPTS[script].data_flag, 16, "--epochs", 1, *SCRIPTS[script].no_children)
    seen = finish(script, *flags, nproc=4, setup=setup)
    preparing = [rank for rank in range(4) if "prepares" in seen[rank]]
    assert preparing == [0, 2], (
        f"{script} on two machines of two processes: ranks 0 and 2 must prepare the data, but it "
        f"was {preparing}")
    assert seen[0]["has prepared"] <= seen[2]["prepares"], (
        f"{script}: rank 0 must have prepared the data before the other machines begin, as a disk "
        f"may be shared: {seen}")
    first_load = min(events["loads"] for events in seen[1:])
    assert seen[2]["has prepared"] <= first_load, (
        f"{script}: a process loads the data before each machine has it (is there a barrier?): "
        f"{seen}")


def test_a_process_that_hangs_ends_the_others_within_timeout():
    """As when a machine hangs."""
    def hang(*_):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # for the end of the test
        time.sleep(1000)

    def setup(module, rank):
        if rank == 0:
            register_optimizer_step_post_hook(hang)

    with pytest.raises(ProcessRaisedException):
        train("cpu_ddp", "--epochs", 100000, "--timeout", 5, nproc=2, setup=setup)


def test_nohup_ignores_sighup(tmp_path):
    """nohup starts a program with SIGHUP ignored."""
    def ignore(rank):
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal_after(2, signal.SIGHUP)

    life = live("cpu_ddp", tmp_path / "run.pt", at_start=ignore)
    assert life.statuses == [0, 0], (
        f"nohup python train.py must go on when the terminal is closed: {life.statuses}")


# --- mp.spawn: python train.py --nproc 2 ---
def start_spawn(checkpoint):
    """Start a run of two processes that ends only if it is stopped."""
    return start("fashionmnist_ddp", "--fake-data", 8192, "--batch-size", 4, "--epochs", 1000,
                 "--log-every", 0.1, "--checkpoint", checkpoint, launcher="spawn", nproc=2)


@pytest.mark.parametrize("name, to_group", [
    ("SIGTERM", False),  # kill PID
    ("SIGINT", True),    # Ctrl-C: the terminal's signal goes to all processes
    ("SIGHUP", True),    # a closed terminal, as well
])
def test_a_signal_to_mp_spawn_saves_and_ends_with_status_1(name, to_group, tmp_path):
    command = f"python fashionmnist_ddp/train.py --nproc 2 and {name}"
    with start_spawn(tmp_path / "run.pt") as job:
        job.wait_for(r" step \d+/", START)
        if to_group:
            os.killpg(job.processes[0].pid, signal.Signals[name])
        else:
            job.send(signal.Signals[name])
        result = job.finish()
        wait_until_gone(job, command)
    assert "stopped by a signal after step" in result.text, (
        f"{command}: must stop after a step\n{result.text}")
    assert os.listdir(tmp_path) == ["run.pt"], (
        f"{command}: must save FILE, and leave nothing else: {os.listdir(tmp_path)}\n{result.text}")
    assert result.status == 1, (
        f"{command}: the exit status must be 1, not {result.status}\n{result.text}")


def test_ctrl_c_while_mp_spawn_starts_is_no_success():
    """PyTorch takes KeyboardInterrupt in a worker for its end."""
    def start_worker(rank):
        signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a new interpreter
        module.run_worker(rank, os.getppid(), None)

    module = load_script("fashionmnist_ddp")
    module.train = lambda args: os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(ProcessExitedException, match="SIGINT"):
        fork(1, start_worker)


def test_a_killed_worker_of_mp_spawn_is_an_error_line(tmp_path):
    """As by the kernel, where memory is short."""
    command = "python fashionmnist_ddp/train.py --nproc 2 with a killed worker"
    with start_spawn(tmp_path / "run.pt") as job:
        job.wait_for(r" step \d+/", START)
        os.kill(job.workers()[1], signal.SIGKILL)
        result = job.finish()
        wait_until_gone(job, command)
    assert result.status == 1, (
        f"{command}: the status must be 1, not {result.status}\n{result.text}")
    assert len(result.errors) == 1, (
        f"{command} must print one error line, not {result.errors}\n{result.text}")
    assert "SIGKILL" in result.errors[0], (
        f"{command}: the error line must name SIGKILL: {result.errors[0]}")


def test_workers_of_a_killed_mp_spawn_end_while_they_import(tmp_path):
    """Before PyTorch has asked the kernel to end them with their parent."""
    with start_spawn(tmp_path / "run.pt") as job:
        end = time.monotonic() + START
        while len(job.workers()) < 2 or job.processes[0].pid in job.workers():
            assert time.monotonic() < end, f"mp.spawn starts no two workers\n{job.text}"
            time.sleep(0.01)
        job.send(signal.SIGKILL)
        wait_until_gone(job, "workers of python --nproc 2, which was killed while they import")
