"""A user's mistake ends in an error line with the remedy, on every process that sees it."""

import re
import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from functions import load_script, redirect, train
from torch.multiprocessing import ProcessRaisedException


class Mistake(NamedTuple):
    """A command that cannot work."""

    name: str
    script: str
    flags: str  # {folder} stands for a folder that the tests fill
    remedy: str  # what the error line names
    nproc: int = 1


MISTAKES = [
    Mistake("a number that is too small", "cpu_ddp", "--epochs 0", "--epochs"),
    Mistake("a negative seed", "cpu_ddp", "--seed -1", "--seed"),
    Mistake("a learning rate that is not a number", "cpu_ddp", "--lr nan", "--lr"),
    Mistake("a learning rate that is infinite", "cpu_ddp", "--lr inf", "--lr"),
    Mistake("an unknown model", "cifar10_ddp", "--model resnet19", "resnet18"),
    Mistake("an unknown flag", "cpu_ddp", "--fake-data", "--fake-data"),
    Mistake("no data", "mnist_dp", "--data-dir {folder}/absent", "--fake-data"),
    Mistake("damaged data", "mnist_dp", "--data-dir {folder}", "delete"),
    Mistake("no folder of images", "cifar10_ddp", "--image-folder absent", "train/CLASS"),
    Mistake("fake images and a folder", "cifar10_ddp", "--image-folder a --fake-data", "--fake"),
    Mistake("a GPU that is not there", "mnist_dp", "--device-ids 0 --fake-data", "--device-ids"),
    Mistake("no number of a GPU", "mnist_dp", "--device-ids a", "--device-ids"),
    Mistake("several processes of mnist_dp", "mnist_dp", "--fake-data", "cifar10_ddp", nproc=2),
    Mistake("--nproc under a launcher", "fashionmnist_ddp", "--nproc 2 --fake-data", "--nproc"),
    Mistake("more processes than samples", "cpu_ddp", "--samples 2", "fewer", nproc=3),
    Mistake("a checkpoint that is a folder", "cpu_ddp", "--checkpoint {folder}", "--checkpoint"),
    Mistake("a checkpoint without a name", "cpu_ddp", "--checkpoint=", "--checkpoint"),
    Mistake("a checkpoint in no folder", "cpu_ddp", "--checkpoint {folder}/no/run", "mkdir -p"),
    Mistake("another run's checkpoint", "cpu_ddp", "--seed 1 --checkpoint {folder}/run",
            "(seed 0, not 1)", nproc=2),
    Mistake("fewer epochs", "cpu_ddp", "--epochs 1 --checkpoint {folder}/run", "--epochs"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a checkpoint, run, and with MNIST's files, which are empty."""
    folder = tmp_path_factory.mktemp("mistakes")
    train("cpu_ddp", "--epochs", 2, "--checkpoint", folder / "run")
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for part in ("train", "t10k"):
        (raw / f"{part}-images-idx3-ubyte").touch()
        (raw / f"{part}-labels-idx1-ubyte").touch()
    return folder


def errors_of(script, *flags, nproc=1, setup=None):
    """Return the error line with which each process ends, or "" if it ends with status 0."""
    with tempfile.TemporaryDirectory() as folder:
        def capture(module, rank):
            redirect("stderr", f"{folder}/{rank}.txt")
            if setup:
                setup(module, rank)

        try:
            ranks = train(script, *flags, nproc=nproc, setup=capture)
        except ProcessRaisedException as error:
            command = " ".join(map(str, (script, *flags)))
            raise AssertionError(f"{command} has no error line, but a traceback:{error}") from None
        errors = []
        for rank, (_, code, _) in enumerate(ranks):
            if code == 2:  # argparse has printed the line
                errors.append(Path(f"{folder}/{rank}.txt").read_text())
            elif code == 0:
                errors.append("")
            else:
                errors.append(str(code))
        return errors


def assert_error_line(error, remedy, what):
    """Fail unless this is an error line that names the remedy."""
    assert "error: " in error, f"{what} is accepted, or no error line. It printed: {error!r}"
    assert remedy in error, f"{what}: the error line does not name {remedy!r}:\n{error}"


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_a_mistake_is_an_error_line(mistake, folder):
    flags = mistake.flags.format(folder=folder).split()
    errors = errors_of(mistake.script, *flags, nproc=mistake.nproc)
    command = f"{mistake.name} ({mistake.script} {mistake.flags})"
    for rank, error in enumerate(errors):
        assert_error_line(error, mistake.remedy, f"{command}, on rank {rank} of {mistake.nproc},")


def test_gpus_that_this_pytorch_cannot_use_are_an_error_line():
    def setup(module, rank):
        torch.cuda.device_count = lambda: 2

    for script in ("mnist_dp", "fashionmnist_ddp"):
        (error,) = errors_of(script, "--fake-data", 16, setup=setup)
        assert_error_line(error, "CUDA_VISIBLE_DEVICES=", f"{script}: a driver that is too old")


@pytest.fixture(scope="module")
def diverged(tmp_path_factory):
    """What each of two processes of cpu_ddp ends with, and the folder of its checkpoint."""
    folder = tmp_path_factory.mktemp("diverged")
    errors = errors_of("cpu_ddp", "--lr", 1e18, "--epochs", 20, "--batch-size", 16,
                       "--checkpoint", folder / "run.pt", nproc=2)
    return errors, folder


def test_weights_that_are_not_finite_end_all_processes(diverged):
    errors, _ = diverged
    for rank, error in enumerate(errors):
        assert_error_line(error, "--lr", f"weights that are not finite, on rank {rank},")
        assert "finite" in error, f"the error line does not say what is wrong:\n{error}"


def test_weights_that_are_not_finite_are_not_saved(diverged):
    _, folder = diverged
    assert not (folder / "run.pt").exists(), "weights that are not finite were saved"


def test_weights_that_are_not_finite_end_mnist_dp_without_a_checkpoint():
    (error,) = errors_of("mnist_dp", "--lr", 1e18, "--epochs", 20, "--batch-size", 16,
                         "--fake-data", 32)
    assert_error_line(error, "--lr", "mnist_dp: weights that are not finite")


def test_the_check_of_a_checkpoint_leaves_another_runs_file_as_it_is(tmp_path):
    """FILE.tmp is opened at the start, to see that it can be written; it is not emptied."""
    module = load_script("fashionmnist_ddp")
    temporary = Path(f"{tmp_path}/run.tmp")
    temporary.write_text("of another run")
    checkpoint = module.load_checkpoint(str(tmp_path / "run"))
    assert checkpoint == {}, f"a checkpoint that is not there is loaded: {checkpoint}"
    assert temporary.read_text() == "of another run", "the file of another run was changed"


def test_help_names_every_flag_with_its_default():
    """Each flag has a help text, and the default is in it."""
    for script in ("cpu_ddp", "fashionmnist_ddp"):
        text = help_of(script)
        epochs = re.search(r"--epochs EPOCHS.*\(default: \d+\)", text)
        assert epochs, f"{script} --help does not say the default of --epochs:\n{text}"


def help_of(script):
    with tempfile.TemporaryDirectory() as folder:
        def setup(module, rank):
            redirect("stdout", f"{folder}/help.txt")

        train(script, "--help", setup=setup)
        return Path(f"{folder}/help.txt").read_text()
