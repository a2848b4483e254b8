"""Options of the kill tests, what may be skipped, and what a machine could not run."""

import os
import random
from collections import defaultdict
from pathlib import Path

import launchers  # noqa: F401  finds the GPUs before they are hidden
import pytest
import torch

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # all but test_gpu.py runs on the CPU
torch.set_num_threads(1)  # two threads that wait for each other are slow on a busy machine


def pytest_addoption(parser):
    parser.addoption("--chaos-kills", type=int, default=12, metavar="N",
                     help="kills of the kill tests, in all")
    parser.addoption("--chaos-seed", type=int, default=random.randrange(10**6), metavar="N",
                     help="seed of their choices")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport():
    """With NO_SKIPS=1 (.ci/run), a skipped test has failed, unless it requires a GPU."""
    report = (yield).get_result()
    if os.environ.get("NO_SKIPS") and report.skipped and "GPU" not in str(report.longrepr):
        report.outcome = "failed"
        report.longrepr = f"may not be skipped here: {report.longrepr}"


def pytest_terminal_summary(terminalreporter):
    """Print once for each reason which files have tests that this machine could not run."""
    files = defaultdict(set)
    for report in terminalreporter.getreports("skipped"):
        reason = report.longrepr[2].removeprefix("Skipped: ")
        files[reason].add(Path(report.nodeid.split("::")[0]).name)
    if files:
        terminalreporter.section("not run on this machine")
    for reason, names in sorted(files.items()):
        terminalreporter.write_line(f"{reason}\n    for tests of {', '.join(sorted(names))}")
    if any("apt-get" in reason for reason in files):
        terminalreporter.write_line("As root on Debian, .ci/run installs it and runs all tests.")
