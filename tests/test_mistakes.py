"""What goes wrong ends in an error that says why, within --timeout, and leaves no process.

Variables of launchers, processes that are lost or hang, flags, folders, data, weights.
"""

import ast
import os
import re
import signal
import sys
import time
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from copies import make_copy
from harness import (TRAIN, flags_of, keep_samples, kill_in_step, own_flags, run, run_to_end,
                     text_of, wrap)
from launchers import run as run_command
from launchers import start, wait_until_gone
from scripts import DDP_SCRIPTS, ROOT, SCRIPTS, load_script, script_path
from slurm_lab import Network, booted
from torch.multiprocessing import ProcessExitedException, start_processes
from torch.utils.data import TensorDataset

CIFAR, FASHION = "cifar10_ddp", "fashionmnist_ddp"
scripts = pytest.mark.parametrize("script", DDP_SCRIPTS)
all_scripts = pytest.mark.parametrize("script", SCRIPTS)


def errors_of(ranks, words, what):
    """Fail unless each rank ends in an error line that has these words."""
    for number, rank in enumerate(ranks):
        assert rank.code == 1 and re.search(f"^error: .*{words}", rank.text, re.MULTILINE), (
            f"{what}: rank {number} must end in an error line with {words!r}\n{text_of(ranks)}")


# ---- variables of launchers ----
STEP = {"SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}
ONE_TASK = {**STEP, "SLURM_STEP_NUM_TASKS": "1"}
TORCHRUN = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29401"}
# Scripts (form_group() of CIFAR is that of two others), variables of a process, GPUs (their number,
# and whether PyTorch can use them), and what the error line names ("": the process trains)
GIVEN = {
    "srun -n 4 python": (["cpu_ddp", CIFAR, FASHION], STEP, (0, False), "RANK"),
    "srun -n 4 mnist_dp": (["mnist_dp"], STEP, (0, False), "one process"),
    "torchrun mnist_dp": (["mnist_dp"], TORCHRUN | {"WORLD_SIZE": "2"}, (0, False), "one process"),
    "srun -n 1 python": (["cpu_ddp", CIFAR, "mnist_dp"], ONE_TASK, (0, False), ""),
    "torchrun": ([FASHION], TORCHRUN, (0, False), ""),
    "torchrun in a step": (["cpu_ddp", CIFAR], STEP | TORCHRUN, (0, False), ""),
    # Their driver is too old
    "GPUs that are not usable": ([CIFAR, "mnist_dp"], {}, (2, False), "CUDA_VISIBLE_DEVICES="),
    "more processes than GPUs": ([CIFAR], TORCHRUN | {"LOCAL_RANK": "2"}, (2, True),
                                 "CUDA_VISIBLE_DEVICES="),
}


@pytest.mark.parametrize("script, case", [
    (script, case) for case in GIVEN for script in GIVEN[case][0]])
def test_a_process_trains_or_ends_with_an_error_line(script, case):
    """Several tasks without ranks would each train, and write one file; or train on the CPU."""
    _, variables, gpus, named = GIVEN[case]

    def change(module, rank, seen):
        torch.cuda.device_count = lambda: gpus[0]
        torch.cuda.is_available = lambda: gpus[1]
        os.environ.update(variables)
        module.load_data = lambda args: sys.exit("it trains")

    nproc = ["--nproc", 2] if script == FASHION else []  # its main() would start two
    ranks = run(script, *SCRIPTS[script].own, *nproc, nproc=1, problem="own", change=change)
    if named:
        errors_of(ranks, named, f"{script}, {case}")
    else:
        assert ranks[0].text == "it trains\n", f"{script}, {case}, must train:\n{ranks[0].text}"


def test_each_process_of_a_machine_has_a_gpu_of_its_own():
    """Of two GPUs, which are not used here. test_gpu.py uses those that there are."""
    def change(module, rank, seen):
        torch.cuda.device_count = lambda: 2
        torch.cuda.is_available = lambda: True
        torch.cuda.set_device = lambda device: sys.exit(str(device))

    found = [rank.text for rank in run(CIFAR, problem="own", change=change)]
    assert found == ["cuda:0\n", "cuda:1\n"], f"two processes use the GPUs {found}"


def test_data_is_prepared_by_rank_0_and_then_once_on_each_machine(tmp_path):
    """Two machines of two processes: rank 0 is the first to look for the data, rank 2 is next."""
    def change(module, rank, seen):
        def say(*words):
            with open(tmp_path / "log", "a") as file:
                print(rank, *words, file=file)

        def prepare_data(args):
            say("prepares")
            time.sleep(0.2)
            say("has prepared")

        def load_data(args):
            say("loads")
            sys.exit()

        os.environ["LOCAL_RANK"] = str(rank % 2)
        module.prepare_data, module.load_data = prepare_data, load_data

    run(FASHION, nproc=4, change=change)  # its form_group() is that of others, too
    text = (tmp_path / "log").read_text()
    expected = "0 prepares\n0 has prepared\n2 prepares\n2 has prepared\n"
    assert text.startswith(expected), f"rank 0 prepares, then rank 2, then they load:\n{text}"
    assert text.count("prepares") == 2, f"others prepare the data, too:\n{text}"


# ---- a process that hangs ----
class SleepingSet(TensorDataset):
    def __getitem__(self, index):
        time.sleep(100)  # in a loader process


@pytest.mark.parametrize("script, place", [("cpu_ddp", "loss_of"), (CIFAR, "evaluate")])
def test_a_process_that_hangs_prints_its_lines_and_ends_the_others(script, place, tmp_path):
    """Before the others end with an error, after --timeout. torchrun would name rank 0 alone.

    Two scripts have the form_group() of CIFAR. For other places, see the test of the alarm.
    """
    ended = tmp_path / "ended"

    def sleep_here(*_):
        for _ in range(600):
            time.sleep(0.1)
            if ended.exists():
                sys.exit(1)
        print("rank 0 does not end")

    def change(module, rank, seen):
        def train(plain, args):
            try:
                plain(args)
            finally:
                ended.touch()

        if rank == 1:
            setattr(module, place, sleep_here)
        else:
            wrap(module, "train", train)

    ranks = run(script, *flags_of(script), "--timeout", 5, change=change)
    assert re.search(r'File ".*test_mistakes.py", line \d+ in sleep_here', ranks[1].text), (
        f"{script}: rank 1 hangs in {place}, and does not say so:\n{text_of(ranks)}")
    assert ranks[0].code == 1 and "does not end" not in ranks[1].text, (
        f"{script}: rank 1 hangs in {place}, and rank 0 does not end:\n{text_of(ranks)}")


@pytest.mark.parametrize("script, seconds", [(CIFAR, 10), ("synthetic_ddp", 1)])
def test_a_loader_process_that_hangs_ends_the_run(script, seconds):
    """Those of cifar10_ddp live as long as the run, and print their lines."""
    def change(module, rank, seen):
        def load_data(args):
            args.classes = ["no", "yes"]
            return 2 * [SleepingSet(torch.zeros(40, 4), torch.zeros(40).long())]

        module.load_data = load_data

    (rank,) = run(script, *flags_of(script), "--workers", 1, "--timeout", seconds, nproc=1,
                  change=change)
    lines = re.search(r'File ".*test_mistakes.py", line \d+ in __getitem__', rank.text)
    assert lines or script != CIFAR, (
        f"{script}: a Dataset hangs in a loader process, which does not say so:\n{rank.text}")
    assert rank.code == 1 and f"timed out after {seconds} seconds" in rank.text, (
        f"{script}: a Dataset hangs, and the run does not end:\n{rank.text}")


@scripts
def test_only_a_process_that_hangs_prints_its_lines(script):
    """The time starts before and after it connects, and with each batch; the end stops it."""
    def change(module, rank, seen):
        signal.setitimer = lambda which, seconds: seen.append(("alarm", seconds > 0))

    for rank in run_to_end(script, *flags_of(script), "--timeout", 300, change=change):
        kinds = [event[0] for event in rank.seen if event[0] in ("train", "val", "alarm")]
        text = "".join({"train": "b", "val": "b", "alarm": "a"}[kind] for kind in kinds)
        assert re.fullmatch("aa(ba+)+", text), f"{script}: batches b and alarms a are {text}"
        assert rank.seen[-1] == ("alarm", False), f"{script} does not stop the alarm at its end"


def test_a_loader_process_without_work_prints_no_lines(monkeypatch):
    module, alarms = load_script(CIFAR), []
    monkeypatch.setattr(module, "get_worker_info", lambda: True)
    monkeypatch.setattr(module, "restart_alarm", alarms.append)
    data = [(torch.zeros(1), 0)]
    module.SeededBatches(Namespace(timeout=7), data).__getitem__((0, 0, 0, [0]))
    assert alarms == [7, 0], f"in a loader process, a batch sets the alarms {alarms}"


def test_an_alarm_of_the_users_code_stays_as_it_is():
    """restart_alarm() is the same in all scripts."""
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    try:
        load_script("cpu_ddp").restart_alarm(100)
        left = signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert left == (0, 0), f"an alarm would call the user's handler in {left[0]} s"


# ---- a process that is stopped ----
def test_ctrl_c_before_training_is_no_success():
    """mp.spawn takes a worker that ends by KeyboardInterrupt for one that has finished."""
    module = load_script(FASHION)
    module.train = lambda args: signal.raise_signal(signal.SIGINT)

    def work(rank):
        signal.signal(signal.SIGINT, signal.default_int_handler)
        module.run_worker(rank, None)

    with pytest.raises(ProcessExitedException, match="SIGINT"):
        start_processes(work, start_method="fork")
        pytest.fail("Ctrl-C, while a worker of mp.spawn starts, is taken for success")


@pytest.mark.parametrize("signum, read", [(signal.SIGINT, True), (signal.SIGHUP, False)])
def test_a_signal_is_saved_and_said_also_if_nobody_reads_the_log(signum, read, tmp_path):
    """As after `2>&1 | tee log`, which Ctrl-C ends first, or in a closed terminal."""
    def change(module, rank, seen):
        if not read:
            reader, writer = os.pipe()
            os.close(reader)
            sys.stdout = sys.stderr = open(writer, "w", buffering=1)
            os.dup2(writer, 2)
        kill_in_step(2, signum)

    path = tmp_path / "run.pt"
    (rank,) = run(CIFAR, *flags_of(CIFAR), "--log-every", 0, "--checkpoint", path, nproc=1,
                  change=change)
    assert rank.code == 1 and torch.load(path)["progress"]["step"] in (2, 3), (
        f"{signum} in step 2: nothing is saved\n{rank.text}")
    assert not read or "a signal has come" in rank.text, f"nothing is said\n{rank.text}"


@pytest.mark.slow
@pytest.mark.parametrize("script, launcher, way", [
    (CIFAR, "torchrun", "Ctrl-C"), (CIFAR, "torchrun", "SIGKILL"), (FASHION, "spawn", "SIGINT")])
def test_a_run_that_is_stopped_ends_with_an_error_and_leaves_nothing(script, launcher, way,
                                                                    tmp_path):
    """By Ctrl-C, which all processes get; by kill -INT of python; for lack of memory (SIGKILL).

    SIGTERM ends python, too: PyTorch then ends its processes, as after SIGINT. How python ends if
    one of them fails: test_an_error_of_rank_0_is_printed_once_and_ends_all_processes.
    """
    copy = make_copy(script, tmp_path / "train.py", (
        'before "optimizer.zero_grad()"', 'print("training", flush=True)\ntime.sleep(0.05)'))
    with start(copy, *own_flags(script), "--epochs", 1000, "--checkpoint", tmp_path / "run.pt",
               "--timeout", 60, launcher=launcher, nproc=2) as job:
        job.wait_for("^training")
        time.sleep(1)  # a loader process that has just begun would not notice a killed parent
        if way == "Ctrl-C":
            os.killpg(job.launcher.pid, signal.SIGINT)
        elif way == "SIGKILL":
            os.kill(job.workers()[1], signal.SIGKILL)
        else:
            job.send(signal.SIGINT)
        result = job.result(timeout=150)
        wait_until_gone(job, f"{way} to {script} under {launcher}")
    assert result.status != 0, f"{way} to {script} under {launcher}: status 0\n{result.text}"
    stopped = "stopped by a signal after step" in result.text
    assert stopped == (script == CIFAR and way != "SIGKILL"), (
        f"{way} to {script} under {launcher}: does it stop after a step? {stopped}\n{result.text}")


@pytest.mark.slow
@pytest.mark.parametrize("script", [CIFAR, "synthetic_ddp"])
def test_an_exception_of_one_rank_ends_the_run_at_once_and_leaves_nothing(script, tmp_path):
    """Python would wait at its end for loader processes. --timeout is 600 seconds here."""
    copy = make_copy(script, tmp_path / "train.py", (
        'before "optimizer.zero_grad()"',
        'if dist.get_rank() == 1:\n    raise RuntimeError("broken on purpose")'))
    with start(copy, *own_flags(script), launcher="torchrun", nproc=2) as job:
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
@pytest.mark.parametrize("script, launcher", [("cpu_ddp", "torchrun"), (FASHION, "spawn")])
def test_an_error_of_rank_0_is_printed_once_and_ends_all_processes(script, launcher, tmp_path):
    """What only rank 0 sees, it sees before the group is formed: its launcher ends the others."""
    status, text = run_command(script, *own_flags(script), "--checkpoint", "absent/run.pt",
                               launcher=launcher, nproc=2, cwd=tmp_path)
    command = f"{script} under {launcher} with --checkpoint absent/run.pt"
    assert status != 0, f"{command} must not end with status 0\n{text}"
    errors = [line for line in re.findall(r"\berror: .*", text) if "absent/run.pt" in line]
    assert len(errors) == 1, f"{command} must print one error line, not {errors}\n{text}"
    own_text = text.split(" failed (exitcode")[0]  # torchrun's own report comes last
    assert "Traceback" not in own_text, f"{command} must print no traceback\n{text}"


def test_processes_of_mp_spawn_share_the_cores():
    def change(module, rank, seen):
        def spawn(function, args, nproc):
            print(nproc, "processes with", os.environ["OMP_NUM_THREADS"], "threads")

        del os.environ["OMP_NUM_THREADS"]
        torch.cuda.device_count = lambda: 2
        torch.get_num_threads = lambda: 9
        module.mp.spawn = spawn

    (rank,) = run(FASHION, nproc=1, problem="own", change=change)
    assert rank.text == "2 processes with 4 threads\n", f"of 9 cores, python starts {rank.text}"


# ---- flags ----
@all_scripts
def test_an_abbreviated_flag_is_an_error(script):
    """job.sh finds --checkpoint by its whole name."""
    with pytest.raises(SystemExit):
        load_script(script).parse_args(["--epoch", "1"])
        pytest.fail(f"{script} takes --epoch for --epochs")


@all_scripts
def test_each_flag_is_used(script):
    """--timeout was in vain in three scripts."""
    functions = [node for node in ast.parse(script_path(script).read_text()).body
                 if getattr(node, "name", "parse_args") != "parse_args"]
    used = {node.attr for function in functions for node in ast.walk(function)
            if isinstance(node, ast.Attribute)
            and "args" in (getattr(node.value, "id", ""), getattr(node.value, "attr", ""))}
    unused = vars(load_script(script).parse_args([])).keys() - used - {"checkpoint"}
    assert not unused, f"{script} does not use its flags {sorted(unused)}"


@pytest.mark.parametrize("script, flag, value, nproc", [
    *[(script, "--global-batch", 100, 1) for script in DDP_SCRIPTS],
    *[(script, "--global-batch", 1, 2) for script in DDP_SCRIPTS],
    ("synthetic_ddp", "--global-batch", 13, 3), (CIFAR, "--batch-size", -1, 1)])
def test_a_batch_that_does_not_fit_is_an_error_line(script, flag, value, nproc):
    """There are 59 samples, and each process needs a share."""
    ranks = run(script, *flags_of(script), flag, value, nproc=nproc)
    errors_of(ranks, f"{flag} {value} ", f"{script} {flag} {value} on {nproc} processes")


@pytest.mark.parametrize("name, value, words", [
    ("seed", "7", "--seed must be an integer"), ("tokenizer", object(), "args.tokenizer is .* at")])
def test_a_value_that_differs_by_process_is_an_error_line(name, value, words):
    """Of a flag, in a copy: the hash of a text, the address of an object.

    describe_run() is the same in all scripts.
    """
    ranks = run("cpu_ddp", *flags_of("cpu_ddp"), change=lambda module, rank, seen: wrap(
        module, "parse_args", lambda plain: Namespace(**{**vars(plain()), name: value})))
    errors_of(ranks, words, f"args.{name} = {value!r}")


def test_other_samples_on_two_ranks_are_an_error_line():
    """As of a file that is missing on one machine, or of files that are listed in another order."""
    def change(module, rank, seen):
        if rank == 1:
            keep_samples(module, FASHION, 0, range(TRAIN - 1, -1, -1))

    ranks = run(FASHION, *flags_of(FASHION), change=change)
    errors_of(ranks, "labels_checksum differs", "rank 1 has other samples than rank 0")


# ---- folders and data ----
@pytest.mark.parametrize("script", ["cpu_ddp", CIFAR])  # of two kinds of form_group()
@pytest.mark.parametrize("folder", ["absent", "/proc"])
def test_a_folder_that_cannot_be_written_is_an_error_line_at_the_start(script, folder):
    """Not even root can create a file in /proc."""
    ranks = run(script, *flags_of(script), "--checkpoint", f"{folder}/run.pt", nproc=1)
    errors_of(ranks, f"{folder}/run.pt", f"{script}: --checkpoint in a folder that is {folder}")
    assert not ranks[0].seen, f"{script} trains before it says so\n{ranks[0].text}"


def test_a_save_that_fails_is_an_error_and_leaves_the_last_checkpoint(tmp_path):
    """On a full disk, as /dev/full is; and of a number of numpy's, which could not be loaded.

    save() is the same in all scripts.
    """
    save, path = load_script("cpu_ddp").save, tmp_path / "run.pt"
    save({"step": 1}, path)
    with pytest.raises(Exception, match="numpy"):
        save({"step": torch.zeros(1).numpy()[0]}, path)
        pytest.fail("a number of numpy's is saved: FILE could not be loaded")
    (tmp_path / "run.pt.tmp").unlink()
    (tmp_path / "run.pt.tmp").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        save({"step": 2}, path)
        pytest.fail("a full disk is no error")
    assert torch.load(path) == {"step": 1}, "a save that failed has changed FILE"


@pytest.mark.parametrize("dtype", [torch.float, torch.bool])
@pytest.mark.parametrize("script", [FASHION, CIFAR])
def test_images_that_would_be_scaled_twice_are_an_error_line(script, dtype):
    """As after ToTensor, and Normalize."""
    with pytest.raises(SystemExit, match=f"^error: .*{dtype}.* ToTensor, Normalize"):
        load_script(script).scale(torch.zeros(2, 3, 28, 28, dtype=dtype), None)
        pytest.fail(f"{script} scales images of {dtype}")


# ---- weights ----
@scripts
def test_a_model_that_is_called_without_ddp_is_an_error_line(script, tmp_path):
    """No gradients are averaged: each rank would train a model of its own."""
    def change(module, rank, seen):
        wrap(module, "loss_and_counts", lambda plain, args, model, *batch: plain(
            args, getattr(model, "module", model), *batch))

    path = tmp_path / "run.pt"
    ranks = run(script, *flags_of(script), "--checkpoint", path, change=change)
    errors_of(ranks, "weights differ by rank", f"{script}, which calls model for ddp_model")
    assert not path.exists(), f"{script} saves the weights of one rank, without the others' data"


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_weights_that_are_not_finite_are_not_saved(value, tmp_path):
    """NaN of one rank is that of all after the next step: here, in the last one before a save.

    check_model() is the same in all scripts.
    """
    def change(module, rank, seen):
        def check_model(plain, model):
            with torch.no_grad():
                next(model.parameters())[0, 0] = value if rank else 0
            plain(model)

        wrap(module, "check_model", check_model)

    path = tmp_path / "run.pt"
    ranks = run("cpu_ddp", *flags_of("cpu_ddp"), "--checkpoint", path, change=change)
    errors_of(ranks, "NaN or infinity", f"{value} on one rank")
    assert not path.exists(), f"{value} is saved\n{text_of(ranks)}"


def test_a_buffer_may_be_infinite_and_frozen_weights_have_any_type():
    """Only weights that train have to be finite: masks are infinite, quantized weights bytes."""
    def change(module, rank, seen):
        def build_model(plain, args):
            model = plain(args)
            model.register_buffer("mask", torch.tensor(-torch.inf))
            for name, values in (("bytes", torch.zeros(3).byte()), ("mask_weight", model.mask)):
                frozen = torch.nn.Parameter(values, requires_grad=False)
                model.register_parameter(name, frozen)
            return model

        wrap(module, "build_model", build_model)

    run_to_end("cpu_ddp", *flags_of("cpu_ddp"), nproc=1, change=change)


# ---- two machines (test_jobs.py: the command with c10d is that of cpu.sbatch) ----
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
