"""Killed runs resume from their last checkpoint, and end with the weights of an undisturbed run.

On 2 processes they are equal bit for bit, on 4 up to rounding.

bash tests/run.sh --all -s -k killed_at_random --chaos-kills 200      # prints what it did
"""

import contextlib
import os
import random
import re
import signal
import time
from collections import Counter

import pytest
from checkpoints import assert_equal, difference, load_checkpoint
from forked import train_to_end
from launchers import start
from scripts import STEP_SCRIPTS

KILLS = [  # how many of 20 kills, script, launcher, processes, flags
    (3, "cpu_ddp", "torchrun", 2, ("--epochs", 60)),
    (3, "cpu_ddp", "torchrun", 4, ("--epochs", 30)),
    (5, "synthetic_ddp", "torchrun", 2, ("--epochs", 6)),
    (4, "cifar10_ddp", "torchrun", 2, ("--fake-data", 64, "--batch-size", 2, "--epochs", 3,
                                       "--model", "shufflenet_v2_x0_5", "--image-size", 32)),
    (5, "fashionmnist_ddp", "spawn", 2, ("--fake-data", 512, "--batch-size", 8, "--epochs", 4)),
]
RESUMED = r" (steps|epochs) [1-9]\d* to "
WAYS = ["SIGKILL while it saves", "SIGTERM", "SIGKILL of all", "SIGKILL of one process",
        "SIGKILL of all while it starts"]


@pytest.fixture
def two_cores():
    """With two cores, processes have one thread, as forked ones have: results depend on it."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(cores)[:2])
    yield
    os.sched_setaffinity(0, cores)


def disturb(job, way, seconds, chance, folder):
    """Disturb a job, which trains for so many seconds, in this way, unless it has ended."""
    if way == "SIGKILL of all while it starts":
        time.sleep(5 * chance.random())
        job.kill()
        return
    with contextlib.suppress(AssertionError):
        job.wait_for(r"^world size ")
    time.sleep(seconds / 2 * chance.random())
    while way == WAYS[0] and job.running() and not list(folder.glob("*.tmp")):
        time.sleep(0.0005)
    if way == "SIGTERM":
        job.send(signal.SIGTERM)
    elif way == "SIGKILL of one process":
        with contextlib.suppress(OSError, IndexError):
            os.kill(chance.choice(job.workers()), signal.SIGKILL)
    else:
        job.kill()


@pytest.mark.parametrize("share, script, launcher, nproc, flags", KILLS, ids=str)
def test_killed_at_random_and_resumed_exactly(share, script, launcher, nproc, flags, request,
                                              tmp_path, two_cores):
    kills = max(1, request.config.getoption("--chaos-kills") * share // 20)
    seed = request.config.getoption("--chaos-seed")
    name = f"{script} by {launcher}, {nproc} processes, --chaos-seed {seed}"
    chance = random.Random(name)
    undisturbed = tmp_path / "undisturbed.pt"
    begin = time.monotonic()
    train_to_end(script, *flags, "--checkpoint", undisturbed, nproc=nproc)
    seconds = time.monotonic() - begin

    folder = tmp_path / "killed"
    folder.mkdir()
    checkpoint = folder / "run.pt"
    if script in STEP_SCRIPTS:
        flags += ("--save-every", seconds / 600, "--log-every", 1)
    flags += ("--checkpoint", checkpoint)
    ways = [*chance.sample(WAYS, len(WAYS)), *chance.choices(WAYS, k=kills)][:kills]
    counts = Counter()
    while ways:  # a run: it ends when it has been disturbed five times, or before by itself
        checkpoint.unlink(missing_ok=True)
        limit = max(0, len(ways) - 5)
        status = None
        while status != 0:
            for file in folder.glob("*.tmp"):  # of a process that was killed while it saved
                file.unlink()
            way = ways[0] if len(ways) > limit else None
            with start(script, *flags, launcher=launcher, nproc=nproc) as job:
                if way:
                    disturb(job, way, seconds, chance, folder)
                status, text = job.result()
            if status != 0:
                assert way, f"{name} was not disturbed but failed, after {counts}\n{text}"
                counts[ways.pop(0)] += 1
            counts["resumed"] += bool(re.search(RESUMED, text, re.MULTILINE))
        counts["runs"] += 1
        why = "runs end before they are disturbed: make them longer"
        if not counts["resumed"]:
            why = "no start has resumed: is nothing saved?"
        assert counts["runs"] <= 10 + kills, f"{name}: {why} {dict(counts)}\n{text}"
        if nproc == 2:
            assert_equal(load_checkpoint(checkpoint), load_checkpoint(undisturbed),
                         f"{name}, after {dict(counts)}, beside an undisturbed run: the checkpoint")
        found = difference(checkpoint, undisturbed)  # DDP's first step adds up in another order
        assert found < 1e-6, f"{name}, after {dict(counts)}: weights differ by {found}"
        if not ways and not counts["resumed"]:  # all were disturbed before they saved
            ways.append("SIGTERM")
    assert counts["resumed"] > 0, f"no start of {name} has resumed: {dict(counts)}"
    print(f"{name}: all runs ended with equal weights after {dict(counts)}")
