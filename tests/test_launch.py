"""Launchers: what a process reads, and how a run ends that is stopped, or of which one process is.

Whatever happens, it ends with an error, within --timeout, and leaves no process.
"""

import os
import re
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from copies import make_copy
from forked import at_step, train_forked
from launchers import run, start, wait_until_gone
from recorder import use_small_model
from scripts import DDP_SCRIPTS, ROOT, SCRIPTS, load_script, script_path
from slurm_lab import Network, booted, reason_to_skip
from torch.multiprocessing import ProcessExitedException, start_processes

STEP = {"SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}
ONE_TASK = {**STEP, "SLURM_STEP_NUM_TASKS": "1"}
TORCHRUN = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29401"}
SPAWNING = [script for script in DDP_SCRIPTS if hasattr(load_script(script), "run_worker")]


def flags_of(script, *more):
    """Return flags for an epoch of 2 steps without loader processes."""
    return [SCRIPTS[script].data_flag, 32, "--global-batch", 12, "--epochs", 1,
            *SCRIPTS[script].no_children, *more]


# ---- variables ----
# Variables of a process, GPUs (their number, and whether PyTorch can use them), and what its error
# line names. GPUs that it cannot use: their driver is too old, or it is the third process on two.
GIVEN = {
    "srun -n 4 python": (STEP, (0, False), "RANK"),
    "srun -n 1 python": (ONE_TASK, (0, False), ""),
    "torchrun in a step": (STEP | TORCHRUN, (0, False), ""),
    "GPUs that are not usable": (TORCHRUN, (2, False), "CUDA_VISIBLE_DEVICES="),
    "more processes than GPUs": (TORCHRUN | {"LOCAL_RANK": "2"}, (2, True),
                                 "CUDA_VISIBLE_DEVICES="),
}
GIVEN_TO_MNIST_DP = {
    "srun -n 4 python": (STEP, (0, False), "one process"),
    "torchrun": (TORCHRUN | {"WORLD_SIZE": "2"}, (0, False), "one process"),
    "srun -n 1 python": (ONE_TASK, (0, False), ""),
    "GPUs that are not usable": ({}, (2, False), "CUDA_VISIBLE_DEVICES="),
}
CASES = [(script, case, *row) for script in SCRIPTS
         for case, row in (GIVEN if script in DDP_SCRIPTS else GIVEN_TO_MNIST_DP).items()
         if script != "cpu_ddp" or "GPUs" not in case]


@pytest.mark.parametrize("script, case, variables, gpus, named", CASES,
                         ids=[f"{script}-{case}" for script, case, *_ in CASES])
def test_a_process_trains_or_ends_with_an_error_line(script, case, variables, gpus, named):
    """Several tasks without ranks would each train, and write one file; or train on the CPU."""
    def setup(module, rank):
        torch.cuda.device_count = lambda: gpus[0]
        torch.cuda.is_available = lambda: gpus[1]
        os.environ.update(variables)
        module.load_data = lambda args: sys.exit("it trains")

    flags = [SCRIPTS[script].data_flag, 32]
    if script in SPAWNING and "RANK" in named:
        flags += ["--nproc", 2]
    (status,) = train_forked(script, *flags, setup=setup).statuses
    if named:
        assert str(status).startswith("error: ") and named in status, (
            f"{script}, {case}: it must end with an error line that names {named}, not {status!r}")
    else:
        assert status == "it trains", f"{script}, {case}: it must train, not end with {status!r}"


@pytest.mark.parametrize("script", SPAWNING)  # its form_group() is that of cifar10_ddp, too
def test_data_is_prepared_by_rank_0_and_then_once_on_each_machine(script):
    """Two machines of two processes: rank 0 is the first to look for the data, rank 2 is next."""
    def setup(module, rank):
        def prepare_data(args):
            print(rank, "prepares")
            time.sleep(0.2)
            print(rank, "has prepared")

        def load_data(args):
            print(rank, "loads")
            sys.exit()

        os.environ["LOCAL_RANK"] = str(rank % 2)
        module.prepare_data = prepare_data
        module.load_data = load_data

    text = train_forked(script, nproc=4, setup=setup).text
    expected = "0 prepares\n0 has prepared\n2 prepares\n2 has prepared\n"
    assert text.startswith(expected), (
        f"{script}: rank 0 prepares the data, then rank 2, and then they load it:\n{text}")
    assert text.count("prepares") == 2, f"{script}: others prepare the data, too:\n{text}"


# ---- a process that is lost ----
@pytest.mark.parametrize("script", DDP_SCRIPTS)
def test_a_process_that_hangs_ends_the_others_within_timeout(script):
    def hang(count):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # for the end of the test
        time.sleep(1000)

    def setup(module, rank):
        use_small_model(module)
        if rank == 0:
            at_step(hang)

    end = train_forked(script, *flags_of(script, "--timeout", 4), nproc=2, setup=setup)
    assert "Process 1 terminated" in end.text, (
        f"{script}: rank 0 hangs: rank 1 must end with an error after --timeout 4\n{end.text}")


@pytest.mark.parametrize("script", SPAWNING)
def test_ctrl_c_before_training_is_no_success(script):
    """mp.spawn takes a worker that ends by KeyboardInterrupt for one that has finished."""
    module = load_script(script)
    module.train = lambda args: signal.raise_signal(signal.SIGINT)

    def work(rank):
        signal.signal(signal.SIGINT, signal.default_int_handler)
        module.run_worker(rank, None)

    with pytest.raises(ProcessExitedException, match="SIGINT"):
        start_processes(work, start_method="fork")
        pytest.fail("Ctrl-C, while a worker of mp.spawn starts, is taken for success")


# ---- by the real command ----
def fast_model(script):
    if script != "cifar10_ddp":
        return []
    return ["--model", "squeezenet1_1", "--image-size", 32, "--lr", 0.1]


STOPS = [("cifar10_ddp", "torchrun", "Ctrl-C"), ("cifar10_ddp", "torchrun", "SIGKILL"),
         *[(script, "spawn", way) for script in SPAWNING
           for way in ("SIGTERM", "Ctrl-C", "SIGKILL")]]


@pytest.mark.slow
@pytest.mark.parametrize("script, launcher, way", STOPS)
def test_a_run_that_is_stopped_ends_with_an_error_and_leaves_nothing(script, launcher, way,
                                                                    tmp_path):
    """kill PID; Ctrl-C, which a terminal sends to all; SIGKILL to a process, for its memory."""
    copy = make_copy(script, tmp_path / "train.py", (
        'before "optimizer.zero_grad()"', 'print("training", flush=True)\ntime.sleep(0.05)'))
    flags = [SCRIPTS[script].data_flag, 64, "--global-batch", 4, "--epochs", 1000,
             *fast_model(script)]
    with start(copy, *flags, "--checkpoint", tmp_path / "run.pt", "--timeout", 60,
               launcher=launcher, nproc=2) as job:
        job.wait_for("^training")
        if way == "Ctrl-C":
            os.killpg(job.launcher.pid, signal.SIGINT)
        elif way == "SIGKILL":
            os.kill(job.workers()[1], signal.SIGKILL)
        else:
            job.send(signal.SIGTERM)
        result = job.result(timeout=150)
        wait_until_gone(job, f"{way} to {script} under {launcher}")
    assert result.status != 0, f"{way} to {script} under {launcher}: status 0\n{result.text}"
    stopped = "stopped by a signal after step" in result.text
    assert stopped == (script == "cifar10_ddp" and way != "SIGKILL"), (
        f"{way} to {script} under {launcher}: does it stop after a step? {stopped}\n{result.text}")


BROKEN_SET = """
class Broken(torch.utils.data.Dataset):
    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        if os.environ["RANK"] == "1":
            raise RuntimeError("broken on purpose")
        return self.data[index]


plain_data = load_data


def load_data(args):
    train_set, val_set = plain_data(args)
    return Broken(train_set), val_set
"""
BROKEN_LOSS = """
if os.environ["RANK"] == "1" and model.training:
    raise RuntimeError("broken on purpose")
"""
EXCEPTIONS = {"cifar10_ddp": ('before "smoothing = 0.0"', BROKEN_LOSS),
              "synthetic_ddp": (None, BROKEN_SET)}


@pytest.mark.slow
@pytest.mark.parametrize("script", EXCEPTIONS)
def test_an_exception_of_one_rank_ends_the_run_at_once_and_leaves_nothing(script, tmp_path):
    """Python would wait at its end for loader processes. --timeout is 600 seconds here."""
    copy = make_copy(script, tmp_path / "train.py", EXCEPTIONS[script])
    flags = [SCRIPTS[script].data_flag, 128, "--global-batch", 8, *fast_model(script)]
    with start(copy, *flags, launcher="torchrun", nproc=2) as job:
        result = job.result(timeout=150)
        wait_until_gone(job, f"an exception in {script}")
    assert result.status != 0, f"an exception in {script}: status 0\n{result.text}"
    assert "broken on purpose" in result.text, (
        f"an exception in {script} is not printed\n{result.text}")
    # torchrun reports nothing if it kills another rank that is just writing an error of its own
    if "Failed to parse reply file" not in result.text:
        report = result.text[result.text.rfind("Root Cause"):]
        assert "broken on purpose" in report, f"torchrun's report has not the error\n{result.text}"


@pytest.mark.slow
@pytest.mark.parametrize("script, launcher", [("cpu_ddp", "torchrun"),
                                              ("fashionmnist_ddp", "spawn")])
def test_an_error_of_rank_0_is_printed_once_and_ends_all_processes(script, launcher, tmp_path):
    """What only rank 0 sees, it sees before the group is formed: its launcher ends the others."""
    status, text = run(script, SCRIPTS[script].data_flag, 64, "--checkpoint", "absent/run.pt",
                       launcher=launcher, nproc=2, cwd=tmp_path)
    command = f"{script} under {launcher} with --checkpoint absent/run.pt"
    assert status != 0, f"{command} must not end with status 0\n{text}"
    errors = [line for line in re.findall(r"\berror: .*", text) if "absent/run.pt" in line]
    assert len(errors) == 1, f"{command} must print one error line, not {errors}\n{text}"
    own_text = text.split(" failed (exitcode")[0]  # torchrun's own report comes last
    assert "Traceback" not in own_text, f"{command} must print no traceback\n{text}"


@pytest.mark.slow
@pytest.mark.parametrize("script", SPAWNING)
def test_processes_of_mp_spawn_share_the_cores(script, tmp_path):
    copy = make_copy(script, tmp_path / "train.py", (
        'before "args, device, checkpoint = form_group(args)"',
        'print("threads", torch.get_num_threads(), flush=True)\nreturn'))
    threads = max(1, torch.get_num_interop_threads() // 2)  # get_num_threads() is 1 in tests
    _, text = run(copy, launcher="spawn", nproc=2)
    assert text.count(f"threads {threads}\n") == 2, (
        f"{script}: each of 2 processes must have {threads} threads:\n{text}")


# ---- two machines: the command of the docstrings is that of cpu.sbatch (test_slurm.py) ----
HOSTS = """
until mountpoint --quiet /etc/nsswitch.conf; do sleep 0.1; done     # until it is set up
printf '%s\\n' '127.0.0.1 localhost' "127.0.1.1 $(hostname)" >/run/hosts
mount --bind /run/hosts /etc/hosts
"""


class Machines(Network):
    def up(self):
        (self.root / "hosts").touch()
        super().up()


@pytest.mark.slurm
def test_the_pages_commands_train_on_machines_whose_own_name_is_a_loopback_address(tmp_path):
    """Debian's hosts file has a machine's own name as 127.0.1.1: HOST is an address."""
    if reason := reason_to_skip():
        pytest.skip(reason)
    page = (ROOT / "cpu_ddp/README.md").read_text().split("### Two machines by hand")[1]
    command = re.search(r"```bash\n(.*?)```", page, re.DOTALL)[1]
    for old, new in [("--nproc-per-node=4", "--nproc-per-node=1"), ("HOST", "10.9.8.2"),
                     ("cifar10_ddp/train.py --global-batch 4096 --batch-size 512",
                      f"{script_path('cpu_ddp')} --epochs 2"),
                     ("/shared/run.pt", str(tmp_path / "run.pt"))]:
        assert command.count(old) == 1, f"the command has no {old}:\n{command}"
        command = command.replace(old, new)
    commands = [command, command.replace("--node-rank=0", "--node-rank=1")]
    env = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": ""}
    with booted(lambda root: Machines(root, 2)) as network, ThreadPoolExecutor() as pool:
        machines = [network.machines[name] for name in network.nodes]
        for machine in machines:
            machine.exec(HOSTS)
        text = "\n".join(pool.map(lambda machine, command: machine.exec(
            command, timeout=200, check=False, env=env), machines, commands))
    assert "world size 2" in text, f"the machines do not train together:\n{text}"
    assert (tmp_path / "run.pt").exists(), f"the training does not end:\n{text}"
