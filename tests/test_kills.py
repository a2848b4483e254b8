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

import pytest
from checkpoints import assert_equal, load_checkpoint
from copies import make_copy
from processes import START, run, start, wait_until_gone

# Kills at random moments, with dropout, BatchNorm and loader processes: how many of 20 kills,
# script, launcher, processes, flags
KILLS = [
    (8, "cpu_ddp", "srun", 2, ("--epochs", 60)),
    (3, "cpu_ddp", "torchrun", 4, ("--epochs", 30)),
    (4, "cifar10_ddp", "torchrun", 2, ("--fake-data", 64, "--batch-size", 2, "--epochs", 3)),
    (5, "fashionmnist_ddp", "spawn", 2, ("--fake-data", 2048, "--batch-size", 32, "--epochs", 4)),
]
WAYS = ["SIGTERM", "SIGKILL while it saves", "SIGKILL of all", "SIGKILL of one process",
        "SIGKILL of the launcher", "SIGKILL of all while it starts"]


class Chaos:
    """Starts a script again and again, disturbs it at random moments, and counts what it did."""

    def __init__(self, script, launcher, nproc, flags, seed, folder):
        self.script = script
        self.launcher = launcher
        self.nproc = nproc
        self.flags = flags
        self.name = f"{script} by {launcher}, {nproc} processes, --chaos-seed {seed}"
        self.folder = folder
        self.random = random.Random(self.name)
        self.checkpoint = folder / "disk0/run.pt"
        self.counts = Counter()  # kills, by what was done
        self.resumed = 0  # starts that found a checkpoint

    def run_undisturbed(self):
        """Run the script to its end, and return its checkpoint."""
        path = self.folder / "undisturbed.pt"
        with start(self.script, *self.flags, "--checkpoint", path, launcher=self.launcher,
                   nproc=self.nproc) as job:
            job.wait_for(r"steps 0 to \d+$", START)
            begin = time.monotonic()
            result = job.finish(START)
        self.seconds = time.monotonic() - begin
        assert result.status == 0, f"the undisturbed run of {self.name} failed\n{result.text}"
        return path

    def start(self):
        """Return the Job of a start. Of srun, each rank has a disk, and that of rank 0 is used."""
        def disk_of(rank):
            return "--checkpoint", self.folder / f"disk{rank}/run.pt"

        flags = (*self.flags, "--save-every", self.seconds / 60 / 10, "--log-every", 1)
        return start(self.script, *flags, *disk_of(0), launcher=self.launcher, nproc=self.nproc,
                     rank_flags=disk_of)

    def run_to_the_end(self, ways):
        """Start the run until it ends by itself, disturb it in these ways, and remove them."""
        for rank in range(self.nproc):
            shutil.rmtree(self.folder / f"disk{rank}", ignore_errors=True)
            (self.folder / f"disk{rank}").mkdir()
        limit = len(ways) - 5
        while True:
            way = ways[0] if len(ways) > max(0, limit) else None
            for file in self.temporary_files():  # of a process that was killed while it saved
                file.unlink()
            with self.start() as job:
                done = self.disturb(job, way) if way else None
                result = job.finish(START)
            self.resumed += bool(re.search(r"steps [1-9]\d* to \d+$", result.text, re.MULTILINE))
            if result.status == 0:  # perhaps before it was disturbed
                return
            assert way, (f"{self.name} was not disturbed but ended with status {result.status}\n"
                         f"{result.text}")
            self.counts[done] += 1
            ways.pop(0)

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
            while way == "SIGKILL while it saves" and job.running() and not self.temporary_files():
                time.sleep(0.0005)
            way = "SIGKILL of all while it saved" if self.temporary_files() else "SIGKILL of all"
            job.kill()
        return way

    def temporary_files(self):
        return list(self.checkpoint.parent.glob("run.pt.*"))


@pytest.mark.parametrize("share, script, launcher, nproc, flags", KILLS, ids=str)
def test_killed_at_random_and_resumed_exactly(share, script, launcher, nproc, flags, request,
                                              tmp_path):
    kills = request.config.getoption("--chaos-kills")
    seed = request.config.getoption("--chaos-seed")
    chaos = Chaos(script, launcher, nproc, flags, seed, tmp_path)
    undisturbed = chaos.run_undisturbed()
    ways = WAYS[:2] + chaos.random.choices(WAYS, k=max(0, kills * share // 20 - 2))
    runs = 0
    while ways:
        runs += 1
        assert runs <= 10 + kills, (
            f"{chaos.name}: most runs ended before they were disturbed: make them longer")
        chaos.run_to_the_end(ways)
        assert_equal(load_checkpoint(chaos.checkpoint), load_checkpoint(undisturbed),
                     f"{chaos.name}, after {dict(chaos.counts)}, beside an undisturbed run: the "
                     "checkpoint")
    assert chaos.resumed > 0, f"no start of {chaos.name} has resumed: {dict(chaos.counts)}"
    print(f"{chaos.name}: {runs} runs ended with equal checkpoints after {dict(chaos.counts)}; "
          f"{chaos.resumed} starts resumed")


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
    copy = tmp_path / "train.py"
    flags = ("--epochs", 20, "--save-every", 0.01, "--log-every", 0, "--checkpoint")
    make_copy("cpu_ddp", copy, ('after "step += 1"', "time.sleep(0.1)"))
    with start(copy, *flags, tmp_path / "run.pt", launcher="torchrun",
               options=("--standalone", "--nproc-per-node=2", "--max-restarts=3"),
               env={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": 1}) as job:  # as the README says
        job.wait_for("step 40/", START)
        make_copy("cpu_ddp", copy)  # restarted workers do not sleep
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
