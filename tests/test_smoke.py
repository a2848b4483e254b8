"""The smoke test: every script trains for one epoch on the CPU, under its launchers, and learns.

Each script is copied alone into an empty folder first, and leaves nothing there but its files.
"""

import os
import re
import shutil

import pytest
from launchers import run
from scripts import SCRIPTS, script_path


@pytest.mark.parametrize("script", SCRIPTS)
def test_one_epoch(script, tmp_path):
    details = SCRIPTS[script]
    launcher, nproc = details.start
    shutil.copy(script_path(script), tmp_path / "mine.py")
    flags = ["--epochs", 1, *details.learn]
    files = ["mine.py"]
    if details.saves:
        flags += ["--checkpoint", "run.pt"]
        files += ["run.pt"]
    if details.best:
        files += ["run.pt.best"]
    status, text = run(tmp_path / "mine.py", *flags, launcher=launcher, nproc=nproc, cwd=tmp_path)
    assert status == 0, f"{script} ends with status {status}:\n{text}"
    found = sorted(os.listdir(tmp_path))
    assert found == files, f"{script} must leave {files}, and has left {found}"
    header = details.header.format(nproc=nproc)
    assert f"\n{header}" in f"\n{text}", f"no line of {script} begins with {header!r}:\n{text}"
    name, limit = details.learned
    found = re.search(rf"^epoch 1/1 .*\b{name} ([\d.]+)", text, re.MULTILINE)
    assert found, f"{script} prints no {name} at the end of the epoch:\n{text}"
    value = float(found[1])
    good = value < limit if name == "loss" else value > limit
    assert good, f"{script} has not learned: {name} {value}, and the limit is {limit}:\n{text}"
