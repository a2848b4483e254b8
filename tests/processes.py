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

GPUS = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
GPUS = GPUS.split(",")[:torch.cuda.device_count()]  # as CUDA_VISIBLE_DEVICES names them: see test_gpu.py
LAUNCHER_VARIABLES = re.compile(r"(SLURM|TORCHELASTIC|PET|MASTER|GROUP|ROLE|LOCAL|OMP)_|RANK$|WORLD_SIZE$")


def free_port():
    while True:  # below the ports that the system gives to other connections until this one is used
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port := random.randrange(10000, 32768)))
            return port


def clean_environment(**extra):
    """The environment without a launcher's variables, GPUs and downloads, plus extra, which may show GPUs."""
    env = {name: value for name, value in os.environ.items() if not LAUNCHER_VARIABLES.match(name)}
    env.update(PYTHONUNBUFFERED="1", CUDA_VISIBLE_DEVICES="", http_proxy="http://127.0.0.1:9",
               https_proxy="http://127.0.0.1:9", no_proxy="",
               OMP_WAIT_POLICY="passive")  # threads that spin take the cores of other tests
    return env | {name: str(value) for name, value in extra.items()}


class Result(NamedTuple):
    status: int  # of the launcher; of several processes, the largest
    text: str  # stdout and stderr of all processes

    @property
    def errors(self):
        """The error lines of the scripts, and of argparse."""
        return re.findall(r"\berror: (?:(?!error: ).)*", self.text)  # two processes may write on one line


class Job:
    """Processes that were started side by side. A context manager that leaves none of them behind."""

    def __init__(self, commands, environments, cwd=None):
        self.token = uuid.uuid4().hex
        self.log = tempfile.NamedTemporaryFile()
        self.processes = [
            subprocess.Popen([str(word) for word in command], env={**env, "TEST_JOB": self.token}, cwd=cwd,
                             stdin=subprocess.DEVNULL, stdout=open(self.log.name, "ab"), stderr=subprocess.STDOUT,
                             start_new_session=True)
            for command, env in zip(commands, environments)]

    @property
    def text(self):
        return Path(self.log.name).read_text(errors="replace")

    def pids(self):
        """All living processes of the job, whoever started them: they inherit its token."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if f"TEST_JOB={self.token}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
        return found

    def workers(self):
        """The living processes that train: those whose parent is the launcher, or a single process itself."""
        def is_worker(pid):
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
                return b"spawn_main" in command or b".py\0" in command and b"torch.distributed.run" not in command
        launchers = [process.pid for process in self.processes if process.poll() is None]
        return [pid for pid in self.pids() if is_worker(pid) and pid not in launchers] or launchers

    def send(self, signum, number=0):
        self.processes[number].send_signal(signum)

    def running(self):
        return any(process.poll() is None for process in self.processes)

    def wait_for(self, pattern, timeout=90, start=0):
        """Return the match of the regular expression in the output behind start, as soon as it is there."""
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            running = self.running()
            if match := re.search(pattern, self.text[start:], re.MULTILINE):
                return match
            assert running, f"ended without {pattern!r}:\n{self.text}"
            time.sleep(0.02)
        raise AssertionError(f"no {pattern!r} within {timeout} s:\n{self.text}")

    def kill(self):
        """SIGKILL to all processes of the job, also to those that they start meanwhile."""
        while pids := self.pids():
            for pid in pids:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            for process in self.processes:
                process.wait(timeout=30)
            time.sleep(0.01)

    def finish(self, timeout=120):
        """Wait for the end and return the Result; a job that runs longer fails the test."""
        end = time.monotonic() + timeout
        try:
            statuses = [process.wait(timeout=max(0, end - time.monotonic())) for process in self.processes]
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout} s:\n{self.text}") from None
        return Result(max(status if status >= 0 else 128 - status for status in statuses), self.text)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()
        self.log.close()


def start(script, *flags, launcher="python", nproc=1, options=(), cwd=None, env=None, rank_flags=None):
    """Start a script (a name of SCRIPTS, or a path) and return the Job, to be used in a `with` statement.

    launcher: "python", "spawn" (python with --nproc), "torchrun" (with options) or "srun" (nproc processes with a
    Slurm step's variables). rank_flags(rank) are flags of one process of "srun".
    """
    program, env, port = [sys.executable, script_path(script)], env or {}, free_port()
    if launcher == "srun":
        ranks = range(nproc)
        commands = [[*program, *flags, *(rank_flags(rank) if rank_flags else ())] for rank in ranks]
        step = {"SLURM_JOB_ID": 4711, "SLURM_STEP_NUM_TASKS": nproc, "SLURM_STEP_NODELIST": "localhost"}
        return Job(commands, [clean_environment(**step, SLURM_PROCID=rank, SLURM_LOCALID=rank, MASTER_PORT=port, **env)
                              for rank in ranks], cwd)
    if launcher == "torchrun":
        program = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={nproc}",
                   *(options or ("--master-addr=127.0.0.1", f"--master-port={port}")), program[1]]
    elif launcher == "spawn":
        program += ["--nproc", nproc]
    return Job([[*program, *flags]], [clean_environment(**env)], cwd)


def run(script, *flags, timeout=180, **how):
    """Run a script to its end, as start() does, and return the Result."""
    with start(script, *flags, **how) as job:
        return job.finish(timeout)
