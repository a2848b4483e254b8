"""The environment scripts. A tiny package takes PyTorch's place, whose installation takes minutes."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from helpers import ROOT


@pytest.fixture
def project(tmp_path):
    shutil.copytree(ROOT / "slurm", tmp_path / "a project/slurm")
    return tmp_path / "a project"


@pytest.fixture
def environment(tmp_path):
    """Where pip finds the tiny package, in versions 1.0 and 2.0, and nothing else."""
    for version in "1.0", "2.0":
        info = f"tiny-{version}.dist-info"
        files = {
            "tiny.py": f"version = '{version}'\n",
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
    """Of the tiny package in an environment."""
    return subprocess.check_output([folder / "bin/python", "-c", "import tiny; print(tiny.version)"], text=True).strip()


CONDA = f"""#!/usr/bin/env bash
# No conda can be had here: this records its arguments and makes a venv.
echo "$*" >>"$0.calls"
case $* in
    "create --yes --prefix "*) {sys.executable} -m venv --clear "$4" ;;
    "run --prefix "*) [[ -d $3 ]] && CONDA_PREFIX=$3 "${{@:4}}" ;;
esac
"""


def assert_follows_the_requirements(script, folder, env):
    for requirement in "1.0", "2.0":
        (script.parent / "requirements.txt").write_text(f"tiny=={requirement}\n")
        done = bash(script, env=env)
        assert done.returncode == 0 and version(folder) == requirement, done.stderr


def test_venv_is_completed(project, environment):
    """It begins as one that was interrupted: without pip, and without the file that venv writes last."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", project / ".venv"], check=True, timeout=60)
    (project / ".venv/bin/activate").unlink()
    assert_follows_the_requirements(project / "slurm/create-venv.sh", project / ".venv", environment)


def test_conda_environment_is_made_once(project, environment, tmp_path):
    script, conda = project / "slurm/create-conda-env.sh", tmp_path / "micromamba"
    environment["PATH"] = f"{tmp_path}:/usr/bin:/bin"
    done = bash(script, env=environment)
    assert done.returncode != 0 and done.stderr.startswith("error: ") and "Miniforge" in done.stderr
    conda.write_text(CONDA)
    conda.chmod(0o755)
    assert_follows_the_requirements(script, project / ".conda", environment)
    calls = re.findall("^create --yes --prefix (.*)", Path(f"{conda}.calls").read_text(), re.MULTILINE)
    assert calls == [f"{project}/.conda --override-channels --channel conda-forge python=3.12 pip"]


@pytest.mark.parametrize("lack, remedy", [("sys.version_info = (3, 9, 1)", "Python 3.10"),
                                          ("sys.modules['ensurepip'] = None", "python3-venv")])
def test_python_that_cannot(lack, remedy, project, environment):
    """This machine's Python takes the place of one that is too old or has no venv."""
    (project / "python").write_text(f'#!/bin/sh\nexec {sys.executable} -c "import sys; {lack}; $2"\n')
    (project / "python").chmod(0o755)
    done = bash(project / "slurm/create-venv.sh", env=environment | {"PYTHON": str(project / "python")})
    assert done.returncode != 0 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert remedy in done.stderr and not (project / ".venv").exists()
