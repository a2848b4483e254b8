"""cifar10_ddp's images are read by processes of a DataLoader, which change no weights.

They read each image once, start once, ignore the signals that stop a run, and end with the
training process, whatever ends it.
"""

import os
import signal
import tempfile

import pytest
import torch
import torch.multiprocessing as mp
from checkpoints import assert_equal
from copies import make_copy
from functions import load_script
from image_folder import TINY, run, write_images
from processes import start, wait_until_gone

TRAIN = 12  # images: three steps of 4 in an epoch
VAL = 5
ROTATE = [  # edits of a copy: a transform that uses Python's random numbers
    ("", """
def rotate(image, label):
    return image.rotate(random.uniform(-20, 20)), label
"""),
    ('instead of "v2.ToImage(), *steps"', "return v2.Compose([rotate, v2.ToImage(), *steps])"),
]
BUSY = ('before "return self.transforms[train_set]"', "if not train_set:\n    time.sleep(600)")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("images"), TRAIN, VAL)


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """A copy whose transforms use random numbers of torch and of Python."""
    return make_copy("cifar10_ddp", tmp_path_factory.mktemp("rotate") / "train.py", *ROTATE)


def flags_of(folder, workers, nproc=2, epochs=2):
    return ("--image-folder", folder, "--workers", workers, "--epochs", epochs,
            "--batch-size", 4 // nproc)


# --- the same weights ---
@pytest.fixture(scope="module")
def by_workers(folder, script, tmp_path_factory):
    """Train on two processes with 0 and 3 loader processes each. Return pairs (checkpoint, Run)."""
    runs = {}
    for workers in (0, 3):
        trial = tmp_path_factory.mktemp(f"workers-{workers}")
        end = run(script, trial, *flags_of(folder, workers), "--checkpoint", trial / "run.pt",
                  nproc=2)
        assert end.statuses == [0, 0], end.text
        runs[workers] = trial / "run.pt", end
    return runs


def test_loader_processes_change_no_weights_and_start_once(by_workers):
    assert_equal(by_workers[3][0], by_workers[0][0])
    _, end = by_workers[3]
    for rank in (0, 1):
        pids = {read.loader for read in end.reads if read.rank == rank}
        assert len(pids) <= 3, (
            f"the loader processes start once in a run: with --workers 3, rank {rank} has read "
            f"images in the processes {pids} in 2 epochs\n{end.text}")


def test_each_image_is_read_once_in_an_epoch(by_workers):
    _, end = by_workers[3]
    found = sorted((read.epoch, read.train_set, read.index) for read in end.reads)
    expected = [(epoch, train_set, index) for epoch in (0, 1)
                for train_set, count in ((0, VAL), (1, TRAIN)) for index in range(count)]
    assert found == expected, (
        f"all ranks together read in each epoch each image once, not (epoch, train, index) {found}")


def test_random_transforms_depend_on_seed_epoch_and_index(folder, script):
    module = load_script(script)
    flags = [str(flag) for flag in ("--image-folder", folder, *TINY)]
    data = module.SeededData(module.parse_args(flags))
    image, *others = (data[key][0] for key in (
        (0, 1, True, 2), (0, 1, True, 2), (1, 1, True, 2), (0, 2, True, 2)))
    equal = [torch.equal(image, other) for other in others]
    assert equal == [True, False, False], (
        "an image must be the same for the same seed, epoch and index, but another one for another "
        f"seed or epoch: {equal}")


# --- signals ---
@pytest.fixture(scope="module")
def stopped(folder, script, tmp_path_factory):
    """Send SIGTERM to all processes after step 4, as Slurm does, so that step 5 is the last."""
    first, second = tmp_path_factory.mktemp("first"), tmp_path_factory.mktemp("second")
    flags = (*flags_of(folder, 2), "--checkpoint", first / "run.pt")

    def send_to_all(step):
        if step == 4:
            for pid in (os.getpid(), *(process.pid for process in mp.active_children())):
                os.kill(pid, signal.SIGTERM)

    end = run(script, first, *flags, nproc=2, at_step=send_to_all)
    return first / "run.pt", end, run(script, second, *flags, nproc=2)


def test_signal_to_all_processes_stops_and_saves(stopped):
    """The loader processes ignore it: training needs their images until it has saved."""
    _, end, _ = stopped
    assert end.statuses == ["stopped by a signal after step 5", 1], (
        f"SIGTERM to training and loader processes: the run must stop and save\n{end.text}")
    assert not end.left, f"20 s after SIGTERM, the processes {end.left} are left\n{end.text}"


def test_resumed_run_repeats_the_random_transforms(by_workers, stopped):
    checkpoint, _, second = stopped
    assert second.statuses == [0, 0], second.text
    assert_equal(checkpoint, by_workers[0][0])
    count = sum(read.train_set for read in second.reads)
    assert count == 4, (f"a run that resumes after step 5 of 6 reads the 4 images of the last "
                        f"step, but it reads {count} images to train\n{second.text}")


# --- the end of a run ---
def kill_a_loader_process():
    os.kill(mp.active_children()[0].pid, signal.SIGKILL)


@pytest.mark.parametrize("name, act, message", [
    ("signal", lambda: os.kill(os.getpid(), signal.SIGTERM), "stopped by a signal after step "),
    ("killed loader process", kill_a_loader_process, "Traceback"),
], ids=str)
def test_run_ends_while_its_loader_processes_are_busy(folder, tmp_path, name, act, message):
    """They would read test images for ten minutes."""
    copy = make_copy("cifar10_ddp", tmp_path / "train.py", BUSY)
    end = run(copy, tmp_path, *flags_of(folder, 2, nproc=1), at_step=lambda step: act())
    assert message in end.text, f"{name}: the run must end with {message!r}\n{end.text}"
    assert act is kill_a_loader_process or "DataLoader worker" not in end.text, (
        f"{name}: DataLoader must not raise another error\n{end.text}")
    assert not end.left, f"{name}: the loader processes {end.left} are left\n{end.text}"


def test_killed_training_process_leaves_no_process(folder, tmp_path):
    end = run("cifar10_ddp", tmp_path, *flags_of(folder, 2, nproc=1, epochs=100),
              at_step=lambda step: step == 5 and os.kill(os.getpid(), signal.SIGKILL))
    assert end.reads, f"no image was read\n{end.text}"
    assert not end.left, (
        f"20 s after SIGKILL of the training process, its loader processes {end.left} are left\n"
        f"{end.text}")


def test_loader_that_cannot_hand_over_a_batch_ends_the_run(folder, tmp_path):
    """The path of a socket has at most 107 characters, and a loader process makes one."""
    def set_long_path(module, rank):
        tempfile.tempdir = str(tmp_path / ("x" * 80))  # as TMPDIR does
        os.mkdir(tempfile.tempdir)

    end = run("cifar10_ddp", tmp_path, *flags_of(folder, 2, nproc=1), "--timeout", 5,
              prepare=set_long_path)
    assert "timed out after 5 seconds" in end.text, (
        f"with a long TMPDIR, the run must end with an error after --timeout 5\n{end.text}")
    assert not end.left, f"20 s after the end, the processes {end.left} are left\n{end.text}"


def test_start_method_spawn(folder, tmp_path):
    """That of macOS. It and Python 3.14's forkserver pickle what they give to loader processes."""
    flags = flags_of(folder, 1, nproc=1)
    forked = run("cifar10_ddp", tmp_path, *flags, "--checkpoint", tmp_path / "forked.pt")
    assert forked.statuses == [0], forked.text
    copy = make_copy("cifar10_ddp", tmp_path / "train.py",
                     ('instead of "mp.set_start_method"', 'mp.set_start_method("spawn")'))
    with start(copy, *TINY, *flags, "--checkpoint", tmp_path / "run.pt",
               env={"OMP_NUM_THREADS": 1}) as job:
        result = job.finish()
        wait_until_gone(job, "start method spawn")
    assert result.status == 0, f"start method spawn: status {result.status}\n{result.text}"
    assert_equal(tmp_path / "run.pt", tmp_path / "forked.pt")
