"""cifar10_ddp's images are read by processes of a DataLoader, which change no weights."""

import os
import signal
import tempfile

import pytest
import torch
import torch.multiprocessing as mp
from checkpoints import assert_equal
from copies import make_copy
from functions import at_step, load_script
from image_folder import TINY, run, write_images
from processes import start, wait_until_gone

ROTATE = [  # edits of a copy: a transform that uses Python's random numbers
    ("", """
def rotate(image, label):
    return image.rotate(random.uniform(-20, 20)), label
"""),
    ('instead of "v2.ToImage(), *steps"', "return v2.Compose([rotate, v2.ToImage(), *steps])"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """A copy whose transforms use random numbers of torch and of Python."""
    return make_copy("cifar10_ddp", tmp_path_factory.mktemp("rotate") / "train.py", *ROTATE)


def flags_of(folder, workers, nproc=1, epochs=2):
    """Return flags for three steps of 4 images in an epoch."""
    return ("--image-folder", folder, "--workers", workers, "--epochs", epochs,
            "--batch-size", 4 // nproc)


# --- the same weights ---
@pytest.fixture(scope="module")
def undisturbed(folder, script, tmp_path_factory):
    """Train on two processes, without loader processes. Return the checkpoint."""
    trial = tmp_path_factory.mktemp("undisturbed")
    end = run(script, trial, *flags_of(folder, 0, 2), "--checkpoint", trial / "run.pt", nproc=2)
    assert end.statuses == [0, 0], end.text
    return trial / "run.pt"


def test_loader_processes_change_no_weights_and_start_once(undisturbed, folder, script, tmp_path):
    end = run(script, tmp_path, *flags_of(folder, 3, 2), "--checkpoint", tmp_path / "run.pt",
              nproc=2)
    assert end.statuses == [0, 0], end.text
    assert_equal(tmp_path / "run.pt", undisturbed)
    ranks = sorted(rank for rank, _ in end.loaders)
    assert ranks == [0, 0, 0, 1, 1, 1], (
        f"--workers 3: in 2 epochs, loader processes have been started by the ranks {ranks}")


def test_random_transforms_depend_on_seed_epoch_and_index(folder, script):
    module = load_script(script)
    flags = [str(flag) for flag in ("--image-folder", folder, *TINY)]
    data = module.SeededData(module.parse_args(flags))
    image, *others = (data[key][0] for key in (
        (0, 1, True, 2), (0, 1, True, 2), (1, 1, True, 2), (0, 2, True, 2)))
    equal = [torch.equal(image, other) for other in others]
    assert equal == [True, False, False], (
        f"an image must be another one for another seed or epoch, but not else: {equal}")


# --- signals ---
def test_signal_to_all_processes_stops_saves_and_a_resume_repeats_the_transforms(
        undisturbed, folder, script, tmp_path):
    """As Slurm sends it. The loader processes ignore it: training needs them until it has saved."""
    def send_to_all(step):
        if step == 4:
            for pid in (os.getpid(), *(process.pid for process in mp.active_children())):
                os.kill(pid, signal.SIGTERM)

    flags = (*flags_of(folder, 2, 2), "--checkpoint", tmp_path / "run.pt")
    end = run(script, tmp_path, *flags, nproc=2, prepare=lambda *_: at_step(send_to_all))
    assert end.statuses == ["stopped by a signal after step 5", 1], (
        f"SIGTERM to training and loader processes: the run must stop and save\n{end.text}")
    assert not end.left, f"20 s after SIGTERM, the processes {end.left} are left\n{end.text}"
    end = run(script, tmp_path, *flags, nproc=2)
    assert end.statuses == [0, 0], end.text
    assert_equal(tmp_path / "run.pt", undisturbed)


# --- the end of a run ---
def test_run_is_stopped_while_its_loader_processes_are_busy(folder, tmp_path):
    """They would read test images for ten minutes."""
    copy = make_copy("cifar10_ddp", tmp_path / "train.py", (
        'before "return self.transforms[train_set]"', "if not train_set:\n    time.sleep(600)"))
    end = run(copy, tmp_path, *flags_of(folder, 2),
              prepare=lambda *_: at_step(lambda step: os.kill(os.getpid(), signal.SIGTERM)))
    assert "stopped by a signal after step " in end.text, f"SIGTERM must stop a run\n{end.text}"
    assert "DataLoader worker" not in end.text, f"DataLoader raises another error\n{end.text}"
    assert not end.left, f"the loader processes {end.left} are left\n{end.text}"


def test_killed_training_process_leaves_no_process(folder, tmp_path):
    end = run("cifar10_ddp", tmp_path, *flags_of(folder, 2, epochs=100), prepare=lambda *_: at_step(
        lambda step: step == 5 and os.kill(os.getpid(), signal.SIGKILL)))
    assert end.loaders, f"no loader process was started\n{end.text}"
    assert not end.left, (
        f"20 s after SIGKILL of the training process, its loader processes {end.left} are left")


def test_loader_that_cannot_hand_over_a_batch_ends_the_run(folder, tmp_path):
    """The path of a socket has at most 107 characters, and a loader process makes one."""
    def set_long_path(module, rank):
        tempfile.tempdir = str(tmp_path / ("x" * 80))  # as TMPDIR does
        os.mkdir(tempfile.tempdir)

    end = run("cifar10_ddp", tmp_path, *flags_of(folder, 2), "--timeout", 5, prepare=set_long_path)
    assert "timed out after 5 seconds" in end.text, (
        f"with a long TMPDIR, the run must end with an error after --timeout 5\n{end.text}")
    assert not end.left, f"20 s after the end, the processes {end.left} are left\n{end.text}"


def test_start_method_spawn(folder, tmp_path):
    """That of macOS. It and Python 3.14's forkserver pickle what they give to loader processes."""
    copy = make_copy("cifar10_ddp", tmp_path / "train.py",
                     ('instead of "mp.set_start_method"', 'mp.set_start_method("spawn")'))
    with start(copy, *TINY, *flags_of(folder, 1)) as job:
        result = job.finish()
        wait_until_gone(job, "start method spawn")
    assert result.status == 0, f"start method spawn: status {result.status}\n{result.text}"
