"""--bf16 computes in bfloat16, also in the threads of nn.DataParallel."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from checkpoints import difference
from functions import load_script
from scripts import DDP_SCRIPTS, SCRIPTS
from stopped_runs import finish


@pytest.mark.parametrize("script", DDP_SCRIPTS)
def test_bfloat16_changes_the_weights_but_not_much(script, tmp_path):
    """bfloat16 has 8 bits of mantissa, float32 has 24."""
    flags = (SCRIPTS[script].data_flag, 16, "--batch-size", 8, "--epochs", 1, "--lr", 1e-3)
    finish(script, *flags, "--checkpoint", tmp_path / "fp32", nproc=1)
    finish(script, *flags, "--bf16", "--checkpoint", tmp_path / "bf16", nproc=1)
    largest = difference(tmp_path / "fp32", tmp_path / "bf16")
    assert largest > 0, "--bf16 changes nothing: autocast is not entered"
    assert largest < 0.05, f"--bf16 changes a weight by {largest:.3f} in 2 steps"


@pytest.mark.parametrize("bf16, dtype", [(True, torch.bfloat16), (False, torch.float32)])
def test_the_model_of_data_parallel_enters_autocast_in_each_thread(bf16, dtype):
    """Autocast is local to a thread, and nn.DataParallel starts one for each GPU."""
    model = load_script("mnist_dp").CNN(bf16)
    dtypes = []
    model.fc1.register_forward_hook(lambda module, inputs, output: dtypes.append(output.dtype))
    with ThreadPoolExecutor() as pool:
        pool.submit(model, torch.zeros(1, 1, 28, 28)).result()
    assert dtypes == [dtype], f"with bf16={bf16}, a thread computes in {dtypes[0]}"
