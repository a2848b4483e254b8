"""A user's mistake ends in an error line with the remedy, and ends all processes."""

import shlex
import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest
from functions import redirect, train
from processes import run
from torch.multiprocessing import ProcessRaisedException

START = 240  # seconds within which new interpreters train, on a machine that is very busy


class Mistake(NamedTuple):
    """A command that cannot work."""

    name: str
    script: str
    flags: str  # {folder} stands for a folder that the tests fill
    remedy: str  # what the error line names
    nproc: int = 1


MISTAKES = [
    Mistake("a number that is too small", "cpu_ddp", "--epochs 0", "epochs"),
    Mistake("a global batch of 0", "cifar10_ddp", "--global-batch 0", "batch sizes"),
    Mistake("no epochs of mnist_dp", "mnist_dp", "--epochs 0", "epochs"),
    Mistake("no processes", "fashionmnist_ddp", "--nproc 0", "numbers"),
    Mistake("no samples", "synthetic_ddp", "--samples 0", "numbers"),
    Mistake("a word in place of a number", "cpu_ddp", "--lr high", "--lr"),
    Mistake("an option of sbatch behind the script", "cpu_ddp", "--time=60", "--time"),
    Mistake("an option of sbatch behind synthetic_ddp", "synthetic_ddp", "--time=60", "--time"),
    Mistake("an unknown model", "cifar10_ddp", "--model resnet19", "resnet18"),
    Mistake("no data", "mnist_dp", "--data-dir {folder}/absent", "--fake-data"),
    Mistake("damaged data", "mnist_dp", "--data-dir {folder}", "delete"),
    Mistake("no folder of images", "cifar10_ddp", "--image-folder absent", "train/CLASS"),
    Mistake("fake images and a folder", "cifar10_ddp", "--image-folder a --fake-data", "--fake"),
    Mistake("a GPU that is not there", "mnist_dp", "--device-ids 0 --fake-data", "--device-ids"),
    Mistake("no number of a GPU", "mnist_dp", "--device-ids a", "--device-ids"),
    Mistake("several processes of mnist_dp", "mnist_dp", "--fake-data", "cifar10_ddp", nproc=2),
    Mistake("more processes than samples", "cpu_ddp", "--samples 2", "fewer", nproc=3),
    Mistake("samples that fill no step", "synthetic_ddp", "--samples 31", "--samples"),
    Mistake("weights that diverge", "cpu_ddp", "--lr 1e18 --checkpoint {folder}/run", "--lr"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with MNIST's files, which are empty."""
    folder = tmp_path_factory.mktemp("mistakes")
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for part in ("train", "t10k"):
        (raw / f"{part}-images-idx3-ubyte").touch()
        (raw / f"{part}-labels-idx1-ubyte").touch()
    return folder


def errors_of(script, *flags, nproc=1):
    """Return the error line with which each process ends, or "" if it ends with status 0."""
    with tempfile.TemporaryDirectory() as folder:
        def capture(module, rank):
            redirect("stderr", f"{folder}/{rank}.txt")

        try:
            ranks = train(script, *flags, nproc=nproc, setup=capture)
        except ProcessRaisedException as error:
            command = shlex.join([script, *flags])
            raise AssertionError(f"{command} has no error line, but a traceback:{error}") from None
        texts = {0: "", 2: Path(f"{folder}/0.txt").read_text()}  # argparse has printed the line
        return [texts.get(code, str(code)) for _, code, _ in ranks]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_a_mistake_is_an_error_line(mistake, folder):
    flags = mistake.flags.format(folder=folder).split()
    command = f"{mistake.name}: {mistake.script} {mistake.flags}"
    for rank, error in enumerate(errors_of(mistake.script, *flags, nproc=mistake.nproc)):
        assert "error: " in error, f"{command}: rank {rank} has no error line, but {error!r}"
        assert mistake.remedy in error, (
            f"{command}: rank {rank}'s error line does not name {mistake.remedy!r}:\n{error}")


@pytest.mark.parametrize("script, launcher, flags, word", [
    ("cpu_ddp", "torchrun", ("--checkpoint", "absent/run.pt"), "absent/run.pt"),
    ("cifar10_ddp", "torchrun", ("--data-dir", "absent"), "--fake-data"),
    ("fashionmnist_ddp", "spawn", ("--data-dir", "absent"), "--fake-data"),
])
def test_an_error_of_rank_0_is_printed_once_and_ends_all_processes(script, launcher, flags, word,
                                                                  tmp_path):
    """What only rank 0 sees, it sees before the group is formed: its launcher ends the others."""
    result = run(script, *flags, launcher=launcher, nproc=2, cwd=tmp_path, timeout=START)
    command = f"{script} under {launcher} with {shlex.join(flags)}"
    assert result.status != 0, f"{command} must not end with status 0\n{result.text}"
    assert len(result.errors) == 1, (
        f"{command} must print one error line, not {result.errors}\n{result.text}")
    assert word in result.errors[0], f"{command}: the error line must name {word}\n{result.text}"
    own_text = result.text.split(" failed (exitcode")[0]  # torchrun's own report comes last
    assert "Traceback" not in own_text, f"{command} must print no traceback\n{result.text}"
