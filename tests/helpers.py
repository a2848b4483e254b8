"""Start the scripts as users do, and read what they leave."""

import contextlib
import importlib.util
import os
import pickle
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import NamedTuple

import torch

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ("cpu_ddp", "mnist_dp", "cifar10_ddp", "fashionmnist_ddp", "synthetic_ddp")
DDP_SCRIPTS = tuple(name for name in SCRIPTS if name != "mnist_dp")
LAUNCHER_VARIABLES = re.compile(r"(SLURM|TORCHELASTIC|PET|MASTER|GROUP|ROLE|LOCAL|OMP)_|RANK$|WORLD_SIZE$|CUDA_VISIBLE_DEVICES$")


class Result(NamedTuple):
    status: int  # of the launcher; of several processes started side by side, the largest
    stdout: str  # of all workers, in the order of their ranks
    stderr: str  # of all workers: what torchrun itself prints is in `launcher`
    statuses: tuple  # of each process started: one per agent for torchrun, one per worker for srun
    launcher: str = ""
    stderrs: tuple = ()  # of each worker

    @property
    def errors(self):
        return error_lines(self.stderr)


def error_lines(text):
    return [line for line in text.splitlines() if line.startswith("error: ")]


def script_path(script):
    """cpu_ddp, or the path of a copy or of a small program, as a path."""
    return ROOT / script / "train.py" if script in SCRIPTS else Path(script)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def clean_environment(extra=None):
    """The environment without any launcher's variables and the user's threads, plus extra (None unsets one).

    No test may download: the proxy is a port where nobody listens.
    """
    env = {name: value for name, value in os.environ.items() if not LAUNCHER_VARIABLES.match(name)}
    nowhere = "http://127.0.0.1:9"
    env.update(PYTHONUNBUFFERED="1", CUDA_VISIBLE_DEVICES="", http_proxy=nowhere, https_proxy=nowhere, no_proxy="")
    for name, value in (extra or {}).items():
        env.pop(name, None)
        if value is not None:
            env[name] = str(value)
    return env


def slurm_step(workers, rank, port, nodes=1):
    """What `srun python` finds in its environment, that is, in so far as the scripts read it."""
    per_node = -(-workers // nodes)
    return {"SLURM_JOB_ID": 4711, "SLURM_STEP_ID": 0, "SLURM_STEP_NUM_TASKS": workers, "SLURM_STEP_NUM_NODES": nodes,
            "SLURM_STEP_NODELIST": f"n[01-{nodes:02}]" if nodes > 1 else "n01", "SLURM_PROCID": rank,
            "SLURM_LOCALID": rank % per_node, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


class Job:
    """Processes started side by side, in sessions of their own; their output goes to files."""

    def __init__(self, commands, environments, cwd=None, logs=None):
        self.folder = tempfile.TemporaryDirectory()
        self.path, self.token, self.logs = Path(self.folder.name), f"TEST_JOB={uuid.uuid4().hex}", logs
        name, value = self.token.split("=")
        self.processes = []
        for number, (command, env) in enumerate(zip(commands, environments)):
            command = [str(part).replace("{logs}", str(self.path / f"workers{number}")) for part in command]
            with open(self.path / f"{number}.out", "wb") as out, open(self.path / f"{number}.err", "wb") as err:
                self.processes.append(subprocess.Popen(command, env={**env, name: value}, cwd=cwd, stdin=subprocess.DEVNULL,
                                                       stdout=out, stderr=err, start_new_session=True))

    def pids(self):
        """All living processes of the job, whoever started them: they inherit its token."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if self.token.encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
        return found

    def send(self, signum, number=0):
        self.processes[number].send_signal(signum)

    def outputs(self, kind):
        """stdout ("out") or stderr ("err") so far, of each worker."""
        files = [self.path / f"{number}.{kind}" for number in range(len(self.processes))]
        if self.logs == "torchrun":
            files = sorted(self.path.glob(f"workers*/*/attempt_*/*/std{kind}.log"))
        return [file.read_text(errors="replace") for file in files]

    def output(self):
        """(stdout, stderr) of the workers so far."""
        return "".join(self.outputs("out")), "".join(self.outputs("err"))

    def wait_for(self, pattern, timeout=60):
        """Return the match of the regular expression in the workers' stdout, as soon as it is there."""
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            match = re.search(pattern, self.output()[0])
            if match:
                return match
            assert any(process.poll() is None for process in self.processes), f"ended without {pattern!r}:\n{self.describe()}"
            time.sleep(0.05)
        self.kill()
        raise AssertionError(f"no {pattern!r} within {timeout} s:\n{self.describe()}")

    def describe(self):
        out, err = self.output()
        return f"statuses {[process.poll() for process in self.processes]}\n--- stdout\n{out}\n--- stderr\n{err}"

    def kill(self):
        for pid in self.pids():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        for process in self.processes:
            process.wait(timeout=30)

    def finish(self, timeout=120):
        """Wait for the end and return the Result; what runs longer is killed and fails the test."""
        end = time.monotonic() + timeout
        try:
            statuses = tuple(process.wait(timeout=max(0, end - time.monotonic())) for process in self.processes)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"still running after {timeout} s:\n{self.describe()}") from None
        out, err = self.output()
        launcher = "".join((self.path / f"{number}.err").read_text(errors="replace") for number in range(len(statuses)))
        status = max(status if status >= 0 else 128 - status for status in statuses)
        return Result(status, out, err, statuses, launcher if self.logs else "", tuple(self.outputs("err")))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()
        self.folder.cleanup()


def own_cores(number, agents):
    """A command that keeps an agent to its part of the cores."""
    cores = sorted(os.sched_getaffinity(0))
    if agents == 1 or len(cores) < agents or not shutil.which("taskset"):
        return []
    share = len(cores) // agents
    return ["taskset", "-c", ",".join(map(str, cores[number * share:(number + 1) * share]))]


def start(script, *flags, launcher="python", workers=1, agents=1, cwd=None, env=None, rank_env=None, rank_flags=None, options=(),
          prefix=()):
    """Start a script (a name of SCRIPTS, or a path) and return the Job, to be used in a `with` statement.

    launcher: "python", "torchrun" (`workers` in all, over `agents` that meet by c10d) or "srun" (`workers` processes
    with a Slurm step's variables). env is added to the environment of all; rank_env(rank) and rank_flags(rank) to each
    process's own. options are torchrun's; prefix is a command that starts the command. Each of several agents gets its
    part of the cores, as if it were alone on a machine.
    """
    program = [sys.executable, script_path(script)]
    count = {"python": 1, "torchrun": agents, "srun": workers}[launcher]
    port = free_port()
    commands, environments = [], []
    for number in range(count):
        extra = {**(env or {}), **(rank_env(number) if rank_env else {})}
        more = [*flags, *(rank_flags(number) if rank_flags else ())]
        if launcher == "srun":
            extra = {**slurm_step(workers, number, port), **extra}
        command = program
        if launcher == "torchrun":
            meeting = (["--master-addr=127.0.0.1", f"--master-port={port}"] if agents == 1 else
                       [f"--nnodes={agents}", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=test",
                        "--local-addr=127.0.0.1"])
            command = [*own_cores(number, agents), sys.executable, "-m", "torch.distributed.run",
                       f"--nproc-per-node={workers // agents}", *meeting, "--log-dir={logs}", "--redirects=3", *options, program[1]]
        commands.append([*prefix, *command, *more])
        environments.append(clean_environment(extra))
    return Job(commands, environments, cwd, "torchrun" if launcher == "torchrun" else None)


def run(script, *flags, timeout=120, **how):
    """Run a script to its end, as start() does, and return the Result."""
    with start(script, *flags, **how) as job:
        return job.finish(timeout)


PEAK = [sys.executable, "-c", """import resource, subprocess, sys
status = subprocess.call(sys.argv[1:])
print("peak", resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // (1024 if sys.platform == "darwin" else 1), "KiB")
sys.exit(status)"""]  # a prefix for start(), under "python" and "srun": prints a worker's peak memory


def peak_gigabytes(result):
    """The largest peak of all workers, in 10 ** 9 bytes."""
    return max(int(peak) for peak in re.findall(r"^peak (\d+) KiB$", result.stdout, re.MULTILINE)) * 1024 / 1e9


def load_script(script):
    """A script as a module, to call one of its functions."""
    spec = importlib.util.spec_from_file_location(script, script_path(script))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load_snapshot(path):
    return torch.load(path, map_location="cpu", weights_only=True)


def weights_equal(one, other, tolerance=0.0):
    """Whether two snapshots (paths or dicts) hold the same model: bit for bit, or within tolerance."""
    one, other = (state if isinstance(state, dict) else load_snapshot(state) for state in (one, other))
    if one["model"].keys() != other["model"].keys():
        return False
    pairs = [(one["model"][name], other["model"][name]) for name in one["model"]]
    if tolerance:
        return all(torch.allclose(a.double(), b.double(), rtol=0, atol=tolerance) for a, b in pairs)
    return all(torch.equal(a, b) for a, b in pairs)


def differences(one, other, place=""):
    """The places where two snapshots (paths, or what torch.load returns) differ in type or in any bit."""
    one, other = (load_snapshot(state) if isinstance(state, (str, Path)) and not place else state for state in (one, other))
    if type(one) is not type(other):
        return [place]
    if isinstance(one, torch.Tensor):
        same = one.dtype == other.dtype and one.shape == other.shape and torch.equal(
            *(tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)))
        return [] if same else [place]
    if isinstance(one, (dict, list, tuple)):
        items = [dict(value if isinstance(value, dict) else enumerate(value)) for value in (one, other)]
        if items[0].keys() != items[1].keys():
            return [place]
        return [found for key in items[0] for found in differences(items[0][key], items[1][key], f"{place}/{key}")]
    return [] if one == other else [place]


def idx(values):
    """A uint8 tensor in the format of MNIST's files."""
    return struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape) + values.contiguous().numpy().tobytes()


def mnist_files(train=40, test=20):
    """{file name: content} of a small data set in the format of MNIST and Fashion-MNIST: images that tell their label."""
    files = {}
    for part, count in ("train", train), ("t10k", test):
        labels = torch.arange(count, dtype=torch.uint8) % 10
        files[f"{part}-images-idx3-ubyte"] = idx((labels * 25).view(-1, 1, 1).expand(-1, 28, 28))
        files[f"{part}-labels-idx1-ubyte"] = idx(labels)
    return files


def write_files(folder, files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)


def cifar_files(per_batch=20):
    """{file name: content} of a small data set in CIFAR-10's own format, rows of 3 x 32 x 32 red, green and blue."""
    def batch(count, seed):
        labels = torch.arange(count) % 10
        noise = torch.randint(60, (count, 3 * 32 * 32), generator=torch.Generator().manual_seed(seed))
        data = (noise + 19 * labels.view(-1, 1)).to(torch.uint8).numpy()
        return pickle.dumps({"batch_label": "a batch", "labels": labels.tolist(), "data": data,
                             "filenames": [f"{number}.png" for number in range(count)]}, protocol=2)
    names = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
    return {**{f"data_batch_{number}": batch(per_batch, number) for number in range(1, 6)}, "test_batch": batch(per_batch, 6),
            "batches.meta": pickle.dumps({"num_cases_per_batch": per_batch, "label_names": names, "num_vis": 3072}, protocol=2)}
