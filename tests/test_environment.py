"""slurm/create-venv.sh and create-conda-env.sh.

A tiny package takes the place of PyTorch, whose installation takes minutes.
"""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from scripts import ROOT

# No conda can be had here: this records its arguments and makes a venv.
CONDA = f"""#!/usr/bin/env bash
echo "$*" >>"$0.calls"
case $* in
    "create --yes --prefix "*)
        {sys.executable} -m venv --clear "$4"
        ;;
    "run --prefix "*)
        [[ -d $3 ]] && CONDA_PREFIX=$3 "${{@:4}}"
        ;;
esac
"""


@pytest.fixture
def project(tmp_path):
    shutil.copytree(ROOT / "slurm", tmp_path / "a project/slurm")
    return tmp_path / "a project"


@pytest.fixture
def environment(tmp_path):
    """Variables with which pip finds nothing but the tiny package, in versions 1.0 and 2.0."""
    for version in ("1.0", "2.0"):
        write_wheel(tmp_path, version)
    env = {}
    for name, value in os.environ.items():
        if not name.startswith(("PIP_", "CONDA_", "MAMBA_")):
            env[name] = value
    env["PIP_CONFIG_FILE"] = os.devnull
    env["PIP_NO_INDEX"] = "1"
    env["PIP_FIND_LINKS"] = tmp_path.as_uri()
    env["HOME"] = str(tmp_path)
    return env


def write_wheel(folder, version):
    info = f"tiny-{version}.dist-info"
    files = {
        "tiny.py": f"version = '{version}'\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: tiny\nVersion: {version}\n",
        f"{info}/WHEEL":
            "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = f"{info}/RECORD"
    files[record] = "".join(f"{name},,\n" for name in [*files, record])
    with zipfile.ZipFile(folder / f"tiny-{version}-py3-none-any.whl", "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)


def bash(*command, env):
    return subprocess.run(["bash", *command], env=env, capture_output=True, text=True, timeout=180)


def installed(folder):
    """Return the version of the tiny package in an environment."""
    command = [folder / "bin/python", "-c", "import tiny; print(tiny.version)"]
    return subprocess.check_output(command, text=True).strip()


def assert_follows_the_requirements(script, folder, env):
    """Run the script, change requirements.txt, and run it again."""
    for version in ("1.0", "2.0"):
        (script.parent / "requirements.txt").write_text(f"tiny=={version}\n")
        done = bash(script, env=env)
        assert done.returncode == 0, f"{script.name} failed:\n{done.stdout}{done.stderr}"
        found = installed(folder)
        assert found == version, (
            f"{script.name} did not install what requirements.txt names: {found} for {version}\n"
            f"{done.stdout}{done.stderr}")


# --- venv ---
def test_venv_that_was_interrupted_is_completed(project, environment):
    """It has no pip, and not the file that venv writes last."""
    command = [sys.executable, "-m", "venv", "--without-pip", project / ".venv"]
    subprocess.run(command, check=True, timeout=60)
    (project / ".venv/bin/activate").unlink()
    script = project / "slurm/create-venv.sh"
    assert_follows_the_requirements(script, project / ".venv", environment)


@pytest.mark.parametrize("lack, remedy", [
    ("sys.version_info = (3, 9, 1)", "Python 3.10"),
    ("sys.modules['ensurepip'] = None", "python3-venv"),
])
def test_python_that_cannot_make_a_venv(lack, remedy, project, environment):
    """This machine's Python takes the place of one that is too old or has no venv."""
    python = project / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -c "import sys; {lack}; $2"\n')
    python.chmod(0o755)
    environment["PYTHON"] = str(python)
    done = bash(project / "slurm/create-venv.sh", env=environment)
    assert done.returncode != 0, f"create-venv.sh accepts a Python without {remedy}"
    assert done.stderr.startswith("error: "), f"no error line:\n{done.stderr}"
    assert done.stderr.count("\n") == 1, f"more than one error line:\n{done.stderr}"
    assert remedy in done.stderr, f"the error line does not name {remedy}:\n{done.stderr}"
    assert not (project / ".venv").exists(), "a Python that cannot make a venv has begun one"


# --- conda ---
def test_without_conda_the_error_shows_how_to_install_it(project, environment):
    environment["PATH"] = "/usr/bin:/bin"
    done = bash(project / "slurm/create-conda-env.sh", env=environment)
    assert done.returncode != 0, "create-conda-env.sh succeeds without conda"
    assert done.stderr.startswith("error: "), f"no error line:\n{done.stderr}"
    commands = re.findall("^    (.*)$", done.stderr, re.MULTILINE)
    assert len(commands) == 2, f"not two commands that install Miniforge:\n{done.stderr}"
    installer = Path(commands[0].split()[-1]).name
    assert installer == f"Miniforge3-{os.uname().sysname}-{os.uname().machine}.sh", (
        f"the download is not the one for this machine:\n{done.stderr}")
    assert commands[1] == f"bash {installer} -b", (
        f"the second command does not run what the first has downloaded:\n{done.stderr}")


@pytest.fixture
def conda(tmp_path, environment):
    """A conda on PATH, and nothing else that is called so."""
    program = tmp_path / "micromamba"
    program.write_text(CONDA)
    program.chmod(0o755)
    environment["PATH"] = f"{tmp_path}:/usr/bin:/bin"
    return program


def test_conda_environment_is_made_once(project, environment, conda):
    script = project / "slurm/create-conda-env.sh"
    assert_follows_the_requirements(script, project / ".conda", environment)
    text = Path(f"{conda}.calls").read_text()
    made = re.findall("^create --yes --prefix (.*)", text, re.MULTILINE)
    options = "--override-channels --channel conda-forge python=3.12 pip"
    assert made == [f"{project}/.conda {options}"], (
        f"two runs did not make one environment, from conda-forge:\n{text}")


def test_conda_is_found_where_miniforge_puts_it(project, environment):
    """As the printed commands install it, without a shell that knows it."""
    environment["PATH"] = "/usr/bin:/bin"
    folder = Path(environment["HOME"]) / "miniforge3/bin"
    folder.mkdir(parents=True)
    (folder / "conda").write_text('#!/bin/sh\necho "$*" >>"$0.calls"\nexit 1\n')
    (folder / "conda").chmod(0o755)
    done = bash(project / "slurm/create-conda-env.sh", env=environment)
    calls = folder / "conda.calls"
    assert calls.exists(), f"~/miniforge3/bin/conda is not used:\n{done.stderr}"
