"""slurm/create-venv.sh and create-conda-env.sh, and shell files of a clone.

A tiny package, whose torchrun prints its version, takes the place of PyTorch. pip is configured for
installations into the home, which has the package already, without torchrun.
"""

import os
import re
import shutil
import subprocess
import sys
import zipfile

import pytest
from scripts import ROOT
from slurm_lab import write_program

pytestmark = pytest.mark.slow

# No conda can be had here: this records its arguments and makes a venv that sees the home, too.
CONDA = f"""
echo "$*" >>"$0.calls"
case $* in
    "create --yes --prefix "*) {sys.executable} -m venv --clear --system-site-packages "$4" ;;
    "run --prefix "*) [[ -d $3 ]] && CONDA_PREFIX=$3 "${{@:4}}" ;;
esac
"""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """A folder with the tiny package, in versions 1.0 and 2.0."""
    folder = tmp_path_factory.mktemp("wheels")
    for version in ("1.0", "2.0"):
        files = {"WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n", "RECORD": "",
                 "METADATA": f"Metadata-Version: 2.1\nName: tiny\nVersion: {version}\n",
                 "entry_points.txt": "[console_scripts]\ntorchrun = tiny:show\n"}
        with zipfile.ZipFile(folder / f"tiny-{version}-py3-none-any.whl", "w") as wheel:
            wheel.writestr("tiny.py", f"def show(): print('{version}')\n")
            for name, text in files.items():
                wheel.writestr(f"tiny-{version}.dist-info/{name}", text)
    return folder


@pytest.fixture(scope="module")
def finished(wheels, tmp_path_factory):
    """A virtual environment with the tiny package."""
    venv = tmp_path_factory.mktemp("finished") / ".venv"
    subprocess.run([sys.executable, "-m", "venv", venv], check=True, timeout=120)
    subprocess.run([venv / "bin/python", "-m", "pip", "install", "--quiet", "--no-index",
                    wheels / "tiny-1.0-py3-none-any.whl"], check=True, timeout=120)
    return venv


@pytest.fixture
def project(wheels, tmp_path, monkeypatch):
    """A folder with slurm/, and pip finds nothing but the tiny package."""
    home = f".local/lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
    shutil.unpack_archive(wheels / "tiny-1.0-py3-none-any.whl", tmp_path / home, "zip")
    monkeypatch.setattr(os, "environ", {
        "PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_USER": "1",
        "PIP_FIND_LINKS": wheels.as_uri(), "PYTHON": sys.executable, "HOME": str(tmp_path),
        "PATH": "/usr/bin:/bin",
        "CDPATH": "."})  # as some shells export it: cd prints where it has found a folder
    shutil.copytree(ROOT / "slurm", tmp_path / "a project/slurm")
    return tmp_path / "a project"


def bash(script):
    """Run a script of a folder, as it is typed beside the folder."""
    path = f"{script.parent.name}/{script.name}"
    return subprocess.run(["bash", path], cwd=script.parents[1], env=os.environ,
                          capture_output=True, text=True, timeout=180)


def assert_follows_the_requirements(script, folder):
    """Run the script, change requirements.txt, and run it again."""
    for version in ("1.0", "2.0"):
        (script.parent / "requirements.txt").write_text(f"tiny=={version}\n")
        done = bash(script)
        assert done.returncode == 0, f"{script.name} failed:\n{done.stdout}{done.stderr}"
        found = subprocess.run(["bash", "-c", f"'{folder}/bin/torchrun'"], capture_output=True,
                               text=True, env={"PYTHONNOUSERSITE": "1"}).stdout.strip()
        assert found == version, (
            f"{script.name}: torchrun is of version {found!r}, not {version}, which "
            f"requirements.txt names:\n{done.stdout}{done.stderr}")


def test_venv_that_was_interrupted_is_completed(project):
    """It has no pip, and not the file that venv writes last."""
    command = [sys.executable, "-m", "venv", "--without-pip", project / ".venv"]
    subprocess.run(command, check=True, timeout=60)
    (project / ".venv/bin/activate").unlink()
    assert_follows_the_requirements(project / "slurm/create-venv.sh", project / ".venv")


@pytest.mark.parametrize("change", [
    "",
    "rm .venv/lib/python*/site-packages/tiny.py",  # as after an upgrade of Python
    "mv .venv/lib/python*/site-packages/tiny* on-path; rm .venv/bin/torchrun",
], ids=["copied", "damaged", "on PYTHONPATH"])
def test_venv_that_does_not_work_is_not_ready(project, finished, change):
    shutil.copytree(finished, project / ".venv", symlinks=True)
    (project / "on-path").mkdir()
    os.environ["PYTHONPATH"] = str(project / "on-path")
    if change:  # of one that was not copied
        command = f"sed -i '1s|{finished}|{project}/.venv|' .venv/bin/*; {change}"
        subprocess.run(["bash", "-c", command], cwd=project, check=True, timeout=30)
    (project / "slurm/requirements.txt").write_text("tiny==1.0\n")
    done = bash(project / "slurm/create-venv.sh")
    assert done.returncode != 0, f"create-venv.sh calls it ready:\n{done.stdout}"
    assert re.search("^error: .*delete .*/\\.venv", done.stderr, re.MULTILINE), (
        f"no error line that names the folder to delete:\n{done.stderr}")


@pytest.mark.parametrize("script, lack, remedy", [
    ("create-venv.sh", "sys.version_info = (3, 9, 1)", "Python 3.10"),
    ("create-venv.sh", "sys.modules['ensurepip'] = None", "python3-venv"),
    ("create-conda-env.sh", "no conda", f"{os.uname().sysname}-{os.uname().machine}.sh\n    bash "),
])
def test_what_the_machine_lacks_is_an_error_line(script, lack, remedy, project):
    """This machine's Python takes the place of one that is too old or has no venv."""
    write_program(project / "python", f'exec {sys.executable} -c "import sys; {lack}; $2"')
    os.environ["PYTHON"] = str(project / "python")
    done = bash(project / "slurm" / script)
    assert done.returncode != 0, f"{script} succeeds, and must say: {remedy}"
    assert done.stderr.startswith("error: "), f"no error line:\n{done.stderr}"
    assert remedy in done.stderr, f"the error line does not name {remedy}:\n{done.stderr}"
    assert not (project / ".venv").exists(), "a Python that cannot make a venv has begun one"


def test_conda_environment_is_made_once(project, tmp_path):
    """By a conda that is where Miniforge puts it, and not on PATH."""
    conda = tmp_path / "miniforge3/bin/conda"
    write_program(conda, CONDA)
    assert_follows_the_requirements(project / "slurm/create-conda-env.sh", project / ".conda")
    text = conda.with_name("conda.calls").read_text()
    made = re.findall("^create --yes --prefix (.*)", text, re.MULTILINE)
    options = "--override-channels --channel conda-forge python=3.12 pip"
    assert made == [f"{project}/.conda {options}"], (
        f"two runs did not make one environment, from conda-forge:\n{text}")


def test_shell_files_run_in_a_clone_with_windows_line_ends(tmp_path):
    command = ["git", "-c", "core.autocrlf=true", "-c", "safe.directory=*", "clone", "--quiet",
               ROOT, tmp_path / "clone"]
    subprocess.run(command, check=True, timeout=60)
    files = [*tmp_path.glob("clone/*/*.sh"), *tmp_path.glob("clone/*/*.sbatch")]
    changed = [path.name for path in files if b"\r\n" in path.read_bytes()]
    assert not changed, f"bash cannot run files of such a clone: {changed}"
