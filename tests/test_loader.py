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
from checkpoints import assert_equal, load_checkpoint
from functions import load_script
from image_folder import TINY, edited_copy, left_after, run, write_images
from processes import start

TRAIN = 12  # images: three steps of 4 in an epoch
VAL = 5
STEPS = 3

# Edits of a copy, as pairs (old text, new text)
ROTATE = ("def transforms(args, train_set):\n", '''def rotate(image, label):
    return image.rotate(random.uniform(-20, 20)), label


def transforms(args, train_set):
    return v2.Compose([rotate, unrotated(args, train_set)])


def unrotated(args, train_set):
''')
READ = "        _, _, train_set, index = key\n"
BUSY = (READ, f"{READ}        if not train_set:\n            time.sleep(600)\n")
FORK = 'mp.set_start_method("fork")'


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


# --- the same weights ---
@pytest.fixture(scope="module")
def by_workers(folder, script, tmp_path_factory):
    """Train on two processes with 0, 1 and 3 loader processes each. Return (checkpoint, Run)."""
    runs = {}
    for workers in (0, 1, 3):
        trial = tmp_path_factory.mktemp(f"workers-{workers}")
        end = run(script, trial, *flags_of(folder, workers), "--checkpoint", trial / "run.pt",
                  nproc=2)
        assert end.statuses == [0, 0], end.text
        runs[workers] = trial / "run.pt", end
    return runs


@pytest.mark.parametrize("workers", [1, 3])
def test_weights_do_not_depend_on_workers(by_workers, workers):
    place = f"the run with --workers {workers}, beside that with --workers 0: checkpoint"
    assert_equal(load_checkpoint(by_workers[workers][0]), load_checkpoint(by_workers[0][0]), place)


@pytest.mark.parametrize("workers", [1, 3])
def test_loader_processes_start_once(by_workers, workers):
    _, end = by_workers[workers]
    for rank in (0, 1):
        pids = {read.pid for read in end.reads if read.rank == rank}
        assert len(pids) <= workers, (
            f"the loader processes start once in a run: with --workers {workers}, rank {rank} has "
            f"read images in the processes {pids} in 2 epochs\n{end.text}")


@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize("train_set, count", [(True, TRAIN), (False, VAL)])
def test_each_image_is_read_once_in_an_epoch(by_workers, epoch, train_set, count):
    _, end = by_workers[3]
    indices = sorted(read.index for read in end.reads
                     if (read.epoch, read.train_set) == (epoch, train_set))
    assert indices == list(range(count)), (
        f"all ranks together read each of {count} images once in epoch {epoch + 1}, not {indices}")


@pytest.mark.parametrize("other, same", [((0, 1, True, 2), True), ((1, 1, True, 2), False),
                                         ((0, 2, True, 2), False)])
def test_random_transforms_depend_on_seed_epoch_and_index(folder, script, other, same):
    module = load_script(script)
    flags = [str(flag) for flag in ("--image-folder", folder, *TINY)]
    data = module.SeededData(module.parse_args(flags))
    image, _ = data[0, 1, True, 2]
    random_image, _ = data[other]
    assert torch.equal(image, random_image) == same, (
        f"the pixels for the key (0, 1, True, 2) must be {'' if same else 'other than '}those for "
        f"{other}")


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
    place = ("the run that was stopped and resumed in mid-epoch, with transforms that use torch's "
             "and Python's random numbers, beside an undisturbed one: checkpoint")
    assert_equal(load_checkpoint(checkpoint), load_checkpoint(by_workers[0][0]), place)


def test_resume_reads_no_image_that_is_not_used(stopped):
    *_, second = stopped
    count = sum(read.train_set for read in second.reads)
    assert count == 4, (f"a run that resumes after step 5 of {2 * STEPS} reads the 4 images of the "
                        f"last step, but it reads {count} images to train\n{second.text}")


# --- the end of a run ---
def fail():
    raise ValueError("a bug in training")


def kill_a_loader_process():
    os.kill(mp.active_children()[0].pid, signal.SIGKILL)


# What happens after each step, and what is printed
ENDS = {
    "exception in training": (fail, "ValueError: a bug in training"),
    "sys.exit": (lambda: exit(3), "[3]"),
    "signal": (lambda: os.kill(os.getpid(), signal.SIGTERM), "stopped by a signal after step "),
    "killed loader process": (kill_a_loader_process, "Traceback"),
}


@pytest.mark.parametrize("name", ENDS)
def test_run_ends_while_its_loader_processes_are_busy(folder, tmp_path, name):
    """They would read test images for ten minutes."""
    act, message = ENDS[name]
    end = run(edited_copy(tmp_path, BUSY), tmp_path, *flags_of(folder, 2, nproc=1),
              at_step=lambda step: act())
    assert message in end.text, f"{name}: the run must end with {message!r}\n{end.text}"
    assert act is kill_a_loader_process or "DataLoader worker" not in end.text, (
        f"{name}: DataLoader must not raise another error\n{end.text}")
    assert not end.left, f"{name}: the loader processes {end.left} are left\n{end.text}"


def test_damaged_image_ends_the_run(tmp_path):
    image = write_images(tmp_path) / "train" / "dog" / "1.jpg"
    image.write_bytes(image.read_bytes()[:400])
    end = run("cifar10_ddp", tmp_path, *flags_of(tmp_path, 2, nproc=1))
    assert end.statuses == [] and f"cannot read the image {image}" in end.text, (
        f"a truncated JPEG must end the run with an error that names it\n{end.text}")
    assert not end.left, f"the loader processes {end.left} are left\n{end.text}"


def test_killed_training_process_leaves_no_process(folder, tmp_path):
    end = run("cifar10_ddp", tmp_path, *flags_of(folder, 2, nproc=1, epochs=100),
              at_step=lambda step: step == 5 and os.kill(os.getpid(), signal.SIGKILL))
    assert end.reads and not end.left, (
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


# --- other start methods than fork: of macOS, and of a copy with Python 3.14 ---
@pytest.mark.parametrize("name", ["spawn", "forkserver"])
def test_weights_do_not_depend_on_the_start_method(folder, tmp_path, name):
    flags = flags_of(folder, 1, nproc=1)
    forked = run("cifar10_ddp", tmp_path, *flags, "--checkpoint", tmp_path / "forked.pt")
    assert forked.statuses == [0], forked.text
    copy = edited_copy(tmp_path, (FORK, FORK.replace("fork", name)))
    with start(copy, *TINY, *flags, "--checkpoint", tmp_path / "run.pt",
               env={"OMP_NUM_THREADS": 1}) as job:
        result = job.finish()
        left = left_after(10, job.pids)
    assert result.status == 0, f"start method {name}: status {result.status}\n{result.text}"
    assert not left, f"start method {name}: {left} are left\n{result.text}"
    place = f"the run with the start method {name}, beside one with fork: checkpoint"
    assert_equal(load_checkpoint(tmp_path / "run.pt"), load_checkpoint(tmp_path / "forked.pt"),
                 place)
