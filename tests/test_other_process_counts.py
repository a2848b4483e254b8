"""A run is defined by its global batch and its batch size, not by its number of processes.

Where the new number of processes divides the first, the weights are those of the undisturbed run
up to the order of summation, also with dropout, random flips and BatchNorm. With other dropout
masks they would differ by 0.02.
"""

import shutil

import pytest
import torch
from checkpoints import load_checkpoint
from functions import watch
from stopped_runs import finish, stop

SUMMATION = 1e-5  # what another order of summation may change


def record_samples(module, rank):
    """A setup for train(): it returns a list that gets the inputs of each call in training."""
    calls = []

    def see(model, inputs, labels):
        if model.training:
            calls.append(inputs.clone())

    watch(module, "loss_and_correct", see)
    return calls


def with_large_eps(module, rank):
    """A setup for train(). Adam divides a gradient by its size, and by eps, 1e-8, if it is smaller.

    So it turns what rounding leaves of a gradient near 0 into a step of any size.
    """
    build_model = module.build_model

    def build_model_with_large_eps(args, device):
        model, optimizer = build_model(args, device)
        for group in optimizer.param_groups:
            group["eps"] = 1e-3
        return model, optimizer

    module.build_model = build_model_with_large_eps
    return record_samples(module, rank)


def largest_difference(one, other):
    """Return (difference, name) of the parameter of two checkpoints (paths) that differs most.

    BatchNorm's running statistics do not count: they are those of rank 0's shares.
    """
    one = load_checkpoint(one)["model"]
    other = load_checkpoint(other)["model"]
    assert one.keys() == other.keys(), "the two checkpoints are of different models"
    differences = []
    for name in one:
        if "running_" not in name and "num_batches_tracked" not in name:
            differences.append(((one[name] - other[name]).abs().max().item(), name))
    return max(differences)


def assert_same_up_to_summation(one, other, what):
    difference, name = largest_difference(one, other)
    assert difference < SUMMATION, (
        f"{what}: {name} differs by {difference:.1e}, more than another order of summation explains"
        f" ({SUMMATION}). Are these other samples, another batch, or other random numbers?")


# --- stopped on more processes, resumed on fewer ---
FASHION = ("--fake-data", 96, "--batch-size", 2, "--epochs", 4, "--log-every", 0, "--checkpoint")


@pytest.fixture(scope="module")
def fashion_on_4(tmp_path_factory):
    """An undisturbed run of 48 steps on 4 processes, and one that is stopped after step 14."""
    folder = tmp_path_factory.mktemp("fashion")
    finish("fashionmnist_ddp", *FASHION, folder / "whole", nproc=4, setup=with_large_eps)
    stop("fashionmnist_ddp", *FASHION, folder / "stopped", nproc=4, after=14,
         setup=with_large_eps)
    return folder


@pytest.mark.parametrize("nproc", [2, 1])
def test_resumed_on_fewer_processes_with_dropout_and_flips(nproc, fashion_on_4):
    resumed = fashion_on_4 / f"resumed on {nproc}"
    shutil.copy(fashion_on_4 / "stopped", resumed)
    calls = finish("fashionmnist_ddp", *FASHION, resumed, nproc=nproc, setup=with_large_eps)

    step = load_checkpoint(resumed)["step"]
    assert step == 48, f"the global batch of the first start stays: 48 steps, not {step}"
    largest = max(len(images) for images in calls[0])
    assert largest <= 2, f"no process computes more than --batch-size 2 images at once: {largest}"
    assert_same_up_to_summation(fashion_on_4 / "whole", resumed,
                                f"4 processes, stopped after step 14, resumed on {nproc}")


def test_resumed_on_one_process_with_batch_norm_and_crops(tmp_path):
    """BatchNorm sees the same parts. The sum of two numbers has no order: parameters are equal."""
    flags = ("--model", "mnasnet0_5", "--image-size", 32, "--fake-data", 96, "--batch-size", 4,
             "--epochs", 4, "--log-every", 0, "--workers", 0, "--checkpoint")
    finish("cifar10_ddp", *flags, tmp_path / "whole", nproc=2)
    stop("cifar10_ddp", *flags, tmp_path / "resumed", nproc=2, after=13)
    finish("cifar10_ddp", *flags, tmp_path / "resumed", nproc=1)
    difference, name = largest_difference(tmp_path / "whole", tmp_path / "resumed")
    assert difference == 0, (
        f"2 processes, stopped after step 13, resumed on 1: {name} differs by {difference:.1e} "
        "after 35 more steps. Are these other parts, crops or dropout masks?")


def test_resumed_on_a_number_that_does_not_divide_the_first(tmp_path):
    """synthetic_ddp draws no random numbers in a step: weights do not depend on the division."""
    flags = ("--samples", 320, "--batch-size", 4, "--epochs", 3, "--log-every", 0, "--checkpoint")
    finish("synthetic_ddp", *flags, tmp_path / "whole", nproc=4)
    stop("synthetic_ddp", *flags, tmp_path / "resumed", nproc=4, after=20)
    finish("synthetic_ddp", *flags, tmp_path / "resumed", nproc=3)
    assert_same_up_to_summation(tmp_path / "whole", tmp_path / "resumed",
                                "4 processes, stopped after step 20, resumed on 3")


# --- --global-batch ---
def test_global_batch_on_one_process_is_the_run_of_eight(tmp_path):
    """--global-batch 32 --batch-size 4 on 1 process: gradients of 8 parts are accumulated."""
    flags = ("--fake-data", 160, "--batch-size", 4, "--epochs", 2, "--checkpoint")
    finish("fashionmnist_ddp", *flags, tmp_path / "eight", nproc=8, setup=with_large_eps)
    (calls,) = finish("fashionmnist_ddp", "--global-batch", 32, *flags, tmp_path / "one", nproc=1,
                      setup=with_large_eps)
    sizes = {len(images) for images in calls}
    assert sizes == {4}, f"each of the 8 parts has --batch-size 4 images, not {sizes}"
    assert_same_up_to_summation(tmp_path / "eight", tmp_path / "one",
                                "8 processes of 4 images, and --global-batch 32 on 1 process")


def samples_of_each_step(calls_of_ranks, global_batch):
    """Return for each step the first number of each sample, of all ranks, in order of size."""
    steps = []
    of_ranks = [torch.cat([inputs[:, 0] for inputs in calls]) for calls in calls_of_ranks]
    nproc = len(of_ranks)
    shares = [len(range(rank, global_batch, nproc)) for rank in range(nproc)]
    for parts in zip(*(numbers.split(share) for numbers, share in zip(of_ranks, shares))):
        steps.append(torch.cat(parts).sort().values.tolist())
    return steps


@pytest.mark.parametrize("nproc, batch_size, global_batch, largest", [
    (4, 8, 6, 2),   # less than the processes take at once: shares of 2, 2, 1 and 1
    (4, 3, 13, 3),  # shares of 4, 3, 3 and 3: rank 0 has two parts, the others have one
    (2, 4, 30, 4),  # shares of 15: four parts each
])
def test_uneven_shares_and_parts(nproc, batch_size, global_batch, largest, tmp_path):
    """Each step takes the same samples, each once, as one process with a batch of that size."""
    flags = ("--samples", 120, "--epochs", 2, "--log-every", 0)
    one = finish("synthetic_ddp", *flags, "--batch-size", global_batch,
                 "--checkpoint", tmp_path / "one", nproc=1, setup=record_samples)
    calls = finish("synthetic_ddp", *flags, "--batch-size", batch_size,
                   "--global-batch", global_batch, "--checkpoint", tmp_path / "several",
                   nproc=nproc, setup=record_samples)
    size = max(len(inputs) for of_rank in calls for inputs in of_rank)
    assert size == largest, f"the largest part has {largest} samples, not {size}"
    expected = samples_of_each_step(one, global_batch)
    found = samples_of_each_step(calls, global_batch)
    assert found == expected, (
        f"a step on {nproc} processes takes other samples than on 1, or one of them twice: "
        f"{found[0]} in step 1, not {expected[0]}")
    assert_same_up_to_summation(tmp_path / "one", tmp_path / "several",
                                f"--global-batch {global_batch} on {nproc} processes, and on 1")
