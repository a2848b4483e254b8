"""What every copy of the scripts must do: resume exactly, count each test sample once, explain mistakes, stay equal."""

import ast
import re
import shutil
import signal
import subprocess
import sys

import pytest
from helpers import ROOT, SCRIPTS, assert_equal, load_checkpoint, run, script_path, start


# --- resuming ---
def test_resume_is_exact(tmp_path):
    """SIGTERM in mid-epoch saves, SIGKILL does not: the run ends with the weights of an uninterrupted one.

    On three processes: the sum of two gradients does not depend on the order, which DDP changes after its first step.
    """
    flags = ("--fake-data", 320, "--batch-size", 16, "--epochs", 3, "--log-every", 0, "--checkpoint")
    three = {"launcher": "torchrun", "nproc": 3}
    assert run("fashionmnist_ddp", *flags, tmp_path / "whole", **three).status == 0
    with start("fashionmnist_ddp", *flags, tmp_path / "parts", **three) as job:
        job.wait_for("step 3/18")
        job.send(signal.SIGTERM)
        result = job.finish()
    stopped = int(re.search(r"stopped by a signal after step (\d+)", result.text)[1])
    assert result.status != 0 and load_checkpoint(tmp_path / "parts")["step"] == stopped >= 3
    with start("fashionmnist_ddp", *flags, tmp_path / "parts", **three) as job:
        job.wait_for(f"steps {stopped} to 18")
        job.wait_for("step 15/18")
        job.kill()
    result = run("fashionmnist_ddp", *flags, tmp_path / "parts", **three)
    assert result.status == 0 and "steps 12 to 18" in result.text, result.text
    assert_equal(tmp_path / "parts", tmp_path / "whole")


# --- evaluation ---
def test_three_processes_count_each_test_sample_once(tmp_path):
    """A finished run that is started again is only evaluated: the same weights score the same."""
    flags = ("--epochs", 1, "--fake-data", 520, "--batch-size", 24, "--checkpoint", tmp_path / "run")
    one, three = run("fashionmnist_ddp", *flags), run("fashionmnist_ddp", *flags, launcher="srun", nproc=3)
    scores = [re.findall(r"test accuracy [\d.]+ \((\d+)/(\d+)\)", result.text) for result in (one, three)]
    assert scores[0] == scores[1] and len(scores[0]) == 1, (one, three)
    correct, count = map(int, scores[0][0])
    assert count == 130 and correct > 65  # 130 = 44 + 43 + 43


# --- mistakes: (script, flags, how, the number of ranks that see it, a word of their error lines) ---
TWO, THREE = {"launcher": "torchrun", "nproc": 2}, {"launcher": "srun", "nproc": 3}
MISTAKES = {
    "zero": ("cpu_ddp", "--epochs 0", {}, 1, "--epochs"),
    "no such model": ("cifar10_ddp", "--model resnet19", {}, 1, "resnet18"),
    "no data": ("mnist_dp", "--data-dir absent", {}, 1, "--fake-data"),
    "no data, mp.spawn": ("fashionmnist_ddp", "", {"launcher": "spawn", "nproc": 2}, 1, "--fake-data"),
    "no such GPU": ("mnist_dp", "--device-ids 0 --fake-data", {}, 1, "--device-ids"),
    "two processes": ("mnist_dp", "--fake-data", {"env": {"WORLD_SIZE": 2}}, 1, "cifar10_ddp"),
    "checkpoint is a folder": ("cpu_ddp", "--checkpoint {folder}", {}, 1, "--checkpoint"),
    "checkpoint of another run": ("cpu_ddp", "--seed 1 --checkpoint {run}", TWO, 2, "seed"),
    "fewer epochs": ("cpu_ddp", "--checkpoint {run} --epochs 1", {}, 1, "--epochs"),
    "both files damaged": ("cpu_ddp", "--checkpoint {damaged}", TWO, 1, "damaged.previous"),
    "more processes than samples": ("cpu_ddp", "--samples 2", THREE, 3, "fewer"),
    "processes twice": ("fashionmnist_ddp", "--nproc 2 --fake-data", TWO, 2, "--nproc"),
    "not a GPU": ("mnist_dp", "--device-ids a", {}, 1, "--device-ids"),
}


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """All mistakes, made at once."""
    folder = tmp_path_factory.mktemp("mistakes")
    (folder / "folder").mkdir()
    for name in "damaged", "damaged.previous":
        (folder / name).write_bytes(b"not a checkpoint")
    assert run("cpu_ddp", "--epochs", 2, "--checkpoint", folder / "run").status == 0
    started = {}
    for name, (script, flags, how, *_) in MISTAKES.items():
        shutil.copy(folder / "run", folder / f"run of {name}")
        paths = {"folder": folder / "folder", "run": folder / f"run of {name}", "damaged": folder / "damaged"}
        started[name] = start(script, *(flag.format(**paths) for flag in flags.split()), cwd=folder, **how)
    yield started
    for job in started.values():
        job.kill()


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_is_an_error_line(name, jobs):
    """All processes end, soon; only torchrun's own report follows the error line."""
    *_, how, ranks, word = MISTAKES[name]
    result = jobs[name].finish()
    assert all(process.returncode for process in jobs[name].processes), result.text
    least = 1 if how is TWO else ranks  # torchrun may end a rank before it prints
    assert least <= len(result.errors) <= ranks, result.text
    assert all(word in error for error in result.errors), result.text
    assert "Traceback" not in result.text.split(" failed (exitcode")[0], result.text


# --- copies ---
BLOCK = re.compile(r"^# --- shared: ([\w ]+) ---\n(.*?)^# --- end ---$", re.MULTILINE | re.DOTALL)


def test_shared_blocks_are_equal():
    copies = {}
    for script in SCRIPTS:
        text = script_path(script).read_text()
        blocks = BLOCK.findall(text)
        assert 2 * len(blocks) == len(re.findall("^# --- ", text, re.MULTILINE)) == 2 * len(dict(blocks))
        for name, block in blocks:
            copies.setdefault(name, []).append(block)
    assert {name: len(blocks) for name, blocks in copies.items()} == {
        "helpers": 5, "processes": 4, "images": 3, "GPUs and evaluation": 3}
    assert all(len(set(blocks)) == 1 for blocks in copies.values())


@pytest.mark.parametrize("path", [script_path(script) for script in SCRIPTS] + sorted((ROOT / "tests").glob("*.py")),
                         ids=lambda path: str(path.relative_to(ROOT)))
def test_imports(path):
    """The standard library, torch and torchvision; in tests also pytest and each other."""
    allowed = sys.stdlib_module_names | {"torch", "torchvision"}
    if path.parent.name == "tests":
        allowed |= {"pytest", *(other.stem for other in path.parent.glob("*.py"))}
    modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules |= {name.name.split(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add("." * node.level + (node.module or "").split(".")[0])
    assert modules <= allowed, modules - allowed


# --- the other files ---
def tracked(*patterns):
    """The files under git that match one of the patterns."""
    git = ["git", "-c", "safe.directory=*", "ls-files", "-z", "--", *patterns]
    names = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=True, timeout=30).stdout.split("\0")
    return [ROOT / name for name in names if name and (ROOT / name).exists()]


def test_top_level():
    names = {path.relative_to(ROOT).parts[0] for path in tracked()}
    assert {name for name in names if name[0] != "."} == {*SCRIPTS, "slurm", "containers", "tests", "README.md"}


@pytest.mark.parametrize("path", tracked("*.sh", "*.sbatch", ".ci/run"), ids=lambda path: str(path.relative_to(ROOT)))
def test_shell_file(path):
    assert subprocess.run(["bash", "-n", path], capture_output=True, text=True, timeout=30).stderr == ""
    assert re.search(r"^set -euo pipefail$", path.read_text(), re.MULTILINE)
    if shutil.which("shellcheck"):
        lint = subprocess.run(["shellcheck", path], capture_output=True, text=True, timeout=60)
        assert lint.returncode == 0, lint.stdout


def test_no_file_names_a_package_registry():
    """Where packages come from is the user's choice. The pattern does not match itself."""
    hosts = r"(pypi|pythonhosted|download\.pytorch|anaconda|deb\.debian)\.(org|com)|archive\.ubuntu\.com"
    assert not [path for path in tracked() if re.search(hosts, path.read_text(errors="replace"))]


def test_lines_have_at_most_120_characters():
    files = tracked("*.py", "*.sh", "*.sbatch", ".ci/run")
    assert not [(path, line) for path in files for line in path.read_text().splitlines() if len(line) > 120]
