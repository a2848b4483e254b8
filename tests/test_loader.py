"""Processes of a DataLoader read samples. They change no weights, and end with the run."""

import os
import select
import signal
import tempfile
from multiprocessing.process import BaseProcess

import pytest
import torch.multiprocessing as mp
from checkpoints import assert_equal
from copies import make_copy
from forked import at_step, signal_after, train_forked, train_to_end, watch
from image_folder import TINY, write_images
from launchers import start, wait_until_gone
from recorder import use_small_model
from torch.utils.data._utils import signal_handling


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("images"), val=40)


def flags_of(folder, workers, *more, nproc=1, epochs=2):
    """Return flags for three steps of 4 images in an epoch."""
    return (*TINY, "--image-folder", folder, "--workers", workers, "--epochs", epochs,
            "--batch-size", 4 // nproc, *more)


def train_and_wait(*arguments, **options):
    """Call train_forked(). Its processes must end within 20 s, and those that they have started."""
    read, write = os.pipe()  # each of them inherits it, and closes it when it ends
    end = train_forked(*arguments, **options)
    os.close(write)
    load = os.getloadavg()[0] / os.cpu_count()  # where others use the cores, it takes longer
    ended, _, _ = select.select([read], [], [], 20 * max(1, load))
    os.close(read)
    assert ended, f"20 s after the end of training, its loader processes are left\n{end.text}"
    return end


# --- the same weights ---
@pytest.fixture(scope="module")
def undisturbed(folder, tmp_path_factory):
    """Train on two processes, without loader processes. Return the checkpoint."""
    path = tmp_path_factory.mktemp("undisturbed") / "run.pt"
    train_to_end("cifar10_ddp", *flags_of(folder, 0, "--checkpoint", path, nproc=2), nproc=2)
    return path


def test_by_default_a_process_has_a_loader_process_for_each_of_its_cores():
    def setup(module, rank):
        use_small_model(module)
        started = []
        os.environ.update(LOCAL_WORLD_SIZE="2")
        os.sched_getaffinity = lambda pid: set(range(6))
        watch(BaseProcess, "start", lambda process: started.append(process.name))
        return started

    flags = ("--fake-data", 64, "--batch-size", 16, "--epochs", 1)
    (started,) = train_to_end("cifar10_ddp", *flags, setup=setup).results
    assert len(started) == 2 * 3, (
        f"2 processes share 6 cores: each loads images in 3, and test images, not in {started}")


def test_loader_processes_change_no_weights_and_start_once(undisturbed, folder, tmp_path):
    def note_processes(module, rank):
        started = []
        watch(BaseProcess, "start", lambda process: started.append(process.name))
        return started

    flags = flags_of(folder, 3, "--checkpoint", tmp_path / "run.pt", nproc=2)
    started = train_to_end("cifar10_ddp", *flags, nproc=2, setup=note_processes).results
    assert_equal(tmp_path / "run.pt", undisturbed, "with loader processes, the checkpoint")
    counts = [len(of_rank) for of_rank in started]
    assert counts == [6, 6], f"--workers 3, to train and to test: ranks start {counts} processes"


# --- signals ---
def test_signal_to_all_processes_stops_saves_and_a_resume_repeats_the_transforms(
        undisturbed, folder, tmp_path):
    """As Slurm and terminals send them, here in the first evaluation, after three steps.

    Loader processes ignore them: the evaluation has more batches than are read ahead.
    """
    def setup(module, rank):
        def send_to_all(args, model, *_):
            if not model.training and not sent:
                sent.append(True)
                for process in mp.active_children():
                    for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
                        os.kill(process.pid, signum)
                signal.raise_signal(signal.SIGTERM)

        sent = []
        watch(module, "loss_and_counts", send_to_all)

    flags = flags_of(folder, 2, "--checkpoint", tmp_path / "run.pt", nproc=2)
    end = train_and_wait("cifar10_ddp", *flags, nproc=2, setup=setup)
    assert end.statuses == ["stopped by a signal after step 4", 1], (
        f"signals to all processes in an evaluation: the run must stop and save\n{end.text}")
    train_to_end("cifar10_ddp", *flags, nproc=2)
    assert_equal(tmp_path / "run.pt", undisturbed, "stopped and resumed, the checkpoint")


# --- the end of a run ---
def test_run_is_stopped_while_its_loader_processes_are_busy(folder, tmp_path):
    """They would read an image of the second epoch each for longer than train_forked() waits."""
    copy = make_copy("cifar10_ddp", tmp_path / "train.py", (
        'before "return self.transform(*self.data"',
        "if key[1] == 1 and index % 4 == 0:\n    time.sleep(150)"))
    end = train_and_wait(copy, *flags_of(folder, 2),
                         setup=lambda *_: at_step(lambda step: signal.raise_signal(signal.SIGTERM)))
    assert "stopped by a signal after step " in str(end.statuses), (
        f"SIGTERM must stop a run\n{end.text}")
    assert "DataLoader worker" not in end.text, f"DataLoader raises another error\n{end.text}"


def test_killed_training_process_leaves_no_process(folder):
    train_and_wait("cifar10_ddp", *flags_of(folder, 2, epochs=100),
                   setup=lambda *_: signal_after(5, signal.SIGKILL))


def test_loader_that_cannot_hand_over_a_batch_ends_the_run(folder, tmp_path):
    """The path of a socket has at most 107 characters, and a loader process makes one."""
    def set_long_path(module, rank):
        tempfile.tempdir = str(tmp_path / ("x" * 80))  # as TMPDIR does
        os.mkdir(tempfile.tempdir)

    end = train_and_wait("cifar10_ddp", *flags_of(folder, 2, "--timeout", 5), setup=set_long_path)
    assert "timed out after 5 seconds" in end.text, (
        f"with a long TMPDIR, the run must end with an error after --timeout 5\n{end.text}")


def test_start_method_spawn(folder, tmp_path):
    """That of macOS. It and Python 3.14's forkserver pickle what they give to loader processes."""
    copy = make_copy("cifar10_ddp", tmp_path / "train.py",
                     ('instead of "context = "fork" if"', 'context = "spawn" if workers else None'))
    with start(copy, *flags_of(folder, 1)) as job:
        result = job.result()
        wait_until_gone(job, "start method spawn")
    assert result.status == 0, (
        f"with start method spawn, a run ends with status {result.status}\n{result.text}")


DAMAGED = """
class Damaged(TensorDataset):
    def __getitem__(self, index):
        if index == 100:
            raise RuntimeError("damaged on purpose")
        return super().__getitem__(index)


load_tensors = load_data


def load_data(args):
    sets = list(load_tensors(args))
    sets[{number}] = Damaged(*sets[{number}].tensors)
    return sets
"""


@pytest.mark.parametrize("launcher, nproc, number", [("python", 1, 0), ("torchrun", 2, 1)])
def test_a_sample_that_cannot_be_read_ends_synthetic_ddp(launcher, nproc, number, tmp_path):
    """A training sample, or a test sample, on one rank.

    Else, Python would wait at its end for the loader processes, which ignore SIGTERM.
    """
    copy = make_copy("synthetic_ddp", tmp_path / "train.py", (None, DAMAGED.format(number=number)))
    with start(copy, launcher=launcher, nproc=nproc) as job:
        result = job.result()
        wait_until_gone(job, "a sample that cannot be read")
    assert result.status != 0 and "damaged on purpose" in result.text, (
        f"a sample cannot be read: status {result.status}\n{result.text}")


def test_loader_processes_of_synthetic_ddp_ignore_signals_from_their_start():
    """They start in each epoch: a signal often comes when PyTorch has just made it end them."""
    def setup(module, rank):
        set_handlers = signal_handling._set_worker_signal_handlers

        def set_handlers_and_signal():
            set_handlers()
            for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                os.kill(os.getpid(), signum)

        signal_handling._set_worker_signal_handlers = set_handlers_and_signal

    train_to_end("synthetic_ddp", "--samples", 64, "--epochs", 2, "--workers", 1, setup=setup)
