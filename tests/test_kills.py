"""Killed runs resume from their last checkpoint, and end with the weights of an undisturbed run.

bash tests/run.sh --all -s -k killed_at_random --chaos-kills 200      # prints what it did
"""
import contextlib
import os
import random
import re
import shutil
import signal
import time
from collections import Counter
from typing import NamedTuple

import pytest
from checkpoints import assert_equal, load_checkpoint
from processes import run, start, wait_until_gone
from scripts import CHECKPOINT_SCRIPTS, script_path

START = 240  # seconds within which new interpreters train, on a machine that is very busy
STEP = "            step += 1\n"  # once in each script


# --- kills at random moments: with dropout, BatchNorm, and loader processes ---
class Kills(NamedTuple):
    """How a script is started, and how many of 20 kills it gets."""
    share: int
    script: str
    launcher: str
    nproc: int
    flags: tuple


KILLS = [
    Kills(8, "cpu_ddp", "srun", 2, ("--epochs", 60)),
    Kills(3, "cpu_ddp", "torchrun", 4, ("--epochs", 30)),
    Kills(4, "cifar10_ddp", "torchrun", 2, ("--fake-data", 64, "--batch-size", 2, "--epochs", 3)),
    Kills(5, "fashionmnist_ddp", "spawn", 2, ("--fake-data", 2048, "--batch-size", 32,
                                              "--epochs", 4)),
]
WAYS = ["SIGTERM", "SIGKILL while it saves", "SIGKILL of all", "SIGKILL of one process",
        "SIGKILL of the launcher", "SIGKILL of all while it starts"]


def test_all_scripts_are_killed():
    killed = {kills.script for kills in KILLS}
    assert killed == {*CHECKPOINT_SCRIPTS}, "each script must be killed at random in this file"


class Chaos:
    """Starts a script again and again, disturbs it at random moments, and counts what it did."""

    def __init__(self, how, kills, seed, folder):
        self.how = how
        self.name = f"{how.script} by {how.launcher}, {how.nproc} processes"
        self.folder = folder
        self.seed = seed
        self.random = random.Random(f"{seed} {self.name}")
        self.checkpoint = folder / "disk0/run.pt"
        self.ways = WAYS[:2] + self.random.choices(WAYS, k=max(0, kills * how.share // 20 - 2))
        self.counts = Counter()  # kills, by what was done
        self.runs = 0  # that came to their end
        self.resumed = 0  # starts that found a checkpoint
        self.seconds = 0  # that the undisturbed run trains

    def run_undisturbed(self):
        """Run the script to its end, and return its checkpoint."""
        path = self.folder / "undisturbed.pt"
        with start(self.how.script, *self.how.flags, "--checkpoint", path,
                   launcher=self.how.launcher, nproc=self.how.nproc) as job:
            job.wait_for(r"steps 0 to \d+$", START)
            begin = time.monotonic()
            result = job.finish(START)
            self.seconds = time.monotonic() - begin
        assert result.status == 0, f"the undisturbed run of {self.name} failed\n{result.text}"
        return path

    def start(self):
        """Return the Job of a start. Of srun, each rank has a disk, and that of rank 0 is used."""
        save_every = self.seconds / 60 / 10
        flags = (*self.how.flags, "--save-every", save_every, "--log-every", 1)
        options = {"launcher": self.how.launcher, "nproc": self.how.nproc}
        if self.how.launcher == "srun":
            options["rank_flags"] = self.disk_of
        else:
            flags += self.disk_of(0)
        return start(self.how.script, *flags, **options)

    def disk_of(self, rank):
        return "--checkpoint", self.folder / f"disk{rank}/run.pt"

    def run_to_the_end(self, limit=5):
        """Start the run until it ends by itself, and disturb it at most limit times."""
        for rank in range(self.how.nproc):
            shutil.rmtree(self.folder / f"disk{rank}", ignore_errors=True)
            (self.folder / f"disk{rank}").mkdir()
        self.runs += 1
        killed = 0
        while True:
            way = self.ways[0] if self.ways and killed < limit else None
            for file in self.temporary_files():  # of a process that was killed while it saved
                file.unlink()
            with self.start() as job:
                done = self.disturb(job, way) if way else None
                result = job.finish(START)
            if re.search(r"steps [1-9]\d* to \d+$", result.text, re.MULTILINE):
                self.resumed += 1
            if result.status == 0:  # perhaps before it was disturbed
                return
            assert way, (f"{self.name} was not disturbed but ended with status {result.status}, "
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
        with contextlib.suppress(AssertionError):  # it has ended
            job.wait_for(r"steps (\d+) to (\d+)$", START)
        time.sleep(self.random.random() * self.seconds * 0.5)
        several = len(job.processes) > 1  # with several, srun would end the others
        if way == "SIGTERM":
            job.send(signal.SIGTERM, self.random.randrange(len(job.processes)))
        elif way == "SIGKILL of one process" and not several:
            with contextlib.suppress(OSError, IndexError):  # it has ended
                os.kill(self.random.choice(job.workers()), signal.SIGKILL)
        elif way == "SIGKILL of the launcher" and not several:
            job.send(signal.SIGKILL)
            wait_until_gone(job, f"{self.name}, whose launcher was killed")
        else:
            return self.kill_all(job, way == "SIGKILL while it saves")
        return way

    def kill_all(self, job, while_it_saves):
        """Kill all processes of a job, perhaps when rank 0 saves. Return in words what was done."""
        while while_it_saves and job.running() and not self.temporary_files():
            time.sleep(0.0005)
        saving = self.temporary_files()
        job.kill()
        return "SIGKILL of all while it saved" if saving else "SIGKILL of all"

    def temporary_files(self):
        return list(self.checkpoint.parent.glob("run.pt.*"))


@pytest.mark.parametrize("how", KILLS, ids=lambda how: f"{how.script}-{how.launcher}-{how.nproc}")
def test_killed_at_random_and_resumed_exactly(how, request, tmp_path):
    kills = request.config.getoption("--chaos-kills")
    chaos = Chaos(how, kills, request.config.getoption("--chaos-seed"), tmp_path)
    undisturbed = chaos.run_undisturbed()
    while chaos.ways:
        assert chaos.runs < 10 + kills, (
            f"{chaos.name}: most of {chaos.runs} runs ended before they were disturbed, and "
            f"{chaos.ways} are left: make the runs longer")
        chaos.run_to_the_end()
        assert_equal(load_checkpoint(chaos.checkpoint), load_checkpoint(undisturbed),
                     f"{chaos.name} after {dict(chaos.counts)} (--chaos-seed {chaos.seed}), beside "
                     "an undisturbed run: the checkpoint")
    assert chaos.resumed > 0, f"no start of {chaos.name} has resumed: {dict(chaos.counts)}"
    print(f"{chaos.name}: {chaos.runs} runs ended with equal checkpoints after "
          f"{dict(chaos.counts)}; {chaos.resumed} starts resumed")


# --- torchrun ---
def test_workers_of_a_killed_torchrun_save_and_end(tmp_path):
    """On Linux, the kernel sends them SIGTERM."""
    with start("cpu_ddp", "--epochs", 5000, "--log-every", 1, "--checkpoint", tmp_path / "run.pt",
               launcher="torchrun", nproc=2) as job:
        job.wait_for(r" step \d+/", START)
        job.send(signal.SIGKILL)
        wait_until_gone(job, "workers of a killed torchrun")
        text = job.text
    assert (tmp_path / "run.pt").exists(), f"workers of a killed torchrun must save\n{text}"
    step = load_checkpoint(tmp_path / "run.pt")["step"]
    assert step < 160000, f"workers of a killed torchrun must stop, not train to the end\n{text}"


def test_torchrun_restarts_a_run_whose_worker_was_killed(tmp_path):
    def write_copy(line):
        text = script_path("cpu_ddp").read_text()
        assert text.count(STEP) == 1, f"cpu_ddp/train.py must have this line once: {STEP}"
        copy.write_text(text.replace(STEP, f"{STEP}            {line}\n"))

    copy = tmp_path / "train.py"
    flags = ("--epochs", 20, "--save-every", 0.01, "--log-every", 0, "--checkpoint")
    write_copy("time.sleep(0.1)")
    with start(copy, *flags, tmp_path / "run.pt", launcher="torchrun",
               options=("--standalone", "--nproc-per-node=2", "--max-restarts=3"),
               env={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": 1}) as job:  # as the README says
        job.wait_for("step 40/", START)
        write_copy("pass")  # restarted workers do not sleep
        os.kill(max(job.workers()), signal.SIGKILL)
        result = job.finish(START)
    assert result.status == 0, (
        f"torchrun --max-restarts=3 with a killed worker: the status is {result.status}\n"
        f"{result.text}")
    starts = [int(step) for step in re.findall(r"steps (\d+) to \d+$", result.text, re.MULTILINE)]
    assert len(starts) == 2, f"torchrun must start the workers twice, not {starts}\n{result.text}"
    assert starts[1] >= 25, (
        f"a worker was killed after step 40, and steps before it were saved: the restarted workers "
        f"must resume from there, not at step {starts[1]}\n{result.text}")
    undisturbed = run("cpu_ddp", *flags, tmp_path / "undisturbed.pt", launcher="srun", nproc=2)
    assert undisturbed.status == 0, f"the undisturbed run has failed\n{undisturbed.text}"
    assert_equal(tmp_path / "run.pt", tmp_path / "undisturbed.pt")
