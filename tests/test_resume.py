"""Runs that are killed, damaged, restarted or resized end as undisturbed ones.

bash tests/run.sh --all -s -k killed_at_random --chaos-kills 200      # prints what it did
"""

import contextlib
import os
import random
import re
import resource
import shutil
import signal
import time
from collections import Counter

import pytest
import torch
from helpers import assert_equal, load_checkpoint, load_script, run, script_path, start, train

# --- kills. With dropout (fashionmnist, mnist), with BatchNorm (cifar10), on 1 to 4 processes ---
RUNS = {  # of 20 kills, how many; how; flags
    "mnist_dp, python": (6, {}, ("--fake-data", 320, "--batch-size", 32, "--epochs", 6)),
    "fashionmnist_ddp, mp.spawn": (4, {"launcher": "spawn", "nproc": 3},
                                   ("--fake-data", 240, "--batch-size", 16, "--epochs", 8)),
    "cifar10_ddp, srun": (2, {"launcher": "srun", "nproc": 2}, ("--fake-data", 16, "--batch-size", 2, "--epochs", 3)),
    "cpu_ddp, torchrun": (4, {"launcher": "torchrun", "nproc": 4},
                          ("--samples", 2560, "--batch-size", 64, "--epochs", 24, "--save-every", 3)),
    "synthetic_ddp, srun": (4, {"launcher": "srun", "nproc": 3},
                            ("--samples", 480, "--batch-size", 16, "--epochs", 24, "--save-every", 2)),
}
WAYS = ("SIGTERM", "SIGKILL while saving", "SIGKILL of all", "SIGKILL of one process", "SIGKILL of the launcher")


def saving(checkpoint):
    """Whether rank 0 is in the middle of saving: the temporary file has content, or the last file is renamed."""
    with contextlib.suppress(OSError):
        return os.path.getsize(f"{checkpoint}.tmp") > 0
    return os.path.exists(f"{checkpoint}.previous") and not os.path.exists(checkpoint)


def wait_until_gone(job, timeout=30):
    end = time.monotonic() + timeout
    while job.pids():
        assert time.monotonic() < end, f"processes outlive their launcher:\n{job.text}"
        time.sleep(0.05)


def disturb(job, way, checkpoint, generator):
    """Stop the job in this way, after some more steps; return whether that was while it saved."""
    first, final = map(int, job.wait_for(r"steps (\d+) to (\d+)$").groups())
    step = generator.randrange(first, max(first + 1, final * 3 // 4)) + 1
    with contextlib.suppress(AssertionError):  # it has ended
        job.wait_for(f"step {step}/")
    time.sleep(generator.random() * 0.05)
    if way == "SIGTERM":
        job.send(signal.SIGTERM, generator.randrange(len(job.processes)))
    elif way == "SIGKILL of one process" and len(job.processes) == 1:  # with several, srun would end the others
        with contextlib.suppress(OSError, IndexError):  # it has ended
            os.kill(generator.choice(job.workers()), signal.SIGKILL)
    elif way == "SIGKILL of the launcher" and len(job.processes) == 1:  # its workers save and end by themselves
        job.send(signal.SIGKILL)
        wait_until_gone(job)
    else:
        while way == "SIGKILL while saving" and job.running() and not saving(checkpoint):
            time.sleep(0.0005)
        struck = saving(checkpoint)
        job.kill()
        return struck
    return False


@pytest.mark.parametrize("name", RUNS)
def test_killed_at_random_and_resumed_exactly(name, request, tmp_path):
    script, (share, how, flags) = name.split(",")[0], RUNS[name]
    flags = (*flags, "--log-every", 0)
    assert run(script, *flags, "--checkpoint", tmp_path / "undisturbed", **how).status == 0
    if how.get("launcher") == "srun":  # each rank has a disk of its own, and rank 0's is used
        how = {**how, "rank_flags": lambda rank: ("--checkpoint", tmp_path / f"disk{rank}/run.pt")}
    else:
        flags = (*flags, "--checkpoint", tmp_path / "disk0/run.pt")
    seed, kills = (request.config.getoption(option) for option in ("--chaos-seed", "--chaos-kills"))
    generator, counts, runs, resumed = random.Random(f"{seed} {name}"), Counter(), 0, 0
    ways = [*WAYS[:2], *generator.choices(WAYS, k=max(0, kills * share // 20 - 2))]
    while ways:
        runs, killed = runs + 1, 0
        shutil.rmtree(tmp_path / "disk0", ignore_errors=True)
        for rank in range(4):
            (tmp_path / f"disk{rank}").mkdir(exist_ok=True)
        while True:
            with start(script, *flags, **how) as job:
                way = ways[0] if ways and killed < 5 else None
                struck = way and disturb(job, way, tmp_path / "disk0/run.pt", generator)
                result = job.finish()
            resumed += "steps 0 to" not in result.text
            if result.status == 0:  # perhaps before it was disturbed
                break
            assert way, f"--chaos-seed {seed}: ended by itself:\n{result.text}"
            counts[f"{ways.pop(0)}{', while it saved' * struck}"] += 1
            killed += 1
        assert_equal(tmp_path / "disk0/run.pt", tmp_path / "undisturbed")
        assert runs <= 10 + kills, "most runs end before they are disturbed"
    assert resumed
    print(f"{name}: {runs} runs ended with equal checkpoints after {dict(counts)}; {resumed} starts resumed")


# --- torchrun's restarts ---
def test_workers_of_a_killed_torchrun_save_and_end(tmp_path):
    command = ("cpu_ddp", "--epochs", 5000, "--checkpoint", tmp_path / "run.pt")
    with start(*command, launcher="torchrun", nproc=2) as job:
        job.wait_for("step 1/")
        job.send(signal.SIGKILL)
        wait_until_gone(job)
    assert 1 <= load_checkpoint(tmp_path / "run.pt")["step"] < 160000


def test_torchrun_restarts_a_killed_worker(tmp_path):
    flags = ("--epochs", 50, "--save-every", 1, "--log-every", 0, "--checkpoint")
    text, step = script_path("cpu_ddp").read_text(), "            step += 1\n"
    assert text.count(step) == 1
    slower = f"{step}            time.sleep(0.1 * (os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'))\n"
    (tmp_path / "train.py").write_text(text.replace(step, slower))
    with start(tmp_path / "train.py", *flags, tmp_path / "run.pt", launcher="torchrun",
               options=("--standalone", "--nproc-per-node=2", "--max-restarts=3"),
               env={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": 1}) as job:  # as the README says for restarts
        job.wait_for("step 40/")
        os.kill(max(job.workers()), signal.SIGKILL)
        result = job.finish()
    assert result.status == 0 and int(re.findall(r"steps (\d+) to", result.text)[1]) > 0, result.text
    train("cpu_ddp", *flags, tmp_path / "undisturbed", nproc=2)
    assert_equal(tmp_path / "run.pt", tmp_path / "undisturbed")


# --- damaged checkpoints ---
def test_damaged_and_malicious_checkpoints_are_detected(tmp_path, request):
    """Such a file is left as it is, and the previous one is used; a flipped bit that changes nothing may pass."""
    class Malicious:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "executed"),)

    cpu_ddp = load_script("cpu_ddp")
    path = tmp_path / "run.pt"
    train("cpu_ddp", "--epochs", 1, "--checkpoint", path)
    content, original = path.read_bytes(), load_checkpoint(path)
    torch.save({"intact": True}, f"{path}.previous")
    generator = random.Random(request.config.getoption("--chaos-seed"))
    end = 8 * content.index(b"PK\1\2")  # of the data; the archive's directory follows
    damaged = 0
    for bit in generator.sample(range(end), 1000):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        loaded = cpu_ddp.load_checkpoint(str(path))
        if "intact" in loaded:
            damaged += 1
        else:
            assert_equal(loaded, original | {"file": str(path)}, f"bit {bit}")
        assert path.read_bytes() == flipped
    assert damaged > 500
    for size in [0, 1, len(content) - 1, *(generator.randrange(len(content)) for _ in range(50))]:
        path.write_bytes(content[:size])
        assert "intact" in cpu_ddp.load_checkpoint(str(path)) and path.read_bytes() == content[:size]
    torch.save({"model": Malicious()}, path)
    assert "intact" in cpu_ddp.load_checkpoint(str(path)) and not (tmp_path / "executed").exists()
    os.remove(f"{path}.previous")
    with pytest.raises(SystemExit, match="error: .*run.pt"):  # and does not start over
        cpu_ddp.load_checkpoint(str(path))


def test_full_disk(tmp_path):
    """The second checkpoint does not fit: the run ends, and the first one is intact."""
    flags = ("--fake-data", 64, "--batch-size", 16, "--checkpoint", tmp_path / "run.pt")
    train("fashionmnist_ddp", "--epochs", 1, *flags)
    saved = (tmp_path / "run.pt").read_bytes()
    ((_, code, _),) = train("fashionmnist_ddp", "--epochs", 2, *flags, setup=lambda *_: resource.setrlimit(
        resource.RLIMIT_FSIZE, (10**6, 10**6)))  # of 14 MB
    assert "error: " in code and "run.pt" in code and (tmp_path / "run.pt").read_bytes() == saved


# --- slow steps, and a process that hangs ---
def test_sigterm_with_default_flags_and_slow_steps(tmp_path):
    """torchrun kills after 30 seconds: at 2 seconds a step, a stop check every 5 seconds is in time."""
    text = script_path("cpu_ddp").read_text().replace("    step += 1\n", "    step += 1; time.sleep(2)\n")
    (tmp_path / "train.py").write_text(text)
    with start(tmp_path / "train.py", "--checkpoint", tmp_path / "run.pt", launcher="torchrun", nproc=2) as job:
        job.wait_for("step 1/")
        job.send(signal.SIGTERM)
        assert job.finish(25).status != 0
    assert 1 < load_checkpoint(tmp_path / "run.pt")["step"] < 6


def test_stopped_process_ends_the_others_within_timeout():
    with start("cpu_ddp", "--epochs", 100000, "--log-every", 0, "--timeout", 5, launcher="srun", nproc=2) as job:
        job.wait_for("step 7/")
        job.send(signal.SIGSTOP, 0)
        assert job.processes[1].wait(60) != 0
