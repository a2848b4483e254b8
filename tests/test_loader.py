"""cifar10_ddp's images are read by processes of a DataLoader, which change no weights.

They are read by index, each once. The processes start once, ignore the signals that stop a run,
and end with the training process, whatever ends it.
"""

import os
import signal
import sys
import time
import traceback
from typing import NamedTuple

import pytest
import torch
import torch.multiprocessing as mp
from checkpoints import assert_equal, load_checkpoint
from functions import load_script, train, watch
from image_folder import TINY, edited_copy, left_after, living, print_to, write_images
from processes import start
from torch.multiprocessing import ProcessExitedException
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data._utils import signal_handling

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
TRAIN = 12  # images: three steps of 4 in an epoch
VAL = 5
STEPS = 3

# Edits of a copy, as pairs (old text, new text)
ROTATE = ("def transforms(args, train_set):\n", '''def rotate(image):
    return image.rotate(random.uniform(-20, 20))


def transforms(args, train_set):
    return v2.Compose([rotate, unrotated(args, train_set)])


def unrotated(args, train_set):
''')
READ = "        _, _, train_set, index = key\n"
BUSY = (READ, READ + '''        if not train_set and torch.utils.data.get_worker_info():
            time.sleep(600)
''')
RAISES = (READ, READ + '''        if not train_set and torch.utils.data.get_worker_info():
            if torch.utils.data.get_worker_info().id == 1:
                raise ValueError("no such image")
            time.sleep(600)
''')
SLOW = (READ, READ + "        time.sleep(0.2)\n")
STEP = "            step += 1\n"
FAILS = (STEP, STEP + '''            if step == 2:
                raise ValueError("a bug in training")
''')
SIGNALS_TO_LOADER = (STEP, STEP + '''            if step == 2:
                for process in mp.active_children():
                    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                        os.kill(process.pid, signum)
''')
MAIN = "def main():\n"


def start_method(name):
    return MAIN, f'{MAIN}    mp.set_start_method("{name}")\n'


# --- runs of processes that are forked from this one, as python train.py ---
class Read(NamedTuple):
    """A loader process has read an image."""
    rank: int
    epoch: int
    train_set: bool
    index: int


class Life(NamedTuple):
    """What was seen of a run from its start to its end."""
    statuses: list  # of each rank, as Python's; empty if one was killed; or that they did not end
    text: str  # of all ranks and loader processes
    reads: list
    loaders: dict  # from (rank, step) to the ids of its loader processes
    left: list  # the loader processes that are left 10 s after the end

    def keys(self, epoch, train_set, rank=None):
        """Return the indices of the images that were read."""
        found = [read.index for read in self.reads
                 if (read.epoch, read.train_set) == (epoch, train_set)
                 and rank in (None, read.rank)]
        return sorted(found)


def nothing(_):
    """Do nothing: for prepare and at_step."""


def live(script, log, *flags, nproc=1, prepare=nothing, at_step=nothing):
    """Run a script in forked processes. Call prepare(module), and at_step(step) after each step.

    log is a path for what they print. What they do is noted in files beside it.
    """
    def setup(module, rank):
        mp.set_start_method("fork", force=True)  # a module of load_script cannot be pickled
        print_to(log)
        training_process = os.getpid()
        steps = []

        def see_read(data, key):
            if os.getpid() != training_process:
                note(f"{log}.reads", rank, *key[1:])

        def after_step(*_):
            steps.append(True)
            pids = sorted(process.pid for process in mp.active_children())
            note(f"{log}.loaders", rank, len(steps), *pids)
            at_step(len(steps))

        def main():
            try:
                script_main()
            except Exception:
                traceback.print_exc()
                sys.exit(1)

        script_main = module.main
        module.main = main
        watch(module.SeededData, "__getitem__", see_read)
        register_optimizer_step_post_hook(after_step)
        prepare(module)

    statuses = []
    try:
        ranks = train(script, *TINY, *flags, nproc=nproc, setup=setup)
        statuses = [code for _, code, _ in ranks]
    except ProcessExitedException:
        pass
    except AssertionError as error:  # fork has waited in vain
        statuses = [str(error)]
    finally:
        loaders = {(rank, step): pids for rank, step, *pids in notes(f"{log}.loaders")}
        left = left_after(10, lambda: living(set(sum(loaders.values(), []))))
        for pid in left:
            os.kill(pid, signal.SIGKILL)
    text = log.read_text()
    text += "".join(f"{code}\n" for code in statuses if isinstance(code, str))  # of sys.exit
    reads = [Read(rank, epoch, bool(train_set), index)
             for rank, epoch, train_set, index in notes(f"{log}.reads")]
    return Life(statuses, text, reads, loaders, left)


def note(path, *numbers):
    """Append a line of integers to a file, in one write."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(file, f"{' '.join(str(int(number)) for number in numbers)}\n".encode())
    os.close(file)


def notes(path):
    """Return the lines of such a file as lists of integers."""
    if not os.path.exists(path):
        return []
    with open(path) as file:
        return [[int(number) for number in line.split()] for line in file]


# --- the same weights ---
@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("images"), TRAIN, VAL)


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """A copy whose transforms use random numbers of torch and of Python."""
    return edited_copy(tmp_path_factory.mktemp("rotate"), ROTATE)


def flags_of(folder, workers, nproc=2, epochs=2):
    return ("--image-folder", folder, "--workers", workers, "--epochs", epochs,
            "--batch-size", 4 // nproc)


@pytest.fixture(scope="module")
def by_workers(folder, script, tmp_path_factory):
    """Train on two processes with 0, 1 and 3 loader processes each. Return (checkpoint, Life)."""
    runs = {}
    for workers in (0, 1, 3):
        checkpoint = tmp_path_factory.mktemp(f"workers-{workers}") / "run.pt"
        life = live(script, checkpoint.with_name("log"), *flags_of(folder, workers),
                    "--checkpoint", checkpoint, nproc=2)
        assert life.statuses == [0, 0], life.text
        runs[workers] = checkpoint, life
    return runs


@pytest.mark.parametrize("workers", [1, 3])
def test_weights_do_not_depend_on_workers(by_workers, workers):
    place = f"the run with --workers {workers}, beside that with --workers 0: checkpoint"
    assert_equal(load_checkpoint(by_workers[workers][0]), load_checkpoint(by_workers[0][0]), place)


@pytest.mark.parametrize("workers", [1, 3])
def test_loader_processes_start_once(by_workers, workers):
    _, life = by_workers[workers]
    for rank in (0, 1):
        pids = [life.loaders[rank, step] for step in range(1, 2 * STEPS + 1)]
        assert len(pids[0]) == workers, (
            f"--workers {workers}: rank {rank} has the loader processes {pids[0]}")
        assert pids == [pids[0]] * len(pids), (
            f"the loader processes start once in a run: those of rank {rank} in each of its "
            f"{2 * STEPS} steps are {pids}\n{life.text}")


@pytest.mark.parametrize("epoch", [0, 1])
def test_each_image_is_read_once_in_an_epoch(by_workers, epoch):
    _, life = by_workers[3]
    assert life.keys(epoch, True) == list(range(TRAIN)), (
        f"all ranks together read each of {TRAIN} images to train once in epoch {epoch + 1}, not "
        f"{life.keys(epoch, True)}")
    assert life.keys(epoch, False) == list(range(VAL)), (
        f"all ranks together read each of {VAL} images to test once in epoch {epoch + 1}, not "
        f"{life.keys(epoch, False)}")


@pytest.mark.parametrize("rank, tested", [(0, 3), (1, 2)])
def test_each_rank_reads_only_its_share(by_workers, rank, tested):
    _, life = by_workers[3]
    for epoch in (0, 1):
        indices = life.keys(epoch, True, rank)
        assert len(indices) == TRAIN // 2, (
            f"each of 2 ranks reads half of {TRAIN} images to train, but in epoch {epoch + 1} "
            f"rank {rank} reads {indices}")
        indices = life.keys(epoch, False, rank)
        assert len(indices) == tested, (
            f"of {VAL} images to test, rank {rank} reads {tested}, but in epoch {epoch + 1} it "
            f"reads {indices}")


@pytest.fixture(scope="module")
def data(folder, script):
    """The data set of a copy whose transforms use random numbers of torch and of Python."""
    module = load_script(script)
    flags = [str(flag) for flag in ("--image-folder", folder, *TINY)]
    return module.SeededData(module.parse_args(flags))


def test_transforms_are_repeated(data):
    first, _ = data[0, 1, True, 2]
    second, _ = data[0, 1, True, 2]
    assert torch.equal(first, second), (
        "the random transforms of an image depend on seed, epoch and index only, but reading it "
        f"twice gives pixels that differ by {first.sub(second).abs().max()}")


@pytest.mark.parametrize("other", [(1, 1, True, 2), (0, 2, True, 2)], ids=["seed", "epoch"])
def test_transforms_differ(data, other):
    first, _ = data[0, 1, True, 2]
    second, _ = data[other]
    assert not torch.equal(first, second), (
        f"image 2 must be transformed in another way with (seed, epoch, ...) {other} than with "
        f"{(0, 1, True, 2)}")


@pytest.fixture(scope="module")
def stopped_and_resumed(folder, script, tmp_path_factory):
    """Stop after step 4, the first of epoch 2, and resume. Return the checkpoint and both Lives."""
    checkpoint = tmp_path_factory.mktemp("resumed") / "run.pt"

    def stop_after_step_4(step):
        if step == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    flags = (*flags_of(folder, 2), "--checkpoint", checkpoint)
    first = live(script, checkpoint.with_name("first"), *flags, nproc=2, at_step=stop_after_step_4)
    second = live(script, checkpoint.with_name("second"), *flags, nproc=2)
    return checkpoint, first, second


def test_resumed_run_repeats_the_random_transforms(by_workers, stopped_and_resumed):
    checkpoint, first, second = stopped_and_resumed
    assert "stopped by a signal after step 4\n" in first.text, first.text
    assert second.statuses == [0, 0], second.text
    place = ("the run that was stopped and resumed in mid-epoch, with transforms that use torch's "
             "and Python's random numbers, beside an undisturbed one: checkpoint")
    assert_equal(load_checkpoint(checkpoint), load_checkpoint(by_workers[0][0]), place)


def test_resume_in_mid_epoch_reads_no_image_that_is_not_used(stopped_and_resumed):
    *_, second = stopped_and_resumed
    used = (STEPS - 1) * 4
    assert len(second.keys(1, True)) == used, (
        f"a run that resumes after step 1 of epoch 2 reads the {used} images of the other steps, "
        f"but it reads {second.keys(1, True)}")
    earlier = [read for read in second.reads if read.epoch == 0]
    assert not earlier, f"a run that resumes in epoch 2 reads images of epoch 1: {earlier}"


# --- signals to loader processes ---
@pytest.fixture(scope="module")
def signalled(folder, script, tmp_path_factory):
    """Send each signal to the loader processes after step 2, when both have worked."""
    checkpoint = tmp_path_factory.mktemp("signalled") / "run.pt"

    def send(step):
        if step == 2:
            for process in mp.active_children():
                for signum in SIGNALS:
                    os.kill(process.pid, signum)

    life = live(script, checkpoint.with_name("log"), *flags_of(folder, 2, nproc=1),
                "--checkpoint", checkpoint, at_step=send)
    return checkpoint, life


def test_loader_processes_ignore_signals(signalled):
    _, life = signalled
    assert life.statuses == [0], (
        "a loader process ignores SIGTERM, SIGINT and SIGHUP, and the run goes on to its end; "
        f"it ended with {life.statuses}\n{life.text}")


def test_no_loader_process_is_left_at_the_normal_end(signalled):
    _, life = signalled
    assert not life.left, (
        f"10 s after the normal end, the loader processes {life.left} are left\n{life.text}")


def test_signal_while_the_loader_starts_is_not_lost(folder, tmp_path):
    """The training process gets it when it starts its loader."""
    def send_first(module):
        def send(*_):
            os.kill(os.getpid(), signal.SIGTERM)
        watch(module, "DataLoader", send)

    life = live("cifar10_ddp", tmp_path / "log", *flags_of(folder, 1, 1), prepare=send_first)
    assert life.statuses != [0], (
        "SIGTERM to the training process while it starts its loader processes must stop the run, "
        f"but it trains to its end\n{life.text}")
    assert not life.left, f"10 s after the end, the loader processes {life.left} are left"


def test_signal_to_a_loader_process_that_starts_is_ignored(folder, tmp_path):
    """Each one gets it when torch has just set its own handler of SIGTERM."""
    def send_later(module):
        set_handlers = signal_handling._set_worker_signal_handlers

        def set_handlers_and_send():
            set_handlers()
            os.kill(os.getpid(), signal.SIGTERM)

        signal_handling._set_worker_signal_handlers = set_handlers_and_send

    life = live("cifar10_ddp", tmp_path / "log", *flags_of(folder, 2, 1), prepare=send_later)
    assert life.statuses == [0], (
        "a loader process ignores SIGTERM from its start on, also where torch sets its handler; "
        f"the run ended with {life.statuses}\n{life.text}")


# --- the end of a run, while a loader process is busy ---
class End(NamedTuple):
    """A way in which a run ends."""
    edit: tuple  # of the copy: what its loader processes do with test images, from step 1 on
    at_step_1: object  # what the training process does after step 1
    statuses: list
    message: str  # in what is printed


def fail():
    raise ValueError("a bug in training")


def kill_a_loader_process():
    os.kill(mp.active_children()[0].pid, signal.SIGKILL)


ENDS = {
    "exception in training": End(BUSY, fail, [1], "ValueError: a bug in training"),
    "sys.exit": End(BUSY, lambda: sys.exit(3), [3], ""),
    "signal": End(BUSY, lambda: os.kill(os.getpid(), signal.SIGTERM), [1],
                  "stopped by a signal after step 1\n"),
    "exception in __getitem__": End(RAISES, lambda: None, [1], "ValueError: no such image"),
    "killed loader process": End(BUSY, kill_a_loader_process, [1], "Traceback"),
    "killed training process": End(BUSY, lambda: os.kill(os.getpid(), signal.SIGKILL), [], ""),
}


@pytest.fixture(scope="module", params=ENDS)
def ended(request, folder, tmp_path_factory):
    """Run a copy on one process, whose loader processes are busy for ten minutes at its end."""
    end = ENDS[request.param]
    trial = tmp_path_factory.mktemp("end")

    def at_step(step):
        if step == 1:
            end.at_step_1()

    life = live(edited_copy(trial, end.edit), trial / "log", *flags_of(folder, 2, nproc=1),
                "--save-every", 10, at_step=at_step)
    return request.param, end, life


def test_run_ends_while_a_loader_process_is_busy(ended):
    name, end, life = ended
    assert life.statuses == end.statuses, (
        f"{name}: the statuses must be {end.statuses}, not {life.statuses}\n{life.text}")


def test_end_says_its_cause(ended):
    name, end, life = ended
    assert end.message in life.text, f"{name}: {end.message!r} must be printed\n{life.text}"


def test_busy_loader_processes_are_not_left(ended):
    name, _, life = ended
    assert life.loaders[0, 1], f"{name}: there are no loader processes after step 1\n{life.text}"
    assert not life.left, (
        f"{name}: 10 s after the end of the training process, its loader processes {life.left} "
        f"are left\n{life.text}")


# --- the same under python and torchrun, as they are typed ---
class Outcome(NamedTuple):
    status: int
    text: str
    left: list  # the processes that are left 10 s after the end


def launch(script, *flags, **how):
    """Start a script as users do, with two loader processes. It computes with one thread."""
    env = {"SLURM_CPUS_ON_NODE": how.get("nproc", 1)}
    return start(script, *TINY, *flags, env=env, **how)


def end_of(job, timeout=120):
    result = job.finish(timeout)
    return Outcome(result.status, result.text, left_after(10, job.pids))


LAUNCHERS = [("python", 1), ("torchrun", 2)]


@pytest.fixture(scope="module", params=LAUNCHERS, ids=["python", "torchrun"])
def failed(request, folder, tmp_path_factory):
    """Raise an exception in training, while the loader processes are busy."""
    launcher, nproc = request.param
    copy = edited_copy(tmp_path_factory.mktemp("failed"), BUSY, FAILS)
    with launch(copy, *flags_of(folder, 2, nproc), launcher=launcher, nproc=nproc) as job:
        return launcher, end_of(job)


def test_exception_in_training_ends_the_run(failed):
    launcher, end = failed
    assert end.status == 1, (f"{launcher}: an exception in training must end the run with status "
                             f"1, not {end.status}\n{end.text}")


def test_exception_in_training_leaves_no_process(failed):
    launcher, end = failed
    assert not end.left, (
        f"{launcher}: 10 s after an exception, the processes {end.left} are left\n{end.text}")


def test_exception_in_training_is_not_followed_by_others(failed):
    launcher, end = failed
    others = [line for line in end.text.splitlines() if "DataLoader worker" in line]
    assert not others, (f"{launcher}: the exception in training is the only one, but DataLoader "
                        f"adds {others}\n{end.text}")


@pytest.fixture(scope="module")
def stopped_group(folder, script, tmp_path_factory):
    """Send SIGTERM to all processes of a job at once, as Slurm does, in mid-epoch. Resume it."""
    trial = tmp_path_factory.mktemp("group")
    copy = edited_copy(trial, ROTATE, SLOW)
    flags = (*flags_of(folder, 2), "--checkpoint", trial / "run.pt")
    with launch(copy, *flags, launcher="torchrun", nproc=2) as job:
        job.wait_for("step 4/6 ")
        for pid in job.pids():
            os.kill(pid, signal.SIGTERM)
        end = end_of(job)
    saved = load_checkpoint(trial / "run.pt")["step"]
    second = live(script, trial / "second", *flags, nproc=2)
    return trial / "run.pt", end, saved, second


def test_signal_to_all_processes_stops_and_saves(stopped_group):
    _, end, saved, _ = stopped_group
    assert f"stopped by a signal after step {saved}\n" in end.text, (
        f"SIGTERM to torchrun, the training and the loader processes: the run must stop and save; "
        f"its checkpoint is of step {saved}\n{end.text}")
    assert end.status == 1, f"the status must be 1, not {end.status}\n{end.text}"


def test_signal_to_all_processes_leaves_none(stopped_group):
    _, end, *_ = stopped_group
    assert not end.left, (f"10 s after SIGTERM has stopped it, the processes {end.left} are left\n"
                          f"{end.text}")


def test_run_stopped_by_a_signal_to_all_processes_resumes(by_workers, stopped_group):
    checkpoint, *_, second = stopped_group
    assert second.statuses == [0, 0], second.text
    place = "the run whose processes all got SIGTERM, beside an undisturbed one: checkpoint"
    assert_equal(load_checkpoint(checkpoint), load_checkpoint(by_workers[0][0]), place)


def test_killed_torchrun_leaves_no_process(folder, tmp_path):
    copy = edited_copy(tmp_path, SLOW)
    with launch(copy, *flags_of(folder, 2, epochs=200), launcher="torchrun", nproc=2) as job:
        job.wait_for("step 2/")
        job.send(signal.SIGKILL)
        left = left_after(10, job.pids)
        assert not left, f"10 s after SIGKILL of torchrun, {left} are left\n{job.text}"


def test_killed_training_process_under_torchrun_leaves_no_loader_process(folder, tmp_path):
    copy = edited_copy(tmp_path, BUSY)
    with launch(copy, *flags_of(folder, 2), launcher="torchrun", nproc=2) as job:
        job.wait_for("step 3/")
        ranks = children_of(job.processes[0].pid)
        loaders = children_of(ranks[1])
        assert len(loaders) == 2, f"rank 1 has the loader processes {loaders}\n{job.text}"
        os.kill(ranks[1], signal.SIGKILL)
        left = left_after(10, lambda: living(loaders))
        assert not left, (f"10 s after SIGKILL of a training process, its loader processes {left} "
                          f"are left\n{job.text}")


def children_of(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(word) for word in file.read().split()]


# --- other start methods than fork: of macOS, and of Python 3.14 ---
@pytest.fixture(scope="module")
def forked(folder, tmp_path_factory):
    checkpoint = tmp_path_factory.mktemp("fork") / "run.pt"
    life = live("cifar10_ddp", checkpoint.with_name("log"), *flags_of(folder, 1, 1),
                "--checkpoint", checkpoint)
    assert life.statuses == [0], life.text
    return checkpoint


@pytest.mark.parametrize("name", ["spawn", "forkserver"])
def test_weights_do_not_depend_on_the_start_method(forked, folder, tmp_path, name):
    """The loader process also gets the signals that stop a run, and ignores them."""
    checkpoint = tmp_path / "run.pt"
    copy = edited_copy(tmp_path, start_method(name), SIGNALS_TO_LOADER)
    with launch(copy, *flags_of(folder, 1, 1), "--checkpoint", checkpoint) as job:
        end = end_of(job)
    assert end.status == 0, (
        f"start method {name}, signals to the loader process: status {end.status}\n{end.text}")
    assert not end.left, f"start method {name}: {end.left} are left\n{end.text}"
    place = f"the run with the start method {name}, beside one with fork: checkpoint"
    assert_equal(load_checkpoint(checkpoint), load_checkpoint(forked), place)


def test_killed_training_process_with_forkserver_leaves_no_process(folder, tmp_path):
    copy = edited_copy(tmp_path, BUSY, start_method("forkserver"))
    with launch(copy, *flags_of(folder, 1, 1)) as job:
        job.wait_for("step 3/")
        job.send(signal.SIGKILL)
        left = left_after(10, job.pids)
        assert not left, (f"forkserver: 10 s after SIGKILL of the training process, {left} are "
                          f"left\n{job.text}")


def test_signal_while_a_forkserver_starts_stops_the_run(folder, tmp_path):
    """It is sent to all processes as soon as there are several."""
    copy = edited_copy(tmp_path, start_method("forkserver"))
    with launch(copy, *flags_of(folder, 1, 1)) as job:
        end = time.monotonic() + 90
        while len(job.pids()) < 2 and time.monotonic() < end:
            time.sleep(0.01)
        pids = job.pids()
        assert len(pids) > 1, f"no fork server has started within 90 s\n{job.text}"
        for pid in pids:
            os.kill(pid, signal.SIGTERM)
        end = end_of(job, 60)
    assert end.status != 0, f"stopped while its loader starts, but the status is 0\n{end.text}"
    assert not end.left, f"10 s after the end, the processes {end.left} are left\n{end.text}"
