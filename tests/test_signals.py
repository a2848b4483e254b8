"""Signals and lost workers: everybody leaves, soon, with one line, and the status file tells what happened."""

import contextlib
import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch
from helpers import free_port, load_snapshot, run, script_path, start
from test_chaos import workers_of

TORCHRUN_2 = {"launcher": "torchrun", "workers": 2}
SRUN_2 = {"launcher": "srun", "workers": 2}
SPAWN_2 = ("--nproc", 2, "--fake-data", 640, "--batch-size", 16)
# Newer than torch 2.6: torchrun can be told which signals to pass on, and how long to wait for its workers.
TORCHRUN_HAS_SIGNALS = tuple(int(number) for number in torch.__version__.split(".")[:2]) >= (2, 9)
USR1_2 = {**TORCHRUN_2, "options": ("--signals-to-handle=SIGTERM,SIGINT,SIGUSR1",) if TORCHRUN_HAS_SIGNALS else ()}


def to_launcher(job):
    return [job.processes[0].pid]


def to_one_worker(job):
    return [max(workers_of(job))]


def to_all(job):
    """What Ctrl-C does: workers get it from the terminal, and again from their launcher."""
    return job.pids()


# The script, how it is started, the signal, who gets it, and the launcher's exit status: torchrun's is always 1.
CASES = {
    "python, TERM": ("cpu_ddp", (), {}, signal.SIGTERM, to_launcher, 75),
    "python, INT": ("synthetic_ddp", (), {}, signal.SIGINT, to_launcher, 75),
    "python, USR1": ("mnist_dp", ("--fake-data", 640), {}, signal.SIGUSR1, to_launcher, 75),
    "mp.spawn, TERM": ("fashionmnist_ddp", SPAWN_2, {}, signal.SIGTERM, to_launcher, 75),
    "mp.spawn, INT": ("fashionmnist_ddp", SPAWN_2, {}, signal.SIGINT, to_all, 75),
    "mp.spawn, USR1": ("fashionmnist_ddp", SPAWN_2, {}, signal.SIGUSR1, to_launcher, 75),
    "mp.spawn's parent killed": ("fashionmnist_ddp", SPAWN_2, {}, signal.SIGKILL, to_launcher, 137),
    "torchrun, TERM": ("cpu_ddp", (), TORCHRUN_2, signal.SIGTERM, to_launcher, 1),
    "torchrun, INT": ("synthetic_ddp", (), TORCHRUN_2, signal.SIGINT, to_all, 1),
    "torchrun, USR1": ("cpu_ddp", (), USR1_2, signal.SIGUSR1, to_launcher if TORCHRUN_HAS_SIGNALS else to_one_worker, 1),
    "torchrun killed": ("cpu_ddp", (), TORCHRUN_2, signal.SIGKILL, to_launcher, 137),
    "torchrun's worker, TERM": ("synthetic_ddp", (), TORCHRUN_2, signal.SIGTERM, to_one_worker, 1),
    "srun, USR1": ("cpu_ddp", (), SRUN_2, signal.SIGUSR1, to_all, 75),
    "srun, TERM to one": ("synthetic_ddp", (), SRUN_2, signal.SIGTERM, to_one_worker, 75),
}


@pytest.mark.parametrize("name", CASES)
def test_all_save_and_leave(name, tmp_path):
    script, flags, how, signum, to_whom, exit_status = CASES[name]
    last = tmp_path / "last"
    flags = (*flags, "--epochs", 5000, "--save-every", 5000, "--log-every", 1, "--checkpoint", last)
    with start(script, *flags, **how) as job:
        job.wait_for("\nstep 7/")
        assert (tmp_path / "last.status").read_text() == "running\n"
        begin = time.monotonic()
        for pid in to_whom(job):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)
        result = job.finish(30)
        while job.pids() and time.monotonic() < begin + 30:
            time.sleep(0.1)
        seconds = time.monotonic() - begin
        assert not job.pids(), "orphans"
        assert seconds < 10, f"{seconds:.1f} s: {job.describe()}"
        stdout, stderr = job.output()
    assert result.status == exit_status, result
    assert (tmp_path / "last.status").read_text() == "preempted\n"
    told = re.findall(r"^stopped by a signal after step (\d+): .*", stdout, re.MULTILINE)
    assert len(told) == 1 and str(last) in stdout
    state = load_snapshot(last)
    assert state["step"] == int(told[0]) >= 7
    assert "Traceback" not in stderr, stderr


def test_second_signal_ends_at_once_but_not_its_repeats(tmp_path):
    """Worker 1 stands still, so worker 0 cannot agree with it on a step, and only a second signal can end it."""
    with start("cpu_ddp", "--epochs", 100000, "--log-every", 1, "--checkpoint", tmp_path / "last", **SRUN_2) as job:
        job.wait_for("\nstep 7/")
        job.send(signal.SIGSTOP, 1)
        time.sleep(0.5)
        for _ in range(3):
            job.send(signal.SIGTERM)
            time.sleep(0.4)
        time.sleep(1.5)
        assert job.processes[0].poll() is None, "repeats within 2 seconds are one signal"
        job.send(signal.SIGTERM)
        assert job.processes[0].wait(timeout=5) == 128 + signal.SIGTERM
    assert (tmp_path / "last.status").read_text() == "running\n"


SLOW_EVALUATION = """import runpy, time, torch
argmax = torch.Tensor.argmax
torch.Tensor.argmax = lambda *arguments: (torch.is_grad_enabled() or time.sleep(4), argmax(*arguments))[1]
"""


@pytest.mark.parametrize("script, epochs", [("mnist_dp", 1), ("mnist_dp", 2), ("fashionmnist_ddp", 1), ("synthetic_ddp", 2)])
def test_signal_while_it_evaluates(script, epochs, tmp_path):
    """It is cut short, in mid-run and at the end, since torchrun kills what has not left after 30 s."""
    program, last = tmp_path / "program.py", tmp_path / "last"
    program.write_text(f"{SLOW_EVALUATION}runpy.run_path({str(script_path(script))!r}, run_name='__main__')\n")
    data = "--samples" if script == "synthetic_ddp" else "--fake-data"  # a quarter as many to test, by two workers in hundreds
    batch, how = (2000, {}) if script == "mnist_dp" else (1000, TORCHRUN_2)
    flags = (data, 4000, "--batch-size", batch, "--epochs", epochs, "--save-every", 2, "--log-every", 1, "--checkpoint", last)
    with start(program, *flags, **how) as job:
        job.wait_for(f"step 2/{2 * epochs}", 200)
        time.sleep(1)
        begin = time.monotonic()
        job.send(signal.SIGTERM)
        result = job.finish(60)
        seconds = time.monotonic() - begin
    assert result.status == (1 if how else 75) and not result.errors and seconds < 15, (seconds, result)
    assert "stopped by a signal after step 2: " in result.stdout and "test accuracy" not in result.stdout, result
    assert (tmp_path / "last.status").read_text() == "preempted\n" and load_snapshot(last)["step"] == 2
    again = run(script, *flags, **how, timeout=300)
    assert again.status == 0 and f"steps 2 to {2 * epochs}" in again.stdout and "test accuracy" in again.stdout, again
    status = Path(f"{last}.status")
    status.unlink()
    with start(program, *flags, **how) as job:  # finished, it tells its result again, or is stopped again
        while not status.exists():
            time.sleep(0.1)
        time.sleep(1)
        job.send(signal.SIGTERM)
        result = job.finish(60)
    assert result.status == (1 if how else 75) and status.read_text() == "preempted\n" and "test accuracy" not in result.stdout, result
    assert run(script, *flags, **how, timeout=300).status == 0
    assert (tmp_path / "last.status").read_text() == "finished\n"


def test_killed_while_it_evaluates(tmp_path):
    """It is not finished before it has told its result: the next start tells it."""
    program, last = tmp_path / "program.py", tmp_path / "last"
    program.write_text(f"{SLOW_EVALUATION}runpy.run_path({str(script_path('mnist_dp'))!r}, run_name='__main__')\n")
    flags = ("--batch-size", 500, "--fake-data", 2000, "--epochs", 1, "--log-every", 1, "--checkpoint", last)
    with start(program, *flags) as job:
        job.wait_for("step 4/4", 100)
        time.sleep(1)
        job.send(signal.SIGKILL)
        assert job.finish(30).status == 128 + signal.SIGKILL
    assert Path(f"{last}.status").read_text() == "running\n" and load_snapshot(last)["step"] == 4
    again = run("mnist_dp", *flags)
    assert again.status == 0 and "already finished, test accuracy" in again.stdout
    assert Path(f"{last}.status").read_text() == "finished\n"


def test_torchrun_killed_while_its_workers_start(tmp_path):
    """They do not join the next torchrun on that port, and train beside its own workers on the same snapshot."""
    how = {**TORCHRUN_2, "options": (f"--master-port={free_port()}",)}
    flags = ("--epochs", 5000, "--save-every", 5000, "--log-every", 1, "--checkpoint", tmp_path / "last")

    def importing(pid):
        with contextlib.suppress(OSError):
            return "libtorch" in Path(f"/proc/{pid}/maps").read_text()

    with start("cpu_ddp", *flags, **how) as first:
        end = time.monotonic() + 60
        while not (len(workers_of(first)) == 2 and all(map(importing, workers_of(first)))):
            assert time.monotonic() < end, first.describe()
            time.sleep(0.01)
        os.kill(first.processes[0].pid, signal.SIGKILL)
        with start("cpu_ddp", *flags, **how) as second:
            second.wait_for("\nstep 7/")
            end = time.monotonic() + 20
            while first.pids():
                assert time.monotonic() < end, f"orphans: {first.describe()}"
                time.sleep(0.1)
            assert first.output()[0] == "", first.describe()
            assert "steps 0 to" in second.output()[0]


@pytest.mark.parametrize("launcher, stopped", [("srun", 0), ("srun", 1), ("torchrun", None)])
def test_worker_that_stands_still(launcher, stopped, tmp_path):
    """SIGSTOP: the others give up after --timeout, with one line; torchrun takes its time to end the stopped one."""
    timeout, patience = 5, 30 if launcher == "torchrun" else 0
    how = {"launcher": launcher, "workers": 2}
    with start("cpu_ddp", "--epochs", 100000, "--log-every", 1, "--timeout", timeout, "--checkpoint", tmp_path / "last", **how) as job:
        job.wait_for("\nstep 7/")
        begin = time.monotonic()
        os.kill(max(workers_of(job)) if stopped is None else job.processes[stopped].pid, signal.SIGSTOP)
        if launcher == "torchrun":
            assert job.finish(timeout + patience + 20).status == 1
        else:
            assert job.processes[1 - stopped].wait(timeout + 20) == 1
        seconds = time.monotonic() - begin
        errors = [line for line in job.output()[1].splitlines() if line]
        assert len(errors) == 1 and errors[0].startswith("error: ") and "lost the other workers" in errors[0], errors
        assert timeout - 1 < seconds < timeout + patience + 8, seconds
        if launcher == "torchrun":
            assert not job.pids(), "orphans"
    assert (tmp_path / "last.status").read_text() == "running\n"
    assert load_snapshot(tmp_path / "last")["step"] % 320 == 0  # whole, and of a step to save after
