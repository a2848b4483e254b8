"""Threads, ranks and GPUs follow from the machine and from the variables of a launcher."""

import argparse
import io
import os

import pytest
import torch
from functions import load_script


@pytest.fixture
def module():
    return load_script("fashionmnist_ddp")


@pytest.fixture
def environ(monkeypatch):
    """The environment variables: none, until a test sets some."""
    env = {}
    monkeypatch.setattr(os, "environ", env)
    return env


class Machine:
    """A made-up machine: its CPUs, and the files that describe it."""

    def __init__(self, module, monkeypatch):
        self.files = {}
        module.open = self.open
        self.monkeypatch = monkeypatch

    def open(self, path):
        if path not in self.files:
            raise FileNotFoundError(path)
        return io.StringIO(self.files[path])

    def set_cpus(self, cpus, threads_per_core):
        """Let the process use these CPUs. CPU n shares a core with the others of n // threads."""
        self.monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {*cpus}, raising=False)
        for cpu in cpus:
            first = cpu // threads_per_core * threads_per_core
            siblings = ",".join(str(first + thread) for thread in range(threads_per_core))
            path = f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
            self.files[path] = f"{siblings}\n"

    def set_quota(self, text):
        """Limit the CPU time, as the cgroup of a container does."""
        self.files["/sys/fs/cgroup/cpu.max"] = text


@pytest.fixture
def machine(module, monkeypatch, environ):
    """8 CPUs on 8 cores, without a limit."""
    machine = Machine(module, monkeypatch)
    machine.set_cpus(range(8), threads_per_core=1)
    machine.set_quota("max 100000\n")
    return machine


# ---- cores ----
def test_cores_without_limits(module, machine):
    cores = module.available_cores()
    assert cores == 8, f"8 CPUs on 8 cores count as {cores}"


def test_hyperthreads_share_a_core(module, machine):
    machine.set_cpus(range(8), threads_per_core=2)
    cores = module.available_cores()
    assert cores == 4, f"8 CPUs, two for each core, count as {cores} cores, not 4"


def test_only_the_cpus_that_the_process_may_use_count(module, machine):
    machine.set_cpus([0, 1, 6], threads_per_core=2)
    cores = module.available_cores()
    assert cores == 2, f"3 CPUs of 2 cores count as {cores}"


def test_cores_without_a_description_of_the_machine(module, machine):
    machine.files.clear()
    cores = module.available_cores()
    assert cores == 8, f"8 CPUs without files in /sys count as {cores}"


def test_the_quota_of_a_container(module, machine):
    machine.set_quota("250000 100000\n")
    cores = module.available_cores()
    assert cores == 2, f"8 CPUs with a quota of 2.5 count as {cores}"


@pytest.mark.parametrize("granted, expected", [(6, 6), (64, 8)])
def test_the_cpus_that_slurm_has_granted(module, machine, environ, granted, expected):
    environ["SLURM_CPUS_ON_NODE"] = str(granted)
    cores = module.available_cores()
    assert cores == expected, f"8 CPUs, of which Slurm grants {granted}, count as {cores}"


# ---- threads ----
@pytest.fixture
def threads(module, monkeypatch, machine):
    """Return a function: the threads that a process sets, or None if it sets none."""
    calls = []
    monkeypatch.setattr(torch, "set_num_threads", calls.append)
    module.ctypes = argparse.Namespace(CDLL=NoLibrary)

    def threads_of(local_world_size):
        module.configure_cpu(local_world_size)
        return calls[-1] if calls else None

    return threads_of


class NoLibrary:
    """The C library of another system: without mallopt."""

    def __init__(self, name):
        pass


def test_processes_share_the_cores(threads):
    assert threads(3) == 2, "3 processes on 8 cores must use 2 threads each"


def test_a_process_has_at_least_one_thread(threads):
    assert threads(9) == 1, "9 processes on 8 cores must use 1 thread each"


def test_a_quota_of_less_than_a_core_is_one_thread(threads, machine):
    machine.set_quota("50000 100000\n")
    assert threads(1) == 1, "with a quota of half a CPU, a process must use 1 thread"


@pytest.mark.parametrize("local_world_size", [1, 4])
def test_omp_num_threads_is_kept(threads, environ, local_world_size):
    environ["OMP_NUM_THREADS"] = "3"
    number = threads(local_world_size)
    assert number is None, f"OMP_NUM_THREADS=3 is replaced by {number} threads"


def test_omp_num_threads_of_1_is_kept_for_a_single_process(threads, environ):
    environ["OMP_NUM_THREADS"] = "1"
    number = threads(1)
    assert number is None, f"OMP_NUM_THREADS=1 is replaced by {number} threads"


def test_torchruns_omp_num_threads_of_1_is_replaced(threads, environ):
    """torchrun sets it to 1 for several processes, unless the user sets it."""
    environ["OMP_NUM_THREADS"] = "1"
    number = threads(4)
    assert number == 2, f"4 processes of torchrun on 8 cores use {number} threads each, not 2"


def test_init_process_counts_the_processes_of_this_machine(module, environ, monkeypatch):
    """LOCAL_WORLD_SIZE, which torchrun sets, and not WORLD_SIZE."""
    environ["LOCAL_WORLD_SIZE"] = "2"
    counts = []
    module.configure_cpu = counts.append
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *_, **options: None)
    module.init_process(0, 8, torch.device("cpu"), 60)
    assert counts == [2], f"of 8 processes, 2 on this machine, {counts} share its cores"


# ---- ranks ----
def test_a_process_without_a_launcher(module, environ):
    ranks = module.setup_environment()
    assert ranks == (0, 0, 1), f"without a launcher: rank, local rank, world size are {ranks}"


def test_torchruns_variables(module, environ):
    environ.update(RANK="5", LOCAL_RANK="1", WORLD_SIZE="8")
    ranks = module.setup_environment()
    assert ranks == (5, 1, 8), f"under torchrun: rank, local rank, world size are {ranks}"


@pytest.fixture
def step(environ):
    """The variables of a step of srun."""
    environ.update(SLURM_JOB_ID="4711", SLURM_STEP_NUM_TASKS="8", SLURM_PROCID="5",
                   SLURM_LOCALID="1", SLURM_STEP_NODELIST="n[07-09]")
    return environ


def test_a_step_of_srun(module, step):
    ranks = module.setup_environment()
    assert ranks == (5, 1, 8), f"in a step of srun: rank, local rank, world size are {ranks}"


@pytest.mark.parametrize("nodes, first", [
    ("n07", "n07"), ("n[07-09]", "n07"), ("n[07,12-14]", "n07"), ("n07,m3", "n07"),
    ("gpu-a100-[001-128]", "gpu-a100-001"), ("n7,gpu[1-2]", "n7"), ("rack1-n[9-10]", "rack1-n9"),
])
def test_the_first_node_of_a_step_is_the_master(module, step, nodes, first):
    step["SLURM_STEP_NODELIST"] = nodes
    module.setup_environment()
    assert step["MASTER_ADDR"] == first, (
        f"the first node of SLURM_STEP_NODELIST={nodes} is {first}, not {step['MASTER_ADDR']}")


def test_a_users_master_address_and_port_are_kept(module, step):
    step.update(MASTER_ADDR="n01", MASTER_PORT="1234")
    module.setup_environment()
    found = step["MASTER_ADDR"], step["MASTER_PORT"]
    assert found == ("n01", "1234"), f"MASTER_ADDR=n01 MASTER_PORT=1234 have become {found}"


def test_jobs_have_different_ports(module, step):
    ports = []
    for job in ("4711", "4712"):
        step.pop("MASTER_PORT", None)
        step.pop("RANK", None)
        step["SLURM_JOB_ID"] = job
        module.setup_environment()
        ports.append(step["MASTER_PORT"])
    assert ports[0] != ports[1], f"two jobs on one machine use the same port: {ports}"


def test_a_shell_of_srun_pty_is_no_step(module, step):
    """In `srun --pty bash`, python is one process, whatever the number of tasks."""
    step["SLURM_PTY_PORT"] = "1"
    ranks = module.setup_environment()
    assert ranks == (0, 0, 1), f"under srun --pty: rank, local rank, world size are {ranks}"


def test_torchrun_in_a_step_of_srun(module, step):
    step.update(RANK="2", LOCAL_RANK="2", WORLD_SIZE="4")
    ranks = module.setup_environment()
    assert ranks == (2, 2, 4), f"torchrun in a step of srun: its ranks are (2, 2, 4), not {ranks}"


# ---- GPUs ----
@pytest.fixture
def gpus(monkeypatch, environ):
    """Return a function that sets the number of GPUs, and whether this PyTorch can use them."""
    def set_gpus(count, usable=True):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: usable)
    return set_gpus


@pytest.mark.parametrize("count, local_world_size, local_rank, expected", [
    (2, 2, 1, "cuda:1"),
    (1, 1, 3, "cuda:0"),  # srun may show each process only its own GPU
    (0, 4, 3, "cpu"),
])
def test_the_device_of_a_process(module, environ, gpus, count, local_world_size, local_rank,
                                 expected):
    gpus(count, usable=count > 0)
    environ["LOCAL_WORLD_SIZE"] = str(local_world_size)
    device = str(module.pick_device(local_rank))
    assert device == expected, (
        f"local rank {local_rank} of {local_world_size} with {count} GPUs uses {device}, "
        f"not {expected}")


@pytest.mark.parametrize("count, usable, local_world_size, local_rank, words", [
    (2, False, 2, 0, "cannot use"), (2, True, 3, 0, "more processes"),
    (2, True, 1, 2, "more processes"),
])
def test_a_device_that_cannot_be_had_is_an_error_line(module, environ, gpus, count, usable,
                                                      local_world_size, local_rank, words):
    gpus(count, usable)
    environ["LOCAL_WORLD_SIZE"] = str(local_world_size)
    with pytest.raises(SystemExit, match=f"error: .*{words}.*CUDA_VISIBLE_DEVICES="):
        module.pick_device(local_rank)


def test_mp_spawn_refuses_more_processes_than_gpus_once(module, gpus):
    """Before it starts them, so that the error line is printed once."""
    gpus(2)
    with pytest.raises(SystemExit, match="error: .*more processes.*CUDA_VISIBLE_DEVICES="):
        module.spawn(3, None)
