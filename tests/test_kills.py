"""Killed runs resume from their last checkpoint, and end with the weights of an undisturbed run.

bash tests/run.sh --all -s -k killed_at_random --chaos-kills 200      # prints what it did
"""
import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import time
from argparse import Namespace
from collections import Counter
from typing import NamedTuple

import pytest
import torch
import torch.nn as nn
from checkpoints import assert_equal, load_checkpoint
from functions import train
from processes import run, start
from scripts import DDP_SCRIPTS, SCRIPTS, script_path

START = 240  # seconds within which new interpreters train, on a machine that is very busy
STEP = "            step += 1\n"  # once in each script


# --- kills at random moments: with dropout, BatchNorm, and loader processes ---
class Kills(NamedTuple):
    """How a script is started, and how many of 20 kills it gets."""
    share: int
    launcher: str
    nproc: int
    flags: tuple


KILLS = {
    "cpu_ddp": Kills(4, "torchrun", 4, ("--samples", 2560, "--batch-size", 64, "--epochs", 24,
                                        "--save-every", 3)),
    "mnist_dp": Kills(6, "python", 1, ("--fake-data", 320, "--batch-size", 32, "--epochs", 6)),
    "cifar10_ddp": Kills(2, "srun", 2, ("--fake-data", 16, "--batch-size", 2, "--epochs", 3,
                                        "--workers", 2)),
    "fashionmnist_ddp": Kills(4, "spawn", 3, ("--fake-data", 240, "--batch-size", 16,
                                              "--epochs", 8)),
    "synthetic_ddp": Kills(4, "srun", 3, ("--samples", 480, "--batch-size", 16, "--epochs", 24,
                                          "--save-every", 2)),
}
WAYS = ["SIGTERM", "SIGKILL while it saves", "SIGKILL of all", "SIGKILL of one process",
        "SIGKILL of the launcher", "SIGKILL of all while it starts"]


def test_all_scripts_are_killed():
    assert KILLS.keys() == SCRIPTS.keys(), "each script must be killed at random in this file"


class Chaos:
    """Starts a script again and again, disturbs it at random moments, and counts what it did."""

    def __init__(self, script, kills, seed, folder):
        self.script = script
        self.how = KILLS[script]
        self.folder = folder
        self.seed = seed
        self.random = random.Random(f"{seed} {script}")
        self.checkpoint = folder / "disk0/run.pt"
        self.ways = WAYS[:2] + self.random.choices(WAYS, k=max(0, kills * self.how.share // 20 - 2))
        self.counts = Counter()  # kills, by what was done
        self.runs = 0  # that came to their end
        self.resumed = 0  # starts that found a checkpoint

    def start(self):
        """Return the Job of a start. Of srun, each rank has a disk, and that of rank 0 is used."""
        flags = (*self.how.flags, "--log-every", 0)
        options = {"launcher": self.how.launcher, "nproc": self.how.nproc}
        if self.how.launcher == "srun":
            options["rank_flags"] = self.disk_of
        else:
            flags += self.disk_of(0)
        return start(self.script, *flags, **options)

    def disk_of(self, rank):
        return "--checkpoint", self.folder / f"disk{rank}/run.pt"

    def clear_disks(self):
        for rank in range(self.how.nproc):
            shutil.rmtree(self.folder / f"disk{rank}", ignore_errors=True)
            (self.folder / f"disk{rank}").mkdir()

    def run_to_the_end(self, limit=5):
        """Start the run until it ends by itself, and disturb it at most limit times."""
        self.clear_disks()
        self.runs += 1
        killed = 0
        while True:
            way = self.ways[0] if self.ways and killed < limit else None
            with self.start() as job:
                done = self.disturb(job, way) if way else None
                result = job.finish(START)
            if re.search(r"steps [1-9]\d* to \d+$", result.text, re.MULTILINE):
                self.resumed += 1
            if result.status == 0:  # perhaps before it was disturbed
                return
            assert way, (f"{self.script} was not disturbed but ended with status {result.status}, "
                         f"after --chaos-seed {self.seed}\n{result.text}")
            self.counts[done] += 1
            self.ways.pop(0)
            killed += 1

    def disturb(self, job, way):
        """Disturb a job in this way, and return in words what was done. It may have ended."""
        if way == "SIGKILL of all while it starts":
            time.sleep(self.random.random() * 5)
            job.kill()
            return way
        self.wait_for_a_step(job)
        several = len(job.processes) > 1  # with several, srun would end the others
        if way == "SIGTERM":
            job.send(signal.SIGTERM, self.random.randrange(len(job.processes)))
        elif way == "SIGKILL of one process" and not several:
            with contextlib.suppress(OSError, IndexError):  # it has ended
                os.kill(self.random.choice(job.workers()), signal.SIGKILL)
        elif way == "SIGKILL of the launcher" and not several:  # its workers save and end
            job.send(signal.SIGKILL)
            wait_until_gone(job)
        else:
            return self.kill_all(job, way == "SIGKILL while it saves")
        return way

    def wait_for_a_step(self, job):
        """Wait until the job has computed some steps, and for a random part of the next ones."""
        first, last = map(int, job.wait_for(r"steps (\d+) to (\d+)$", START).groups())
        step = self.random.randrange(first, max(first + 1, last * 3 // 4)) + 1
        with contextlib.suppress(AssertionError):  # it has ended
            job.wait_for(f"step {step}/", START)
        time.sleep(self.random.random() * 0.05)

    def kill_all(self, job, while_it_saves):
        """Kill all processes of a job, perhaps when rank 0 saves. Return in words what was done."""
        while while_it_saves and job.running() and not is_saving(self.checkpoint):
            time.sleep(0.0005)
        saving = is_saving(self.checkpoint)
        job.kill()
        return "SIGKILL of all while it saved" if saving else "SIGKILL of all"


def is_saving(checkpoint):
    """Return whether the temporary file has content, or the last file is already renamed."""
    with contextlib.suppress(OSError):
        return os.path.getsize(f"{checkpoint}.tmp") > 0
    return os.path.exists(f"{checkpoint}.previous") and not os.path.exists(checkpoint)


def wait_until_gone(job, timeout=60):
    """Wait until no process of the job is left."""
    end = time.monotonic() + timeout
    while job.pids():
        assert time.monotonic() < end, (
            f"processes outlive their killed launcher by {timeout} s\n{job.text}")
        time.sleep(0.05)


@pytest.mark.parametrize("script", KILLS)
def test_killed_at_random_and_resumed_exactly(script, request, tmp_path):
    kills = request.config.getoption("--chaos-kills")
    chaos = Chaos(script, kills, request.config.getoption("--chaos-seed"), tmp_path)
    undisturbed = run(script, *chaos.how.flags, "--checkpoint", tmp_path / "undisturbed.pt",
                      launcher=chaos.how.launcher, nproc=chaos.how.nproc, timeout=START)
    assert undisturbed.status == 0, f"the undisturbed run of {script} failed\n{undisturbed.text}"
    while chaos.ways:
        assert chaos.runs < 10 + kills, (
            f"{script}: most of {chaos.runs} runs ended before they were disturbed, and "
            f"{chaos.ways} are left: make the runs longer")
        chaos.run_to_the_end()
        assert_equal(load_checkpoint(chaos.checkpoint),
                     load_checkpoint(tmp_path / "undisturbed.pt"),
                     f"{script} after {dict(chaos.counts)} (--chaos-seed {chaos.seed}), beside an "
                     "undisturbed run: the checkpoint")
    assert chaos.resumed > 0, f"no start of {script} has found a checkpoint: {dict(chaos.counts)}"
    print(f"{script} by {chaos.how.launcher}, {chaos.how.nproc} processes: {chaos.runs} runs ended "
          f"with equal checkpoints after {dict(chaos.counts)}; {chaos.resumed} starts resumed")


# --- torchrun ---
def write_copy(script, path, line):
    """Write a copy of a script to path, with a line of code after each step."""
    text = script_path(script).read_text()
    assert text.count(STEP) == 1, f"{script}/train.py must have this line once: {STEP}"
    path.write_text(text.replace(STEP, f"{STEP}            {line}\n"))


def test_workers_of_a_killed_torchrun_save_and_end(tmp_path):
    """On Linux, the kernel sends them SIGTERM."""
    with start("cpu_ddp", "--epochs", 5000, "--log-every", 1, "--checkpoint", tmp_path / "run.pt",
               launcher="torchrun", nproc=2) as job:
        job.wait_for("step 1/", START)
        job.send(signal.SIGKILL)
        wait_until_gone(job)
        text = job.text
    assert (tmp_path / "run.pt").exists(), f"workers of a killed torchrun must save\n{text}"
    step = load_checkpoint(tmp_path / "run.pt")["step"]
    assert step < 160000, f"workers of a killed torchrun must stop, not train to the end\n{text}"


@pytest.fixture(scope="module")
def restarted(tmp_path_factory):
    """Kill a worker of torchrun --max-restarts. Return the folder of checkpoints and the Result."""
    folder = tmp_path_factory.mktemp("restarted")
    flags = ("--epochs", 50, "--save-every", 1, "--log-every", 0, "--checkpoint")
    write_copy("cpu_ddp", folder / "train.py", "time.sleep(0.1)")
    with start(folder / "train.py", *flags, folder / "run.pt", launcher="torchrun",
               options=("--standalone", "--nproc-per-node=2", "--max-restarts=3"),
               env={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": 1}) as job:  # as the README says
        job.wait_for("step 40/", START)
        write_copy("cpu_ddp", folder / "train.py", "pass")  # restarted workers do not sleep
        os.kill(max(job.workers()), signal.SIGKILL)
        result = job.finish(START)
    train("cpu_ddp", *flags, folder / "undisturbed.pt", nproc=2)
    return folder, result


def test_torchrun_restarts_a_run_whose_worker_was_killed(restarted):
    _, result = restarted
    assert result.status == 0, (
        f"torchrun --max-restarts=3 with a killed worker: the status is {result.status}\n"
        f"{result.text}")


def test_restarted_workers_resume(restarted):
    _, result = restarted
    starts = [int(step) for step in re.findall(r"steps (\d+) to \d+$", result.text, re.MULTILINE)]
    assert len(starts) == 2, (
        f"a worker was killed once: torchrun must start the workers twice, but the headers name "
        f"{len(starts)} starts\n{result.text}")
    assert starts[1] >= 32, (
        f"a worker was killed after step 40, and step 32 was saved: the restarted workers must "
        f"resume there, not at step {starts[1]}\n{result.text}")


def test_restarted_run_has_the_weights_of_an_undisturbed_run(restarted):
    folder, _ = restarted
    assert_equal(load_checkpoint(folder / "run.pt"), load_checkpoint(folder / "undisturbed.pt"),
                 "restarted by torchrun, beside an undisturbed run: the checkpoint")


# --- slow steps: torchrun and Slurm kill 30 seconds after SIGTERM ---
def test_slow_steps_are_saved_before_torchrun_kills(tmp_path):
    """2 seconds a step, with the default --log-every."""
    write_copy("cpu_ddp", tmp_path / "train.py", "time.sleep(2)")
    with start(tmp_path / "train.py", "--checkpoint", tmp_path / "run.pt", launcher="torchrun",
               nproc=2) as job:
        job.wait_for("step 1/", START)
        job.send(signal.SIGTERM)
        result = job.finish(60)
    assert "stopped by a signal after step" in result.text, (
        "with steps of 2 seconds, SIGTERM must stop the run within torchrun's 30 seconds; it was "
        f"killed\n{result.text}")
    step = load_checkpoint(tmp_path / "run.pt")["step"]
    assert step < 6, f"with steps of 2 seconds, SIGTERM after step 1 was obeyed after step {step}"


@pytest.fixture(scope="module", params=DDP_SCRIPTS)
def slower_steps(request):
    """Train by a made-up clock: 30 steps of 1 ms, then 0.3 s each, as when a cache is used up.

    Return the script, and the steps and times of its log lines.
    """
    script = request.param
    flags = (SCRIPTS[script].data_flag, 400, *SCRIPTS[script].no_children, "--epochs", 1,
             "--batch-size", 1)

    def setup(module, rank):
        lines = []
        clock = Namespace(steps=0)
        log = module.log

        def seconds():
            return 0.001 * min(clock.steps, 30) + 0.3 * max(0, clock.steps - 30)

        def watch(message):
            match = re.search(r" step (\d+)/", message)
            if match:
                lines.append((int(match[1]), seconds()))
            log(message)

        def learning_rate(step, total_steps):
            clock.steps += 1
            return 1e-6

        module.time = Namespace(perf_counter=seconds, sleep=time.sleep)
        module.log = watch
        module.learning_rate = learning_rate
        if script == "cifar10_ddp":
            module.build_model = small_model
        return lines

    ((lines, code, _),) = train(script, *flags, setup=setup)
    assert code == 0, f"{script} {flags} ended with {code}"
    return script, lines


def small_model(*_):
    """Return a model for images of any size, which is faster than ResNet, and its optimizer."""
    model = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 10))
    return model, torch.optim.SGD(model.parameters(), lr=0.001)


def test_signals_are_looked_for_in_time_when_steps_become_slower(slower_steps):
    script, lines = slower_steps
    times = [0, *(seconds for _, seconds in lines)]
    longest = max(after - before for before, after in zip(times, times[1:]))
    assert longest < 20, (
        f"{script}: 30 steps take 1 ms, the others 0.3 s. A signal must be obeyed within the 30 "
        f"seconds that torchrun waits, but {longest:.0f} seconds pass between two log lines, where "
        f"signals are looked for. (step, time) of the lines: {lines}")


def test_steps_between_log_lines_at_most_double(slower_steps):
    script, lines = slower_steps
    steps = [0, *(step for step, _ in lines)]
    numbers = [after - before for before, after in zip(steps, steps[1:])]
    more = [after for before, after in zip(numbers, numbers[1:]) if after > 2 * before]
    assert not more, (
        f"{script}: from a log line to the next, the number of steps may at most double, so that "
        f"steps that become slower do not delay a stop; these numbers are {numbers}")


def test_lines_come_about_every_5_seconds_when_steps_are_slow(slower_steps):
    """The default of --log-every."""
    script, lines = slower_steps
    seconds = lines[-2][1] - lines[-3][1]  # the last line is due at the end of the epoch
    assert 4 < seconds < 6, (
        f"{script}: with steps of 0.3 s, lines must come about every 5 s, not {seconds:.1f} s; "
        f"(step, time) of the lines: {lines}")


# --- a process that hangs ---
def test_stopped_process_ends_the_others_within_timeout():
    """SIGSTOP, as when a machine hangs. --timeout is 5 seconds."""
    with start("cpu_ddp", "--epochs", 100000, "--log-every", 0, "--timeout", 5, launcher="srun",
               nproc=2) as job:
        job.wait_for("step 7/", START)
        job.send(signal.SIGSTOP, 0)
        try:
            status = job.processes[1].wait(60)
        except subprocess.TimeoutExpired:
            status = None
    assert status is not None, "rank 0 hangs: with --timeout 5, rank 1 must end, but waits for 60 s"
    assert status != 0, "rank 0 hangs: rank 1 must end with an error, not with status 0"
