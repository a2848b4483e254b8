"""Runs that are killed at random, started again until they finish, and end bit for bit as undisturbed ones.

bash tests/run.sh -s tests/test_chaos.py --chaos-kills 200      # over all scripts; prints what it did
"""

import contextlib
import os
import random
import re
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
from helpers import differences, start

# Each run takes some seconds, so that a kill can be placed at a step. The weight is the share of the kills.
RUNS = {
    "cpu_ddp, torchrun": (5, "cpu_ddp", {"launcher": "torchrun", "workers": 2},
                          ("--samples", 32768, "--batch-size", 1024, "--epochs", 100, "--save-every-steps", 7)),
    "synthetic_ddp, srun": (4, "synthetic_ddp", {"launcher": "srun", "workers": 2},
                            ("--samples", 8192, "--batch-size", 256, "--epochs", 60, "--save-every-steps", 5)),
    "fashionmnist_ddp, torchrun": (3, "fashionmnist_ddp", {"launcher": "torchrun", "workers": 2},
                                   ("--fake-data", 640, "--batch-size", 16, "--epochs", 4, "--save-every-steps", 3)),
    "fashionmnist_ddp, mp.spawn": (3, "fashionmnist_ddp", {},
                                   ("--nproc", 2, "--fake-data", 640, "--batch-size", 16, "--epochs", 4, "--save-every-steps", 3)),
    "cifar10_ddp, torchrun": (3, "cifar10_ddp", {"launcher": "torchrun", "workers": 2},
                              ("--fake-data", 64, "--batch-size", 4, "--epochs", 2, "--save-every-steps", 2)),
    "mnist_dp": (3, "mnist_dp", {}, ("--fake-data", 1024, "--batch-size", 32, "--epochs", 4, "--save-every-steps", 3)),
}
TOTAL = sum(weight for weight, *_ in RUNS.values())
WAYS = ("SIGKILL of a worker", "SIGKILL of the launcher", "SIGKILL of all", "SIGKILL while saving", "SIGTERM")


def workers_of(job):
    """The processes that train: all but torchrun or mp.spawn's parent and Python's helpers."""
    def command(pid):
        with contextlib.suppress(OSError):
            return Path(f"/proc/{pid}/cmdline").read_bytes()
        return b""
    launchers = {process.pid for process in job.processes}
    children = [pid for pid in job.pids() if pid not in launchers and b"train.py" in command(pid)
                or b"spawn_main" in command(pid)]
    return children or sorted(launchers)


def steps_seen(job):
    """The (step it starts from, its last step so far, its final step), or None before the first line."""
    out = job.output()[0]
    header = re.search(r"steps (\d+) to (\d+)\n", out)
    if not header:
        return None
    steps = re.findall(r"^step (\d+)/\d+ ", out, re.MULTILINE)
    return int(header[1]), int(steps[-1]) if steps else int(header[1]), int(header[2])


def wait_for_step(job, choose_step, timeout=90):
    """Wait until the step that choose_step(first, final) names is seen. Returns steps_seen, or None if the run ended."""
    target, end = None, time.monotonic() + timeout
    while time.monotonic() < end:
        ended = all(process.poll() is not None for process in job.processes)
        seen = steps_seen(job)
        if seen and target is None:
            target = choose_step(seen[0], seen[2])
        if ended:
            return None
        if seen and seen[1] >= target:
            return seen
        time.sleep(0.01)
    raise AssertionError(f"no step {target} within {timeout} s:\n{job.describe()}")


def kill(job, way, checkpoint, generator):
    """Kill the job in this way. Returns whether that struck while it was saving."""
    time.sleep(generator.random() * 0.05)  # not always right behind the line that tells the step
    if way == "SIGTERM":
        job.send(signal.SIGTERM, generator.randrange(len(job.processes)))
    elif way == "SIGKILL of a worker":
        with contextlib.suppress(ProcessLookupError):
            os.kill(generator.choice(workers_of(job)), signal.SIGKILL)
    elif way == "SIGKILL of the launcher":
        job.send(signal.SIGKILL, generator.randrange(len(job.processes)))
    else:
        if way == "SIGKILL while saving":
            end = time.monotonic() + 5
            pids = job.pids()
            while time.monotonic() < end and not os.path.exists(f"{checkpoint}.tmp"):
                pass
            time.sleep(generator.choice([0, 0.005 * generator.random()]))
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        job.kill()
    return os.path.exists(f"{checkpoint}.tmp") or not os.path.exists(checkpoint)


def status(checkpoint):
    return Path(f"{checkpoint}.status").read_text().strip()


@pytest.mark.parametrize("name", RUNS)
def test_killed_at_random_and_finished_bit_for_bit(name, request, tmp_path, chaos_seed):
    weight, script, how, flags = RUNS[name]
    kills_left = -(-request.config.getoption("--chaos-kills") * weight // TOTAL)
    generator = random.Random(f"{chaos_seed} {name}")
    flags, counts, resumed, restarts = (*flags, "--log-every", 1, "--timeout", 60), Counter(), 0, 0
    undisturbed = start(script, *flags, "--checkpoint", tmp_path / "undisturbed", **how)
    with undisturbed:
        assert undisturbed.finish(120).status == 0
    round_number, ways = 0, []
    while kills_left:  # a round is a run from its first start to its end
        round_number += 1
        checkpoint, starts = tmp_path / f"round{round_number}", 0

        def choose_step(first, final):
            return min(first + generator.randrange(1, 2 + 2 * (final - first) // min(kills_left + 1, 5)), final)

        while True:
            starts += 1
            assert starts < 200, "goes round in circles"
            with start(script, *flags, "--checkpoint", checkpoint, **how) as job:
                ways = ways or generator.sample(WAYS, len(WAYS))
                way = ways.pop()
                seen = wait_for_step(job, choose_step) if kills_left else None
                killed = seen is not None
                if killed:
                    saving = kill(job, way, checkpoint, generator)
                result = job.finish(120)
                end = time.monotonic() + 20
                while job.pids() and time.monotonic() < end:
                    time.sleep(0.1)
                assert not job.pids(), f"orphans after {way}: {job.describe()}"
                first, last, final = steps_seen(job) or (0, 0, 0)
            if starts > 1:
                restarts += 1
                resumed += first > 0
            assert "Traceback" not in result.stderr, result.stderr
            if killed:
                kills_left -= 1
                counts[way] += 1
                counts["struck while saving"] += saving
                print(f"{name}: {way} at step {last}/{final}{' while saving' if saving else ''}, started from {first}: status {result.statuses}")
                if way == "SIGTERM":
                    assert status(checkpoint) in ("preempted", "finished"), f"{way}: {result}"
            if status(checkpoint) == "finished":
                break
            assert killed, f"ended without being killed: {result}"
        assert not differences(checkpoint, tmp_path / "undisturbed"), f"round {round_number} ends with other bits"
        for path in tmp_path.glob(f"{checkpoint.name}*"):
            path.unlink()
    print(f"{name}: {round_number} runs, {dict(counts)}, {resumed} of {restarts} restarts resumed from a step above 0")
    assert 2 * resumed >= restarts
