"""Ranks, threads and GPUs follow from the variables of a launcher, on any machine.

The functions are equal in all scripts: those of fashionmnist_ddp are tested.
"""

import os
import re
import sys

import pytest
import torch
from copies import make_copy
from launchers import run
from scripts import load_script

module = load_script("fashionmnist_ddp")


@pytest.fixture(autouse=True)
def environ(monkeypatch):
    """The environment variables: none, until a test sets some."""
    env = {}
    monkeypatch.setattr(os, "environ", env)
    return env


# ---- ranks ----
STEP = {"SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "8",
        "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_STEP_NODELIST": "n[07-09]"}
BY_HAND = {"RANK": "2", "LOCAL_RANK": "0", "WORLD_SIZE": "4"}
TORCHRUN = BY_HAND | {"TORCHELASTIC_RUN_ID": "none"}
NOTEBOOK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}


@pytest.mark.parametrize("variables, terminal, expected, what", [
    (TORCHRUN, False, (2, 0, 4), "torchrun"),
    (BY_HAND, False, (2, 0, 4), "variables set by hand"),
    (NOTEBOOK, False, (0, 0, 1), "variables that a notebook left"),
    (STEP | NOTEBOOK, False, (5, 1, 8), "a step of srun, with variables that a notebook left"),
    (STEP | BY_HAND, False, (5, 1, 8), "a step of srun, with variables of another run"),
    (STEP | BY_HAND | {"WORLD_SIZE": "16"}, False, (2, 0, 16),
     "processes that each task of a step has started"),
    (STEP, False, (5, 1, 8), "a step of srun"),
    (STEP, True, (5, 1, 8), "a step of srun whose first task has a terminal"),
    (STEP | TORCHRUN | {"TORCHELASTIC_RUN_ID": "1"}, False, (2, 0, 4), "torchrun in a step"),
    (STEP | {"SLURM_STEP_NUM_TASKS": "1"} | TORCHRUN, False, (2, 0, 4), "a launcher in a step"),
    (STEP | {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}, False, (5, 1, 8),
     "a step of srun in a shell that a notebook has left variables in"),
    (STEP | {"SLURM_PTY_PORT": "1"}, True, (0, 0, 1), "a shell of srun --pty: one process"),
    (STEP | {"SLURM_PTY_PORT": "1"}, False, (5, 1, 8),
     "a step that a shell of srun --pty has started, and that inherits SLURM_PTY_PORT"),
    (STEP | {"PMI_SIZE": "8", "PMIX_RANK": "5"}, False, (5, 1, 8), "a step of srun --mpi"),
    (TORCHRUN | {"OMPI_COMM_WORLD_SIZE": "4"}, False, (2, 0, 4), "torchrun under mpirun"),
    ({"SLURM_JOB_ID": "4711", "SLURM_PROCID": "0"}, False, (0, 0, 1), "an sbatch file"),
])
def test_ranks_by_the_variables_of_a_launcher(environ, monkeypatch, variables, terminal, expected,
                                              what):
    environ.update(variables)
    monkeypatch.setattr(os, "isatty", lambda descriptor: terminal)
    ranks = module.setup_environment()
    assert ranks == expected, f"{what}: rank, local rank, world size are {ranks}, not {expected}"


@pytest.mark.parametrize("variables, master", [
    ({"SLURM_STEP_NODELIST": "n07"}, r"n07:\d+"),
    ({"SLURM_STEP_NODELIST": "n[07,12-14]"}, r"n07:\d+"),
    ({"SLURM_STEP_NODELIST": "gpu-a100-[001-128]"}, r"gpu-a100-001:\d+"),
    ({"SLURM_STEP_NODELIST": "n7,gpu[1-2]"}, r"n7:\d+"),
    ({"MASTER_ADDR": "n01", "MASTER_PORT": "1234"}, "n01:1234"),
], ids=str)
def test_the_master_is_the_first_node_of_a_step_or_the_users_choice(environ, variables, master):
    environ.update(STEP | variables)
    module.setup_environment()
    found = f"{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}"
    assert re.fullmatch(master, found), f"{variables}: the master is {found}, not {master}"


def test_jobs_and_steps_have_different_ports(environ):
    """They may run side by side on one machine."""
    ports = set()
    for job, step in [("4711", "0"), ("4712", "0"), ("4711", "1"), ("4712", "1")]:
        environ.clear()
        environ.update(STEP, SLURM_JOB_ID=job, SLURM_STEP_ID=step)
        module.setup_environment()
        ports.add(int(environ["MASTER_PORT"]))
    assert len(ports) == 4, f"jobs or steps use the same port: {ports}"
    assert all(1024 <= port < 32768 for port in ports), (
        f"ports that may be the system's, or another connection's: {ports}")


# ---- ports ----
def test_mp_spawns_port_cannot_be_taken(tmp_path):
    """Another program takes it, if it can, before the processes start."""
    copy = make_copy("fashionmnist_ddp", tmp_path / "train.py", ('after "    pick_device(0)"', """
        from contextlib import suppress
        with suppress(OSError):
            taken = socket.create_server(("", int(os.environ["MASTER_PORT"])))
        """))
    status, text = run(copy, *"--fake-data 8 --epochs 1".split(), launcher="spawn", nproc=2)
    assert status == 0, f"the port that mp.spawn's processes meet at was taken:\n{text}"


# ---- threads ----
def test_processes_of_mp_spawn_share_the_cores():
    cores = torch.get_num_interop_threads()  # torch.get_num_threads() is 1 in these tests
    threads = max(1, cores // 2)
    flags = "--fake-data 8 --epochs 0".split()
    _, text = run("fashionmnist_ddp", *flags, launcher="spawn", nproc=2)
    assert f"threads {threads} " in text, (
        f"each of 2 processes on {cores} cores has not {threads} threads:\n{text}")


# ---- GPUs ----
@pytest.mark.parametrize("variables, terminal, refused, what", [
    (STEP, False, True, "a step of srun"),
    (STEP | NOTEBOOK, False, True, "a step of srun, with variables that a notebook left"),
    (TORCHRUN, False, True, "torchrun"),
    (STEP | {"SLURM_PTY_PORT": "1"} | TORCHRUN, True, True, "torchrun in a shell of srun --pty"),
    (STEP | {"SLURM_STEP_NUM_TASKS": "1"}, False, False, "a step of one task"),
    (STEP | {"SLURM_PTY_PORT": "1"}, True, False, "python in a shell of srun --pty"),
], ids=str)
def test_mnist_dp_is_one_process(environ, monkeypatch, variables, terminal, refused, what):
    """Several would all train the same model."""
    environ.update(variables)
    monkeypatch.setattr(os, "isatty", lambda descriptor: terminal)
    try:
        load_script("mnist_dp").pick_devices(None)
        error = ""
    except SystemExit as exit:
        error = str(exit)
    assert ("start one with python" in error) == refused, f"{what}: mnist_dp says {error!r}"


def set_gpus(monkeypatch, count, usable):
    """Set the number of GPUs, and whether this PyTorch can use them."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: usable)


@pytest.mark.parametrize("count, local_world_size, local_rank, expected", [
    (2, "2", 1, "cuda:1"),
    (1, "1", 3, "cuda:0"),  # srun may show each process only its own GPU
    (0, "4", 3, "cpu"),
])
def test_the_device_of_a_process(environ, monkeypatch, count, local_world_size, local_rank,
                                 expected):
    set_gpus(monkeypatch, count, usable=count > 0)
    environ["LOCAL_WORLD_SIZE"] = local_world_size
    device = str(module.pick_device(local_rank))
    assert device == expected, f"local rank {local_rank} uses {device} of {count} GPUs"


def test_a_process_of_srun_or_torchrun_starts_no_others(environ, monkeypatch):
    """Here, on a machine with 2 GPUs."""
    set_gpus(monkeypatch, 2, usable=True)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    started = []
    monkeypatch.setattr(module, "train", lambda args: started.append("train"))
    monkeypatch.setattr(module, "spawn", lambda nproc, args: started.append(f"spawn {nproc}"))
    for variables in (STEP, TORCHRUN, {}):
        environ.clear()
        environ.update(variables)
        module.main()
    assert started == ["train", "train", "spawn 2"], (
        f"under srun, torchrun and python, fashionmnist_ddp's main() calls {started}")


@pytest.mark.parametrize("call", [
    lambda: module.pick_device(0),
    lambda: load_script("mnist_dp").pick_devices(None),
    lambda: module.spawn(2, None),  # once: before they start
], ids=["a process", "mnist_dp", "mp.spawn"])
def test_gpus_that_this_pytorch_cannot_use_are_an_error_line(environ, monkeypatch, call):
    """Their driver is too old, or it is PyTorch for CPUs: it would train on the CPU."""
    set_gpus(monkeypatch, 2, usable=False)
    monkeypatch.setattr(torch.multiprocessing, "spawn",
                        lambda *_, **__: pytest.fail("processes are started"))
    with pytest.raises(SystemExit, match="error: .*CUDA_VISIBLE_DEVICES="):
        pytest.fail(f"no error line, but {call()}")
