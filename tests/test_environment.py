"""Setting up: the two environment scripts, the test runner, and the rules that every file obeys."""

import ast
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import zipfile

import pytest
from conftest import ROOT, tracked

SHELL = tracked("*.sh", "*.sbatch", ".ci/run")
PYTHON = tracked("*.py")


def with_environment(changes):
    """The environment with these changes; None unsets."""
    return {name: value for name, value in {**os.environ, **changes}.items() if value is not None}


def bash(script, *arguments, timeout=120, **changes):
    """Run a shell script of the project with these changes to its environment."""
    command = ["bash", str(script), *map(str, arguments)]
    return subprocess.run(command, env=with_environment(changes), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout)


def assert_one_line(result, script, *words):
    """It failed, with one line on stderr that begins with the script's name and has these words."""
    assert result.returncode != 0, result.stdout
    assert re.fullmatch(rf"{script}: [^\n]+\n", result.stderr), result.stderr
    for word in words:
        assert word in result.stderr


@pytest.fixture
def offline():
    """pip without a network, whatever this machine's settings are."""
    index = "http://127.0.0.1:9/simple"
    return {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": index, "PIP_RETRIES": "0",
            "PIP_EXTRA_INDEX_URL": None, "PIP_FIND_LINKS": None, "VIRTUAL_ENV": None}


@pytest.fixture
def wheels(tmp_path, offline):
    """What pip needs in its environment to find two versions of a tiny package, and nothing else."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    for version in "1.0", "2.0":
        info = f"tiny-{version}.dist-info"
        with zipfile.ZipFile(folder / f"tiny-{version}-py3-none-any.whl", "w") as wheel:
            wheel.writestr("tiny.py", f"version = '{version}'\n")
            wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: tiny\nVersion: {version}\n")
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", f"tiny.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    return {**offline, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": folder.as_uri()}


@pytest.fixture
def project(tmp_path):
    """A project with slurm/ in it that requires the tiny package, since PyTorch takes minutes."""
    top = tmp_path / "a project"
    shutil.copytree(ROOT / "slurm", top / "slurm")
    (top / "slurm/requirements.txt").write_text("tiny>=1.0\n")
    return top


def tiny_version(environment):
    python = [str(environment / "bin/python"), "-c", "import tiny; print(tiny.version)"]
    return subprocess.run(python, capture_output=True, text=True, timeout=30).stdout.strip()


# --- create-venv.sh ---

def test_venv_is_made_once_and_follows_the_requirements(project, wheels, offline):
    script, venv = project / "slurm/create-venv.sh", project / ".venv"
    (project / "slurm/requirements.txt").write_text("tiny==1.0\n")
    result = bash(script, **wheels)
    assert (result.returncode, result.stderr) == (0, "") and tiny_version(venv) == "1.0", result.stderr

    (venv / "mine").touch()
    start = time.monotonic()
    result = bash(script, **offline)                            # satisfied: no network is needed
    assert (result.returncode, result.stderr) == (0, "") and time.monotonic() - start < 20, result.stderr

    (project / "slurm/requirements.txt").write_text("tiny>=2.0\n")
    assert_one_line(bash(script, **offline), "create-venv.sh", "check the network", "PIP_INDEX_URL", "tiny>=2.0")
    assert tiny_version(venv) == "1.0"                          # a failed update breaks nothing
    assert bash(script, **wheels).returncode == 0
    assert tiny_version(venv) == "2.0" and (venv / "mine").exists()


def test_venv_of_an_interrupted_run_is_made_anew(project, wheels, offline):
    """Killed while pip waits for an index that never answers, as a power cut would leave it."""
    script, venv = project / "slurm/create-venv.sh", project / "else where/venv"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        index = f"http://127.0.0.1:{silent.getsockname()[1]}/"
        run = subprocess.Popen(["bash", str(script), str(venv)], env=with_environment({**offline, "PIP_INDEX_URL": index}),
                               start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        silent.settimeout(60)
        try:
            silent.accept()
        finally:
            os.killpg(run.pid, signal.SIGKILL)
            run.wait(10)
    shutil.rmtree(next(venv.glob("lib/python*/site-packages/pip/_internal")))           # a part of it is missing
    (venv / "debris").touch()
    result = bash(script, venv, **wheels)
    assert result.returncode == 0 and tiny_version(venv) == "2.0", result.stderr
    assert not (venv / "debris").exists()


def test_venv_is_no_loss_to_what_is_there(project, wheels):
    """A folder that is no virtual environment is refused, not replaced."""
    (project / "photos").mkdir()
    (project / "photos/1.jpg").touch()
    result = bash(project / "slurm/create-venv.sh", project / "photos", **wheels)
    assert_one_line(result, "create-venv.sh", "no working virtual environment", "another DIR")
    assert (project / "photos/1.jpg").exists()


def test_venv_without_a_network(project, offline):
    assert_one_line(bash(project / "slurm/create-venv.sh", **offline), "create-venv.sh", "check the network", "PIP_INDEX_URL")
    assert not (project / ".venv").exists()                     # nothing half-made stays


def test_venv_on_a_full_disk(project, wheels):
    mount = ["unshare", "--map-root-user", "--mount"]
    if subprocess.run([*mount, "true"], capture_output=True, timeout=10).returncode:
        pytest.skip("no user namespaces: sysctl kernel.unprivileged_userns_clone=1, or run as root")
    (project / "disk").mkdir()
    script = 'mount -t tmpfs -o size=4m tmpfs "$1" && bash "$2" "$1/venv"'
    command = [*mount, "bash", "-c", script, "-", str(project / "disk"), str(project / "slurm/create-venv.sh")]
    result = subprocess.run(command, env=with_environment(wheels), capture_output=True, text=True, timeout=60)
    assert_one_line(result, "create-venv.sh", "full disk")


def fake_python(path, body):
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def test_venv_needs_a_python_that_can(project):
    """Stand-ins for interpreters that this machine does not have; all else in them is its real Python."""
    script = project / "slurm/create-venv.sh"
    assert_one_line(bash(script, PYTHON="python9"), "create-venv.sh", "python9 does not run", "PYTHON=")
    real = f'exec {sys.executable} -c "$code"'
    old = fake_python(project / "old", f'code="import sys; sys.version_info = (3, 8, 1); $2"; {real}')
    assert_one_line(bash(script, PYTHON=old), "create-venv.sh", "Python 3.8", "3.10 or newer", "PYTHON=")
    bare = fake_python(project / "bare", f'code="import sys; sys.modules[\'ensurepip\'] = None; $2"; {real}')
    assert_one_line(bash(script, PYTHON=bare), "create-venv.sh", "apt-get install python3.", "-venv")
    assert not (project / ".venv").exists()


# --- create-conda-env.sh, against a stand-in: there is no conda on the machines that run the tests ---

STAND_IN = f"""#!/usr/bin/env bash
# A stand-in for conda: it writes down its arguments; `create` makes a venv where conda would make an
# environment, and `run` runs a command there. That the real conda takes these arguments is not shown.
echo "$(basename "$0") $*" >>"$CALLS"
verb=$1; shift; [[ $verb == run ]] || shift                     # --yes
case $1 in --prefix) folder=$2 ;; --name) folder=$ENVIRONMENTS/$2 ;; *) exit 2 ;; esac
case $verb in
    create | install) {sys.executable} -m venv "$folder" ;;
    run) [[ -d $folder ]] || exit 1; shift 2; CONDA_PREFIX=$folder "$@" ;;
    *) exit 2 ;;
esac
"""


@pytest.fixture
def conda(project, wheels, tmp_path):
    """Run create-conda-env.sh with these stand-ins on the PATH; the answer is the result and the new calls."""
    calls = tmp_path / "calls"

    def run(*arguments, tools=("conda",)):
        path = tmp_path / ("tools-" + "-".join(tools))
        path.mkdir(exist_ok=True)
        for tool in tools:
            (path / tool).write_text(STAND_IN)
            (path / tool).chmod(0o755)
        calls.write_text("")
        result = bash(project / "slurm/create-conda-env.sh", *arguments, **wheels, PATH=f"{path}:/usr/bin:/bin",
                      CALLS=str(calls), ENVIRONMENTS=str(tmp_path / "envs"), CONDA_EXE=None, MAMBA_EXE=None)
        return result, calls.read_text().splitlines()

    return run


def test_conda_environment_is_made_once(conda, project):
    folder = project / ".conda"
    result, calls = conda()
    assert result.returncode == 0 and result.stdout.endswith(f"CONDA_ENV={folder}\n"), result.stderr
    assert [c for c in calls if " run " not in c] == [
        f"conda create --yes --prefix {folder} --override-channels --channel conda-forge python=3.12 pip"]
    assert tiny_version(folder) == "2.0"

    (project / "slurm/requirements.txt").write_text("tiny==1.0\n")
    result, calls = conda()                                     # only pip has something to do
    assert result.returncode == 0 and tiny_version(folder) == "1.0", result.stderr
    assert calls == [f"conda run --prefix {folder} printenv CONDA_PREFIX"]

    (folder / "bin/python").unlink()                            # as an interrupted run leaves it
    result, calls = conda()
    assert result.returncode == 0 and any(c.startswith("conda install --yes") for c in calls), result.stderr


@pytest.mark.parametrize("tool", ["mamba", "micromamba"])
def test_conda_takes_its_relatives_and_a_name(conda, tmp_path, tool):
    result, calls = conda("training", tools=(tool,))
    assert result.returncode == 0 and tiny_version(tmp_path / "envs/training") == "2.0", result.stderr
    assert f"{tool} create --yes --name training --override-channels --channel conda-forge python=3.12 pip" in calls


def test_conda_is_installed_when_asked(conda, project):
    result, _ = conda(tools=())
    assert_one_line(result, "create-conda-env.sh", "no conda", "--install-miniconda")
    installer = project / "installer.sh"                        # stands in for Miniconda's, and takes its options
    installer.write_text(f'[[ "$1 $2 $3" == "-b -u -p" ]] && mkdir -p "$4/bin" && cp "{project}/conda" "$4/bin/conda"\n')
    (project / "conda").write_text(STAND_IN)
    (project / "conda").chmod(0o755)
    address = installer.as_uri() if shutil.which("curl") else installer
    result, calls = conda("--install-miniconda", address, tools=())
    assert result.returncode == 0 and (project / ".miniconda3/bin/conda").exists() and calls, result.stderr
    result, calls = conda(tools=())                             # the next run finds it
    assert result.returncode == 0 and len(calls) == 1, result.stderr


# --- run.sh and NO_SKIPS ---

SKIPS = """import pytest
def test_good(): pass
@pytest.mark.skipif(True, reason="needs a GPU")
def test_gpu(): pass
@pytest.mark.skipif({}, reason="no cheese: apt-get install cheese")
def test_cheese(): pass
"""


@pytest.mark.parametrize("cheese, no_skips, status", [(False, "", 0), (False, "1", 1), (True, "1", 0)])
def test_run_lists_what_was_skipped(tmp_path, cheese, no_skips, status):
    shutil.copytree(ROOT / "tests", tmp_path / "tests", ignore=shutil.ignore_patterns("test_*", "__pycache__"))
    (tmp_path / "tests/test_skips.py").write_text(SKIPS.format(not cheese))
    result = bash(tmp_path / "tests/run.sh", VENV=sys.prefix, NO_SKIPS=no_skips)
    assert result.returncode == status, result.stdout
    assert "needs a GPU" in result.stdout and ("apt-get install cheese" in result.stdout) is not cheese


def test_run_passes_arguments_and_status_on(tmp_path):
    result = bash(ROOT / "tests/run.sh", "-k", "no_test_has_this_name", ROOT / "tests/test_environment.py", VENV=sys.prefix)
    assert result.returncode == 5 and "deselected" in result.stdout
    result = bash(ROOT / "tests/run.sh", VENV=tmp_path)
    assert_one_line(result, "run.sh", "create-venv.sh")


# --- rules ---

@pytest.fixture
def files():
    return tracked() or pytest.skip("this is no clone: git clone the project")


def test_top_level(files):
    allowed = {"cpu_ddp", "mnist_dp", "cifar10_ddp", "fashionmnist_ddp", "synthetic_ddp", "slurm", "containers", "tests", "README.md"}
    names = {path.relative_to(ROOT).parts[0] for path in files}
    assert {name for name in names if not name.startswith(".")} == allowed


@pytest.mark.parametrize("path", SHELL, ids=lambda path: str(path.relative_to(ROOT)))
def test_shell_script(path):
    assert subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True, timeout=30).stderr == ""
    if not shutil.which("shellcheck"):
        pytest.skip("no shellcheck: apt-get install shellcheck")
    lint = subprocess.run(["shellcheck", str(path)], capture_output=True, text=True, timeout=60)
    assert lint.returncode == 0, lint.stdout


def test_shell_scripts_were_found(files):
    assert {"create-venv.sh", "run.sh", "run"} <= {path.name for path in SHELL}


@pytest.mark.parametrize("path", PYTHON, ids=lambda path: str(path.relative_to(ROOT)))
def test_python_imports(path):
    """The standard library, torch, torchvision, pytest; and tests may import each other."""
    allowed = set(sys.stdlib_module_names) | {"torch", "torchvision", "pytest"}
    if path.parent == ROOT / "tests":
        allowed |= {other.stem for other in PYTHON if other.parent == path.parent}
    modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add("." * node.level + (node.module or ""))
    assert {module.split(".")[0] for module in modules} <= allowed


def test_requirements():
    lines = (ROOT / "slurm/requirements.txt").read_text().splitlines()
    assert [re.split("[<>=]", line)[0] for line in lines if line and line[0] != "#"] == ["torch", "torchvision", "pytest"]


def test_no_file_names_a_registry_or_a_developers_machine(files):
    """Where packages come from is the user's choice; these patterns do not match themselves."""
    hosts = r"pypi\.org|pythonhosted\.org|download\.pytorch\.org|anaconda\.(?:org|com)|deb\.debian\.org|archive\.ubuntu\.com"
    paths = r"/opt/(?:venv|pypi|wheels)|(?<![\w.}$])/[w]ork/|/root/\.[p]yenv|\.\./[s]hared\b"
    found = []
    for path in files:
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            if re.search(f"{hosts}|{paths}", line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert not found, "\n".join(found)
