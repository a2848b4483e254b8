"""A run that is stopped by a signal saves, and the same command ends with the same weights.

Most runs are processes forked from this one, which start at once (see functions.py).
"""
import errno
import os
import shlex
import signal
import subprocess
import sys
import time
from typing import NamedTuple

import pytest
from checkpoints import assert_equal, load_checkpoint
from functions import train
from processes import clean_environment, run, start
from scripts import DDP_SCRIPTS, SCRIPTS, script_path
from torch.multiprocessing import ProcessExitedException
from torch.optim.optimizer import register_optimizer_step_post_hook

# Three epochs of six steps of 12 samples. The sum of three gradients depends on their order.
TOTAL_STEPS = 18
MORE_FLAGS = {"cifar10_ddp": ("--model", "mnasnet0_5", "--image-size", 32)}  # BatchNorm, dropout
START = 240  # seconds within which a new interpreter trains, on a machine that is very busy


def processes_of(script):
    return 3 if SCRIPTS[script].several_processes else 1


def flags_of(script, checkpoint, epochs=3):
    """Return the flags of a run that looks for signals and logs in each step."""
    return (SCRIPTS[script].data_flag, 72, *MORE_FLAGS.get(script, ()),
            "--batch-size", 12 // processes_of(script), "--epochs", epochs,
            "--save-every", 1, "--log-every", 0, "--checkpoint", checkpoint)


class Life(NamedTuple):
    """What was seen of the processes from one start of a script to their end."""
    statuses: list  # the exit status of each rank
    ends: list      # the time at which each rank ended
    steps: list     # how many steps each rank has computed
    text: str       # stdout and stderr of all ranks


def live(script, checkpoint, output, at_step=None, epochs=3, nohup=False):
    """Train in forked processes, and call at_step(rank, number of steps computed) after each step.

    What the processes print goes to the file output, which must be new. nohup ignores SIGHUP.
    """
    def setup(module, rank):
        steps = []

        def after_step(*_):
            steps.append(rank)
            if at_step:
                at_step(rank, len(steps))

        if nohup:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        sys.stdout = sys.stderr = open(output, "a", buffering=1)
        register_optimizer_step_post_hook(after_step)
        return steps

    try:
        ranks = train(script, *flags_of(script, checkpoint, epochs), *SCRIPTS[script].no_children,
                      nproc=processes_of(script), setup=setup)
    except AssertionError as error:
        raise AssertionError(f"{script}: {error}. Has a signal to one process stopped only this "
                             f"one?\n{output.read_text()}") from None
    text = output.read_text()
    statuses = []
    for _, code, _ in ranks:
        if isinstance(code, str):  # Python prints what sys.exit is given, and exits with 1
            text += f"{code}\n"
            code = 1
        statuses.append(code)
    return Life(statuses, [end for *_, end in ranks], [len(steps) for steps, *_ in ranks], text)


def signal_to(stopped_rank, signum, step):
    """Return a function for live: this rank sends itself a signal after this many steps."""
    def at_step(rank, steps):
        if rank == stopped_rank and steps == step:
            os.kill(os.getpid(), signum)
    return at_step


# --- one run in five lives: SIGINT, SIGTERM, SIGHUP, SIGKILL, and to its end ---
class Run(NamedTuple):
    script: str
    checkpoint: object  # of the run that was disturbed
    undisturbed: object  # the checkpoint of a run that was not
    lives: dict  # from the signal's name to a Life
    saved: dict  # from the signal's name to the step of the checkpoint after that life
    save_time: float  # when the checkpoint of the first life was complete


class ClosedTerminal:
    def write(self, text):
        raise OSError(errno.EIO, "the terminal is closed")


@pytest.fixture(scope="module", params=SCRIPTS)
def disturbed(request, tmp_path_factory):
    """Run a script without a disturbance, and once in five lives."""
    script = request.param
    last_rank = processes_of(script) - 1
    folder = tmp_path_factory.mktemp(script)
    checkpoint = folder / "run.pt"
    lives = {}
    saved = {}

    def keep(name, at_step):
        lives[name] = live(script, checkpoint, folder / f"{name}.txt", at_step)
        saved[name] = load_checkpoint(checkpoint)["step"]

    def hang_up(rank, steps):
        if rank == 0 and steps == 3:
            sys.stdout = ClosedTerminal()
        signal_to(last_rank, signal.SIGHUP, 3)(rank, steps)

    def kill_all(rank, steps):
        signal_to(rank, signal.SIGKILL, 5)(rank, steps)

    def slow_disk(*_):
        time.sleep(1)

    lives["undisturbed"] = live(script, folder / "undisturbed.pt", folder / "undisturbed.txt")
    fsync = os.fsync
    os.fsync = slow_disk  # forked processes inherit it
    try:
        keep("SIGINT", signal_to(last_rank, signal.SIGINT, 2))  # after step 2
    finally:
        os.fsync = fsync
    save_time = checkpoint.stat().st_ctime  # of the rename
    keep("SIGTERM", signal_to(0, signal.SIGTERM, 4))  # after step 6, the end of an epoch
    keep("SIGHUP", hang_up)  # after step 9
    with pytest.raises(ProcessExitedException):
        live(script, checkpoint, folder / "SIGKILL.txt", kill_all)  # after step 14
    saved["SIGKILL"] = load_checkpoint(checkpoint)["step"]
    keep("end", None)
    return Run(script, checkpoint, folder / "undisturbed.pt", lives, saved, save_time)


@pytest.mark.parametrize("name, steps", [("SIGINT", 2), ("SIGTERM", 4), ("SIGHUP", 3)])
def test_signal_to_one_process_stops_all_after_the_same_step(disturbed, name, steps):
    life = disturbed.lives[name]
    assert life.steps == [steps] * len(life.steps), (
        f"{name} to one process of {disturbed.script} after {steps} steps: all processes must stop "
        f"after this step, but they computed {life.steps} steps\n{life.text}")


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_stopped_run_exits_with_status_1(disturbed, name):
    life = disturbed.lives[name]
    assert life.statuses == [1] * len(life.statuses), (
        f"{disturbed.script} stopped by {name}: each process must exit with status 1, so that the "
        f"job counts as unfinished; the statuses are {life.statuses}\n{life.text}")


@pytest.mark.parametrize("name, step", [("SIGINT", 2), ("SIGTERM", 6), ("SIGHUP", 9)])
def test_stopped_run_has_saved_its_last_step(disturbed, name, step):
    assert disturbed.saved[name] == step, (
        f"{disturbed.script} stopped by {name} after step {step}: the checkpoint must be of this "
        f"step, but is of step {disturbed.saved[name]}\n{disturbed.lives[name].text}")


@pytest.mark.parametrize("name, step", [("SIGINT", 2), ("SIGTERM", 6)])
def test_stopped_run_says_so_once(disturbed, name, step):
    text = disturbed.lives[name].text
    count = text.count(f"stopped by a signal after step {step}\n")
    assert count == 1, (
        f"{disturbed.script} stopped by {name}: one line, by rank 0, must say 'stopped by a signal "
        f"after step {step}'\n{text}")


def test_all_processes_wait_until_rank_0_has_saved(disturbed):
    """A launcher ends the others when one process exits. Here, saving takes a second longer."""
    first_end = min(disturbed.lives["SIGINT"].ends)
    assert first_end >= disturbed.save_time, (
        f"{disturbed.script}: a process exited {disturbed.save_time - first_end:.2f} s before "
        "rank 0 had saved; its launcher would kill rank 0 meanwhile (is there a barrier?)")


def test_killed_run_resumes_from_its_last_checkpoint(disturbed):
    """It was killed after step 14. Epochs of 6 steps end at step 12, where it saves."""
    assert disturbed.saved["SIGKILL"] == 12, (
        f"{disturbed.script} saves after each epoch and was killed after step 14: the checkpoint "
        f"must be of step 12, not {disturbed.saved['SIGKILL']}")
    header = "steps 12 to 18\n"
    assert header in disturbed.lives["end"].text, (
        f"{disturbed.script} must resume from the checkpoint of step 12 and print {header!r}\n"
        f"{disturbed.lives['end'].text}")


def test_resumed_run_ends_with_status_0(disturbed):
    life = disturbed.lives["end"]
    assert life.statuses == [0] * len(life.statuses), (
        f"{disturbed.script} resumed and finished: the statuses are {life.statuses}\n{life.text}")


def test_resumed_run_has_the_weights_of_an_undisturbed_run(disturbed):
    assert load_checkpoint(disturbed.undisturbed)["step"] == TOTAL_STEPS, "the undisturbed run"
    place = f"{disturbed.script} stopped 3 times, killed and resumed, beside an undisturbed run"
    assert_equal(load_checkpoint(disturbed.checkpoint), load_checkpoint(disturbed.undisturbed),
                 place)


def test_previous_checkpoint_is_kept(disturbed):
    """The file before the last one, which was saved at the end of epoch 2."""
    step = load_checkpoint(f"{disturbed.checkpoint}.previous")["step"]
    assert step == 12, (f"{disturbed.script} saved steps 12 and 18: FILE.previous must be of step "
                        f"12, not {step}")


def test_run_that_stopped_at_the_end_of_an_epoch_evaluates_again(disturbed):
    """SIGTERM stopped it after step 6, before the evaluation of epoch 1."""
    if disturbed.script == "cpu_ddp":
        return  # it has no test set
    stopped = disturbed.lives["SIGTERM"].text
    assert "epoch 1/3  test loss" not in stopped, f"it was stopped before its evaluation\n{stopped}"
    resumed = disturbed.lives["SIGHUP"].text
    count = resumed.count("epoch 1/3  test loss")
    assert count == 1, (
        f"{disturbed.script} resumed at the end of epoch 1, whose evaluation was missed: it must "
        f"print one line 'epoch 1/3  test loss ...'\n{resumed}")


# --- a finished run ---
@pytest.mark.parametrize("script", [script for script in SCRIPTS if script != "cpu_ddp"])
def test_finished_run_is_only_evaluated(script, tmp_path):
    live(script, tmp_path / "run.pt", tmp_path / "first.txt", epochs=1)
    again = live(script, tmp_path / "run.pt", tmp_path / "again.txt", epochs=1)
    assert again.steps == [0] * len(again.steps), (
        f"{script}: the same command after the end must not train, but computed {again.steps} "
        f"steps\n{again.text}")
    count = again.text.count("epoch 1/1  test loss")
    assert count == 1, (
        f"{script}: the same command after the end must print the test loss once\n{again.text}")
    assert set(again.statuses) == {0}, (
        f"{script}: the same command after the end must end with status 0: {again.statuses}\n"
        f"{again.text}")


@pytest.mark.parametrize("script", SCRIPTS)
def test_more_epochs_continue_a_finished_run(script, tmp_path):
    live(script, tmp_path / "run.pt", tmp_path / "first.txt", epochs=1)
    longer = live(script, tmp_path / "run.pt", tmp_path / "longer.txt", epochs=2)
    assert longer.steps == [6] * len(longer.steps), (
        f"{script}: --epochs 2 after --epochs 1 must compute the 6 steps of the second epoch, not "
        f"{longer.steps}\n{longer.text}")
    assert load_checkpoint(tmp_path / "run.pt")["step"] == 12, (
        f"{script}: the checkpoint of a continued run must be of step 12\n{longer.text}")


# --- nohup, and a pipe whose reader ends ---
@pytest.mark.parametrize("script", SCRIPTS)
def test_nohup_ignores_sighup(script, tmp_path):
    """nohup starts a program with SIGHUP ignored."""
    def hang_up(rank, steps):
        os.kill(os.getpid(), signal.SIGHUP)

    life = live(script, tmp_path / "run.pt", tmp_path / "output.txt", hang_up, epochs=1, nohup=True)
    assert life.statuses == [0] * len(life.statuses), (
        f"nohup python train.py ({script}) must go on when the terminal is closed, but it ended "
        f"with {life.statuses}\n{life.text}")


@pytest.mark.parametrize("script", SCRIPTS)
def test_closed_pipe_does_not_prevent_the_save(script, tmp_path):
    """As typed: python train.py ... | head -2"""
    flags = flags_of(script, tmp_path / "run.pt", epochs=2)
    command = shlex.join(map(str, [sys.executable, script_path(script), *flags]))
    result = subprocess.run(["bash", "-c", f"{command} | head -2"], env=clean_environment(),
                            capture_output=True, text=True, timeout=START)
    assert result.stdout.count("\n") == 2, f"head must have read two lines: {result}"
    assert (tmp_path / "run.pt").exists(), (
        f"python {script}/train.py ... | head -2: the run must go on without its reader, and "
        f"save\n{result.stderr}")
    total_steps = 2 * 72 // flags[flags.index("--batch-size") + 1]
    step = load_checkpoint(tmp_path / "run.pt")["step"]
    assert step == total_steps, (
        f"python {script}/train.py ... | head -2: the run must go on without its reader up to "
        f"step {total_steps}, but the checkpoint is of step {step}\n{result.stderr}")


# --- mp.spawn: python train.py --nproc 2 ---
def start_spawn(checkpoint):
    """Start a run of two processes that ends only if it is stopped."""
    return start("fashionmnist_ddp", "--fake-data", 64, "--batch-size", 8, "--epochs", 10000,
                 "--save-every", 10000, "--log-every", 0, "--checkpoint", checkpoint,
                 launcher="spawn", nproc=2)


def pids_after(job, seconds):
    """Return the job's processes that are left after these seconds, without waiting in vain.

    multiprocessing's resource tracker ends a moment after the process that has started it.
    """
    end = time.monotonic() + seconds
    while job.pids() and time.monotonic() < end:
        time.sleep(0.1)
    return job.pids()


@pytest.mark.parametrize("name, to_group", [
    ("SIGTERM", False),  # kill PID
    ("SIGINT", True),    # Ctrl-C: the terminal's signal goes to all processes
    ("SIGHUP", True),    # a closed terminal, as well
])
def test_signal_to_mp_spawn_saves_and_ends_with_status_1(name, to_group, tmp_path):
    command = f"python fashionmnist_ddp/train.py --nproc 2 and {name}"
    with start_spawn(tmp_path / "run.pt") as job:
        job.wait_for("step 5/", START)
        if to_group:
            os.killpg(job.processes[0].pid, signal.Signals[name])
        else:
            job.send(signal.Signals[name])
        result = job.finish()
        left = pids_after(job, 20)
    assert (tmp_path / "run.pt").exists(), f"{command}: nothing was saved\n{result.text}"
    assert result.status == 1, (
        f"{command}: the exit status must be 1, not {result.status}\n{result.text}")
    assert not left, f"{command}: processes {left} are left behind\n{result.text}"


def test_killed_worker_of_mp_spawn_is_reported(tmp_path):
    """As by the kernel, where memory is short."""
    with start_spawn(tmp_path / "run.pt") as job:
        job.wait_for("step 1/", START)
        os.kill(job.workers()[1], signal.SIGKILL)
        result = job.finish()
    command = "python fashionmnist_ddp/train.py --nproc 2 with a killed worker"
    assert result.status == 1, (
        f"{command}: the status must be 1, not {result.status}\n{result.text}")
    assert len(result.errors) == 1, (
        f"{command} must print one error line, not {result.errors}\n{result.text}")
    assert "SIGKILL" in result.errors[0], (
        f"{command}: the error line must name SIGKILL: {result.errors[0]}")


# --- before the group is formed ---
@pytest.mark.parametrize("script", DDP_SCRIPTS)
def test_data_is_prepared_by_rank_0_and_then_once_on_each_machine(script):
    """Two machines of two processes: rank 0 is the first to look for the data, rank 2 is next."""
    def setup(module, rank):
        os.environ["LOCAL_RANK"] = str(rank % 2)
        events = []

        def prepare_data(args):
            events.append(("prepares", time.monotonic()))
            time.sleep(0.5)
            events.append(("has prepared", time.monotonic()))

        def load_data(*_, **options):
            events.append(("loads", time.monotonic()))
            sys.exit(0)

        module.prepare_data = prepare_data
        module.load_data = load_data
        return events

    flags = flags_of(script, "unused.pt")[:-2]  # without --checkpoint
    seen = [dict(events) for events, *_ in train(script, *flags, nproc=4, setup=setup)]
    preparing = [rank for rank in range(4) if "prepares" in seen[rank]]
    assert preparing == [0, 2], (
        f"{script} on two machines of two processes: ranks 0 and 2 must prepare the data, but it "
        f"was {preparing}")
    assert seen[0]["has prepared"] <= seen[2]["prepares"], (
        f"{script}: rank 0 must have prepared the data before the other machines begin, as a disk "
        f"may be shared: {seen}")
    first_load = min(events["loads"] for events in seen)
    assert seen[2]["has prepared"] <= first_load, (
        f"{script}: a process loads the data before each machine has it (is there a barrier?): "
        f"{seen}")


class Failed(NamedTuple):
    """A run of two processes of which rank 0 fails before the group is formed."""
    what: str  # the script, launcher and flags
    word: str  # which the error line must name
    launcher: str
    status: int
    text: str
    errors: list


@pytest.fixture(scope="module", params=[
    ("cpu_ddp", ("--checkpoint", "run.pt"), "torchrun"),
    ("cifar10_ddp", ("--data-dir", "absent"), "torchrun"),
    ("fashionmnist_ddp", ("--data-dir", "absent"), "spawn"),
    ("synthetic_ddp", ("--checkpoint", "run.pt"), "srun"),
], ids=["cpu_ddp torchrun", "cifar10_ddp torchrun", "fashionmnist_ddp spawn", "synthetic_ddp srun"])
def failed(request, tmp_path_factory):
    """A checkpoint that cannot be loaded, or no data."""
    script, flags, launcher = request.param
    folder = tmp_path_factory.mktemp("failed")
    for name in ("run.pt", "run.pt.previous"):
        (folder / name).write_text("not a checkpoint")
    timeout = ("--timeout", 5) if launcher == "srun" else ()  # nobody ends rank 1
    result = run(script, *flags, *timeout, launcher=launcher, nproc=2, cwd=folder, timeout=START)
    what = f"{script} under {launcher}, with {' '.join(flags)}"
    return Failed(what, flags[-1], launcher, result.status, result.text, result.errors)


def test_error_of_rank_0_ends_all_processes(failed):
    """Without srun itself, which would kill it, rank 1 ends after --timeout."""
    assert failed.status != 0, f"{failed.what} must not end with status 0\n{failed.text}"


def test_error_of_rank_0_is_one_line(failed):
    assert len(failed.errors) == 1, (
        f"{failed.what} must print one error line, not {len(failed.errors)}\n{failed.text}")


def test_error_line_of_rank_0_names_the_file(failed):
    assert failed.word in failed.errors[0], (
        f"{failed.what}: the error line must name {failed.word}: {failed.errors[0]}")


def test_error_of_rank_0_has_no_traceback(failed):
    """But for torchrun's own report, which comes last."""
    if failed.launcher == "srun":
        return  # without srun itself, rank 1 waits for rank 0, and says so
    own_text = failed.text.split(" failed (exitcode")[0]
    assert "Traceback" not in own_text, (
        f"{failed.what} must not print a traceback\n{failed.text}")
