"""A run is resumed on another number of processes: it is defined by its global batch.

Where the new number divides the first, the weights are those of the undisturbed run up to the order
of summation, also with dropout, random flips and BatchNorm. With other dropout masks they would
differ by 0.02.
"""

import pytest
import torch
from checkpoints import load_checkpoint
from functions import finish, stop


def use_sgd(module, rank):
    """A setup for train(). Adam may turn what rounding leaves of a gradient into a large step."""
    if hasattr(module, "CNN"):
        build_model = module.build_model

        def build_model_with_sgd(*arguments):
            model, _ = build_model(*arguments)
            return model, torch.optim.SGD(model.parameters(), lr=0.1)

        module.build_model = build_model_with_sgd


@pytest.mark.parametrize("script, flags, first, second, tolerance", [
    # It draws no random numbers in a step: 3 need not divide 4
    ("cpu_ddp", ["--samples", 320], 4, 3, 1e-5),
    ("fashionmnist_ddp", ["--fake-data", 96], 4, 2, 1e-5),  # dropout, flips
    # BatchNorm, crops. The sum of two numbers has no order: parameters are equal
    ("cifar10_ddp", ["--fake-data", 48, "--model", "mnasnet0_5", "--image-size", 32,
                     "--workers", 0], 2, 1, 0),
])
def test_resumed_on_fewer_processes(script, flags, first, second, tolerance, tmp_path):
    flags += ["--batch-size", 4, "--epochs", 3, "--checkpoint"]
    finish(script, *flags, tmp_path / "whole", nproc=first, setup=use_sgd)
    stop(script, *flags, tmp_path / "resumed", nproc=first, after=7, setup=use_sgd)
    finish(script, *flags, tmp_path / "resumed", nproc=second, setup=use_sgd)
    whole, resumed = load_checkpoint(tmp_path / "whole"), load_checkpoint(tmp_path / "resumed")
    steps = whole["step"], resumed["step"]
    assert steps[0] == steps[1], f"the resumed run has another global batch: {steps} steps"
    differences = [((whole["model"][name] - value).abs().max().item(), name)
                   for name, value in resumed["model"].items()
                   if "running_" not in name and "num_batches_tracked" not in name]  # of rank 0
    difference, name = max(differences)
    assert difference <= tolerance, (
        f"resumed on another number of processes, {name} differs by {difference:.1e} at the end. "
        "Are these other samples or parts, another batch, or other random numbers?")
