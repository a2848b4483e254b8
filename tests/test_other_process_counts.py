"""A run is resumed on another number of processes: it is defined by its global batch.

Where the new number divides the first, the weights are those of the undisturbed run up to the order
of summation, also with dropout, random flips and BatchNorm. With other dropout masks they would
differ by 0.02.
"""

import shutil

import pytest
from checkpoints import load_checkpoint
from stopped_runs import finish, stop


def with_large_eps(module, rank):
    """A setup for train(). Adam divides a gradient by its size, and by eps, 1e-8, if it is smaller.

    So it turns what rounding leaves of a gradient near 0 into a step of any size.
    """
    build_model = module.build_model

    def build_model_with_large_eps(*arguments):
        model, optimizer = build_model(*arguments)
        for group in optimizer.param_groups:
            group["eps"] = 1e-3
        return model, optimizer

    module.build_model = build_model_with_large_eps


def assert_same(whole, resumed, tolerance):
    """Fail unless step and parameters of two checkpoints (paths) are the same.

    BatchNorm's running statistics do not count: they are those of rank 0's shares.
    """
    whole, resumed = load_checkpoint(whole), load_checkpoint(resumed)
    steps = whole["step"], resumed["step"]
    assert steps[0] == steps[1], f"the resumed run has another global batch: {steps} steps"
    differences = [((whole["model"][name] - value).abs().max().item(), name)
                   for name, value in resumed["model"].items()
                   if "running_" not in name and "num_batches_tracked" not in name]
    difference, name = max(differences)
    assert difference <= tolerance, (
        f"resumed on another number of processes, {name} differs by {difference:.1e} at the end. "
        "Are these other samples or parts, another batch, or other random numbers?")


FASHION = ("--fake-data", 96, "--batch-size", 2, "--epochs", 4, "--checkpoint")


@pytest.fixture(scope="module")
def fashion_on_4(tmp_path_factory):
    """An undisturbed run of 48 steps on 4 processes, and one that is stopped after step 14."""
    folder = tmp_path_factory.mktemp("fashion")
    finish("fashionmnist_ddp", *FASHION, folder / "whole", nproc=4, setup=with_large_eps)
    stop("fashionmnist_ddp", *FASHION, folder / "stopped", nproc=4, after=14, setup=with_large_eps)
    return folder


@pytest.mark.parametrize("nproc", [2, 1])
def test_resumed_on_fewer_processes_with_dropout_and_flips(nproc, fashion_on_4, tmp_path):
    resumed = tmp_path / "resumed"
    shutil.copy(fashion_on_4 / "stopped", resumed)
    finish("fashionmnist_ddp", *FASHION, resumed, nproc=nproc, setup=with_large_eps)
    assert_same(fashion_on_4 / "whole", resumed, 1e-5)


def test_resumed_on_one_process_with_batch_norm_and_crops(tmp_path):
    """BatchNorm sees the same parts. The sum of two numbers has no order: parameters are equal."""
    flags = ("--model", "mnasnet0_5", "--image-size", 32, "--fake-data", 48, "--batch-size", 4,
             "--epochs", 3, "--workers", 0, "--checkpoint")
    finish("cifar10_ddp", *flags, tmp_path / "whole", nproc=2)
    stop("cifar10_ddp", *flags, tmp_path / "resumed", nproc=2, after=7)
    finish("cifar10_ddp", *flags, tmp_path / "resumed", nproc=1)
    assert_same(tmp_path / "whole", tmp_path / "resumed", 0)


def test_resumed_on_a_number_that_does_not_divide_the_first(tmp_path):
    """cpu_ddp draws no random numbers in a step: weights do not depend on the division."""
    flags = ("--samples", 320, "--batch-size", 4, "--epochs", 3, "--checkpoint")
    finish("cpu_ddp", *flags, tmp_path / "whole", nproc=4)
    stop("cpu_ddp", *flags, tmp_path / "resumed", nproc=4, after=20)
    finish("cpu_ddp", *flags, tmp_path / "resumed", nproc=3)
    assert_same(tmp_path / "whole", tmp_path / "resumed", 1e-5)
