"""Start the scripts as users do, and read what they print."""

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


class Result(NamedTuple):
    """The end of a job."""

    status: int  # of the launcher; of several processes, the largest
    text: str  # stdout and stderr of all processes

    @property
    def errors(self):
        """The error lines. Two processes may write on one line."""
        return re.findall(r"\berror: (?:(?!error: ).)*", self.text)


class Job:
    """Processes that were started side by side. A context manager that leaves none behind."""

    def __init__(self, commands, environments, cwd=None):
        self.token = uuid.uuid4().hex
        self.log = tempfile.NamedTemporaryFile()
        output = open(self.log.name, "ab")
        self.processes = [subprocess.Popen(
            [str(word) for word in command], env={**env, "TEST_JOB": self.token}, cwd=cwd,
            stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True)
            for command, env in zip(commands, environments)]

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
        """Return the living processes that train: the launcher's, or a single process itself."""
        launchers = [process.pid for process in self.processes if process.poll() is None]
        found = []
        for pid in set(self.pids()).difference(launchers):
            with contextlib.suppress(OSError):  # it has ended
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
                if b"spawn_main" in command or (
                        b".py\0" in command and b"torch.distributed.run" not in command):
                    found.append(pid)
        return found or launchers

    def send(self, signum, number=0):
        """Send a signal to the process with this number."""
        self.processes[number].send_signal(signum)

    def running(self):
        return any(process.poll() is None for process in self.processes)

    def wait_for(self, pattern, timeout=90):
        """Wait until the regular expression is in the output."""
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            running = self.running()
            if re.search(pattern, self.text, re.MULTILINE):
                return
            assert running, f"ended without {pattern!r}:\n{self.text}"
            time.sleep(0.02)
        raise AssertionError(f"no {pattern!r} within {timeout} s:\n{self.text}")

    def kill(self):
        """Send SIGKILL to all processes of the job, also to those that they start meanwhile."""
        pids = self.pids()
        while pids:
            for pid in pids:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            for process in self.processes:
                process.wait(timeout=30)
            time.sleep(0.01)
            pids = self.pids()

    def finish(self, timeout=120):
        """Wait for the end and return the Result. A job that runs longer fails the test."""
        end = time.monotonic() + timeout
        while self.running():
            assert time.monotonic() < end, f"still running after {timeout} s:\n{self.text}"
            time.sleep(0.02)
        codes = [process.returncode for process in self.processes]
        statuses = [code if code >= 0 else 128 - code for code in codes]  # as a shell says it
        return Result(max(statuses), self.text)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()
        self.log.close()


def wait_until_gone(job, what, timeout=60):
    """Wait until no process of the job is left. The message of a failure begins with what."""
    end = time.monotonic() + timeout
    while job.pids():
        assert time.monotonic() < end, f"{what}: processes are left for {timeout} s\n{job.text}"
        time.sleep(0.05)


def start(script, *flags, launcher="python", nproc=1, options=(), cwd=None, env=None,
          rank_flags=lambda rank: ()):
    """Start a script (a name of SCRIPTS, or a path). Return the Job, for a `with` statement.

    launcher: "python", "spawn" (python with --nproc), "torchrun" (with options) or "srun" (nproc
    processes with a Slurm step's variables). rank_flags(rank) are flags of one process of "srun".
    """
    command = [sys.executable, script_path(script)]
    port = free_port()
    if launcher == "srun":
        commands = [[*command, *flags, *rank_flags(rank)] for rank in range(nproc)]
        environments = [clean_environment(
            SLURM_JOB_ID=4711, SLURM_STEP_ID=0, SLURM_STEP_NUM_TASKS=nproc,
            SLURM_STEP_NODELIST="localhost", SLURM_PROCID=rank, SLURM_LOCALID=rank,
            MASTER_PORT=port, **(env or {})) for rank in range(nproc)]
        return Job(commands, environments, cwd)
    if launcher == "torchrun":
        options = options or ("--master-addr=127.0.0.1", f"--master-port={port}")
        command[1:1] = ["-m", "torch.distributed.run", f"--nproc-per-node={nproc}", *options]
    elif launcher == "spawn":
        command += ["--nproc", nproc]
    return Job([[*command, *flags]], [clean_environment(**(env or {}))], cwd)


def run(script, *flags, timeout=180, **how):
    """Run a script to its end, as start() does, and return the Result."""
    with start(script, *flags, **how) as job:
        return job.finish(timeout)
