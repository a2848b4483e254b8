"""A run is resumed on another number of processes: it is defined by its global batch.

Where the new number divides the first, the weights are those of the undisturbed run up to the order
of summation. With other dropout masks they would differ by 0.02.
"""

import pytest
import torch
from checkpoints import difference, load_checkpoint
from forked import train_to_end, train_until


def use_sgd(module, rank):
    """Adam may turn what rounding leaves of a gradient into a large step."""
    torch.optim.Adam = lambda parameters, **_: torch.optim.SGD(parameters, lr=0.1)


@pytest.mark.parametrize("script, flags, first, second, tolerance", [
    # It draws no random numbers in a step: 3 need not divide 4
    ("cpu_ddp", ["--samples", 320], 4, 3, 1e-5),
    ("fashionmnist_ddp", ["--fake-data", 96], 4, 2, 1e-5),  # dropout, flips
    # BatchNorm, crops. The sum of two numbers has no order: parameters are equal
    ("cifar10_ddp", ["--fake-data", 48, "--model", "mnasnet0_5", "--image-size", 32,
                     "--workers", 0], 2, 1, 0),
])
def test_resumed_on_fewer_processes(script, flags, first, second, tolerance, tmp_path):
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    flags += ["--batch-size", 4, "--epochs", 3, "--checkpoint"]
    train_to_end(script, *flags, whole, nproc=first, setup=use_sgd)
    train_until(script, *flags, resumed, nproc=first, after=7, setup=use_sgd)
    train_to_end(script, *flags, resumed, nproc=second, setup=use_sgd)
    steps = load_checkpoint(whole)["step"], load_checkpoint(resumed)["step"]
    assert steps[0] == steps[1], f"the resumed run has another global batch: {steps} steps"
    found = difference(whole, resumed)
    assert found <= tolerance, (
        f"resumed on another number of processes, weights differ by {found:.1e} at the end: are "
        "these other samples or parts, another batch, or other random numbers?")
