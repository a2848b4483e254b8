"""The smoke test: every script trains for one epoch on the CPU, under each launcher, and learns.

Each script is copied alone into an empty folder first, and leaves nothing there but its checkpoint.
"""

import os
import re
import shutil

import pytest
import torch
import torch.nn.functional as F
from checkpoints import load_checkpoint
from launchers import run
from scripts import SCRIPTS, load_script, script_path


@pytest.mark.parametrize("script, launcher, nproc", [
    (script, *how) for script, details in SCRIPTS.items() for how in details.smoke_runs])
def test_one_epoch(script, launcher, nproc, tmp_path):
    details = SCRIPTS[script]
    shutil.copy(script_path(script), tmp_path / "mine.py")
    flags = ["--epochs", 1, "--batch-size", details.batch_size, *details.learn]
    files = ["mine.py"]
    if details.saves:
        flags += ["--checkpoint", "run.pt"]
        files += ["run.pt"]
    if script == "synthetic_ddp":
        files += ["run.pt.best"]
    status, text = run(tmp_path / "mine.py", *flags, launcher=launcher, nproc=nproc, cwd=tmp_path)
    assert status == 0, f"{script} ends with status {status}:\n{text}"
    found = sorted(os.listdir(tmp_path))
    assert found == files, f"{script} must leave {files}, and has left {found}"
    if details.several_processes:
        header = re.search(rf"^world size {nproc}\b", text, re.MULTILINE)
        assert header, f"{script} has not {nproc} processes:\n{text}"
    if script == "cpu_ddp":
        module = load_script(script)
        torch.manual_seed(0)  # as train() does
        inputs, targets = module.load_data(module.parse_args([]))
        model = load_checkpoint(tmp_path / "run.pt")["model"]
        loss = F.mse_loss(F.linear(inputs, model["weight"], model["bias"]), targets)
        assert loss < 0.1, f"{script} has not learned: its loss is {loss:.4f}:\n{text}"
    else:
        accuracy = re.search(r"test loss [\d.]+  accuracy ([\d.]+)", text)
        assert accuracy, f"{script} prints no test accuracy:\n{text}"
        assert float(accuracy[1]) > details.least_accuracy, f"{script} has not learned:\n{text}"
