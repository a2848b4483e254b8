"""Each way to start the scripts gives each process its rank, and the run its world size."""
import re
import sys
from typing import NamedTuple

import pytest
from processes import Job, clean_environment, free_port, run
from scripts import script_path

START = 240  # seconds within which new interpreters train, on a machine that is very busy
RANKS = "    rank, local_rank, world_size = setup_environment()\n"
PRINT = '    print(f"<rank {rank} local rank {local_rank} of {world_size}>")\n'
ONE_EPOCH = {"cpu_ddp": ("--samples", 64, "--epochs", 1),
             "fashionmnist_ddp": ("--fake-data", 32, "--epochs", 1)}


def write_copy(script, folder):
    """Write a copy of a script whose processes print their ranks. Return its path."""
    text = script_path(script).read_text()
    assert text.count(RANKS) == 1, f"{script}/train.py must have this line once: {RANKS}"
    copy = folder / f"{script}.py"
    copy.write_text(text.replace(RANKS, RANKS + PRINT))
    return copy


class Started(NamedTuple):
    """What a launcher's run has printed."""
    status: int
    text: str

    @property
    def ranks(self):
        """Return (rank, local rank, world size) of each process that trained."""
        found = re.findall(r"<rank (\d+) local rank (\d+) of (\d+)>", self.text)
        return sorted(tuple(map(int, numbers)) for numbers in found)

    @property
    def headers(self):
        """Return the world sizes that the headers of the logs name."""
        return [int(number) for number in re.findall(r"^world size (\d+) on ", self.text,
                                                     re.MULTILINE)]


def start_two_agents(copy):
    """Return the Job of two torchrun agents of two processes each, as on two machines."""
    port = free_port()
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2",
               "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=agents",
               "--local-addr=127.0.0.1", copy, *ONE_EPOCH["cpu_ddp"]]
    return Job([command, command], [clean_environment(), clean_environment()])


# A shell in a job of four tasks: srun --ntasks=4 --pty bash
PTY = {"SLURM_JOB_ID": 4711, "SLURM_STEP_NUM_TASKS": 4, "SLURM_STEP_NODELIST": "localhost",
       "SLURM_PROCID": 0, "SLURM_LOCALID": 0, "SLURM_PTY_PORT": 40000}
LAUNCHES = {
    "python": ("cpu_ddp", {}),
    "python in srun --pty bash": ("cpu_ddp", {"env": PTY}),
    "torchrun": ("cpu_ddp", {"launcher": "torchrun", "nproc": 3}),
    "srun": ("cpu_ddp", {"launcher": "srun", "nproc": 3}),
    "python --nproc 2": ("fashionmnist_ddp", {"launcher": "spawn", "nproc": 2}),
}
EXPECTED = {  # rank, local rank, world size
    "python": [(0, 0, 1)],
    "python in srun --pty bash": [(0, 0, 1)],
    "torchrun": [(0, 0, 3), (1, 1, 3), (2, 2, 3)],
    "srun": [(0, 0, 3), (1, 1, 3), (2, 2, 3)],
    "python --nproc 2": [(0, 0, 2), (1, 1, 2)],
    "torchrun with two agents": [(0, 0, 4), (1, 1, 4), (2, 0, 4), (3, 1, 4)],
}


@pytest.fixture(scope="module", params=EXPECTED)
def launch(request, tmp_path_factory):
    """Start a run of one epoch by a launcher, and return its name and what was printed."""
    name = request.param
    folder = tmp_path_factory.mktemp("launch")
    if name == "torchrun with two agents":
        with start_two_agents(write_copy("cpu_ddp", folder)) as job:
            result = job.finish(START)
    else:
        script, how = LAUNCHES[name]
        timeout = ("--timeout", 30) if how.get("env") == PTY else ()  # if it waited for others
        result = run(write_copy(script, folder), *ONE_EPOCH[script], *timeout, timeout=START, **how)
    return name, Started(result.status, result.text)


def test_launched_run_ends_with_status_0(launch):
    name, started = launch
    assert started.status == 0, f"{name}: the status is {started.status}\n{started.text}"


def test_launcher_gives_each_process_its_rank(launch):
    name, started = launch
    assert started.ranks == EXPECTED[name], (
        f"{name}: (rank, local rank, world size) of the processes must be {EXPECTED[name]}, not "
        f"{started.ranks}\n{started.text}")


def test_header_names_the_world_size_once(launch):
    name, started = launch
    world_size = EXPECTED[name][0][2]
    assert started.headers == [world_size], (
        f"{name}: rank 0 alone must print the header, with 'world size {world_size}'; world sizes "
        f"of the headers: {started.headers}\n{started.text}")
