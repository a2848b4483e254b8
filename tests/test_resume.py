"""A run that was stopped, anywhere and by anything, ends bit for bit as the undisturbed one."""

import os
import re
import shutil
import signal
import time

import pytest
from helpers import differences, free_port, load_snapshot, run, start, weights_equal
from test_chaos import steps_seen, workers_of

TORCHRUN = {"launcher": "torchrun"}
# With dropout (fashionmnist) and with BatchNorm (cifar10); test_chaos.py has 2 workers, and the other scripts.
CONFIGURATIONS = {
    "fashionmnist_ddp, 1 worker": ("fashionmnist_ddp", {}, ("--fake-data", 320, "--batch-size", 32)),
    "fashionmnist_ddp, 4 workers": ("fashionmnist_ddp", {**TORCHRUN, "workers": 4}, ("--fake-data", 320, "--batch-size", 8)),
    "fashionmnist_ddp, bfloat16": ("fashionmnist_ddp", {**TORCHRUN, "workers": 2},
                                   ("--fake-data", 320, "--batch-size", 16, "--bf16", "--compress")),
    "cifar10_ddp, 4 workers": ("cifar10_ddp", {**TORCHRUN, "workers": 4}, ("--fake-data", 80, "--batch-size", 2)),
}


def stop(job, pattern, signum):
    """Wait for the pattern, send the signal to all (SIGKILL) or to the launcher, wait for the end. Returns the first line's step."""
    job.wait_for(pattern, 90)
    job.kill() if signum == signal.SIGKILL else job.send(signum)
    job.finish(60)
    return steps_seen(job)[0]


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_stopped_in_mid_epoch_and_at_its_end(name, tmp_path):
    """Three epochs of ten steps: SIGKILL in the first, SIGTERM in the second, SIGKILL at the end of the second."""
    script, how, flags = CONFIGURATIONS[name]
    last, undisturbed = tmp_path / "last", tmp_path / "undisturbed"
    flags = (*flags, "--epochs", 3, "--save-every-steps", 4, "--log-every", 1)
    assert run(script, *flags, "--checkpoint", undisturbed, **how).status == 0
    flags = (*flags, "--checkpoint", last)
    starts = []
    for pattern, signum in ("step 6/30", signal.SIGKILL), ("step 13/30", signal.SIGTERM), ("epoch 2/3", signal.SIGKILL):
        with start(script, *flags, **how) as job:
            starts.append(stop(job, pattern, signum))
    assert starts[0] == 0 and starts[1] >= 4 and starts[2] >= 13
    final = run(script, *flags, **how)
    assert final.status == 0 and re.search(r"steps 2\d to 30", final.stdout), final
    assert not differences(last, undisturbed)


@pytest.mark.parametrize("script, flags, steps_per_epoch", [
    ("cpu_ddp", ("--samples", 500, "--batch-size", 7), 36),
    ("synthetic_ddp", ("--samples", 500, "--batch-size", 7), 36),
    ("fashionmnist_ddp", ("--fake-data", 100, "--batch-size", 7), 8),
    ("cifar10_ddp", ("--fake-data", 27, "--batch-size", 3), 5),
    ("mnist_dp", ("--fake-data", 100, "--batch-size", 13), 8),
])
def test_from_the_snapshot_before(script, flags, steps_per_epoch, tmp_path):
    """In mid-epoch, with an odd batch per worker and a smaller batch at the end of every epoch."""
    how = {**TORCHRUN, "workers": 2} if script != "mnist_dp" else {}
    last, before, epochs = tmp_path / "last", tmp_path / "before", 3
    flags = (*flags, "--epochs", epochs, "--save-every", epochs)
    every = next(steps for steps in (4, 5) if epochs * steps_per_epoch % steps)
    assert run(script, *flags, "--save-every-steps", every, "--checkpoint", last, **how).status == 0
    shutil.copy(f"{last}.previous", before)
    step = load_snapshot(before)["step"]
    assert step % steps_per_epoch and step > (epochs - 1) * steps_per_epoch
    final = run(script, *flags, "--checkpoint", before, **how)
    assert final.status == 0 and f"steps {step} to {epochs * steps_per_epoch}" in final.stdout, final
    assert not differences(last, before)
    told = run(script, *flags, "--checkpoint", before)  # a finished run tells its result again, to any number of workers
    assert told.status == 0 and "already finished" in told.stdout, told
    first, again = (re.findall(r"test accuracy [\d.]+ \(\d+/\d+\)|are within [\d.]+", each.stdout)[-1] for each in (final, told))
    assert first == again and not differences(last, before)


def test_node_local_disks(tmp_path):
    """Only rank 0's path leads to the snapshot; the others resume with it, and write nothing."""
    how = {"launcher": "srun", "workers": 2}
    flags = ("--fake-data", 320, "--batch-size", 16, "--epochs", 2, "--save-every-steps", 4, "--log-every", 1)
    assert run("fashionmnist_ddp", *flags, "--checkpoint", tmp_path / "undisturbed", **how).status == 0
    for rank in (0, 1):
        (tmp_path / f"node{rank}").mkdir()
    how["rank_flags"] = lambda rank: ("--checkpoint", tmp_path / f"node{rank}" / "last")
    with start("fashionmnist_ddp", *flags, **how) as job:
        stop(job, "step 6/", signal.SIGKILL)
    result = run("fashionmnist_ddp", *flags, **how)
    assert result.status == 0 and re.search("steps [48] to 20", result.stdout), result
    assert not differences(tmp_path / "node0" / "last", tmp_path / "undisturbed")
    assert not list((tmp_path / "node1").iterdir())


def test_other_numbers_of_workers(tmp_path):
    """2, then 4, then 1 workers go on with the same global batches; 3 are refused with the numbers that fit."""
    flags = ("--samples", 640, "--epochs", 3, "--log-every", 1, "--save-every", 1, "--batch-size", 16)
    assert run("cpu_ddp", *flags, "--checkpoint", tmp_path / "undisturbed", **TORCHRUN, workers=2).status == 0
    flags = (*flags, "--checkpoint", tmp_path / "last")
    for workers, pattern in ((2, "step 22/60"), (4, "step 45/60")):
        with start("cpu_ddp", *flags, **TORCHRUN, workers=workers) as job:
            stop(job, pattern, signal.SIGKILL)
            assert "global batch 32 of" in job.output()[0]
    before = (tmp_path / "last").read_bytes()
    refused = run("cpu_ddp", *flags, **TORCHRUN, workers=3)
    assert refused.status == 1 and len(refused.errors) == len(refused.stderr.splitlines()) == 1
    assert "1, 2, 4, 8, 16, 32" in refused.stderr and (tmp_path / "last").read_bytes() == before
    final = run("cpu_ddp", *flags)
    assert final.status == 0 and "global batch 32 of" in final.stdout and re.search("steps [24]0 to 60", final.stdout)
    assert weights_equal(tmp_path / "last", tmp_path / "undisturbed", tolerance=1e-5)
    assert load_snapshot(tmp_path / "last")["step"] == 60


def test_torchrun_restarts_a_killed_worker(tmp_path):
    """Without a human, from the snapshot, and in spite of --fresh, which was meant for the first start."""
    flags = ("--fake-data", 640, "--batch-size", 16, "--epochs", 2, "--save-every-steps", 4, "--log-every", 1)
    how = {**TORCHRUN, "workers": 2, "options": ("--max-restarts=3",)}
    assert run("fashionmnist_ddp", *flags, "--checkpoint", tmp_path / "undisturbed", **how).status == 0
    with start("fashionmnist_ddp", *flags, "--fresh", "--checkpoint", tmp_path / "last", **how) as job:
        job.wait_for("step 6/40")
        os.kill(max(workers_of(job)), signal.SIGKILL)
        job.wait_for(r"steps [48] to 40")
        job.wait_for("step 27/40")
        os.kill(min(workers_of(job)), signal.SIGKILL)
        result = job.finish()
    assert result.status == 0, result
    assert re.search(r"steps 2\d to 40", result.stdout)
    assert (tmp_path / "last.status").read_text() == "finished\n"
    assert not differences(tmp_path / "last", tmp_path / "undisturbed")


def test_elastic_with_two_agents(tmp_path):
    """One agent alone, joined by another, alone again after that one's end by SIGKILL, joined again."""
    port = free_port()
    options = ("--nnodes=1:2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=elastic", "--local-addr=127.0.0.1",
               "--rdzv-conf=last_call_timeout=1", "--max-restarts=9")
    flags = ("--samples", 2**16, "--batch-size", 2**14, "--epochs", 5000, "--save-every", 5000, "--save-every-steps", 10, "--log-every", 1, "--timeout", 60)
    # Without it, an agent that joins waits for an address that rank 0 told only in the round before (torch 2.15).
    how = {**TORCHRUN, "workers": 1, "options": options, "env": {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": 1}}
    last = tmp_path / "last"

    def agent():
        return start("cpu_ddp", *flags, "--checkpoint", last, **how)

    def wait_until(condition, what):
        end = time.monotonic() + 100
        while not condition():
            assert time.monotonic() < end, f"no {what}: {stayer.describe()}"
            assert stayer.processes[0].poll() is None, f"ended without {what}: {stayer.describe()}"
            time.sleep(0.05)

    steps = []

    def wait_for_group(workers, *jobs):
        """Wait until so many workers go on from a later step than the group before, and have saved twice."""
        earliest = steps[-1] + 10 if steps else 0

        def saved_twice():
            out = "".join(job.output()[0] for job in jobs)
            starts = re.findall(r"cpu_ddp: (\d) worker.* global batch 16384 of .* steps (\d+) to", out)
            later = [int(step) for number, step in starts if int(number) == workers and int(step) >= earliest]
            found[:] = [step for step in later if f"\nstep {step + 22}/" in out]
            return found
        found = []
        wait_until(saved_twice, f"{workers} workers after {steps}")
        steps.append(found[0])

    with agent() as stayer:
        wait_for_group(1, stayer)
        with agent() as guest:
            wait_for_group(2, stayer, guest)
            guest.kill()
            wait_for_group(1, stayer)
        with agent() as guest:
            wait_for_group(2, stayer, guest)
            stayer.kill()
    print(f"the groups of 1, 2, 1 and 2 workers began with steps {steps}")
    # The same steps, undisturbed, by one worker: equal but for the order of summation.
    final, undisturbed = load_snapshot(last)["step"], tmp_path / "undisturbed"
    with start("cpu_ddp", *flags, "--save-every-steps", final, "--checkpoint", undisturbed) as job:
        job.wait_for(f"step {final + 1}/", 100)
    assert load_snapshot(undisturbed)["step"] == final
    assert weights_equal(last, undisturbed, tolerance=1e-5)
