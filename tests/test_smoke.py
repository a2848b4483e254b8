"""The smoke test: every script trains for one epoch on the CPU, under each launcher, and learns.

Each script is copied alone into an empty folder first, and leaves nothing there but its checkpoint.
"""

import os
import re
import shutil

import pytest
from helpers import load_checkpoint, run, script_path

FLAGS = {  # of one epoch that is enough to learn, on two processes or with twice the batch size on one
    "cpu_ddp": ["--lr", "0.05", "--batch-size", "16"],
    "mnist_dp": ["--fake-data", "--lr", "2e-3", "--batch-size", "16"],
    "cifar10_ddp": ["--fake-data", "192", "--lr", "0.6", "--batch-size", "4"],
    "fashionmnist_ddp": ["--fake-data", "--batch-size", "8"],
    "synthetic_ddp": ["--lr", "0.05", "--batch-size", "16"],
}
ACCURACY = {"mnist_dp": 0.7, "cifar10_ddp": 0.3, "fashionmnist_ddp": 0.5, "synthetic_ddp": 0.85}
RUNS = [
    ("cpu_ddp", "python", 1), ("cpu_ddp", "torchrun", 2),
    ("mnist_dp", "python", 1),
    ("cifar10_ddp", "torchrun", 2),  # the slowest: under one launcher
    ("fashionmnist_ddp", "python", 1), ("fashionmnist_ddp", "torchrun", 2), ("fashionmnist_ddp", "srun", 2),
    ("fashionmnist_ddp", "spawn", 2),
    ("synthetic_ddp", "torchrun", 2), ("synthetic_ddp", "srun", 2),
]


@pytest.mark.parametrize("script, launcher, nproc", RUNS)
def test_one_epoch(script, launcher, nproc, tmp_path):
    shutil.copy(script_path(script), tmp_path / "mine.py")
    result = run(tmp_path / "mine.py", "--epochs", 1, *FLAGS[script], "--checkpoint", "run.pt", launcher=launcher,
                 nproc=nproc, cwd=tmp_path)
    assert result.status == 0 and "Traceback" not in result.text, result.text
    assert load_checkpoint(tmp_path / "run.pt")["step"] > 0
    assert sorted(os.listdir(tmp_path)) == ["mine.py", "run.pt"]
    if script == "cpu_ddp":
        assert float(re.search(r"error of a learned weight: ([\d.]+)", result.text)[1]) < 0.1
    else:
        assert float(re.search(r"test accuracy ([\d.]+)", result.text)[1]) > ACCURACY[script]
    assert script == "mnist_dp" or f"world size {nproc} on cpu" in result.text
