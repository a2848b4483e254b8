"""The smoke test: every script trains for one epoch on the CPU, under each launcher, and learns.

Each script is copied alone into an empty folder first, and leaves nothing there but its checkpoint.
"""

import os
import re
import shutil

import pytest
from launchers import run
from scripts import SCRIPTS, script_path


@pytest.mark.parametrize("script, launcher, nproc", [
    (script, *how) for script, details in SCRIPTS.items() for how in details.smoke_runs])
def test_one_epoch(script, launcher, nproc, tmp_path):
    details = SCRIPTS[script]
    shutil.copy(script_path(script), tmp_path / "mine.py")
    flags = ["--epochs", 1, "--batch-size", details.batch_size, *details.learn]
    files = ["mine.py"]
    if details.has_checkpoint:
        flags += ["--checkpoint", "run.pt"]
        files += ["run.pt"]
    status, text = run(tmp_path / "mine.py", *flags, launcher=launcher, nproc=nproc, cwd=tmp_path)
    assert status == 0, f"{script} ends with status {status}:\n{text}"
    found = sorted(os.listdir(tmp_path))
    assert found == files, f"{script} must leave {files}, and has left {found}"
    if details.several_processes:
        header = re.search(rf"^world size {nproc}\b", text, re.MULTILINE)
        assert header, f"{script} has not {nproc} processes:\n{text}"
    if script == "cpu_ddp":
        error = re.search(r"largest error of a learned weight: ([\d.]+)", text)
        assert error, f"{script} prints no error of a weight:\n{text}"
        assert float(error[1]) < 0.1, f"{script} has not learned:\n{text}"
    else:
        accuracy = re.search(r"test loss [\d.]+  accuracy ([\d.]+)", text)
        assert accuracy, f"{script} prints no test accuracy:\n{text}"
        assert float(accuracy[1]) > details.least_accuracy, f"{script} has not learned:\n{text}"
