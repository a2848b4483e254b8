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


def visible_gpus():
    """Return the GPUs as CUDA_VISIBLE_DEVICES names them: for test_gpu.py."""
    count = torch.cuda.device_count()
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    if names:
        return names.split(",")[:count]
    return [str(number) for number in range(count)]


GPUS = visible_gpus()  # before conftest.py hides them
LAUNCHER_VARIABLES = re.compile(
    r"(SLURM|TORCHELASTIC|PET|MASTER|GROUP|ROLE|LOCAL|OMP|OMPI|PMI|PMIX)_|RANK$|WORLD_SIZE$")


def free_port():
    """Return a port that nobody uses.

    It is below the ports that the system gives to other connections until this one is used.
    """
    while True:
        port = random.randrange(10000, 32768)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


def clean_environment(**extra):
    """Return the environment without launchers, GPUs and downloads, plus extra.

    The variable CUDA_VISIBLE_DEVICES in extra shows GPUs.
    """
    env = {}
    for name, value in os.environ.items():
        if not LAUNCHER_VARIABLES.match(name):
            env[name] = value
    env["PYTHONUNBUFFERED"] = "1"
    env["CUDA_VISIBLE_DEVICES"] = ""
    env["http_proxy"] = env["https_proxy"] = "http://127.0.0.1:9"
    env["no_proxy"] = ""
    env["OMP_WAIT_POLICY"] = "passive"  # threads that spin take the cores of other tests
    for name, value in extra.items():
        env[name] = str(value)
    return env


class Result(NamedTuple):
    """The end of a job."""

    status: int  # of the launcher; of several processes, the largest
    text: str  # stdout and stderr of all processes

    @property
    def errors(self):
        """The error lines of the scripts, and of argparse."""
        # Two processes may write on one line
        return re.findall(r"\berror: (?:(?!error: ).)*", self.text)


class Job:
    """Processes that were started side by side. A context manager that leaves none behind."""

    def __init__(self, commands, environments, cwd=None):
        self.token = uuid.uuid4().hex
        self.log = tempfile.NamedTemporaryFile()
        self.processes = []
        for command, env in zip(commands, environments):
            with open(self.log.name, "ab") as output:
                process = subprocess.Popen(
                    [str(word) for word in command], env={**env, "TEST_JOB": self.token}, cwd=cwd,
                    stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                    start_new_session=True)
            self.processes.append(process)

    @property
    def text(self):
        return Path(self.log.name).read_text(errors="replace")

    def pids(self):
        """Return all living processes of the job, whoever started them: they inherit its token."""
        token = f"TEST_JOB={self.token}".encode()
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if token in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
        return found

    def workers(self):
        """Return the living processes that train: the launcher's, or a single process itself."""
        launchers = [process.pid for process in self.processes if process.poll() is None]
        found = [pid for pid in self.pids() if pid not in launchers and is_worker(pid)]
        return found or launchers

    def send(self, signum, number=0):
        """Send a signal to the process with this number."""
        self.processes[number].send_signal(signum)

    def running(self):
        return any(process.poll() is None for process in self.processes)

    def wait_for(self, pattern, timeout=90):
        """Return the match of the regular expression in the output, once it is there.

        A job that ends without it fails the test.
        """
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            running = self.running()
            match = re.search(pattern, self.text, re.MULTILINE)
            if match:
                return match
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
        statuses = []
        for process in self.processes:
            try:
                status = process.wait(timeout=max(0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"still running after {timeout} s:\n{self.text}") from None
            if status < 0:  # ended by a signal: as a shell says it
                status = 128 - status
            statuses.append(status)
        return Result(max(statuses), self.text)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()
        self.log.close()


def is_worker(pid):
    """Return whether the process runs a script, by itself or for mp.spawn."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has ended
        return False
    if b"spawn_main" in command:
        return True
    return b".py\0" in command and b"torch.distributed.run" not in command


def wait_until_gone(job, what, timeout=60):
    """Wait until no process of the job is left. The message of a failure begins with what."""
    end = time.monotonic() + timeout
    while job.pids():
        assert time.monotonic() < end, f"{what}: processes are left for {timeout} s\n{job.text}"
        time.sleep(0.05)


def start(script, *flags, launcher="python", nproc=1, options=(), cwd=None, env=None,
          rank_flags=None):
    """Start a script (a name of SCRIPTS, or a path). Return the Job, for a `with` statement.

    launcher: "python", "spawn" (python with --nproc), "torchrun" (with options) or "srun" (nproc
    processes with a Slurm step's variables). rank_flags(rank) are flags of one process of "srun".
    """
    path = script_path(script)
    env = env or {}
    port = free_port()
    if launcher == "srun":
        return start_step(path, flags, nproc, port, cwd, env, rank_flags)
    command = [sys.executable, path]
    if launcher == "torchrun":
        if not options:
            options = ("--master-addr=127.0.0.1", f"--master-port={port}")
        command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={nproc}",
                   *options, path]
    elif launcher == "spawn":
        command = [sys.executable, path, "--nproc", nproc]
    return Job([[*command, *flags]], [clean_environment(**env)], cwd)


def start_step(path, flags, nproc, port, cwd, env, rank_flags):
    """Start nproc processes with the variables of a Slurm step, and return the Job."""
    commands = []
    environments = []
    for rank in range(nproc):
        command = [sys.executable, path, *flags]
        if rank_flags:
            command += rank_flags(rank)
        commands.append(command)
        environments.append(clean_environment(
            SLURM_JOB_ID=4711, SLURM_STEP_ID=0, SLURM_STEP_NUM_TASKS=nproc,
            SLURM_STEP_NODELIST="localhost", SLURM_PROCID=rank, SLURM_LOCALID=rank,
            MASTER_PORT=port, **env))
    return Job(commands, environments, cwd)


def run(script, *flags, timeout=180, **how):
    """Run a script to its end, as start() does, and return the Result."""
    with start(script, *flags, **how) as job:
        return job.finish(timeout)
