"""A user's mistake ends in an error line with the remedy, and ends all processes."""

import pytest
from functions import train
from image_folder import print_to
from processes import START, run
from torch.multiprocessing import ProcessRaisedException

MISTAKES = {  # script, flags, what the error line names; {folder} has MNIST's files, empty
    "a number that is too small": ("cpu_ddp", "--epochs 0", "epochs"),
    "a global batch of 0": ("cifar10_ddp", "--global-batch 0", "batch sizes"),
    "no epochs of mnist_dp": ("mnist_dp", "--epochs 0", "epochs"),
    "no processes": ("fashionmnist_ddp", "--nproc 0", "numbers"),
    "no samples": ("synthetic_ddp", "--samples 0", "numbers"),
    "an option of sbatch behind the script": ("cpu_ddp", "--time=60", "--time"),
    "an option of sbatch behind synthetic_ddp": ("synthetic_ddp", "--time=60", "--time"),
    "an unknown model": ("cifar10_ddp", "--model resnet19", "resnet18"),
    "no data": ("mnist_dp", "--data-dir {folder}/absent", "--fake-data"),
    "damaged data": ("mnist_dp", "--data-dir {folder}", "delete"),
    "no folder of images": ("cifar10_ddp", "--image-folder absent", "train/CLASS"),
    "fake images and a folder": ("cifar10_ddp", "--image-folder a --fake-data", "--fake"),
    "a GPU that is not there": ("mnist_dp", "--device-ids 0 --fake-data", "--device-ids"),
    "no number of a GPU": ("mnist_dp", "--device-ids a", "--device-ids"),
    "several processes of mnist_dp": ("mnist_dp", "--fake-data", "cifar10_ddp", 2),
    "more processes than samples": ("cpu_ddp", "--samples 2", "fewer", 3),
    "samples that fill no step": ("synthetic_ddp", "--samples 31", "--samples"),
    "weights that diverge": ("cpu_ddp", "--lr 1e18 --checkpoint {folder}/run", "--lr"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_an_error_line(name, tmp_path):
    script, flags, remedy, *nproc = MISTAKES[name]
    (tmp_path / "MNIST" / "raw").mkdir(parents=True)
    for part in ("train", "t10k"):
        for kind in ("images-idx3", "labels-idx1"):
            (tmp_path / "MNIST" / "raw" / f"{part}-{kind}-ubyte").touch()
    command = f"{name}: {script} {flags}"
    log = tmp_path / "log"
    try:
        ranks = train(script, *flags.format(folder=tmp_path).split(), nproc=sum(nproc) or 1,
                      setup=lambda module, rank: print_to(log))
    except ProcessRaisedException as error:
        raise AssertionError(f"{command} has no error line, but a traceback:{error}") from None
    for rank, (_, code, _) in enumerate(ranks):
        error = log.read_text() if code == 2 else str(code)  # argparse has printed it
        assert "error: " in error, f"{command}: rank {rank} has no error line, but {error!r}"
        assert remedy in error, (
            f"{command}: rank {rank}'s error line does not name {remedy!r}:\n{error}")


@pytest.mark.parametrize("script, launcher, flags, word", [
    ("cpu_ddp", "torchrun", ("--checkpoint", "absent/run.pt"), "absent/run.pt"),
    ("fashionmnist_ddp", "spawn", ("--data-dir", "absent"), "--fake-data"),
])
def test_an_error_of_rank_0_is_printed_once_and_ends_all_processes(script, launcher, flags, word,
                                                                  tmp_path):
    """What only rank 0 sees, it sees before the group is formed: its launcher ends the others.

    That of cifar10_ddp: test_data_is_prepared_by_rank_0_and_then_once_on_each_machine.
    """
    result = run(script, *flags, launcher=launcher, nproc=2, cwd=tmp_path, timeout=START)
    command = f"{script} under {launcher} with {' '.join(flags)}"
    assert result.status != 0, f"{command} must not end with status 0\n{result.text}"
    assert len(result.errors) == 1, (
        f"{command} must print one error line, not {result.errors}\n{result.text}")
    assert word in result.errors[0], f"{command}: the error line must name {word}\n{result.text}"
    own_text = result.text.split(" failed (exitcode")[0]  # torchrun's own report comes last
    assert "Traceback" not in own_text, f"{command} must print no traceback\n{result.text}"
