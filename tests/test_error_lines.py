"""A user's mistake ends in an error line with the remedy, and ends all processes."""

import os
import re

import pytest
from copies import make_copy
from forked import train_forked
from launchers import run

MISTAKES = {  # script, flags, what the error line names; {folder} is empty
    "no epochs": ("cpu_ddp", "--epochs 0", "epochs"),
    "a global batch of 0": ("cifar10_ddp", "--global-batch 0", "batch sizes"),
    "no epochs of mnist_dp": ("mnist_dp", "--epochs 0", "epochs"),
    "no processes": ("fashionmnist_ddp", "--nproc 0", "numbers"),
    "no samples": ("synthetic_ddp", "--samples 0", "numbers"),
    "an option of sbatch behind the script": ("cpu_ddp", "--time=60", "--time"),
    "no data": ("mnist_dp", "--data-dir {folder}", "--fake-data"),
    "a folder and generated images": ("cifar10_ddp", "--image-folder a --fake-data", "not allowed"),
    "no folder of images": ("cifar10_ddp", "--image-folder absent", "train/CLASS"),
    "a GPU that is not there": ("mnist_dp", "--device-ids 0 --fake-data", "--device-ids"),
    "no number of a GPU": ("mnist_dp", "--device-ids a", "--device-ids"),
    "a size that a model does not take": ("cifar10_ddp", "--model vit_b_16 --image-size 32", "224"),
    "no pretrained weights": ("cifar10_ddp", "--pretrained --fake-data", "hub/checkpoints"),
    "several processes of mnist_dp": ("mnist_dp", "--fake-data", "cifar10_ddp", 2),
    "more processes than samples": ("cpu_ddp", "--samples 2", "fewer", 3),
    "samples that fill no step": ("synthetic_ddp", "--samples 31", "--samples"),
    "weights that diverge": ("cpu_ddp", "--epochs 1 --lr 1e18 --checkpoint {folder}/run", "--lr"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_an_error_line(name, tmp_path):
    script, flags, remedy, *nproc = MISTAKES[name]
    command = f"{name}: {script} {flags}"

    def setup(module, rank):
        os.environ["TORCH_HOME"] = str(tmp_path)

    flags = flags.format(folder=tmp_path).split()
    end = train_forked(script, *flags, nproc=sum(nproc) or 1, setup=setup)
    assert end.results, f"{command} must end in an error line, not in a traceback\n{end.text}"
    for rank, status in enumerate(end.statuses):
        error = end.text if status == 2 else str(status)  # argparse has printed it
        assert "error: " in error, f"{command}: rank {rank} has no error line, but {error!r}"
        assert remedy in error, (
            f"{command}: rank {rank}'s error line does not name {remedy!r}:\n{error}")


def test_torchrun_names_the_rank_that_failed_and_its_error(tmp_path):
    copy = make_copy("cpu_ddp", tmp_path / "train.py", (
        'after "step += 1"', 'assert step < 3 or rank == 0, "broken on purpose"'))
    status, text = run(copy, launcher="torchrun", nproc=2)
    assert status != 0, f"rank 1 raises an error, and torchrun ends with status 0\n{text}"
    report = text[text.rfind("Root Cause"):]
    for words in (r"rank +: 1 ", "broken on purpose"):
        assert re.search(words, report), f"torchrun's last lines do not have {words!r}:\n{text}"


@pytest.mark.parametrize("script, launcher, flags, word", [
    ("cpu_ddp", "torchrun", ("--checkpoint", "absent/run.pt"), "absent/run.pt"),
    ("fashionmnist_ddp", "spawn", ("--data-dir", "absent"), "--fake-data"),
])
def test_an_error_of_rank_0_is_printed_once_and_ends_all_processes(script, launcher, flags, word,
                                                                  tmp_path):
    """What only rank 0 sees, it sees before the group is formed: its launcher ends the others."""
    status, text = run(script, *flags, launcher=launcher, nproc=2, cwd=tmp_path)
    command = f"{script} under {launcher} with {' '.join(flags)}"
    assert status != 0, f"{command} must not end with status 0\n{text}"
    errors = re.findall(r"\berror: .*", text)
    assert len(errors) == 1, f"{command} must print one error line, not {errors}\n{text}"
    assert word in errors[0], f"{command}: the error line must name {word}\n{text}"
    own_text = text.split(" failed (exitcode")[0]  # torchrun's own report comes last
    assert "Traceback" not in own_text, f"{command} must print no traceback\n{text}"
