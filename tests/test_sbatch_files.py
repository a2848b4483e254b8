"""What the sbatch files say and refuse, without a Slurm. test_slurm.py submits them."""

import re
import subprocess

import pytest
from scripts import ROOT
from slurm_lab import write_program

FILES = sorted((ROOT / "slurm").glob("*.sbatch"))
JOB = (ROOT / "slurm/job.sh").read_text()
ENVIRONMENT = re.search(r"^for folder in.*?^done\n", JOB, re.MULTILINE | re.DOTALL)[0]


def name_of(file):
    return file.name


def bash(script, folder, **variables):
    """Run a script of bash in a folder, with these variables alone."""
    return subprocess.run(["bash", "-euc", script], cwd=folder, capture_output=True, text=True,
                          env={"PATH": "/usr/bin:/bin"} | variables, timeout=30)


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_submitted_in_another_folder_an_error_line_names_the_right_one(tmp_path, file):
    done = bash(f"source {file}", tmp_path)
    assert done.returncode != 0, f"the job goes on:\n{done.stdout}"
    assert re.fullmatch(f"error: .* above slurm/, not in {tmp_path}\n", done.stdout), (
        f"no error line that names the folder:\n{done.stdout}{done.stderr}")


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_torchrun_waits_for_a_save_and_ends_before_the_time_limit(file):
    """It kills its processes when its own limit is over, Slurm when the time limit is."""
    text = file.read_text()
    notice = re.search(r"^#SBATCH --signal=TERM@(\d+)", text, re.MULTILINE)
    assert bool(notice) == ("requeue" in text.splitlines()[-1]), (
        f"{file.name}: --signal is for jobs that come back, and they need it")
    wait = int(re.search(r"SHUTDOWN_TIMEOUT=(\d+)", JOB)[1])
    assert not notice or wait + 5 <= int(notice[1]) <= wait + 60, (
        f"{file.name} says {notice[0]}, and torchrun waits for {wait} s of them")


def test_torchrun_is_launched_in_the_same_way_by_all_files():
    """test_slurm.py trains by cpu.sbatch."""
    texts = [file.read_text() for file in FILES]
    launches = {text[text.index("    torchrun "):] for text in texts if "    torchrun " in text}
    assert len(launches) == 1, "torchrun is launched in different ways:\n" + "\n".join(launches)


def test_a_terminal_finds_the_environment_as_a_job_does():
    text = (ROOT / "slurm/ddp-worker-node.sh").read_text()
    lines = ENVIRONMENT.replace(" && ! ${image:-}", "")
    assert lines in text, f"ddp-worker-node.sh has not these lines of job.sh:\n{lines}"


@pytest.mark.parametrize("used, variables, others", [
    ("home", {}, []),
    (".conda", {}, []),
    (".venv", {}, [".conda"]),
    ("conda", {"CONDA_PREFIX": "conda"}, [".venv"]),
    (".venv", {"CONDA_PREFIX": "base"}, []),  # which has no torchrun
    ("venv", {"CONDA_PREFIX": "conda", "VIRTUAL_ENV": "venv"}, [".venv", "conda"]),
], ids=str)
def test_environment_of_a_job(tmp_path, used, variables, others):
    """Each environment has a torchrun that shows its name. One is in the home and on PATH."""
    for folder in {used, *others, "home"}:
        write_program(tmp_path / folder / "bin/torchrun",
                      f'echo "{folder}, user site off: ${{PYTHONNOUSERSITE:-}}"')
        write_program(tmp_path / folder / "bin/python", "")
    variables = {name: str(tmp_path / value) for name, value in variables.items()}
    done = bash(f"{ENVIRONMENT}torchrun", tmp_path, **variables,
                PATH=f"{tmp_path}/home/bin:/usr/bin:/bin")
    expected = f"{used}, user site off: {'' if used == 'home' else 1}\n"
    assert done.stdout == expected, f"not {expected!r}:\n{done.stdout}{done.stderr}"


def test_a_node_without_the_python_of_the_environment_ends_the_job(tmp_path):
    """Another python on PATH would train."""
    write_program(tmp_path / ".venv/bin/torchrun", "")
    (tmp_path / ".venv/bin/python").symlink_to("missing")
    done = bash(f"{ENVIRONMENT}python3 --version", tmp_path)
    assert done.returncode != 0, f"the job goes on, with {done.stdout}"
    assert ".venv/bin/python: " in done.stderr, f"the error names no file:\n{done.stderr}"
