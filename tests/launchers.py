"""Start the scripts by real launchers, as users do, and read what they print."""

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import NamedTuple

import torch
from scripts import script_path

COUNT = torch.cuda.device_count()  # before conftest.py hides them
GPUS = (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(COUNT)))).split(",")
GPUS = GPUS[:COUNT]  # as CUDA_VISIBLE_DEVICES names them: for test_gpu.py
START = 240  # seconds within which new interpreters train, on a machine that is very busy
LAUNCHER_VARIABLES = re.compile(
    r"(SLURM|TORCHELASTIC|PET|MASTER|GROUP|ROLE|LOCAL|OMP|OMPI|PMI|PMIX)_|RANK$|WORLD_SIZE$")


def free_port():
    """Return a port that nobody uses, below those that the system gives to other connections."""
    while True:
        port = random.randrange(10000, 32768)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


def clean_environment(**extra):
    """Return the environment without launchers, GPUs and downloads, plus extra."""
    env = {name: value for name, value in os.environ.items() if not LAUNCHER_VARIABLES.match(name)}
    env.update(PYTHONUNBUFFERED="1", CUDA_VISIBLE_DEVICES="", http_proxy="http://127.0.0.1:9",
               https_proxy="http://127.0.0.1:9", no_proxy="",
               OMP_WAIT_POLICY="passive")  # threads that spin take the cores of other tests
    env.update((name, str(value)) for name, value in extra.items())
    return env


def read(path):
    """Return the bytes of a file of /proc, none if the process has ended."""
    with contextlib.suppress(OSError):
        return Path(path).read_bytes()
    return b""


def children_of(pid):
    """Return the processes that a process has started, none if it has ended."""
    return [int(child) for child in read(f"/proc/{pid}/task/{pid}/children").split()]


class Result(NamedTuple):
    status: int  # of the launcher
    text: str  # stdout and stderr of all processes


class Job:
    """A launcher and all that it starts. A context manager that leaves no process behind."""

    def __init__(self, command, env, cwd):
        self.token = uuid.uuid4().hex
        self.log = tempfile.NamedTemporaryFile()
        self.launcher = subprocess.Popen(
            [str(word) for word in command], env={**env, "TEST_JOB": self.token}, cwd=cwd,
            stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log, start_new_session=True)

    @property
    def text(self):
        return Path(self.log.name).read_text(errors="replace")

    def pids(self):
        """Return all living processes of the job, whoever started them: they inherit its token."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if self.token.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
        return found

    def workers(self):
        """Return the training processes that the launcher has started: none under python."""
        return [pid for pid in children_of(self.launcher.pid)
                if re.search(rb"spawn_main|\.py\0", read(f"/proc/{pid}/cmdline"))]

    def loaders(self):
        """Return the loader processes of all training processes."""
        training = self.workers() or [self.launcher.pid]
        return [loader for pid in training for loader in children_of(pid)]

    def send(self, signum):
        """Send a signal to the launcher."""
        self.launcher.send_signal(signum)

    def wait_for(self, pattern, timeout=START):
        """Wait until the regular expression is in the output."""
        end = time.monotonic() + timeout
        running = True
        while not re.search(pattern, self.text, re.MULTILINE):
            assert running, f"ended without {pattern!r}:\n{self.text}"
            assert time.monotonic() < end, f"no {pattern!r} within {timeout} s:\n{self.text}"
            time.sleep(0.02)
            running = self.launcher.poll() is None

    def kill(self):
        """Send SIGKILL to all processes of the job, also to those that they start meanwhile."""
        while pids := self.pids():
            for pid in pids:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        self.launcher.wait(30)

    def result(self, timeout=START):
        """Wait for the end and return the Result. A job that runs longer fails the test."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return Result(self.launcher.wait(timeout), self.text)
        raise AssertionError(f"the job must have ended, and runs after {timeout} s:\n{self.text}")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()
        self.log.close()


def wait_until_gone(job, what):
    """Wait until no process of the job is left. The message of a failure begins with what."""
    end = time.monotonic() + 60
    while job.pids():
        assert time.monotonic() < end, f"{what}: processes are left after 60 s\n{job.text}"
        time.sleep(0.05)


def start(script, *flags, launcher="python", nproc=1, cwd=None, env=None):
    """Start a script (a name of SCRIPTS, or a path). Return the Job, for a `with` statement.

    launcher: "python", "spawn" (python with --nproc) or "torchrun".
    """
    command = [sys.executable, script_path(script)]
    env = clean_environment(**(env or {}))
    port = free_port()
    if launcher == "torchrun":
        command[1:1] = ["-m", "torch.distributed.run", f"--nproc-per-node={nproc}",
                        "--master-addr=127.0.0.1", f"--master-port={port}"]
    elif launcher == "spawn":
        command += ["--nproc", nproc]
    return Job([*command, *flags], env, cwd)


def run(script, *flags, timeout=START, **how):
    """Run a script to its end, as start() does, and return the Result."""
    with start(script, *flags, **how) as job:
        return job.result(timeout)
