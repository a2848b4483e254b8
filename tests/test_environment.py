"""The environment scripts and tests/run.sh. A tiny package takes PyTorch's place, whose installation takes minutes."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
from helpers import ROOT

FILES = 500  # of the package: enough to see pip at work


@pytest.fixture
def project(tmp_path):
    shutil.copytree(ROOT / "slurm", tmp_path / "a project/slurm")
    return tmp_path / "a project"


@pytest.fixture
def environment(tmp_path):
    """Where pip finds the tiny package, in versions 1.0 and 2.0, and nothing else."""
    for version in "1.0", "2.0":
        info = f"tiny-{version}.dist-info"
        files = {f"tiny/data{number}.py": "" for number in range(FILES)} | {
            "tiny/__init__.py": f"version = '{version}'\n",
            f"{info}/METADATA": f"Metadata-Version: 2.1\nName: tiny\nVersion: {version}\n",
            f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"}
        files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"])
        with zipfile.ZipFile(tmp_path / f"tiny-{version}-py3-none-any.whl", "w") as wheel:
            for name, text in files.items():
                wheel.writestr(name, text)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "CONDA_", "MAMBA_"))}
    return env | {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": tmp_path.as_uri()}


def bash(*command, env):
    return subprocess.run(["bash", *command], env=env, capture_output=True, text=True, timeout=180)


def version(folder):
    """Of the tiny package in an environment, all of whose files are there."""
    assert len(list(folder.glob("lib/python*/site-packages/tiny/data*.py"))) == FILES
    command = [folder / "bin/python", "-c", "import tiny; print(tiny.version)"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.strip()


# --- create-venv.sh ---
def test_venv_survives_interruptions_and_follows_the_requirements(project, environment):
    """SIGKILL while venv installs pip, and while pip installs the package; then what users do."""
    slurm, folder = project / "slurm", project / ".venv"
    (slurm / "requirements.txt").write_text("tiny==1.0\n")
    for package, moment in ("pip", "pip/_internal"), ("tiny", "tiny/data0.py"):
        process = subprocess.Popen(["bash", slurm / "create-venv.sh"], env=environment, start_new_session=True)
        while not list(folder.glob(f"lib/python*/site-packages/{moment}")) and process.poll() is None:
            time.sleep(0.005)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert not list(folder.glob(f"lib/python*/site-packages/{package}-*/RECORD")), "it was not interrupted"
    for requirement, result in ("tiny==1.0", "1.0"), ("tiny", "1.0"), ("tiny>=2.0", "2.0"):
        (slurm / "requirements.txt").write_text(f"{requirement}\n")
        links = {"PIP_FIND_LINKS": ""} if requirement == "tiny" else {}  # what is there requires no index
        done = bash(slurm / "create-venv.sh", env=environment | links)
        assert done.returncode == 0 and version(folder) == result, done.stderr


@pytest.mark.parametrize("lack, remedy", [("sys.version_info = (3, 9, 1)", "Python 3.10"),
                                          ("sys.modules['ensurepip'] = None", "python3-venv")])
def test_python_that_cannot(lack, remedy, project, environment):
    """This machine's Python takes the place of one that is too old or has no venv."""
    (project / "python").write_text(f'#!/bin/sh\nexec {sys.executable} -c "import sys; {lack}; $2"\n')
    (project / "python").chmod(0o755)
    done = bash(project / "slurm/create-venv.sh", env=environment | {"PYTHON": str(project / "python")})
    assert done.returncode != 0 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert remedy in done.stderr and not (project / ".venv").exists()


# --- create-conda-env.sh: no conda can be had here, so a stand-in records its arguments and makes a venv ---
STAND_IN = f"""#!/usr/bin/env bash
echo "$*" >>"$0.calls"
case $* in
    "create --yes --prefix "*) {sys.executable} -m venv --clear "$4" ;;
    "run --prefix "*) [[ -d $3 ]] && CONDA_PREFIX=$3 "${{@:4}}" ;;
esac
"""


def test_conda_environment_is_made_once(project, environment, tmp_path):
    script, folder, conda = project / "slurm/create-conda-env.sh", project / ".conda", tmp_path / "micromamba"
    environment["PATH"] = f"{tmp_path}:/usr/bin:/bin"
    done = bash(script, env=environment)
    assert done.returncode != 0 and done.stderr.startswith("error: ") and "Miniforge" in done.stderr
    conda.write_text(STAND_IN)
    conda.chmod(0o755)
    for requirement in "1.0", "2.0":
        (project / "slurm/requirements.txt").write_text(f"tiny=={requirement}\n")
        done = bash(script, env=environment)
        assert done.returncode == 0 and version(folder) == requirement, done.stderr
    calls = re.findall("^create.*", Path(f"{conda}.calls").read_text(), re.MULTILINE)
    assert calls == [f"create --yes --prefix {folder} --override-channels --channel conda-forge python=3.12 pip"]


# --- run.sh ---
@pytest.mark.parametrize("arguments, no_skips, status, summary", [
    ([], "1", 0, "2 passed, 2 skipped"), (["--all"], "", 0, "3 passed, 3 skipped"),
    (["--all"], "1", 1, "3 passed, 2 skipped, 1 error"), (["-k", "nothing"], "", 5, "deselected")])
def test_run(arguments, no_skips, status, summary, tmp_path):
    """Its choice of tests, the list of skipped ones, and NO_SKIPS: only what requires a GPU may be skipped."""
    shutil.copytree(ROOT / "tests", tmp_path / "tests", ignore=shutil.ignore_patterns("test_*", "__pycache__"))
    for name, lack in ("smoke", "a GPU"), ("scripts", "a GPU"), ("more", "cheese: apt-get install cheese"):
        text = f"import pytest\ndef test_good(): pass\n@pytest.mark.skip('requires {lack}')\ndef test_skipped(): pass\n"
        (tmp_path / f"tests/test_{name}.py").write_text(text)
    done = bash(tmp_path / "tests/run.sh", *arguments, env=os.environ | {"VENV": sys.prefix, "NO_SKIPS": no_skips})
    assert done.returncode == status and summary in done.stdout, done.stdout + done.stderr
    assert ("apt-get install cheese" if "--all" in arguments else "run.sh --all") in done.stdout
