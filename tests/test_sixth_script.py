"""A sixth script is added by the recipe of tests/README.md: a copy of fashionmnist_ddp for KMNIST.

Nothing has to be known besides, and what is missing is named.
"""

import os
import re
import subprocess
import sys

import pytest
from scripts import ROOT

ROW = '''    "kmnist_ddp": Script(
        learn=("--fake-data", "--global-batch", 16),
        learned=("val_accuracy", 0.5),
        header="world size {nproc} on cpu | global batch 16 ",
        start=("python", 1),
    ),
'''


def edit(path, old, new):
    text = path.read_text()
    assert text.count(old) >= 1, f"{path.name} has no {old!r}"
    path.write_text(text.replace(old, new))


def copy_script(root):
    for name in ("train.py", "README.md"):
        text = (root / "fashionmnist_ddp" / name).read_text()
        (root / "kmnist_ddp").mkdir(exist_ok=True)
        (root / "kmnist_ddp" / name).write_text(
            text.replace("fashionmnist_ddp", "kmnist_ddp").replace("FashionMNIST", "KMNIST"))


def copy_sbatch(root):
    text = (root / "slurm/fashionmnist.sbatch").read_text()
    (root / "slurm/kmnist.sbatch").write_text(text.replace("fashionmnist", "kmnist"))


STEPS = {  # by what the message names if the step is left out
    "kmnist_ddp/train.py": copy_script,
    "SCRIPTS": lambda root: edit(root / "tests/scripts.py", "SCRIPTS = {\n",
                                 "SCRIPTS = {\n" + ROW),
    "slurm/*.sbatch": copy_sbatch,
    ".dockerignore": lambda root: edit(root / ".dockerignore", "!cpu_ddp/train.py\n",
                                       "!cpu_ddp/train.py\n!kmnist_ddp/train.py\n"),
    "kmnist_ddp/README.md in README.md": lambda root: edit(
        root / "README.md", "[`cpu_ddp`](cpu_ddp/README.md)",
        "[`cpu_ddp`](cpu_ddp/README.md) [`kmnist_ddp`](kmnist_ddp/README.md)"),
}


@pytest.fixture
def clone(tmp_path):
    """A repository with the tracked files as they are here."""
    command = """git -c safe.directory='*' ls-files -z | xargs -0 cp --parents -t "$0"
cd "$0" && git init --quiet"""
    subprocess.run(["bash", "-c", command, tmp_path], cwd=ROOT, check=True, timeout=60)
    return tmp_path


def run_tests(clone, *arguments):
    """Run the quick tests of the clone that are named, and return the finished process."""
    subprocess.run(["git", "add", "--all"], cwd=clone, check=True, timeout=60)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=clone, capture_output=True, text=True, timeout=900,
                          env={**os.environ, "NO_SKIPS": ""})


@pytest.mark.slow
def test_a_script_is_added_by_the_recipe(clone):
    for step in STEPS.values():
        step(clone)
    done = run_tests(clone, "tests/test_repository.py", "tests/test_smoke.py",
                     "tests/test_equal.py", "tests/test_resume.py", "tests/test_launch.py",
                     "tests/test_bad_input.py", "-m", "not slow and not slurm",
                     "-k", "kmnist_ddp or declared or same_name")
    assert done.returncode == 0, f"the tests of a sixth script fail:\n{done.stdout[-6000:]}"
    passed = int(re.search(r"(\d+) passed", done.stdout)[1])
    assert passed > 40, f"only {passed} tests run for a sixth script:\n{done.stdout}"


@pytest.mark.slow
@pytest.mark.parametrize("made", ["kmnist_ddp/train.py", "SCRIPTS"])
def test_steps_that_are_left_out_are_named(clone, made):
    """All but one. Without its row in SCRIPTS, the other steps are not missed yet."""
    STEPS[made](clone)
    done = run_tests(clone, "tests/test_repository.py", "-k", "declared", "--tb=line")
    assert done.returncode != 0, f"nothing is missing with the step of {made} alone"
    for name in ["SCRIPTS"] if made != "SCRIPTS" else STEPS.keys() - {made}:
        assert name in done.stdout, f"{name} is missing, and is not named:\n{done.stdout}"
