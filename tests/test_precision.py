"""--bf16 computes in bfloat16, also in the threads of nn.DataParallel."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from functions import load_script
from stopped_runs import finish


def record_types(module, rank):
    """A setup for train(): it returns a list that gets the type of each output of the model."""
    types = []
    loss_and_correct = module.loss_and_correct

    def recorded_loss(model, *batch):
        model.register_forward_hook(lambda _, arguments, output: types.append(output.dtype))
        return loss_and_correct(model, *batch)

    module.loss_and_correct = recorded_loss
    return types


@pytest.mark.parametrize("script, data_flag", [
    ("cifar10_ddp", "--fake-data"), ("fashionmnist_ddp", "--fake-data"),
    ("synthetic_ddp", "--samples")])
def test_bfloat16_in_training_and_evaluation(script, data_flag):
    flags = (data_flag, 16, "--batch-size", 8, "--epochs", 1)
    (types,) = finish(script, *flags, "--bf16", nproc=1, setup=record_types)
    assert set(types) == {torch.bfloat16}, f"with --bf16, {script} computes in {set(types)}"


@pytest.mark.parametrize("bf16, dtype", [(True, torch.bfloat16), (False, torch.float32)])
def test_the_model_of_data_parallel_enters_autocast_in_each_thread(bf16, dtype):
    """Autocast is local to a thread, and nn.DataParallel starts one for each GPU."""
    model = load_script("mnist_dp").CNN(bf16)
    dtypes = []
    model.fc1.register_forward_hook(lambda module, inputs, output: dtypes.append(output.dtype))
    with ThreadPoolExecutor() as pool:
        pool.submit(model, torch.zeros(1, 1, 28, 28)).result()
    assert dtypes == [dtype], f"with bf16={bf16}, a thread computes in {dtypes[0]}"
